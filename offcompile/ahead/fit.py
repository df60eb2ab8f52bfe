"""`offcompile.fit`: tells if a step fits, how fast it would be, and what the alternatives are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offcompile.ir import InvalidInput, Violation
from offcompile.machine.hardware import load_profile
from offcompile.machine.options import Options
from offcompile.runtime.base.progress import Progress

from .answers.cards import CardRow, StepWork, by_step, read_cards, read_prices
from .answers.fit_report import FitReport
from .answers.lengths import LengthRow
from .answers.training import TrainedParameters
from .batch_trace import as_arguments
from .fitting import DeviceFit, MoreAnswers
from .lora.adapters import with_adapters
from .lora.request import LoraRequest
from .plan import ForecastRequest, Tell, check_model, refuse_measuring
from .ranks.request import RankRequest


def fit(
    model: nn.Module,
    make_inputs: Callable[..., Any],
    batch: int = 1,
    *,
    memory: int | float | str | None = None,
    hardware: str | Path | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: str | None = None,
    host_memory: int | str | None = None,
    measure: bool = False,
    table: bool = True,
    largest: bool = True,
    compare: bool = False,
    stream_states: bool = True,
    options: Mapping[str, object] | None = None,
    ranks: int | None = None,
    shard: str = "ddp",
    link: str = "nvlink",
    node_ranks: int | None = None,
    lengths: Iterable[int] | None = None,
    lora: str | Mapping[str, Any] | None = None,
    cards: str | Iterable[str] | None = None,
    prices: Mapping[str, float] | None = None,
    forks: bool = False,
) -> FitReport:
    """Tell if a training step fits, how long it would take, and what the other choices are.

    make_inputs: maps a batch size to the model's arguments: a tensor, a tuple, or a dictionary of
    keywords. table: also plan under other budgets; largest: search for the largest batch that fits;
    compare: also plan with each published policy by itself.
    ranks: how many ranks train the model, each with such a batch, sharing it as `shard` says
    ("ddp", "fsdp", "zero1") over `link` ("nvlink", "nvlink3", "pcie", "400gb", "100gb", or a rate
    as in "20GB/s"); node_ranks: those on one node. Then `table` means the other ways to share.
    lengths: compare sequences of these lengths; `make_inputs` is called with a batch and a length.
    The rest of the answer is that of the longest that fits.
    lora: train only low-rank adapters: "r=16", with alpha=32 or targets=q_proj,v_proj behind a
    comma, or a dictionary of these; targets: names of linear layers (default: "all-linear").
    cards: compare these profiles, or "all" of them, tracing once. The rest of the answer is that of
    the fastest. prices: card → its price of an hour, in any currency, to name the cheapest.
    forks: use a second core by forking processes, as the command does. Only for a process whose
    other threads hold no locks, and not after CUDA was used.
    The other arguments are those of `offcompile.plan`, which raises if nothing fits.
    """
    if batch < 1:
        raise _bad("batch", f"{batch} is no batch; give 1 or more")
    compared = None if cards is None else read_cards(cards)
    priced = read_prices(prices, compared)
    if compared is not None and (hardware is not None or lengths is not None):
        other = "lengths" if hardware is None else "hardware"
        raise _bad("cards", f"they do not go with {other}; leave out one of the two")
    refuse_measuring(hardware if compared is None else compared[0], measure)
    wanted = None if lengths is None else check_lengths(lengths)
    given = {"host_memory": host_memory} | dict(options or {})
    read = Options.read(given | {"memory": memory, "hardware": hardware})
    several = None
    if ranks is not None:
        several = RankRequest.read(ranks, shard, link, node_ranks, optimizer)

    whole, training = _trained(check_model(model), lora)

    def asked(of: int, *length: int) -> ForecastRequest:
        inputs = make_inputs(of, *length)
        named = inputs if isinstance(inputs, dict) else {}
        plain = () if isinstance(inputs, dict) else as_arguments(inputs)
        return ForecastRequest(
            whole,
            plain,
            named,
            read,
            loss,
            optimizer,
            measures=measure,
            streams=stream_states,
        )

    more = MoreAnswers(table, largest, compare, forks)
    with Progress("fit") as tell:
        if wanted is not None:
            found = _over_lengths(asked, batch, wanted, several, more, tell)
        elif compared is not None:
            found = _over_cards(asked, batch, _Cards(compared, priced), several, more, tell)
        else:
            found = DeviceFit(
                asked, batch, tell, several, seeks_largest=largest, forks=forks
            ).result(more)
    return replace(found, training=training)


def _trained(
    model: nn.Module, lora: str | Mapping[str, Any] | None
) -> tuple[nn.Module, TrainedParameters]:
    """The model, with adapters if they were asked for, and how much of it trains."""
    rank = adapted = 0
    if lora is not None:
        request = LoraRequest.read(lora)
        model, adapted = with_adapters(model, request)
        rank = request.r
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained = sum(count for count, trains in counts if trains)
    total = sum(count for count, _ in counts)
    return model, TrainedParameters(trained, total, rank, adapted)


def check_lengths(lengths: Iterable[int]) -> tuple[int, ...]:
    """The lengths in order, each once. Raises `InvalidInput` if one is no length."""
    found = tuple(lengths)
    if not found:
        raise _bad("lengths", "there is none; give one or more, as in 512,1024")
    for length in found:
        if type(length) is not int or length < 1:
            raise _bad("lengths", f"{length!r} is no length; give whole numbers of 1 or more")
    return tuple(sorted(set(found)))


def _bad(where: str, detail: str) -> InvalidInput:
    return InvalidInput([Violation("bad-value", where, detail)])


def _over_lengths(
    asked: Callable[[int, int], ForecastRequest],
    batch: int,
    lengths: tuple[int, ...],
    ranks: RankRequest | None,
    more: MoreAnswers,
    tell: Tell,
) -> FitReport:
    """Answer for the one that `answered` names, with a row for each length."""
    more = replace(more, table=False)  # one table is enough
    rows, best = [], None
    for length in lengths:

        def told(text: str, length: int = length) -> None:
            tell(f"length {length}: {text}")

        def of(batch: int, length: int = length) -> ForecastRequest:
            return asked(batch, length)

        one = DeviceFit(of, batch, told, ranks, seeks_largest=more.largest, forks=more.forks)
        outcome = one.answer.outcome
        tokens = batch * length * (1 if ranks is None else ranks.ranks)
        rows.append(LengthRow(length, tokens, outcome, one.largest if more.largest else None))
        if best is None or outcome.fits:
            best = one
    assert best is not None
    return replace(best.result(more), lengths=tuple(rows))


@dataclass(frozen=True)
class _Cards:
    names: tuple[str, ...]
    prices: Mapping[str, float]


def _over_cards(
    asked: Callable[[int], ForecastRequest],
    batch: int,
    cards: _Cards,
    ranks: RankRequest | None,
    more: MoreAnswers,
    tell: Tell,
) -> FitReport:
    """Answer for the fastest, with a row for each card."""
    more = replace(more, table=False)  # one table is enough
    work = work_of(asked(batch), batch, 1 if ranks is None else ranks.ranks)
    rows: list[CardRow] = []
    best = like = None
    for card in cards.names:

        def told(text: str, card: str = card) -> None:
            tell(f"{card}: {text}")

        def of(batch: int, card: str = card) -> ForecastRequest:
            request = asked(batch)
            return replace(request, options=_on_card(request.options, card))

        one = DeviceFit(of, batch, told, ranks, like)
        like = like or one.ahead
        outcome = one.answer.outcome
        rows.append(CardRow(card, one.memory, outcome, work, cards.prices.get(card)))
        if by_step(rows)[0] is rows[-1]:
            best = one
    assert best is not None
    return replace(best.result(more), cards=by_step(rows))


def _on_card(options: Options, card: str) -> Options:
    """The options on this card, with no more memory than it has."""
    most, memory = load_profile(card).device_memory_bytes, options.memory
    return replace(
        options, hardware=card, memory=min(memory, most) if type(memory) is int else memory
    )


def work_of(asked: ForecastRequest, batch: int, ranks: int) -> StepWork:
    """The work of a step: tokens, if an input is a table of whole numbers (the first one's elements
    count), or else samples."""
    for given in tree_leaves((asked.inputs, dict(asked.keywords))):
        if isinstance(given, torch.Tensor) and given.ndim == 2 and not given.is_floating_point():
            return StepWork(ranks * given.numel(), "tokens", ranks)
    return StepWork(ranks * batch, "samples", ranks)
