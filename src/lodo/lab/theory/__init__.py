"""The paper's theory, computed: each claim checked by numbers and drawn, with where it stops holding.

Needs the extra `lab`. ``lodo theory NAME`` runs it; `represent` is a tool of its own.
"""

from lodo.lab.theory.represent import Represented, represent

__all__ = ["Represented", "represent"]
