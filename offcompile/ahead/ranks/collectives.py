"""Lists the collectives of a step on one rank.

A ring of n ranks passes on 2(n-1)/n of the bytes that it reduces for all of them, and (n-1)/n of
those that it gathers for all, or reduces for one rank each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from offcompile.ir import BACKWARD, FORWARD, HOST, UPDATE, Plan, Problem
from offcompile.machine.hardware import BYTES_PER_US_PER_GBPS, HardwareProfile
from offcompile.planning.ranks.beside import GATHER, REDUCE, Collective, Ring
from offcompile.planning.ranks.judge import CollectivesBeside

from .request import RankRequest
from .sharding import ROOT, groups_of

MIB = 1 << 20
#: bytes of DDP's buckets: the first is small, so that reducing begins early
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB


@dataclass(frozen=True, eq=False)
class Collectives:
    """Lists the collectives of one step.

    problem, plan: of one rank. names: tensor → name of its parameter. nbytes: bytes of weights and
    gradients that are whole.
    """

    problem: Problem
    plan: Plan
    names: Mapping[str, str]
    nbytes: Mapping[str, int]
    ranks: RankRequest

    def all(self) -> list[Collective]:
        """Return them, those of a queue in its order."""
        if self.ranks.shard == "fsdp":
            return [*self._gathers(), *self._scatters()]
        found = list(self._buckets())
        if self.ranks.shard == "zero1":
            found.append(self._weights_back())
        return found

    # --- DDP and ZeRO-1 -------------------------------------------------------------------------

    def _buckets(self) -> Iterator[Collective]:
        """All-reduce buckets of gradients, in the order in which backward makes them."""
        bucket, held, limit, number = list[str](), 0, FIRST_BUCKET_BYTES, 0
        for gradient in sorted(self._made, key=lambda g: self._made[g]):
            bucket.append(gradient)
            held += self._whole(gradient)
            if held >= limit:
                yield self._reduced(f"bucket {number}", bucket, held)
                bucket, held, limit, number = [], 0, BUCKET_BYTES, number + 1
        if bucket:
            yield self._reduced(f"bucket {number}", bucket, held)

    def _reduced(self, name: str, bucket: Sequence[str], nbytes: int) -> Collective:
        rounds = 1 if self.ranks.shard == "fsdp" else 2
        after = max(self._made[gradient] for gradient in bucket)
        readers = (
            op.id
            for op in self.problem.ops
            if op.phase == UPDATE
            and op.id not in self._on_host
            and not set(bucket).isdisjoint(op.reads)
        )
        return Collective(
            name,
            REDUCE,
            self._sent(nbytes, rounds),
            rounds * (self.ranks.ranks - 1),
            self.problem.ops[after].id,
            next(readers, None),
            tuple(bucket),
        )

    def _weights_back(self) -> Collective:
        """All-gather the weights that the ranks have updated, at the end."""
        trained = {self.names.get(gradient) for gradient in self._made}
        nbytes = sum(self._whole(w) for w in self._weights if self.names.get(w) in trained)
        last = self.problem.ops[-1].id
        return Collective("updated weights", GATHER, self._sent(nbytes), self.ranks.ranks - 1, last)

    # --- FSDP2 ----------------------------------------------------------------------------------

    def _gathers(self) -> Iterator[Collective]:
        """All-gather each group before forward needs it and again before backward does, while the
        group before it computes. The root comes first, and its weights stay after forward."""
        groups = groups_of(self.names, self._weights)
        for phase in (FORWARD, BACKWARD):
            begins = {
                name: min(indices)
                for name, ids in groups.items()
                if (indices := self._uses(phase, ids)) and (phase == FORWARD or name != ROOT)
            }
            if ROOT in begins:
                begins[ROOT] = 0
            order = sorted(begins, key=lambda name: (begins[name], name != ROOT))
            for name, earlier in zip(order, order[:1] + order, strict=False):
                trigger, nbytes = begins[earlier], sum(map(self._whole, groups[name]))
                yield Collective(
                    f"weights of {name or 'the root'} for {phase}",
                    GATHER,
                    self._sent(nbytes),
                    self.ranks.ranks - 1,
                    self.problem.ops[trigger - 1].id if trigger else None,
                    self.problem.ops[begins[name]].id,
                )

    def _uses(self, phase: str, weights: Sequence[str]) -> list[int]:
        """Positions of the ops of a phase that need these weights, also to run an op again."""
        wanted, found = set(weights), list[int]()
        for i, op in enumerate(self.problem.ops):
            if wanted.isdisjoint(op.reads):
                continue
            if op.phase == phase:
                found.append(i)
            if phase == BACKWARD:
                found += self._again.get(op.id, ())
        return found

    def _scatters(self) -> Iterator[Collective]:
        """Reduce and scatter the gradients of each group once backward has made them."""
        groups = groups_of(self.names, self._made)
        made = {name: max(self._made[g] for g in some) for name, some in groups.items()}
        for name in sorted(groups, key=lambda group: made[group]):
            nbytes = sum(map(self._whole, groups[name]))
            yield self._reduced(f"gradients of {name or 'the root'}", groups[name], nbytes)

    # --- what they are made of ------------------------------------------------------------------

    @cached_property
    def _weights(self) -> list[str]:
        return [t.id for t in self.problem.tensors if t.kind == "weight" and t.id in self.names]

    @cached_property
    def _made(self) -> dict[str, int]:
        """Gradient of a parameter → position of the op that completes it."""
        kinds = {t.id: t.kind for t in self.problem.tensors}
        return {
            t: i
            for i, op in enumerate(self.problem.ops)
            if op.phase == BACKWARD
            for t in op.writes
            if kinds[t] == "gradient" and t in self.names
        }

    @cached_property
    def _again(self) -> dict[str, list[int]]:
        """Op → positions of the ops before which it runs again."""
        found = dict[str, list[int]]()
        for again in self.plan.recomputes:
            found.setdefault(again.op, []).append(self.problem.op_index[again.before])
        return found

    @cached_property
    def _on_host(self) -> frozenset[str]:
        """Updates that the host makes."""
        hosted = {u.weight for u in self.plan.updates if u.where == HOST}
        updates = (op for op in self.problem.ops if op.phase == UPDATE)
        return frozenset(op.id for op in updates if not hosted.isdisjoint(op.writes))

    def _whole(self, tensor: str) -> int:
        known = self.nbytes.get(tensor)
        if known is not None:
            return known
        share = self.problem.tensor[tensor].nbytes
        return share * self.ranks.ranks if self.ranks.shard == "fsdp" else share

    def _sent(self, nbytes: int, rounds: int = 1) -> int:
        """Bytes that each rank passes on, for so many times around the ring."""
        n = self.ranks.ranks
        return -(-rounds * (n - 1) * nbytes // n)


@dataclass(frozen=True, eq=False)
class StepCollectives(CollectivesBeside):
    """Lists the collectives of all plans of one step; see `Collectives`."""

    names: Mapping[str, str]
    nbytes: Mapping[str, int]
    ranks: RankRequest
    profile: HardwareProfile

    @property
    def ring(self) -> Ring:
        return ring_of(self.ranks, self.profile)

    def collectives(self, problem: Problem, plan: Plan) -> list[Collective]:
        found = Collectives(problem, plan, self.names, self.nbytes, self.ranks).all()
        return [one for one in found if one.sent_bytes]


def ring_of(ranks: RankRequest, profile: HardwareProfile) -> Ring:
    """The way from one card to the next."""
    link, card_gbps = ranks.link, min(profile.h2d_gbps, profile.d2h_gbps)
    gbps = card_gbps if link.gbps is None else link.gbps
    if link.takes_host_link:
        gbps = min(gbps, card_gbps)
    return Ring(gbps * BYTES_PER_US_PER_GBPS, link.latency_us, link.takes_host_link)
