"""`offcompile fit`: tells if a model fits and how fast it trains, without the hardware."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offcompile.runtime.base.interpreter import rarely_collected

from .files import invalid

DTYPES = ("bfloat16", "float16", "float32")
DONE, INFEASIBLE = 0, 3


def add_fit(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    fit = commands.add_parser(
        "fit",
        help="say whether a model fits, how fast it would train, and which batch is largest",
        description="Nothing is allocated and nothing runs: the hardware need not be there.",
    )
    fit.add_argument(
        "model",
        metavar="MODEL",
        help="file.py:factory, module:factory, hf:NAME (such as hf:gpt2-xl) or hf:FOLDER; a factory"
        " returns (model, inputs) or (model, inputs, loss) and may take batch and length",
    )
    fit.add_argument(
        "--hardware", metavar="NAME", help="a profile's name or .toml file (default: this machine)"
    )
    fit.add_argument(
        "--cards",
        nargs="?",
        const="all",
        metavar="NAME,NAME,…",
        help="compare these profiles (without names: all cards)",
    )
    fit.add_argument(
        "--price",
        metavar="NAME=X,…",
        help="what an hour of a card costs you, as in rtx4090=0.40,h100-sxm=2.50",
    )
    fit.add_argument("--memory", metavar="SIZE", help="device budget (default: all of it)")
    fit.add_argument("--host-memory", metavar="SIZE", help="host budget; more goes to disk")
    fit.add_argument("--batch", type=int, default=1, metavar="N", help="default: %(default)s")
    _add_lengths(fit)
    fit.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="of hf: models (default: %(default)s)"
    )
    fit.add_argument(
        "--optimizer", metavar="NAME", help="adamw, adam, momentum or sgd (default: no updates)"
    )
    fit.add_argument(
        "--lora",
        metavar="r=R[,alpha=A][,targets=NAMES]",
        help="train low-rank adapters only, on the linear layers of these names, as in"
        " r=16,targets=q_proj,v_proj (default: all-linear)",
    )
    fit.add_argument(
        "--stream-states",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let states on the host cross to the device for updates there (default: they may)",
    )
    _add_ranks(fit)
    fit.add_argument("--quick", action="store_true", help="no other budgets, no largest batch")
    fit.add_argument(
        "--compare", action="store_true", help="plan with each published policy by itself too"
    )
    fit.add_argument("--html", metavar="FILE", help="also write the plan as a page")
    fit.add_argument("--json", action="store_true", help="print one JSON object")
    fit.set_defaults(run=run_fit)


def _add_lengths(fit: Any) -> None:
    one_or_more = fit.add_mutually_exclusive_group()
    one_or_more.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="of sequences: hf: models, and factories that take length (default: 1024)",
    )
    one_or_more.add_argument(
        "--lengths", metavar="N,N,…", help="compare these lengths, as in 512,1024,2048"
    )


def _read_lengths(text: str | None) -> tuple[int, ...] | None:
    from offcompile.ahead.fit import check_lengths

    if text is None:
        return None
    try:
        return check_lengths(int(part) for part in text.split(","))
    except ValueError:
        detail = f"{text!r} is no list of lengths; write whole numbers, as in 512,1024,2048"
        raise invalid("bad-value", "--lengths", detail) from None


def _read_cards(text: str | None) -> str | list[str] | None:
    return text if text is None or text == "all" else text.split(",")


def _read_prices(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    found = {}
    for part in text.split(","):
        name, _, price = part.partition("=")
        try:
            found[name.strip()] = float(price)
        except ValueError:
            detail = f"{part!r} is no price; write NAME=X, as in rtx4090=0.40,h100-sxm=2.50"
            raise invalid("bad-value", "--price", detail) from None
    return found


def _add_ranks(fit: Any) -> None:
    fit.add_argument(
        "--ranks", type=int, metavar="N", help="ranks that train it, each with such a batch"
    )
    fit.add_argument(
        "--shard",
        metavar="WAY",
        help="how ranks share it: ddp, fsdp or zero1 (default: ddp)",
    )
    fit.add_argument(
        "--link",
        metavar="NAME",
        help="between ranks: nvlink, nvlink3, pcie, 400gb, 100gb, or a rate as in 20GB/s"
        " (default: nvlink)",
    )
    fit.add_argument(
        "--node-ranks",
        type=int,
        metavar="N",
        help="ranks on one node (default: all of them over nvlink and pcie, else one)",
    )


def _asked_of_ranks(options: argparse.Namespace) -> dict[str, Any]:
    names = ("ranks", "shard", "link", "node_ranks")
    given = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    if given and "ranks" not in given:
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise invalid("bad-value", option, "there is one rank; give --ranks too, 2 or more")
    return given


def run_fit(options: argparse.Namespace) -> int:
    with _cycles_left_alone():
        return _fit(options)


@contextmanager
def _cycles_left_alone() -> Iterator[None]:
    """Collect garbage rarely: it takes a tenth of the time, and as long again at exit."""
    atexit.register(gc.freeze)  # no collection at exit
    with rarely_collected():
        yield


def _fit(options: argparse.Namespace) -> int:
    from offcompile.ahead.factories import build
    from offcompile.ahead.fit import fit

    lengths = _read_lengths(options.lengths)
    longest = options.length if lengths is None else lengths[-1]
    built = build(options.model, options.batch, longest, options.dtype)
    if lengths is not None and "length" not in built.takes:
        detail = f"{options.model} takes no length; give it a parameter `length`, or leave this out"
        raise invalid("bad-value", "--lengths", detail)
    found = fit(
        built.model,
        built.inputs,
        options.batch,
        memory=options.memory,
        hardware=options.hardware,
        loss=built.loss,
        optimizer=options.optimizer,
        host_memory=options.host_memory,
        table=not options.quick,
        largest="batch" in built.takes and not options.quick,
        compare=options.compare,
        stream_states=options.stream_states,
        lengths=lengths,
        lora=options.lora,
        cards=_read_cards(options.cards),
        prices=_read_prices(options.price),
        forks=True,
        **_asked_of_ranks(options),
    )
    if options.html is not None and found.report is not None:
        found.report.save_html(options.html)
    print(json.dumps(found.to_json(), allow_nan=False) if options.json else found.to_text())
    return DONE if found.fits else INFEASIBLE
