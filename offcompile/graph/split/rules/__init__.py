"""Rules, one per kind of op, that define how the op is computed for a subset of tokens.

`apply` applies the rule of a node; `frame` defines the inputs and results of a rule.
"""

from . import labels, pointwise, products, shapes, slices, words  # noqa: F401  # bring their rules
from .frame import Known, Made, Piece, Rule, apply, numel_of_others

__all__ = ["Known", "Made", "Piece", "Rule", "apply", "numel_of_others"]
