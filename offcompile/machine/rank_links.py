"""The links between ranks: how fast a ring of them passes bytes on.

Rates are what collectives of many megabytes reach, sent and received at once, by each rank. They
are starting figures, about 80 to 90% of a datasheet's; a rate of your own may stand for a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from offcompile.ir import InvalidInput, Violation

#: limits on a rate in GB/s
LEAST_GBPS, MOST_GBPS = 1e-3, 1e5
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*gb/s", re.I)


@dataclass(frozen=True)
class RankLink:
    """A link of the ring, from each rank to the next one."""

    name: str
    title: str
    #: decimal GB/s in each direction; None: those of the card's own link to the host
    gbps: float | None
    #: time that one hop takes whatever its size
    latency_us: float
    #: True if bytes take the card's link to the host, which copies of plans use too
    takes_host_link: bool
    #: True if all ranks are on one node
    one_node: bool


LINKS = {
    link.name: link
    for link in (
        RankLink("nvlink", "NVLink 4 of an H100 (450 GB/s)", 360.0, 3.0, False, True),
        RankLink("nvlink3", "NVLink 3 of an A100 (300 GB/s)", 240.0, 3.0, False, True),
        RankLink("pcie", "PCIe of the card", None, 5.0, True, True),
        RankLink("400gb", "one network card of 400 Gb/s for each rank", 45.0, 10.0, True, False),
        RankLink("100gb", "one network card of 100 Gb/s for each rank", 11.0, 10.0, True, False),
    )
}


def rank_link(text: str) -> RankLink:
    """Return the link of that name, or a network of the rate in the text (`20GB/s`)."""
    wanted = text.strip().lower()
    if wanted in LINKS:
        return LINKS[wanted]
    match = _RATE.fullmatch(wanted)
    if match is None:
        nearest = get_close_matches(wanted, LINKS, n=1, cutoff=0.0)[0]
        raise _invalid(
            f"{text!r:.60} is no link between ranks; the nearest is {nearest!r} (there are"
            f" {', '.join(LINKS)}, or write a rate as in '20GB/s')"
        )
    gbps = float(match[1])
    if not LEAST_GBPS <= gbps <= MOST_GBPS:
        raise _invalid(
            f"{text!r:.60} is no rate of a link; write {LEAST_GBPS:g} to {MOST_GBPS:g} GB/s"
        )
    return RankLink(wanted, f"a network of {gbps:g} GB/s for each rank", gbps, 10.0, True, False)


def _invalid(detail: str) -> InvalidInput:
    return InvalidInput([Violation("bad-value", "link", detail)])
