"""Prints the doctor's results: figures by device and disk, then the limits of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offcompile.cli.tables import _cells, _facts, _print, _table
from offcompile.ir.units import printable, show_us, size
from offcompile.machine.hardware import ADAM_BYTES_PER_PARAMETER, HardwareProfile

from .figures import Examination, Gpu, Spill
from .words import findings

NOTHING = "-"


def show_examination(found: Examination, written: Sequence[Path]) -> None:
    parts: list[RenderableType] = []
    if found.no_gpu is not None:
        parts.append(Text(printable(f"{found.no_gpu}; the CPU target is measured")))
    for gpu in found.gpus:
        parts += _card(gpu)
    parts += [Text("\nCPU target", style="bold"), _facts(dict(_cpu(found)))]
    parts.append(_spills(found.spills))
    missing = dict(found.failed) | {
        f"{gpu.place}: {step}": why for gpu in found.gpus for step, why in gpu.failed.items()
    }
    if missing:
        table = _table("not measured", ("what", "why"))
        for step, why in missing.items():
            table.add_row(*_cells(step, why))
        parts.append(table)
    parts += [_found(found), *_kept(found, written)]
    _print(*parts)


def _card(gpu: Gpu) -> Iterator[RenderableType]:
    yield Text(printable(f"\n{gpu.place}  {gpu.name}"), style="bold")
    p = gpu.profile
    if p is None:
        return
    facts = {
        "memory": f"{size(p.device_memory_bytes)}, {p.memory_gbps:.4g} GB/s",
        "matrix products": _products(p),
        "attention": _attention(p),
        "link": f"{p.h2d_gbps:.3g} GB/s to the card, {p.d2h_gbps:.3g} GB/s back",
        "both at once": f"{_rate(p.h2d_both_gbps)} to the card, {_rate(p.d2h_both_gbps)} back",
        "small copy, launch": f"{show_us(p.latency_us)}, {_time(p.launch_us)}",
        "kernels on host memory": ", ".join(
            f"{way.replace('_', ' ')} {rate:.3g}" for way, rate in p.direct_gbps.items()
        )
        + (" GB/s" if p.direct_gbps else NOTHING),
        "pinning": NOTHING if p.pin_us_per_gib is None else f"{show_us(p.pin_us_per_gib)} a GiB",
    }
    if gpu.link is not None:
        of = gpu.link
        facts["wired"] = f"PCIe Gen{of.generation} x{of.width} of " + (
            f"Gen{of.most_generation} x{of.most_width}"
        )
    yield _facts(facts)


def _cpu(found: Examination) -> Iterator[tuple[str, str]]:
    p, limits = found.cpu, found.limits
    yield "processor", p.title
    yield "memory", f"{size(limits.memory_bytes)}, {p.memory_gbps:.3g} GB/s read and written"
    yield "copy by one thread", _rate(p.host_copy_gbps)
    if p.copy_toll_share is not None:
        yield "copies beside compute", f"take {p.copy_toll_share:.0%} of their time from it"
    if p.disk_toll_share is not None:
        yield "disks beside compute", f"take {p.disk_toll_share:.0%} of their time from it"
    yield "matrix products", _products(p)
    yield "attention", _attention(p)
    adam = p.host_adam_gbps
    yield (
        "AdamW",
        NOTHING
        if adam is None
        else f"{adam / ADAM_BYTES_PER_PARAMETER:.3g} billion parameters a second, {_rate(adam)}",
    )
    yield (
        "malloc",
        (f"glibc {found.glibc}" if found.glibc else "not glibc")
        + (", leaves holes" if found.leaves_holes else ""),
    )
    yield "huge pages", limits.huge_pages or "not known"
    bounds = (
        ("locked", limits.memlock_bytes),
        ("data", limits.data_bytes),
        ("addresses", limits.address_bytes),
    )
    said = [f"{name} {'no limit' if n is None else size(n)}" for name, n in bounds]
    files = "no limit" if limits.open_files is None else str(limits.open_files)
    yield "limits", ", ".join([*said, f"open files {files}"])


def _spills(spills: Sequence[Spill]) -> Table:
    speeds = ("read", "write", "both read", "both write", "cached read", "cached write")
    figures = ("free", "writes a day", *speeds)
    table = _table(
        "spill directories, GB/s",
        ("directory", "file system", "direct I/O", "small read", *figures),
        ("small read", *figures),
    )
    for s in spills:
        rates = (
            *(s.read_gbps, s.write_gbps, s.read_both_gbps, s.write_both_gbps),
            *(s.read_buffered_gbps, s.write_buffered_gbps),
        )
        table.add_row(
            *_cells(
                s.directory,
                s.filesystem or "not known",
                "yes" if s.direct_io else "no",
                show_us(s.latency_us),
                size(s.free_bytes),
                NOTHING if s.daily_bytes is None else size(int(s.daily_bytes)),
                *(NOTHING if rate is None else f"{rate:.3g}" for rate in rates),
            )
        )
    return table


def _found(found: Examination) -> Table:
    table = _table("what limits, by expected effect on a step", ("costs", "where", "what"), ())
    for finding in findings(found):
        cost = f"{100 * finding.effect:.0f}%" if finding.effect >= 0.005 else NOTHING
        text = Text(printable(finding.says))
        if finding.helps:
            text.append(printable(f" → {finding.helps}"), style="bold")
        table.add_row(*_cells(cost, finding.where), text)
    return table


def _kept(found: Examination, written: Sequence[Path]) -> Iterator[RenderableType]:
    yield Text(
        f"\nPlanning uses these figures from now on, in runs with {found.limits.threads} threads."
    )
    for path in written:
        yield Text(printable(f"written: {path}"))


def _products(p: HardwareProfile) -> str:
    return ", ".join(f"{name} {rate:.3g}" for name, rate in p.matmul_tflops.items()) + " TFLOP/s"


def _attention(p: HardwareProfile) -> str:
    rates = [f"{way} {rate:.3g}" for way, rate in p.attention_tflops.items()]
    return ", ".join(rates) + " TFLOP/s" if rates else NOTHING


def _rate(gbps: float | None) -> str:
    return NOTHING if gbps is None else f"{gbps:.3g} GB/s"


def _time(duration_us: float | None) -> str:
    return NOTHING if duration_us is None else show_us(duration_us)
