"""Hardware profiles: the figures of a device, so that planning needs no device.

A profile is a TOML file whose keys are the fields of `HardwareProfile`. The profiles in
`offcompile/machine/profiles` are starting points from datasheets and published measurements; a
file with your own figures loads the same way and may name one of them as its `base`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from fractions import Fraction
from importlib.resources import files
from pathlib import Path

from offcompile.ir import (
    DEVICE,
    HOST,
    Codec,
    InvalidInput,
    Lane,
    Machine,
    SharedLink,
    Tier,
    Violation,
)
from offcompile.ir._read import LARGEST, show
from offcompile.ir.jsonio import loads_toml
from offcompile.ir.reading import MOST_TOML_BYTES, read_bounded
from offcompile.ir.units import show_bytes

DISK = "disk"
#: common names of cards that have several variants
ALIASES = {"h100": "h100-sxm", "a100": "a100-80g", "v100": "v100-16g"}
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")

#: codec name → (lossless, raw bytes coded per byte of device memory traffic). Casting reads each
#: element once and writes half; the bit vector needs a pass to count before the pass that packs.
CODECS: Mapping[str, tuple[bool, float]] = {
    "bitmask": (True, 0.35),
    "fp16": (False, 0.6),
    "bf16": (False, 0.6),
}

#: access patterns of kernels in host memory: whole, rows with gaps, rows by index
DIRECT_WAYS = ("read", "read_strided", "read_gather", "write", "write_strided")
ATTENTION = ("forward", "backward")
#: AdamW on float32 reads weight, gradient and two moments, and writes all but the gradient
ADAM_BYTES_PER_PARAMETER = 28

BYTES_PER_US_PER_GBPS = 1000.0  # 1 GB/s is 1,000 bytes per microsecond

_UNIT_BYTES: Mapping[str, int] = {
    unit: size
    for power, letter in enumerate("kmgt", start=1)
    for unit, size in ((f"{letter}ib", 1024**power), (f"{letter}b", 1000**power))
} | {"": 1, "b": 1, "bytes": 1}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)")
#: limits on rates and times of a profile, so that products of them stay within a machine's range
_MOST_FIGURE, _LEAST_RATE = 1e15, 1e-15
_SHOWN_CHARACTERS = 60


# one figure for each key of a profile's file and of the doctor's JSON, which users write and read
@dataclass(frozen=True)
class HardwareProfile:
    """One device and its surroundings. Rates are effective ones, in decimal GB/s."""

    name: str
    title: str
    device_memory_bytes: int
    memory_gbps: float
    h2d_gbps: float
    d2h_gbps: float
    #: origin of the figures
    source: str
    #: dtype → rate of dense matrix multiplication
    matmul_tflops: Mapping[str, float] = field(default_factory=dict, hash=False)
    latency_us: float = 10.0
    #: None if not known, and then not limited
    host_memory_bytes: int | None = None
    disk_read_gbps: float | None = None
    disk_write_gbps: float | None = None
    disk_latency_us: float = 100.0
    #: codec → raw bytes coded; missing ones are derived from `memory_gbps`
    codec_gbps: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: True if the figures were measured on the machine itself
    measured: bool = False

    # Measured by `offcompile doctor`; None, or a missing key, if not known.
    #: rate of the link in each direction while both are in use
    h2d_both_gbps: float | None = None
    d2h_both_gbps: float | None = None
    #: pattern of `DIRECT_WAYS` → useful bytes of host memory that a device kernel moves
    direct_gbps: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: pass of `ATTENTION` → rate in bf16 (on the CPU target: fp32), without a mask
    attention_tflops: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: duration of a nearly empty kernel in a sequence of such kernels
    launch_us: float | None = None
    #: time to pin memory that has been touched, so that copies need no staging
    pin_us_per_gib: float | None = None
    #: bytes read plus bytes written by a copy in host memory, all threads
    host_memory_gbps: float | None = None
    #: bytes copied by one thread of the host
    host_copy_gbps: float | None = None
    #: compute time lost to a copy by the host's processor, as a share of the copy's time
    copy_toll_share: float | None = None
    #: the same, lost to direct I/O of the disk
    disk_toll_share: float | None = None
    #: bytes read plus bytes written by AdamW on the host: `ADAM_BYTES_PER_PARAMETER` each
    host_adam_gbps: float | None = None
    #: rate of the disk in each direction while both are in use
    disk_read_both_gbps: float | None = None
    disk_write_both_gbps: float | None = None
    #: rates through the page cache: reads from the disk, and writes until the disk has the data
    disk_read_buffered_gbps: float | None = None
    disk_write_buffered_gbps: float | None = None


def parse_bytes(text: str) -> int:
    """`8GiB`, `500 MB` or `1048576` as bytes; raises `InvalidInput` for anything else."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNIT_BYTES:
        raise _invalid(
            "bad-value", "size", f"{_said(text)} is not a size; write bytes, or a unit as in '8GiB'"
        )
    nbytes = math.floor(Fraction(match[1]) * _UNIT_BYTES[unit])
    if nbytes == 0 and Fraction(match[1]) > 0:
        raise _invalid(
            "bad-value", "size", f"{_said(text)} is less than one byte; write a unit, as in '8GiB'"
        )
    return nbytes


def list_profiles() -> tuple[str, ...]:
    """Names of the profiles that ship with offcompile."""
    names = (entry.name for entry in files("offcompile.machine").joinpath("profiles").iterdir())
    return tuple(sorted(n.removesuffix(".toml") for n in names if n.endswith(".toml")))


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """Loads a shipped profile by name, or a file (anything with a `/` or ending in `.toml`)."""
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(".toml"):
        return load_measured(text)
    return _shipped(text)


def _shipped(text: str) -> HardwareProfile:
    name = ALIASES.get(text.lower(), text.lower())
    known = list_profiles()
    if name not in known:
        nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise _invalid(
            "unknown-id",
            "hardware",
            f"no profile is named {_said(text)}; the nearest is {nearest!r} "
            f"(there are {', '.join(known)}, or give a .toml file)",
        )
    resource = files("offcompile.machine").joinpath("profiles", f"{name}.toml")
    return _read(resource.read_text("utf-8"), f"profile {name}")


def load_measured(path: str | Path) -> HardwareProfile:
    """Loads a user's profile; raises `InvalidInput` naming the file and the fault."""
    try:
        text = read_bounded(path, MOST_TOML_BYTES)
    except (OSError, ValueError) as error:
        raise _invalid("bad-value", str(path), f"the profile cannot be read: {error}") from error
    return _read(text, str(path))


def to_machine(
    profile: HardwareProfile,
    memory_bytes: int | None = None,
    host_bytes: int | None = None,
    disk: bool = False,
    disk_bytes: int | None = None,
) -> Machine:
    """The machine to plan for, under budgets (default: the whole device, the host as profiled).

    `disk` adds the disk tier and its two lanes, from and to the host.
    """
    if memory_bytes is not None and not 0 < memory_bytes <= profile.device_memory_bytes:
        raise _invalid(
            "bad-value",
            "memory",
            f"{show_bytes(memory_bytes)} asked of {profile.name}, which has "
            f"{show_bytes(profile.device_memory_bytes)}; ask for that much or less",
        )
    tiers = [
        Tier(DEVICE, profile.device_memory_bytes if memory_bytes is None else memory_bytes),
        Tier(HOST, profile.host_memory_bytes if host_bytes is None else host_bytes),
    ]
    lanes = [
        _lane("h2d", HOST, DEVICE, profile.h2d_gbps, profile.latency_us),
        _lane("d2h", DEVICE, HOST, profile.d2h_gbps, profile.latency_us),
    ]
    if disk:
        if profile.disk_read_gbps is None or profile.disk_write_gbps is None:
            raise _invalid(
                "bad-value",
                "disk",
                f"profile {profile.name} has no figures for a disk; "
                "add disk_read_gbps and disk_write_gbps",
            )
        tiers.append(Tier(DISK, disk_bytes))
        latency_us = profile.disk_latency_us
        lanes.append(_lane("disk_read", DISK, HOST, profile.disk_read_gbps, latency_us))
        lanes.append(_lane("disk_write", HOST, DISK, profile.disk_write_gbps, latency_us))
    codecs = tuple(
        Codec(
            name,
            lossless,
            BYTES_PER_US_PER_GBPS * profile.codec_gbps.get(name, share * profile.memory_gbps),
        )
        for name, (lossless, share) in CODECS.items()
    )
    return Machine(tuple(tiers), tuple(lanes), codecs, shared_links(profile))


def shared_links(
    profile: HardwareProfile, ins: tuple[str, ...] = ("h2d",), outs: tuple[str, ...] = ("d2h",)
) -> tuple[SharedLink, ...]:
    """The link of a card, which carries copies over these lanes and accesses of host memory.

    One share per direction, and one for both if the profile says how they slow each other down.
    """
    direct = profile.direct_gbps
    into = max([profile.h2d_gbps, *(direct[w] for w in direct if w.startswith("read"))])
    out = max([profile.d2h_gbps, *(direct[w] for w in direct if w.startswith("write"))])
    found = [
        SharedLink("link_in", into * BYTES_PER_US_PER_GBPS, ins, in_place_reads=True),
        SharedLink("link_out", out * BYTES_PER_US_PER_GBPS, outs, in_place_writes=True),
    ]
    if profile.h2d_both_gbps is not None and profile.d2h_both_gbps is not None:
        both = (profile.h2d_both_gbps + profile.d2h_both_gbps) * BYTES_PER_US_PER_GBPS
        if both < sum(link.bytes_per_us for link in found):
            found.append(SharedLink("link_both_ways", both, ins + outs, True, True))
    return tuple(found)


def _lane(name: str, source: str, target: str, gbps: float, latency_us: float) -> Lane:
    return Lane(name, source, target, gbps * BYTES_PER_US_PER_GBPS, latency_us)


def _invalid(rule: str, where: str, detail: str) -> InvalidInput:
    return InvalidInput([Violation(rule, where, detail)])


def _said(value: object) -> str:
    """The value as Python writes it, if that is short."""
    short = isinstance(value, bool) or (isinstance(value, str) and len(value) <= _SHOWN_CHARACTERS)
    return repr(value) if short else show(value)


# --- reading -------------------------------------------------------------------------------


def _read(text: str, where: str) -> HardwareProfile:
    try:
        table = loads_toml(text, "profile")
    except InvalidInput as error:
        raise _invalid("bad-value", where, error.violations[0].detail) from None
    figures: dict[str, object] = {}
    if "base" in table:
        base = _shipped(_text(table.pop("base"), f"{where}: base"))
        figures = {f.name: getattr(base, f.name) for f in fields(base)}
    for key, value in table.items():
        if key not in _READERS:
            nearest = get_close_matches(key, _READERS, n=1, cutoff=0.0)[0]
            raise _invalid(
                "unknown-key", where, f"{_said(key)} is no key of a profile ({nearest}?)"
            )
        figures[key] = _READERS[key](value, f"{where}: {key}")
    missing = [
        f.name
        for f in fields(HardwareProfile)
        if f.default is MISSING and f.default_factory is MISSING and f.name not in figures
    ]
    if missing:
        raise _invalid(
            "bad-value", where, f"missing {', '.join(missing)} (or name a profile as `base`)"
        )
    return HardwareProfile(**figures)  # type: ignore[arg-type]  # each value came from its reader


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _invalid("bad-value", where, f"{_said(value)} is not a text")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _invalid("bad-value", where, f"{_said(value)} is not true or false")
    return value


def _size(value: object, where: str) -> int:
    if isinstance(value, str):
        try:
            value = parse_bytes(value)
        except InvalidInput as error:
            raise _invalid("bad-value", where, error.violations[0].detail) from None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
        detail = f"{_said(value)} is not a size; write whole bytes or text as in '80 GiB'"
        raise _invalid("bad-value", where, detail)
    return value


def _number(value: object, where: str) -> float:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    if not ok or not 0 <= value <= _MOST_FIGURE:  # type: ignore[operator]
        raise _invalid("bad-value", where, f"{_said(value)} is not a number of 0 or more, to 1e15")
    return float(value)  # type: ignore[arg-type]


def _rate(value: object, where: str) -> float:
    if (rate := _number(value, where)) < _LEAST_RATE:
        raise _invalid("bad-value", where, "a rate must be more than 0 (1e-15 or more)")
    return rate


def _share(value: object, where: str) -> float:
    if (share := _number(value, where)) > 1:
        raise _invalid("bad-value", where, f"{_said(value)} is not a share; write 0 to 1")
    return share


def _rates(names: tuple[str, ...]) -> Callable[[object, str], dict[str, float]]:
    def read(value: object, where: str) -> dict[str, float]:
        if not isinstance(value, dict):
            raise _invalid("bad-value", where, f"{_said(value)} is not a table")
        for key in value:
            if key not in names:
                raise _invalid("unknown-key", where, f"{_said(key)} is none of {', '.join(names)}")
        return {key: _rate(rate, f"{where}.{key}") for key, rate in value.items()}

    return read


_READERS: Mapping[str, Callable[[object, str], object]] = {
    "name": _text,
    "title": _text,
    "source": _text,
    "device_memory_bytes": _size,
    "host_memory_bytes": _size,
    "memory_gbps": _rate,
    "h2d_gbps": _rate,
    "d2h_gbps": _rate,
    "disk_read_gbps": _rate,
    "disk_write_gbps": _rate,
    "latency_us": _number,
    "disk_latency_us": _number,
    "matmul_tflops": _rates(DTYPES),
    "codec_gbps": _rates(tuple(CODECS)),
    "measured": _flag,
    "h2d_both_gbps": _rate,
    "d2h_both_gbps": _rate,
    "direct_gbps": _rates(DIRECT_WAYS),
    "attention_tflops": _rates(ATTENTION),
    "launch_us": _number,
    "pin_us_per_gib": _number,
    "host_memory_gbps": _rate,
    "host_copy_gbps": _rate,
    "host_adam_gbps": _rate,
    "copy_toll_share": _share,
    "disk_toll_share": _share,
    "disk_read_both_gbps": _rate,
    "disk_write_both_gbps": _rate,
    "disk_read_buffered_gbps": _rate,
    "disk_write_buffered_gbps": _rate,
}
