"""`offcompile doctor`: measures this machine for both targets, and caches figures for planning.

Planning reads the caches of `this_machine` and `gpu_profile`; the doctor adds the figures that they
leave out. The CUDA measurements have not run on a real device yet (docs/gpu.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from offcompile.ir import InvalidInput, OffloadError, Violation
from offcompile.machine.cost_cache import forget_costs
from offcompile.machine.gpu_figures import gpu_profile, measure_card
from offcompile.machine.hardware import BYTES_PER_US_PER_GBPS, HardwareProfile
from offcompile.machine.option_values import default_spill
from offcompile.machine.optional_figures import More, measure_more
from offcompile.machine.options import Options
from offcompile.machine.this_machine import (
    MORE_OF_DISK,
    MORE_OF_MACHINE,
    Progress,
    disk_figures,
    disk_identity,
    this_machine,
)
from offcompile.planning.feedback.endurance import daily_bytes
from offcompile.runtime.base.host_limits import in_container, in_wsl
from offcompile.runtime.base.limits import read_limits
from offcompile.runtime.device.cuda.calls import CudaCalls, DriverCalls, count_cards, why_no_cards
from offcompile.runtime.disk.directories import (
    check_directory,
    default_directory,
    filesystem_type,
    free_bytes,
)
from offcompile.runtime.disk.gds import why_not_direct
from offcompile.runtime.measure.cuda import QUICK, Sizes
from offcompile.runtime.measure.host import (
    ADAM_PARAMETERS,
    FILE_BYTES,
    adam_parameters_per_us,
    attention_flop_per_us,
    copy_bytes_per_us,
    measure_files,
    passes_page_cache,
)
from offcompile.runtime.measure.timing import machine_identity, undisturbed
from offcompile.runtime.memory.malloc.advice import malloc_leaves_holes
from offcompile.runtime.memory.malloc.glibc import glibc_version

from .figures import Examination, Gpu, Spill
from .words import findings

FILE_SECONDS, QUICK_FILE_SECONDS = 1.0, 0.2
QUICK_SHARE = 4
#: figures for planning are never measured quickly
WHOLE = Sizes()


def spill_directories(named: Sequence[str]) -> tuple[Path, ...]:
    """The named directories, or the default. Raises `InvalidInput`, which lists all bad ones."""
    asked: dict[str, object] = {"spill": list(named)} if named else {}
    places = Options.read(asked).spill
    if places == default_spill():
        try:
            places = (default_directory(),)
        except OffloadError as error:
            raise InvalidInput([Violation("bad-value", "--spill", str(error))]) from None
    wrong = []
    for place in places:
        try:
            check_directory(place)
        except OffloadError as error:
            wrong.append(Violation("bad-value", "--spill", str(error)))
    if wrong:
        raise InvalidInput(wrong)
    return places


def examine(
    directories: Sequence[Path],
    quick: bool = False,
    refresh: bool = False,
    tell: Progress = lambda text: None,
) -> Examination:
    """Measure this machine with these spill directories; takes up to a few minutes.

    quick: move and compute less for each figure. Cached figures are measured again only with
    `refresh`, or if they are from a quick run and this one is not quick. `refresh` also forgets the
    times of single ops, which the next compilation measures again.
    """
    if refresh:
        forget_costs()
    machine = _measure_machine(quick, refresh, tell)
    disks = {place: _measure_disk(place, quick, refresh, tell) for place in directories}
    cpu = this_machine(directories, refresh, tell)
    count = count_cards()
    glibc = glibc_version()
    return Examination(
        limits=read_limits(),
        cpu=cpu,
        spills=tuple(_spill(place, disks[place].figures, tell) for place in directories),
        gpus=tuple(_gpu(i, directories, quick, refresh, tell) for i in range(count)),
        no_gpu=None if count else why_no_cards(),
        no_direct_files=why_not_direct(directories) if count else None,
        glibc=None if glibc is None else "{}.{}".format(*glibc),
        leaves_holes=malloc_leaves_holes(os.environ),
        container=in_container(),
        wsl=in_wsl(),
        failed={
            **machine.failed,
            **{
                f"{step} of {place}": why
                for place, more in disks.items()
                for step, why in more.failed.items()
            },
        },
    )


def profiles(found: Examination) -> dict[str, HardwareProfile]:
    """The profiles that planning uses, by place: GPUs first, then the CPU target."""
    cards = {gpu.place: gpu.profile for gpu in found.gpus if gpu.profile is not None}
    return {**cards, "cpu": found.cpu}


def output_paths(found: Examination, output: Path) -> dict[Path, HardwareProfile]:
    """Map `output` to the first profile, and `FILE.cpu.toml` etc. beside it to the others."""
    (_, first), *others = profiles(found).items()
    beside = {
        output.with_suffix(f".{place.replace(':', '')}{output.suffix}"): profile
        for place, profile in others
    }
    return {output: first, **beside}


def open_output(path: str) -> Path:
    """Check the output path before anything is measured. Raises `InvalidInput`."""
    target = Path(path)
    why = None
    if target.suffix.lower() != ".toml":
        why = "a profile is a .toml file; name one that ends so"
    elif target.is_dir() or not target.parent.is_dir():
        why = "the profile cannot be written there; name a file in a directory that exists"
    else:
        why = _refusal(target)
    if why is not None:
        raise InvalidInput([Violation("bad-value", path, why)])
    return target


def _refusal(target: Path) -> str | None:
    """The reason that it cannot be written, found by trying; permission bits are not enough."""
    existed = target.exists()
    try:
        target.open("ab").close()
    except OSError as error:
        return f"the profile cannot be written there: {error.strerror}"
    if not existed:
        target.unlink()
    return None


def to_json(found: Examination, written: Sequence[Path] = ()) -> dict[str, object]:
    """The whole examination in plain values."""
    return {
        **asdict(replace(found, gpus=(), spills=())),
        "spills": [asdict(spill) for spill in found.spills],
        "gpus": [asdict(gpu) for gpu in found.gpus],
        "findings": [asdict(finding) for finding in findings(found)],
        "written": [str(path) for path in written],
    }


# --- measuring -----------------------------------------------------------------------------


def _measure_machine(quick: bool, refresh: bool, tell: Progress) -> More:
    share = QUICK_SHARE if quick else 1

    def attention() -> dict[str, float]:
        forward, backward = attention_flop_per_us()
        return {"attention_forward": forward, "attention_backward": backward}

    steps = {
        "attention": attention,
        "AdamW": lambda: {"adam": adam_parameters_per_us(ADAM_PARAMETERS // share)},
        "copies by one thread": lambda: {"copy": copy_bytes_per_us()},
    }
    with undisturbed():
        return measure_more(MORE_OF_MACHINE, machine_identity(), steps, quick, refresh, tell)


def _measure_disk(directory: Path, quick: bool, refresh: bool, tell: Progress) -> More:
    def files() -> Mapping[str, float]:
        if quick:
            found = measure_files(directory, QUICK_FILE_SECONDS, FILE_BYTES // QUICK_SHARE)
        else:
            found = measure_files(directory, FILE_SECONDS)
        return found._asdict()

    steps = {"files": files}
    identity = disk_identity(directory)
    named = f"of {directory}"
    with undisturbed():
        return measure_more(
            MORE_OF_DISK, identity, steps, quick, refresh, lambda text: tell(f"{text} {named}")
        )


def _spill(directory: Path, more: Mapping[str, float], tell: Progress) -> Spill:
    disk = disk_figures(directory, False, tell)

    def gbps(name: str) -> float | None:
        return more[name] / BYTES_PER_US_PER_GBPS if name in more else None

    return Spill(
        directory=str(directory),
        filesystem=filesystem_type(directory),
        free_bytes=free_bytes(directory),
        direct_io=passes_page_cache(directory),
        read_gbps=disk["read"] / BYTES_PER_US_PER_GBPS,
        write_gbps=disk["write"] / BYTES_PER_US_PER_GBPS,
        latency_us=disk["latency"],
        read_both_gbps=gbps("read_both"),
        write_both_gbps=gbps("write_both"),
        read_buffered_gbps=gbps("read_buffered"),
        write_buffered_gbps=gbps("write_buffered"),
        daily_bytes=daily_bytes(directory),
    )


def _gpu(
    index: int, directories: Sequence[Path], quick: bool, refresh: bool, tell: Progress
) -> Gpu:
    """Measure one GPU. A failure is reported in the result, so that others are still measured."""
    name = f"card {index}"
    try:
        calls: DriverCalls = CudaCalls(index)
        name = calls.card.name
        # warms up the GPU, since an idle link runs at a lower speed
        gpu_profile(index, (), refresh, tell, calls, WHOLE)
        more = measure_card(calls, QUICK if quick else WHOLE, quick, refresh, tell)
        link = calls.link()
        profile = gpu_profile(index, directories, False, tell, calls, WHOLE)
    except (RuntimeError, OffloadError) as error:
        return Gpu(index, name, None, failed={"all": str(error).strip().split("\n")[0]})
    return Gpu(index, name, profile, link, more.failed)
