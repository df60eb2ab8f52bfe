"""Which ops may be computed for some tokens alone, and how: a rule for each kind of op.

`apply` asks the rule of a node; `frame` says what a rule is given and what it answers.
"""

from . import labels, pointwise, products, shapes, slices, words  # noqa: F401  # bring their rules
from .frame import Known, Made, Piece, Rule, apply, numel_of_others

__all__ = ["Known", "Made", "Piece", "Rule", "apply", "numel_of_others"]
