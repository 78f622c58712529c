"""The paper's theory, computed: each claim checked by numbers and drawn, with where it stops holding.

``lodo theory NAME`` runs a part of it; `lodo.lab.theory.represent.represent` can be used by itself. This file imports
nothing, so that the names of the parts are there without torch.
"""
