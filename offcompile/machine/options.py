"""The options of the backend, read once into one frozen `Options`.

Options come from `torch.compile(…, options={…})` and from `OFFCOMPILE_*` variables; those given
in code win, even if they are None. All faults are reported at once, by name.
"""

from __future__ import annotations

import math
import numbers
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from offcompile.ir import InvalidInput, Violation
from offcompile.ir.units import show_bytes
from offcompile.passes.registry import make, policy_class
from offcompile.passes.registry import options as policy_options

from .hardware import load_profile, parse_bytes

LOSSY = ("fp16", "bf16")
LOWERINGS = ("inductor", "aot_eager")
MINIMUM: Literal["minimum"] = "minimum"

PREFIX = "OFFCOMPILE_"
#: variables of offcompile that set no option
OTHER_VARIABLES = (
    "OFFCOMPILE_CACHE_DIR",
    "OFFCOMPILE_ALLOCATOR",
    "OFFCOMPILE_STALL_SECONDS",
    "OFFCOMPILE_HYPOTHESIS",
)

_SWITCHES = {"1": True, "true": True, "0": False, "false": False}
_MEMORY_FORMS = (
    "bytes, text as in '8GiB', a share of the device as in 0.5 or '50%', 'minimum' or None"
)
_HOST_FORMS = "bytes, text as in '64GiB', or None"
_SPILL_FORMS = "a directory or a list of directories"


def default_spill() -> tuple[Path, ...]:
    """The system's temporary directory."""
    try:
        return (Path(tempfile.gettempdir()).absolute(),)
    except OSError as error:
        detail = f"there is no temporary directory to spill to ({error}); name one"
        raise _refusal("spill", detail) from error


@dataclass(frozen=True)
class Options:
    """The checked settings of one compilation. Created by `Options.read`."""

    #: device budget for everything the compiled step holds: bytes, a share of the device, the
    #: smallest possible ("minimum"), or all of the device (None)
    memory: int | float | Literal["minimum"] | None = None
    #: bytes that the host tier may hold; None: no limit
    host_memory: int | None = None
    #: directories for the files of the slow tiers
    spill: tuple[Path, ...] = field(default_factory=default_spill)
    #: type to which offloaded activations may be rounded; None: everything stays exact
    lossy: Literal["fp16", "bf16"] | None = None
    lowering: Literal["inductor", "aot_eager"] = "inductor"
    #: `NAME` or `NAME:key=value,…`
    policy: str = "joint"
    #: profile name or file; None: measured on this machine
    hardware: str | None = None
    #: directory to which graphs, problems and plans are written; None: not written
    dump: Path | None = None
    #: time limit for planning; None: chosen from the size of the problem
    seconds: float | None = None
    #: share of the gradients' bytes that may stay on the device while the rest is written to the
    #: host; None: the policy chooses
    gradient_reserve: float | None = None
    #: True if data read from spill files is compared with checksums of the data written
    verify_spill: bool = False
    #: True if the first step also runs without offloading and all results are compared
    verify: bool = False
    #: True if a loss over a large vocabulary may be computed in pieces; a number: in that many
    #: pieces; None: where a budget needs it, under Inductor only
    split: bool | int | None = None
    #: True if plans are kept in the user's cache folder, and found there by later runs
    reuse_plans: bool = True
    #: True if a step is captured as a CUDA graph once its plan has settled
    cudagraphs: bool = False

    @classmethod
    def read(
        cls,
        given: Mapping[str, object] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Options:
        """Reads the options; code overrides variables, which override defaults. Raises
        `InvalidInput` with all faults.

        A variable with an empty value counts as not set.
        """
        if given is not None and not isinstance(given, Mapping):
            raise _refusal("options", f"{_show(given)} is no mapping; write {{'memory': '8GiB'}}")
        wrong: list[Violation] = []
        values: dict[str, object] = {}
        sources = [(k, _variable(k), v) for k, v in _from_environment(environ, wrong).items()]
        for key, value in (given or {}).items():
            if key in _READERS:
                sources.append((key, f"option {key}", value))
            else:
                names = ", ".join(_READERS)
                hint = _nearest(str(key), _READERS)
                detail = f"there is no option {_show(key)}{hint} (there are {names})"
                wrong.append(Violation("unknown-key", "options", detail))
        asked = {key: (where, value) for key, where, value in sources}  # the last one counts
        for key, (where, value) in asked.items():
            try:
                values[key] = _READERS[key](value, where)
            except InvalidInput as error:
                wrong += (Violation(v.rule, where, v.detail) for v in error.violations)
        if values.get("gradient_reserve") is not None and values.get("policy", "joint") != "joint":
            detail = (
                f"gradient_reserve={values['gradient_reserve']} plans by the policy of that name,"
                f" not by {values['policy']!r}; leave out one of the two"
            )
            wrong.append(_bad(asked["gradient_reserve"][0], detail))
        if wrong:
            raise InvalidInput(wrong)
        return cls(**values)  # type: ignore[arg-type]  # each value came from its reader

    @property
    def whole_policy(self) -> str:
        """The policy to plan with, including arguments that come from other options."""
        policy = self.policy
        if self.gradient_reserve is not None:
            policy = f"gradient_reserve:reserve={self.gradient_reserve}"
        if self.lossy is not None and _may_be_lossy(policy):
            policy += f"{',' if ':' in policy else ':'}lossy=true"
        return policy

    @property
    def may_split(self) -> bool:
        """True if the planner may split a loss, which changes the order of summation."""
        if self.split is None:
            return self.lowering == "inductor" and not self.minimum
        return self.split is not False

    @property
    def pieces(self) -> int | None:
        """The requested number of pieces; None: the planner decides."""
        return None if self.split is None or isinstance(self.split, bool) else self.split

    @property
    def minimum(self) -> bool:
        """True if the budget is the smallest possible: everything that can be evicted is."""
        return self.memory == MINIMUM

    def memory_bytes(self, device_total: int, whole: int | None = None) -> int | None:
        """The budget on a device of this size; None: the minimum, which depends on the problem.

        whole: bytes of the device of which only `device_total` can be used. A budget in between is
        cut to `device_total`. Raises `InvalidInput` if it exceeds the device.
        """
        if self.memory is None:
            return device_total
        if isinstance(self.memory, str):
            return None
        if isinstance(self.memory, float):
            return max(1, math.floor(self.memory * device_total))
        if self.memory > max(device_total, whole or 0):
            raise _refusal(
                "memory",
                f"{show_bytes(self.memory)} asked of a device that has "
                f"{show_bytes(device_total)}; ask for that much or less",
            )
        return min(self.memory, device_total)


def _may_be_lossy(policy: str) -> bool:
    """True if the policy has an option `lossy` that was not given."""
    name, _, rest = policy.partition(":")
    return "lossy" in policy_options(policy_class(name)) and "lossy=" not in rest


# --- the environment -----------------------------------------------------------------------


def _variable(option: str) -> str:
    return PREFIX + option.upper()


def _from_environment(environ: Mapping[str, str], wrong: list[Violation]) -> dict[str, object]:
    """Maps options to the values of their variables, in the form used in code."""
    options = {_variable(option): option for option in _READERS}
    found: dict[str, object] = {}
    for name in sorted(n for n in environ if n.startswith(PREFIX)):
        text = environ[name].strip()
        if name in OTHER_VARIABLES:
            continue
        if name not in options:
            known = (*options, *OTHER_VARIABLES[:2])
            detail = f"no such variable{_nearest(name, known)} (there are {', '.join(known)})"
            wrong.append(Violation("unknown-key", name, detail))
        elif text:
            option = options[name]
            try:
                found[option] = _unwritten(option, text)
            except ValueError:
                wrong.append(_bad(name, f"{text!r} is not a number"))
    return found


def _unwritten(option: str, text: str) -> object:
    """Converts text from the shell: numbers, lists of directories, switches, and None."""
    if option == "spill":
        return text.split(os.pathsep)
    if option in ("verify_spill", "verify", "reuse_plans", "cudagraphs"):
        return _SWITCHES.get(text.lower(), text)
    if option == "split" and text.lower() != "none":
        is_count = text.isdecimal() and int(text) > 1
        return int(text) if is_count else _SWITCHES.get(text.lower(), text)
    if text.lower() == "none" and option not in ("policy", "lowering"):
        return None
    return float(text) if option in ("seconds", "gradient_reserve") else text


# --- values --------------------------------------------------------------------------------


def _memory(value: object, where: str) -> int | float | str | None:
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == MINIMUM:
            return MINIMUM
        fraction = _fraction(text)
        return _size(value, where, _MEMORY_FORMS) if fraction is None else _share(fraction, value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return _share(float(value), value)
    return None if value is None else _size(value, where, _MEMORY_FORMS)


def _fraction(text: str) -> float | None:
    """`0.5` and `50%` as a number; None for text with another unit or without a point, which is a
    size."""
    number = text.removesuffix("%").rstrip()
    if not number.removeprefix("-").replace(".", "", 1).isdecimal():
        return None
    if text.endswith("%"):
        return float(number) / 100
    return float(number) if "." in text else None


def _share(fraction: float, shown: object) -> float:
    if not 0 < fraction <= 1:
        raise _refusal(
            "memory",
            f"{_show(shown)} is no share of the device; a share is more than 0 and "
            f"at most 1, and a size is whole bytes or has a unit ({_MEMORY_FORMS})",
        )
    return fraction


def _host_memory(value: object, where: str) -> int | None:
    return None if value is None else _size(value, where, _HOST_FORMS)


def _size(value: object, where: str, forms: str) -> int:
    if isinstance(value, str):
        try:
            nbytes = parse_bytes(value)
        except InvalidInput as error:
            detail = f"{error.violations[0].detail} (allowed: {forms})"
            raise _refusal(where, detail) from None
    elif isinstance(value, numbers.Integral) and not isinstance(value, bool):
        nbytes = int(value)
    else:
        raise _refusal(where, f"{_show(value)} is not a size; allowed: {forms}")
    if nbytes <= 0:
        raise _refusal(where, f"{_show(value)} is not more than 0; allowed: {forms}")
    return nbytes


def _spill(value: object, where: str) -> tuple[Path, ...]:
    if value is None:
        return default_spill()
    single = isinstance(value, str | os.PathLike)
    if not single and not isinstance(value, Sequence):
        raise _refusal(where, f"{_show(value)} is not {_SPILL_FORMS}")
    listed: list[object] = [value] if single else list(value)  # type: ignore[call-overload]
    if not listed:
        raise _refusal(where, f"the list is empty; name {_SPILL_FORMS}, or leave it out")
    paths = tuple(_path(v, where, _SPILL_FORMS) for v in listed)
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise _refusal(where, f"{str(path)!r} is named twice; name it once")
    return paths


def _path(value: object, where: str, forms: str) -> Path:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise _refusal(where, f"{_show(value)} is not {forms}")
    try:
        # absolute: the process may be elsewhere when the backward is compiled
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise _refusal(where, f"{text!r}: {error}") from None


def _dump(value: object, where: str) -> Path | None:
    return None if value is None else _path(value, where, "a directory or None")


def _one_of(allowed: tuple[str, ...], none: bool) -> Callable[[object, str], str | None]:
    def read(value: object, where: str) -> str | None:
        if (none and value is None) or (isinstance(value, str) and value in allowed):
            return value
        names = " or ".join([*(repr(name) for name in allowed), *(["None"] if none else [])])
        hint = _nearest(value.lower(), allowed) if isinstance(value, str) else ""
        raise _refusal(where, f"{_show(value)} is not allowed{hint} (it is {names})")

    return read


def _policy(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _refusal(where, f"{_show(value)} is not a policy; write 'NAME' or 'NAME:key=value,…'")
    make(value.strip())
    return value.strip()


def _hardware(value: object, where: str) -> str | None:
    if value is None:
        return None
    path = _path(value, where, "the name of a profile, a profile file or None")
    is_file = not isinstance(value, str) or "/" in value or value.endswith(".toml")
    named = str(path) if is_file else str(value).strip()
    load_profile(named)
    return named


def _seconds(value: object, where: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    seconds = float(value) if number else math.nan  # type: ignore[arg-type]
    if not math.isfinite(seconds) or seconds <= 0:
        raise _refusal(where, f"{_show(value)} is no planning time; write seconds above 0, or None")
    return seconds


def _gradient_reserve(value: object, where: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    share = float(value) if number else math.nan  # type: ignore[arg-type]
    if not 0 <= share <= 1:
        raise _refusal(
            where,
            f"{_show(value)} is no share of the gradients; write a number from 0 to 1, or None",
        )
    return share


def _switch(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        detail = f"{_show(value)} is neither True nor False; write one of them"
        raise _refusal(where, f"{detail} (as a variable: 1 or 0)")
    return value


def _split(value: object, where: str) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral) and int(value) > 1:
        return int(value)
    detail = "write True, False, None, or a number of pieces from 2 on"
    raise _refusal(where, f"{_show(value)} does not say how to split; {detail}")


_READERS: Mapping[str, Callable[[object, str], object]] = {
    "memory": _memory,
    "host_memory": _host_memory,
    "spill": _spill,
    "lossy": _one_of(LOSSY, none=True),
    "lowering": _one_of(LOWERINGS, none=False),
    "policy": _policy,
    "hardware": _hardware,
    "dump": _dump,
    "seconds": _seconds,
    "gradient_reserve": _gradient_reserve,
    "verify_spill": _switch,
    "verify": _switch,
    "split": _split,
    "reuse_plans": _switch,
    "cudagraphs": _switch,
}
assert tuple(_READERS) == tuple(f.name for f in fields(Options))


# --- messages ------------------------------------------------------------------------------


def _bad(where: str, detail: str) -> Violation:
    return Violation("bad-value", where, detail)


def _refusal(where: str, detail: str) -> InvalidInput:
    return InvalidInput([_bad(where, detail)])


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _nearest(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
