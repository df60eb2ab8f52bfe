"""Hypothesis strategies for problems, machines and plans: small, but wild.

    from hypothesis import given, strategies as st
    from offcompile.testing import plans, problems_with_machines

    @given(problems_with_machines().flatmap(lambda pm: st.tuples(st.just(pm), plans(*pm))))

All of it shrinks towards one layer, zero sizes, unlimited tiers and an empty plan. Hypothesis
is needed only when one of these functions is called.
"""

from .plans import plans
from .problems import machines, problems, problems_with_machines

__all__ = ["machines", "plans", "problems", "problems_with_machines"]
