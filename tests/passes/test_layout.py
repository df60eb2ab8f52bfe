"""A layout overlaps nothing that lives at the same time, and says what it wastes."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo import MLP

import offcompile
from offcompile.passes.build.layout import AddressStay, Layout, lay_out, peak_bytes

STAYS = st.lists(
    st.builds(
        lambda nbytes, first, length: AddressStay(nbytes, first, first + length),
        st.integers(0, 40),
        st.integers(0, 12),
        st.integers(0, 8),
    ),
    max_size=14,
)


@given(STAYS)
def test_no_two_that_live_together_overlap_and_all_lie_within(stays: list[AddressStay]) -> None:
    made = lay_out(stays)
    places = list(zip(stays, made.offsets, strict=True))
    for (a, at), (b, other) in combinations(places, 2):
        together = a.first <= b.last and b.first <= a.last
        assert not together or at + a.nbytes <= other or other + b.nbytes <= at
    assert all(at >= 0 and at + stay.nbytes <= made.extent_bytes for stay, at in places)


@given(STAYS)
def test_the_extent_is_between_the_peak_and_the_sum(stays: list[AddressStay]) -> None:
    made = lay_out(stays)
    held = [sum(s.nbytes for s in stays if s.first <= at <= s.last) for at in range(25)]
    assert made.peak_bytes == peak_bytes(stays) == max(held)
    assert made.peak_bytes <= made.extent_bytes <= sum(s.nbytes for s in stays)
    assert made.waste >= 0
    assert lay_out(stays) == made


def test_a_stack_of_activations_with_workspaces_wastes_nothing() -> None:
    """Forward saves, backward frees in reverse order; at each op a workspace comes and goes."""
    saved = [AddressStay(10, i, 19 - i) for i in range(10)]
    passing = [AddressStay(size, i, i) for i, size in enumerate([7, 30, 5, 11, 2, 9] * 3)]
    assert lay_out(saved + passing).waste == 0


def test_short_ones_at_the_same_end_would_leave_holes() -> None:
    """A saved tensor is born beside a workspace, and would stand above it."""
    stays = [s for i in range(6) for s in (AddressStay(9 - i, i, i + 1), AddressStay(10, i, 20))]
    made = lay_out(stays)
    assert made.waste < 0.1
    assert len(set(made.offsets)) > 1


def test_waste_is_a_share_of_the_peak() -> None:
    assert Layout((0,), 15, 10).waste == 0.5
    assert lay_out([]) == Layout((), 0, 0)
    assert lay_out([]).waste == 0


#: costs that are reckoned, so that the plan is the same wherever it is made
RECKONED = "cpu"


def report_of(memory: int | str, **more: str) -> offcompile.PlanReport:
    options = {"memory": memory, "lowering": "aot_eager", **more}
    torch._dynamo.reset()
    run = torch.compile(MLP(64, 6), backend="offcompile", options=options)
    run(torch.randn(512, 64)).sum().backward()
    return offcompile.reports()[-1]


def test_a_report_says_what_a_planned_layout_would_need() -> None:
    tight = report_of("minimum", hardware=RECKONED)
    assert not tight.fits
    assert tight.layout_waste is not None and 0 <= tight.layout_waste < 0.5
    assert "offsets planned ahead would need" in tight.to_text()
    roomy = report_of("8GiB")
    assert roomy.layout_waste is None
    assert "offsets planned ahead" not in roomy.to_text()
