"""Hypothesis strategies for problems, machines and plans: small, but with odd corner cases.

    from hypothesis import given, strategies as st
    from . import plans, problems_with_machines

    @given(st.data())
    def test_something(data):
        problem, machine = data.draw(problems_with_machines())
        plan = data.draw(plans(problem, machine))

Values shrink towards one op on one tensor of zero bytes, unlimited tiers, and plans without
unnecessary moves. Hypothesis is needed only when one of these functions is called.
"""

from .plans import plans
from .problems import machines, problems, problems_with_machines

__all__ = ["machines", "plans", "problems", "problems_with_machines"]
