"""Plans a traced model on one of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from offcompile.ahead.plan import CPU, Ahead, ForecastRequest, Tell
from offcompile.ahead.surveyed import AheadProblemSource
from offcompile.graph.annotate import Annotated
from offcompile.graph.graphs import Graphs, Hint
from offcompile.ir import Infeasible
from offcompile.machine.in_place import InPlace
from offcompile.machine.options import Options
from offcompile.machine.target import Target
from offcompile.planning.planner import NO_RIVAL, Beaten, Rival, bounded_longer
from offcompile.planning.ranks.judge import StepJudge
from offcompile.run.plan.candidates import Candidate
from offcompile.run.plan.planner import GraphPlanner
from offcompile.run.problem_source import ProblemSource

from .collectives import StepCollectives
from .request import RankRequest
from .sharding import ROOT, groups_of, on_rank, trained_bytes

MIB = 1 << 20
#: offcompile's own buckets on the CPU target: a share of all parameters, and how many there may be
OWN_BUCKET_SHARE, OWN_BUCKETS = 16, 3
#: whole groups of FSDP2 in backward: weights in use and weights gathered ahead, and as many
#: gradients if they train: those being made and those being reduced. The root keeps its weights
#: after forward, and its gradients until the end of backward.
GROUPS_AT_ONCE = 2


@dataclass(frozen=True)
class RankedRequest(ForecastRequest):
    """A request to plan a model on one of several ranks."""

    ranks: RankRequest | None = None


@dataclass(eq=False)
class RankProblemSource(AheadProblemSource):
    """A survey of the step of one rank."""

    ranks: RankRequest | None = None

    def problem(
        self,
        graphs: Graphs,
        in_place: InPlace | None = None,
        stays: frozenset[str] = frozenset(),
        hint: Hint | None = None,
    ) -> Annotated:
        assert self.ranks is not None
        found = ProblemSource.problem(self, graphs, in_place, stays, hint)
        return on_rank(found, self.ranks, self.updates)

    def whole(self, graphs: Graphs) -> Annotated:
        """Annotate the step without ranks and updates."""
        return ProblemSource.problem(self, graphs)


@dataclass(eq=False)
class AheadOnRank(Ahead):
    """A traced model, to be planned on one of several ranks."""

    #: True if plans are judged with the collectives of the step beside them
    knows: bool = False

    @classmethod
    def sharing(cls, one: Ahead, ranks: RankRequest, tell: Tell) -> AheadOnRank:
        """Return a model that was traced for one rank, for one of several."""
        asked = RankedRequest(**(vars(one.asked) | {"ranks": ranks}))
        made = cls._made(asked, one.target, one.traces, one.layers, None, tell)
        assert isinstance(made, AheadOnRank)
        return made

    @staticmethod
    def _survey(asked: ForecastRequest, target: Target, graphs: Graphs) -> AheadProblemSource:
        assert isinstance(asked, RankedRequest)
        one = Ahead._survey(asked, target, graphs)
        return RankProblemSource(
            one.options,
            one.target,
            one.profile,
            one.kind,
            updates=one.updates,
            traced=one.traced,
            ranks=asked.ranks,
        )

    def planner(
        self, options: Options, tell: Tell, explains: bool = True, rival: Rival = NO_RIVAL
    ) -> GraphPlanner:
        made = super().planner(options, tell, explains, rival)
        beside = self.collectives(self.survey.problem(self.graphs).names) if self.knows else None
        request = replace(made.request, held_bytes=self.beside_bytes, beside=beside)
        return replace(made, request=request)

    def candidate(
        self, memory: Any, tell: Tell, seconds: float | None = None, explains: bool = True
    ) -> Candidate:
        """See `Ahead.candidate`. Where something moves, also plan with the collectives, and keep
        the better of the two by the step with them."""
        found = super().candidate(memory, tell, seconds, explains)
        if found.choice.decided.fits:
            return found
        tell("planning beside collectives")
        ahead = self if found.pieces is None else self.in_pieces(found.pieces, tell)
        assert isinstance(ahead, AheadOnRank)
        other = replace(ahead, knows=True)
        step_us, cost_us = other._with_collectives(found)
        choice = found.choice
        rival = Rival(cost_us=cost_us, plan=choice.decided.result.plan, stays=choice.stays)
        try:
            made = other.choose_whole(memory, tell, seconds, False, rival)
        except (Infeasible, Beaten):
            return found
        better_us, better_cost_us = other._with_collectives(made)
        if better_us > step_us or better_cost_us >= cost_us:
            return found
        new = made.choice.decided
        result = bounded_longer(made.choice.annotated.problem, new.machine, new.result)
        choice = replace(
            made.choice, decided=replace(new, result=result), splitting=choice.splitting
        )
        return replace(made, choice=choice, pieces=found.pieces)

    def _with_collectives(self, found: Candidate) -> tuple[float, float]:
        """The time of the step with its collectives, and its cost."""
        annotated, made = found.choice.annotated, found.choice.decided
        beside = self.collectives(annotated.names)
        timeline = StepJudge(annotated.problem, made.machine, beside)(made.result.plan)
        if not timeline.valid:
            return float("inf"), float("inf")
        return timeline.makespan_us, timeline.cost_us + made.touching_us + made.updates_us

    def collectives(self, names: Mapping[str, str]) -> StepCollectives:
        """Return the collectives of the step. names: tensor → name of its parameter."""
        nbytes = {t.id: t.nbytes for t in self.whole.problem.tensors}
        return StepCollectives(names, nbytes, self.ranks, self.target.profile)

    @property
    def ranks(self) -> RankRequest:
        assert isinstance(self.asked, RankedRequest) and self.asked.ranks is not None
        return self.asked.ranks

    @cached_property
    def whole(self) -> Annotated:
        """The step without ranks and updates."""
        assert isinstance(self.survey, RankProblemSource)
        return self.survey.whole(self.graphs)

    @cached_property
    def beside_bytes(self) -> int:
        """Device memory that DDP and FSDP2 take beside the tensors of the step."""
        problem, names = self.whole.problem, self.whole.names
        if self.ranks.shard == "fsdp":
            sizes: dict[str, int] = {}
            for kind in ("weight", "gradient"):
                nbytes = {t.id: t.nbytes for t in problem.tensors if t.kind == kind}
                for name, some in groups_of(names, nbytes).items():
                    sizes[name] = sizes.get(name, 0) + sum(nbytes[t] for t in some)
            root = sizes.pop(ROOT, 0)
            if not sizes:
                return GROUPS_AT_ONCE * root
            return root + GROUPS_AT_ONCE * max(sizes.values())
        trained = trained_bytes(problem)
        if self.target.device.type != CPU:
            return trained
        largest = max((t.nbytes for t in problem.tensors if t.kind == "gradient"), default=0)
        return largest + (OWN_BUCKETS - 1) * max(MIB, trained // OWN_BUCKET_SHARE)
