"""Rules, one per kind of op, that define how the op is computed for a subset of tokens.

`apply` applies the rule of a node; `frame` defines the inputs and results of a rule.
"""

from . import (  # noqa: F401  # bring their rules
    groups,
    labels,
    pointwise,
    products,
    shapes,
    slices,
    words,
)
from .frame import Known, Made, Piece, Rule, apply, factors, numel_of_others
from .shapes import fill_of

__all__ = ["Known", "Made", "Piece", "Rule", "apply", "factors", "fill_of", "numel_of_others"]
