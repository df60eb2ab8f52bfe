"""The options of the backend, read once into one frozen `Options`.

Options come from `torch.compile(…, options={…})` and from `OFFCOMPILE_*` variables; those given
in code win, even if they are None. `option_values` checks each. All faults are reported at once, by
name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from offcompile.ir import InvalidInput, Violation
from offcompile.ir.units import show_bytes
from offcompile.passes.registry import options as policy_options
from offcompile.passes.registry import policy_class

from .option_values import (
    MINIMUM,
    READERS,
    bad_value,
    default_spill,
    nearest_to,
    quoted,
    refusal,
)

PREFIX = "OFFCOMPILE_"
#: variables of offcompile that set no option
OTHER_VARIABLES = (
    "OFFCOMPILE_CACHE_DIR",
    "OFFCOMPILE_ALLOCATOR",
    "OFFCOMPILE_STALL_SECONDS",
    "OFFCOMPILE_HYPOTHESIS",
)

_SWITCHES = {"1": True, "true": True, "0": False, "false": False}


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
            raise refusal("options", f"{quoted(given)} is no mapping; write {{'memory': '8GiB'}}")
        wrong: list[Violation] = []
        values: dict[str, object] = {}
        sources = [(k, _variable(k), v) for k, v in _from_environment(environ, wrong).items()]
        for key, value in (given or {}).items():
            if key in READERS:
                sources.append((key, f"option {key}", value))
            else:
                names = ", ".join(READERS)
                hint = nearest_to(str(key), READERS)
                detail = f"there is no option {quoted(key)}{hint} (there are {names})"
                wrong.append(Violation("unknown-key", "options", detail))
        asked = {key: (where, value) for key, where, value in sources}  # the last one counts
        for key, (where, value) in asked.items():
            try:
                values[key] = READERS[key](value, where)
            except InvalidInput as error:
                wrong += (Violation(v.rule, where, v.detail) for v in error.violations)
        if values.get("gradient_reserve") is not None and values.get("policy", "joint") != "joint":
            detail = (
                f"gradient_reserve={values['gradient_reserve']} plans by the policy of that name,"
                f" not by {values['policy']!r}; leave out one of the two"
            )
            wrong.append(bad_value(asked["gradient_reserve"][0], detail))
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
            raise refusal(
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
    options = {_variable(option): option for option in READERS}
    found: dict[str, object] = {}
    for name in sorted(n for n in environ if n.startswith(PREFIX)):
        text = environ[name].strip()
        if name in OTHER_VARIABLES:
            continue
        if name not in options:
            known = (*options, *OTHER_VARIABLES[:2])
            detail = f"no such variable{nearest_to(name, known)} (there are {', '.join(known)})"
            wrong.append(Violation("unknown-key", name, detail))
        elif text:
            option = options[name]
            try:
                found[option] = _unwritten(option, text)
            except ValueError:
                wrong.append(bad_value(name, f"{text!r} is not a number"))
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


assert tuple(READERS) == tuple(f.name for f in fields(Options))
