"""The documented path of `offcompile.machine.hardware`."""

from offcompile.machine.hardware import (
    ADAM_BYTES_PER_PARAMETER,
    ALIASES,
    ATTENTION,
    BYTES_PER_US_PER_GBPS,
    CODECS,
    DIRECT_WAYS,
    DISK,
    DTYPES,
    HardwareProfile,
    list_profiles,
    load_measured,
    load_profile,
    parse_bytes,
    to_machine,
)

__all__ = [
    "ADAM_BYTES_PER_PARAMETER",
    "ALIASES",
    "ATTENTION",
    "BYTES_PER_US_PER_GBPS",
    "CODECS",
    "DIRECT_WAYS",
    "DISK",
    "DTYPES",
    "HardwareProfile",
    "list_profiles",
    "load_measured",
    "load_profile",
    "parse_bytes",
    "to_machine",
]
