"""The device's share of the updates: the last gradients, and no other share ends before it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from offcompile.passes.select.update_share import HostRun, UpdateTimes, device_share

TIMES = st.integers(0, 1000)


@st.composite
def updates(draw: st.DrawFn) -> list[UpdateTimes]:
    count = draw(st.integers(0, 7))
    return [
        UpdateTimes(
            f"w{n}",
            HostRun(draw(TIMES), draw(TIMES), draw(TIMES), draw(TIMES)),
            draw(TIMES),
            draw(st.integers(0, 100)),
        )
        for n in range(count)
    ]


def end_ns(made: list[UpdateTimes], share: set[str], compute_ns: int) -> int:
    """Event by event: gradients queue for the link, then for the host; weights for the way back."""
    link_free = host_free = 0
    there = []
    for update in sorted(made, key=lambda u: u.host.ready_ns):
        if update.weight in share:
            continue
        begin = update.host.ready_ns if update.host.ready_ns > link_free else link_free
        link_free = begin + update.host.out_ns
        begin = link_free if link_free > host_free else host_free
        host_free = begin + update.host.host_ns
        there.append(update)
    device = compute_ns + sum(u.device_ns for u in made if u.weight in share)
    return max(device, link_free, host_free, sum(u.host.back_ns for u in there))


def suffixes(made: list[UpdateTimes], room_bytes: int | None) -> list[set[str]]:
    ordered = sorted(made, key=lambda u: u.host.ready_ns)
    found = [ordered[count:] for count in range(len(ordered) + 1)]
    fitting = [
        f for f in found if room_bytes is None or sum(u.device_bytes for u in f) <= room_bytes
    ]
    return [{u.weight for u in f} for f in fitting]


ROOM = st.none() | st.integers(0, 400)


@given(updates(), TIMES, ROOM)
def test_no_share_of_the_last_ones_ends_before(
    made: list[UpdateTimes], compute_ns: int, room_bytes: int | None
) -> None:
    share = set(device_share(made, compute_ns, room_bytes))
    possible = suffixes(made, room_bytes)
    assert share in possible
    ends = [end_ns(made, one, compute_ns) for one in possible]
    assert end_ns(made, share, compute_ns) == min(ends)
    # the smallest of several equally good
    best = [one for one, end in zip(possible, ends, strict=True) if end == min(ends)]
    assert len(share) == min(map(len, best))


@given(updates(), TIMES, ROOM, st.integers(2, 10))
def test_a_slower_host_is_left_no_more(
    made: list[UpdateTimes], compute_ns: int, room_bytes: int | None, factor: int
) -> None:
    slower = [
        replace(u, host=replace(u.host, host_ns=factor * u.host.host_ns + factor)) for u in made
    ]
    before = device_share(made, compute_ns, room_bytes)
    assert set(before) <= set(device_share(slower, compute_ns, room_bytes))


@given(updates(), TIMES)
def test_the_order_of_mention_says_nothing(made: list[UpdateTimes], compute_ns: int) -> None:
    ready = {u.host.ready_ns for u in made}
    if len(ready) == len(made):
        assert device_share(made, compute_ns) == device_share(made[::-1], compute_ns)


def test_a_balance_by_hand() -> None:
    # eight gradients, one each 10; a crossing takes 5, an update 15 on the host and 4 on the device
    made = [UpdateTimes(f"w{n}", HostRun(10 * n + 10, 5, 15, 5), 4) for n in range(8)]
    # all on the host: it is done 5 + 8 × 15 = 125 after the first; the device idles from 80 on
    assert end_ns(made, set(), 80) == 135
    assert end_ns(made, {"w6", "w7"}, 80) == 105
    assert device_share(made, 80) == ("w5", "w6", "w7")
    assert end_ns(made, {"w5", "w6", "w7"}, 80) == 92
    assert end_ns(made, {"w4", "w5", "w6", "w7"}, 80) == 96
    # without room for the states of three
    made = [replace(u, device_bytes=8) for u in made]
    assert device_share(made, 80, room_bytes=16) == ("w6", "w7")
