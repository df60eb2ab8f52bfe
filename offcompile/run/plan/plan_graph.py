"""Plans a captured graph: graphs in, a `Planned` and the graphs that carry it out, out."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial

import sympy
import torch
from torch import fx

from offcompile.graph.graphs import Graphs
from offcompile.graph.lowering.order import pin_order
from offcompile.graph.sizes import hint_of
from offcompile.graph.split import Splits
from offcompile.graph.weight_placement import TRIAL_SHARE, Choice
from offcompile.ir import DEVICE, HOST, Infeasible, Machine, Plan, Problem
from offcompile.planning.empty_turn import kept_at_turn
from offcompile.planning.feedback.corrections import with_factors
from offcompile.planning.feedback.earlier_figures import as_found_before
from offcompile.planning.feedback.endurance import planned_life
from offcompile.planning.feedback.profiling import WORTH, Settled, reconsider
from offcompile.planning.feedback.sparsity import Packability
from offcompile.planning.fit_budget import Decided
from offcompile.planning.footprint import Footprint, NeedsBySize, bytes_of, standing_in, total_bytes
from offcompile.planning.plan_cache import planner_digest
from offcompile.report.dump import Dumped as Compilation
from offcompile.report.dump import dump
from offcompile.report.figures import PlannedMemory, RunFigures
from offcompile.report.log import log_compiled, log_decision
from offcompile.report.report import PlanReport, remember
from offcompile.report.stalls import move_names
from offcompile.report.verified import Verified
from offcompile.run.accounts.graph_runs import kept_between
from offcompile.run.accounts.usage import GraphUsage
from offcompile.run.problem_source import ProblemSource, values
from offcompile.run.ranks.meeting import Known, Meeting
from offcompile.run.recording import weights_of
from offcompile.run.step_recorder import StepRecorder
from offcompile.run.verifying import Verifying
from offcompile.runtime.base.clock import clock_for
from offcompile.runtime.base.interpreter import in_large_chunk
from offcompile.runtime.base.progress import Progress

from .candidates import Candidate
from .carry_out import carry_out, reserve, unplaced
from .contract import GraphFacts, Instead, Planned, PlanRequest
from .free_states import with_states
from .planner import GraphPlanner
from .remembered import remembered_candidate
from .together import plan_together


@in_large_chunk
def plan_graph(
    facts: GraphFacts,
    request: PlanRequest,
    source: ProblemSource,
    given: Graphs,
    splits: Splits | None,
    meeting: Meeting | None = None,
    instead: Instead | None = None,
) -> tuple[Planned, Graphs | None]:
    """Return the plan, and the graphs that carry it out; None if they are the given ones. Raises
    `Infeasible`. `splits`: offers to split the loss. `meeting`: the ranks that plan together.
    `instead` may pass over the plan for another one before it is carried out."""
    name, options = request.name, facts.options
    with Progress(name) as progress:
        planner = GraphPlanner(source, request, progress)
        if meeting is None:
            if given.backward is None:
                planner = replace(planner, request=replace(request, states=None))
            planner, found = with_states(planner, lambda p: remembered_candidate(p, given, splits))
            request = planner.request
        else:
            found = plan_together(meeting, planner, given, splits)
        planner = replace(planner, source=found.source)
        known = report_of(planner, found.choice)
        progress.becomes(known.summary())
    needs = _needs(planner, found, known, facts.symbols)
    facts.runs.entry.trains = found.graphs.backward is not None
    if instead is not None and (rather := instead(request, needs)) is not None:
        with suppress(Infeasible):
            planned, graphs = plan_graph(facts, rather, source, given, splits)
            planned.needs.passed_over = needs
            return planned, graphs
    source = found.source
    annotated, decided = found.choice.annotated, found.choice.decided
    verifying = _verifying(facts, planner, given, found) if options.verify else None
    verified = None if verifying is None else verifying.verified
    clock, steps = clock_for(facts.target.device), decided.order.steps
    recorder = StepRecorder(
        name,
        clock,
        partial(_waiting, weakref.ref(facts.runs.entry)),
        steps,
        move_names(decided.result.plan, annotated.labels, annotated.names),
    )
    report = replace(
        known,
        profile=facts.profile,
        verified=verified,
        running=replace(
            known.running,
            settle=clock.settle,
            kept=partial(kept_between, source.target.runtime),
            steps=recorder,
        ),
    )
    weights = weights_of(found.graphs, annotated, sorted(facts.parameters))
    made, placement = None, unplaced(facts)
    if not decided.fits:
        made, placement = carry_out(facts, name, found, verified)
    carried, offered = _offering(found, request, found.graphs if made is None else made.graphs)
    if options.lowering == "inductor" and carried is not given:
        for _, module in carried:
            pin_order(module)
    tensors = annotated.problem.tensors if made is not None else ()
    packable = frozenset(t.id for t in tensors if t.kind == "activation" and not t.pinned)
    annotated.problem.forget()
    planned = Planned(
        replace(request, settled=None),
        source,
        decided,
        annotated.dtypes,
        found.pieces,
        report,
        needs,
        placement,
        weights,
        () if made is None else tuple(s if s in packable else None for s in made.saved),
        packable,
        offered,
        clock,
        recorder,
        verifying,
    )
    if made is not None:
        reserve(planned)
    graphs = None if carried is given else carried
    remember(report)
    said = Compilation(
        report,
        dict(found.graphs),
        {} if graphs is None else dict(graphs),
        "\n".join(map(str, steps)),
        {} if found.pieces is None else dict(given),
    )
    log_compiled(said)
    if options.dump is not None:
        dump(options.dump, name, said)
    return planned, graphs


def _offering(
    found: Candidate, request: PlanRequest, carried: Graphs
) -> tuple[Graphs, tuple[int, ...] | None]:
    """Return graphs that carry out the plan and hand over gradients early, if anybody wants them;
    and the outputs of backward that do. None if nothing is handed over."""
    if found.offers is not None:
        return carried, found.offers.outputs
    wanted, source, annotated = request.taken.reduced, found.source, found.choice.annotated
    if not wanted or source.options.verify:
        return carried, None
    offers = source.with_early_gradients(carried, found.graphs, annotated, wanted)
    if offers is None:
        return carried, None
    return offers.graphs, offers.outputs


def report_of(planner: GraphPlanner, choice: Choice) -> PlanReport:
    """Report what is known before anything runs."""
    annotated, decided, source = choice.annotated, choice.decided, planner.source
    budget, peak, target = planner.budget(), decided.order.peak_bytes, source.target
    reserve = target.kept_back_bytes(budget or peak, not decided.fits)
    whole_bytes = budget if budget is not None else peak + reserve
    return PlanReport(
        name=planner.request.name,
        problem=annotated.problem,
        machine=decided.machine,
        result=decided.result,
        memory=PlannedMemory(
            whole_bytes,
            reserve,
            decided.holes_bytes,
            peak,
            planner.request.held_bytes,
            target.room(whole_bytes),
            source.touch_again_us_per_mib,
        ),
        labels=annotated.labels,
        names=annotated.names,
        splitting=choice.splitting,
        running=RunFigures(
            life=partial(planned_life, annotated.problem, decided.result.plan, target.runtime),
            updates_us=decided.updates_us,
        ),
    )


def plan_again(
    planned: Planned, facts: GraphFacts, held_bytes: int, known: Known | None = None
) -> Settled | None:
    """Plan again if the findings of runs make it worth recompiling; see `profiling`. `known`: the
    ranks that the plan is for."""
    if planned.decided.fits:
        return None
    name, source, made = planned.request.name, planned.source, planned.decided
    options, profile, problem = source.options, source.profile, planned.report.problem
    with Progress(name) as progress:
        if known is None and options.reuse_plans and profile.calls_for_search:
            figures, machine = profile.figures, facts.target.machine(facts.target.device_bytes)
            before = problem, machine, made.result.plan, planner_digest()
            profile.take(as_found_before(figures, *before))
        source.learn_codecs()
        lacking = planned.request.lacking_bytes if known is None else known.lacking_bytes
        request = replace(planned.request, held_bytes=held_bytes, lacking_bytes=lacking)
        if known is None:
            request = replace(request, kind=facts.kind_again(request.kind))
        if source.costs_as_planned is None:
            problem = with_factors(problem, profile.factors)
        if known is not None:
            source = replace(source, slowest=known.slowest)
        planner = GraphPlanner(source, request, progress)
        text, found = reconsider(
            problem,
            made.result.plan,
            source.machine(made.machine.tier[DEVICE].capacity_bytes or 1),
            Packability(planned.dtypes, profile.densities, options.lossy),
            WORTH[options.lowering],
            partial(_searched, planner),
            profile.seen,
        )
    facts.profile.decided(text, found is not None)
    log_decision(name, text)
    if found is None:
        return None
    return Settled(found[0], planner.budget(), found[1], planned.pieces)


def _searched(planner: GraphPlanner, problem: Problem, worth_us: float, shortly: bool) -> Decided:
    share = TRIAL_SHARE if shortly else 1.0
    return planner.decide(problem, planner.budget(), share=share, worth_us=worth_us, trial=shortly)


# --- parts of `plan_graph` -----------------------------------------------------------------------


def _verifying(
    facts: GraphFacts, planner: GraphPlanner, given: Graphs, found: Candidate
) -> Verifying:
    annotated, decided = found.choice.annotated, found.choice.decided
    rounds = _rounds(decided.result.plan, decided.machine)
    exact = facts.options.lowering == "aot_eager" and not rounds and found.pieces is None

    def label(phase: str, node: fx.Node) -> str:
        return annotated.labels.get(annotated.storage_of.get((phase, node.name), ""), "")

    verified, fixed = Verified(exact), planner.request.fixed
    if fixed and (not decided.fits or planner.budget() is None):
        count = f"{len(fixed)} weight{'s' if len(fixed) > 1 else ''}"
        verified.notes["weights"] = (
            f"{count} stayed on the device, where others hold the same memory"
        )
    return Verifying(planner.request.name, given, facts.target.device, verified, label)


def _needs(
    planner: GraphPlanner, found: Candidate, report: PlanReport, symbols: tuple[sympy.Symbol, ...]
) -> NeedsBySize:
    decided, problem = found.choice.decided, found.choice.annotated.problem
    plan, timeline = decided.result.plan, decided.result.timeline
    kept = decided.kept
    if kept is None:
        kept = kept_at_turn(problem, timeline)
    dynamic = any(isinstance(v, torch.SymInt) for v in values(found.graphs))

    def problem_at(sizes: tuple[int, ...]) -> Problem:
        return found.problem_at(hint_of(dict(zip(symbols, sizes, strict=True))))

    return NeedsBySize(
        Footprint(
            standing_in(problem),
            report.needed_peak_bytes,
            bytes_of(problem, kept),
            timeline.peak_bytes.get(HOST, 0) + planner.results_on_host(problem, plan),
        ),
        problem_at if dynamic else None,
        plan,
        decided.order.steps,
        report.memory.reserve_bytes,
        kept,
        total_bytes(problem),
    )


def _rounds(plan: Plan, machine: Machine) -> bool:
    """True if a move uses a lossy codec."""
    lossless = {codec.name for codec in machine.codecs if codec.lossless}
    return any(move.codec is not None and move.codec not in lossless for move in plan.moves)


def _waiting(entry: weakref.ref[GraphUsage]) -> int:
    """Count forwards that wait for their backward. Weak, since reports outlive their graph."""
    found = entry()
    return 0 if found is None else len(found.waiting())
