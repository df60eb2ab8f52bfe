"""Outlines a step: a small linear program says roughly how its fastest plan would look.

The step is cut into a few slots, and like tensors of a slot count as one. The program decides
which share of each group stays, moves, is computed again, is accessed in place, or is updated on
the host, and how long each slot then takes. Its answer proves nothing: it is where searches start,
and it says which places of weights are worth a search.
"""

from .outline import StepOutline, outline, outlines

__all__ = ["StepOutline", "outline", "outlines"]
