"""The paper's theory, checked numerically: each claim with its evidence, figures and limits.

``lodo theory NAME`` runs a part of it; `lodo.lab.theory.represent.represent` can be used by itself. This file imports
nothing, so that the names of the parts are there without torch.
"""
