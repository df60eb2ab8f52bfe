"""A naive executor of plans, written from the words of the contract alone.

It exists to hold the simulator: plain dicts and lists, no cleverness, nothing imported from the
planner, the simulator or the verifier. At every instant it looks at everything, in the order of
the contract, and starts again from the top after each single change; when nothing more can
change it jumps to the next completion.
"""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

from oracle_rules import WHOLE, copy_bytes, move_ns, ns, static_rules

MOST_STEPS = 8


def run(problem: Any, machine: Any, plan: Any) -> dict[str, Any]:
    """Execute: valid, rules, makespan_ns, peak, spans {(id, step): (start, end)}, settled."""
    rules = static_rules(problem, machine, plan)
    if rules:
        return {"valid": False, "rules": rules}
    return Run(problem, machine, plan).result()


class Run:
    def __init__(self, problem: Any, machine: Any, plan: Any) -> None:
        self.problem, self.machine, self.plan = problem, machine, plan
        hosted = {u.weight for u in plan.updates if u.where == "host"}
        #: every run of an op in listed order: (name, op, whether it is a host update)
        self.listed = []
        for op in problem.ops:
            for r in plan.recomputes:
                if r.before == op.id:
                    self.listed.append((f"{r.op}@{r.before}", problem.op[r.op], False))
            on_host = op.phase == "update" and bool(hosted & set(op.writes))
            self.listed.append((op.id, op, on_host))
        self.now = 0
        self.rules: set[str] = set()
        self.held: dict[tuple[str, str], dict[str, Any]] = {}
        self.running: list[dict[str, Any]] = []
        self.queue: dict[str, list[Any]] = {lane.name: [] for lane in machine.lanes}
        self.drops: list[Any] = []  # (drop, step), not yet due
        self.pending: list[Any] = []  # due, not yet done
        self.steps: list[dict[str, Any]] = []
        self.spans: dict[tuple[str, int], tuple[int, int]] = {}
        self.peak = {t.name: 0 for t in machine.tiers}
        self.done = self.settled = False
        for s in plan.start:
            codec = None
            for m in plan.moves:
                if problem.steady and (m.tensor, m.target) == (s.tensor, s.tier) != "device":
                    codec = m.codec
            if s.tier == "device":
                codec = None
            size = copy_bytes(problem.tensor[s.tensor], codec)
            self.held[s.tensor, s.tier] = {"bytes": size, "valid": True, "codec": codec}
        self.first = {(*place, c["codec"]) for place, c in self.held.items()}

    def result(self) -> dict[str, Any]:
        for tier in self.machine.tiers:
            if not self.fits(tier.name, 0):
                self.rules.add("no-space")
        if not self.rules:
            self.begin_step()
        while not self.done and not self.rules:
            self.note_peaks()
            if self.complete() or self.drop() or self.die() or self.end_step():
                continue
            if self.start_op() or self.start_update() or self.start_move():
                continue
            if not self.running:
                self.stuck()
            else:
                self.advance()
        if self.rules:
            return {"valid": False, "rules": self.rules}
        lengths = [step["end"] - step["start"] for step in self.steps]
        makespan = lengths[-1]
        if self.problem.steady and not self.settled:
            for lane in self.machine.lanes:
                moves = [m for m in self.plan.moves if m.lane == lane.name]
                busy = sum(move_ns(self.problem, self.machine, m) for m in moves)
                makespan = max(makespan, busy)
            for link in self.machine.shared:
                makespan = max(makespan, self.link_busy(link))
        return {
            "valid": True,
            "rules": set(),
            "makespan_ns": makespan,
            "peak": self.peak,
            "spans": self.spans,
            "under way": {(j["id"], j["step"]["no"]) for j in self.running},
            "steps": [(step["start"], step["end"]) for step in self.steps],
            "settled": self.settled or not self.problem.steady,
        }

    # space

    def used(self, tier: str) -> int:
        copies = sum(c["bytes"] for (_, where), c in self.held.items() if where == tier)
        return copies + sum(j["workspace"] for j in self.running if j["works_on"] == tier)

    def fits(self, tier: str, more: int) -> bool:
        capacity = self.machine.tier[tier].capacity_bytes
        return capacity is None or self.used(tier) + more <= capacity

    def note_peaks(self) -> None:
        for tier in self.peak:
            self.peak[tier] = max(self.peak[tier], self.used(tier))

    # steps

    def begin_step(self) -> None:
        step = {"no": len(self.steps), "start": self.now, "started": set(), "ended": set()}
        step["window"] = {}
        self.steps.append(step)
        for m in self.plan.moves:
            self.queue[m.lane].append((m, step))
        self.drops += [(d, step) for d in self.plan.drops]

    def end_step(self) -> bool:
        step = self.steps[-1]
        if any(name not in step["ended"] for name, _, _ in self.listed):
            return False
        before = self.steps[-2] if len(self.steps) > 1 else None
        for m in self.plan.moves:
            if not m.wraps and m.id not in step["ended"]:
                return False
            if m.wraps and before is not None and m.id not in before["ended"]:
                return False
        step["end"] = self.now
        step["under way"] = sorted((job["id"], job["left"]) for job in self.running)
        filling = {place for job in self.running for place in job["makes"]}
        for place in list(self.held):
            if not self.held[place]["valid"] and place not in filling:
                del self.held[place]
        if self.problem.steady:
            self.check_settled()
            if len(self.steps) > 1 and self.window(-1) == self.window(-2):
                self.settled = self.done = True
            if len(self.steps) == MOST_STEPS:
                self.done = True
        else:
            self.check_end()
            self.done = True
        if not self.done:
            self.begin_step()
        return True

    def window(self, which: int) -> Any:
        step = self.steps[which]
        begun = sorted((name, start - step["start"]) for (name, _), start in step["window"].items())
        return begun, step["end"] - step["start"], step["under way"]

    def check_end(self) -> None:
        self.drop_all_that_can()
        if self.pending:
            self.rules.add("missing-write-back")
        read = {t for op in self.problem.ops for t in op.reads}
        for t in self.problem.tensors:
            needed = t.kind in ("weight", "state", "output")
            needed = needed or (t.kind == "gradient" and t.id not in read)
            if needed and not self.valid_tiers(t.id):
                self.rules.add("lost")

    def check_settled(self) -> None:
        """Let what is left of the step finish by itself, and look at what remains."""
        ghost = copy.copy(self)
        changing = ("held", "running", "queue", "drops", "pending", "steps", "spans")
        ghost.__dict__.update(copy.deepcopy({name: getattr(self, name) for name in changing}))
        while True:
            ghost.drop_all_that_can()
            if ghost.running:
                ghost.finish(ghost.running[0])
            elif not ghost.begin_left_move():
                break
        if ghost.pending:
            self.rules.add("missing-write-back")
        remain = {(*place, c["codec"]) for place, c in ghost.held.items() if c["valid"]}
        wrapped = {(m.tensor, m.target) for m in self.plan.moves if m.wraps}
        left_out = {c for c in remain - self.first if c[:2] in wrapped}
        if remain - left_out != self.first:
            self.rules.add("steady")

    def begin_left_move(self) -> bool:
        for waiting in self.queue.values():
            if waiting:
                m, step = waiting[0]
                source, target = self.copy_of(m.tensor, m.source), self.copy_of(m.tensor, m.target)
                due = m.start_after is None or m.start_after in step["ended"]
                if due and source and source["valid"] and not (target and target["valid"]):
                    self.begin_move(waiting.pop(0))
                    return True
        return False

    def drop_all_that_can(self) -> None:
        while self.drop() or self.die():
            pass

    # completions and drops

    def complete(self) -> bool:
        for job in self.running:
            if job["left"] <= 0:
                self.spans[job["id"], job["step"]["no"]] = (job["start"], self.now)
                self.finish(job)
                return True
        return False

    # shared links: what runs takes its share first, and moves share what is left

    def advance(self) -> None:
        """Goes to the next completion at the speeds of everything that runs."""
        speeds = [self.speed(job) for job in self.running]
        took = [
            math.ceil(Fraction(job["left"], speed))
            for job, speed in zip(self.running, speeds, strict=True)
            if speed
        ]
        for job, speed in zip(self.running, speeds, strict=True):
            job["left"] -= speed * min(took)
        self.now += min(took)

    def speed(self, job: dict[str, Any]) -> int:
        slowest = WHOLE
        for link in self.machine.shared:
            if job["lane"] in link.lanes:
                free = WHOLE - sum(j["shares"][link.name] for j in self.running if not j["lane"])
                asked = sum(
                    self.lane_share(link, j["lane"])
                    for j in self.running
                    if j["lane"] in link.lanes
                )
                slowest = min(slowest, WHOLE * max(0, free) // asked)
        return slowest

    def lane_share(self, link: Any, lane: str) -> int:
        rate = Fraction(str(self.machine.lane[lane].bytes_per_us))
        share = math.ceil(WHOLE * rate / Fraction(str(link.bytes_per_us)))
        return min(share, WHOLE * WHOLE // len(link.lanes))

    def crossing_ns(self, link: Any, op: Any, on_host: bool) -> Fraction:
        """The time that a link takes for what an op or a host update accesses on the host."""
        reads = link.updates if on_host else link.in_place_reads
        writes = link.updates if on_host else link.in_place_writes
        there = [t for t in self.problem.tensor if self.place_of(op, on_host, t)[1] == "host"]
        sizes = [self.problem.tensor[t].nbytes * (t in op.reads) * reads for t in there]
        sizes += [self.problem.tensor[t].nbytes * (t in op.writes) * writes for t in there]
        return sum(sizes) * 1000 / Fraction(str(link.bytes_per_us))

    def lasts(self, op: Any, on_host: bool) -> int:
        lasts = ns(op.host_duration_us) if on_host else ns(op.duration_us)
        if not on_host:
            for t in {a.tensor for a in self.plan.directs if a.op == op.id}:
                lasts += ns(op.direct[t]) - ns(op.duration_us)
        return max(0, lasts)

    def shares(self, op: Any, on_host: bool) -> dict[str, int]:
        lasts = self.lasts(op, on_host)
        return {
            link.name: math.ceil(
                WHOLE * min(Fraction(1), self.crossing_ns(link, op, on_host) / lasts)
            )
            if lasts
            else 0
            for link in self.machine.shared
        }

    def link_busy(self, link: Any) -> int:
        taken = 0
        for _, op, on_host in self.listed:
            taken += self.shares(op, on_host)[link.name] * self.lasts(op, on_host)
        for m in self.plan.moves:
            if m.lane in link.lanes:
                taken += self.lane_share(link, m.lane) * move_ns(self.problem, self.machine, m)
        return taken // WHOLE

    def finish(self, job: dict[str, Any]) -> None:
        self.running.remove(job)
        job["step"]["ended"].add(job["id"])
        for place in job["makes"]:
            self.held[place]["valid"] = True

    def drop(self) -> bool:
        for due in list(self.drops):
            d, step = due
            if d.after is None or d.after in step["ended"]:
                self.drops.remove(due)
                self.pending.append(due)
        self.pending = [(d, s) for d, s in self.pending if (d.tensor, d.tier) in self.held]
        for d, _ in self.pending:
            place = (d.tensor, d.tier)
            elsewhere = set(self.valid_tiers(d.tensor)) - {d.tier}
            if self.in_use(place):
                continue
            if elsewhere or (self.may_end(d.tensor) and self.dead(d.tensor, "started")):
                del self.held[place]
                return True
        return False

    def may_end(self, tensor: str) -> bool:
        kind = self.problem.tensor[tensor].kind
        if kind == "gradient":
            return any(tensor in op.reads for op in self.problem.ops)
        return kind not in ("weight", "state", "output")

    def die(self) -> bool:
        for tensor, tier in self.held:
            if self.problem.tensor[tensor].kind in ("activation", "temporary"):
                named = {n for n, op, _ in self.listed if tensor in op.reads + op.writes}
                if not any(named & step["ended"] for step in self.steps):
                    continue  # a value of the start that nobody has read has no last reader yet
                busy = any(tensor in j["touches"] for j in self.running if not j["lane"])
                if not busy and self.dead(tensor, "ended") and not self.in_use((tensor, tier)):
                    del self.held[tensor, tier]
                    return True
        return False

    def dead(self, tensor: str, after_what: str) -> bool:
        """True if the next access after those started or ended only writes, or there is none."""
        accesses = [(n, op) for n, op, _ in self.listed if tensor in op.reads + op.writes]
        left = [(n, op) for n, op in accesses if n not in self.steps[-1][after_what]]
        if not left and self.problem.steady:
            left = accesses
        return not left or tensor not in left[0][1].reads

    def in_use(self, place: tuple[str, str]) -> bool:
        return any(place in job["uses"] for job in self.running)

    def copy_of(self, tensor: str, tier: str) -> dict[str, Any] | None:
        return self.held.get((tensor, tier))

    def valid_tiers(self, tensor: str) -> list[str]:
        return [tier for (t, tier), c in self.held.items() if t == tensor and c["valid"]]

    # ops

    def place_of(self, op: Any, on_host: bool, tensor: str) -> tuple[str, str]:
        direct = any(a.op == op.id and a.tensor == tensor for a in self.plan.directs)
        return (tensor, "host" if on_host or direct else "device")

    def why_op_waits(self, name: str, op: Any, on_host: bool) -> set[str]:
        """Rules that name what the op waits for; empty when it may start."""
        why = set()
        step, touched = self.steps[-1], set(op.reads + op.writes)
        for m in self.plan.moves:
            if m.ready_before == name:
                if not m.wraps and m.id not in step["ended"]:
                    why.add("late-move")
                if m.wraps and len(self.steps) > 1 and m.id not in self.steps[-2]["ended"]:
                    why.add("late-move")
        for other, earlier, hosted in self.listed:
            if other == name:
                break
            share = touched & set(earlier.reads + earlier.writes)
            in_order = hosted == on_host or share
            if in_order and other not in step["ended"]:
                why.add("deadlock")
        for t in op.reads:
            there = self.copy_of(*self.place_of(op, on_host, t))
            if there is None:
                why.add("missing-copy")
            elif not there["valid"]:
                why.add("stale-read")
            elif there["codec"] is not None:
                why |= {"codec", "direct"}
        for job in self.running:
            if job["lane"] and job["touches"] & set(op.writes):
                why.add("deadlock")
        for tier, more in self.op_space(op, on_host).items():
            if more > 0 and not self.fits(tier, more):
                why.add("no-space")
        return why

    def op_space(self, op: Any, on_host: bool) -> dict[str, int]:
        more = {"device": 0, "host": 0}
        more["host" if on_host else "device"] += op.workspace_bytes
        for t in set(op.writes):
            place = self.place_of(op, on_host, t)
            old = self.copy_of(*place)
            more[place[1]] += self.problem.tensor[t].nbytes - (old["bytes"] if old else 0)
        return {tier: n for tier, n in more.items() if tier in self.machine.tier}

    def try_op(self, name: str, op: Any, on_host: bool) -> bool:
        if self.why_op_waits(name, op, on_host):
            return False
        reads = {self.place_of(op, on_host, t) for t in op.reads}
        makes = {self.place_of(op, on_host, t) for t in op.writes}
        if any((d.tensor, d.tier) in reads for d, _ in self.pending):
            self.rules.add("read-after-drop")
            return True
        for (tensor, _), c in self.held.items():
            if tensor in op.writes:
                c["valid"] = False
        for place in makes:
            size = self.problem.tensor[place[0]].nbytes
            self.held[place] = {"bytes": size, "valid": False, "codec": None}
        self.begin(
            name, self.steps[-1], self.lasts(op, on_host), reads | makes, makes,
            op.workspace_bytes, "host" if on_host else "device", False,
            self.shares(op, on_host),
        )  # fmt: skip
        return True

    def start_op(self) -> bool:
        return self.start_next(False)

    def start_update(self) -> bool:
        return self.start_next(True)

    def start_next(self, wanted: bool) -> bool:
        for name, op, on_host in self.listed:
            if on_host == wanted and name not in self.steps[-1]["started"]:
                return self.try_op(name, op, on_host)
        return False

    # moves

    def start_move(self) -> bool:
        for lane, waiting in self.queue.items():
            busy = any(job["lane"] == lane for job in self.running)
            if waiting and not busy and not self.why_move_waits(*waiting[0]):
                self.begin_move(waiting.pop(0))
                return True
        return False

    def why_move_waits(self, m: Any, step: Any) -> set[str]:
        why = set()
        if m.start_after is not None and m.start_after not in step["ended"]:
            why.add("late-move")
        source, target = self.copy_of(m.tensor, m.source), self.copy_of(m.tensor, m.target)
        if source is None:
            why.add("missing-copy")
        elif not source["valid"]:
            why.add("stale-read")
        elif m.source != "device" and source["codec"] != m.codec:
            why.add("codec")
        if target is not None and target["valid"]:
            why.add("deadlock")
        if any((m.tensor, m.target) in job["makes"] for job in self.running):
            why.add("deadlock")
        more = self.landing(m) - (target["bytes"] if target else 0)
        if more > 0 and not self.fits(m.target, more):
            why.add("no-space")
        return why

    def landing(self, m: Any) -> int:
        codec = None if m.target == "device" else m.codec
        return copy_bytes(self.problem.tensor[m.tensor], codec)

    def begin_move(self, queued: Any) -> None:
        m, step = queued
        codec = None if m.target == "device" else m.codec
        place = (m.tensor, m.target)
        self.held[place] = {"bytes": self.landing(m), "valid": False, "codec": codec}
        lasts = move_ns(self.problem, self.machine, m)
        uses = {place, (m.tensor, m.source)}
        self.begin(m.id, step, lasts, uses, {place}, 0, "", m.lane, {})

    def begin(
        self, name: str, step: Any, lasts: int, uses: Any, makes: Any, work: int, tier: str,
        lane: Any, shares: Any,
    ) -> None:  # fmt: skip
        step["started"].add(name)
        self.running.append({
            "id": name, "step": step, "start": self.now, "left": lasts * WHOLE,
            "shares": shares, "uses": uses, "makes": makes,
            "workspace": work, "works_on": tier, "lane": lane, "touches": {t for t, _ in uses},
        })  # fmt: skip
        self.spans[name, step["no"]] = (self.now, self.now)  # the end is known when it comes
        self.steps[-1]["window"][name, step["no"]] = self.now

    def stuck(self) -> None:
        self.rules.add("deadlock")
        started = self.steps[-1]["started"]
        for wanted in (False, True):
            left = [x for x in self.listed if x[2] == wanted and x[0] not in started]
            if left:
                self.rules |= self.why_op_waits(*left[0])
        for waiting in self.queue.values():
            if waiting:
                self.rules |= self.why_move_waits(*waiting[0])
