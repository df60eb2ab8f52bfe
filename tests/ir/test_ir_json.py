"""JSON: what is accepted, what comes back, and how refusals read."""

import copy
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offcompile.ir import InvalidInput, Machine, Move, Op, Plan, Problem, Start, Tensor, Tier
from offcompile.ir.jsonio import (
    check_homes,
    loads_machine,
    loads_plan,
    loads_problem,
    machine_from_json,
    machine_from_toml,
    machine_to_json,
    plan_from_json,
    plan_to_json,
    problem_from_json,
    problem_to_json,
)
from offcompile.simulate import simulate
from offcompile.testing import plans, problems_with_machines

EASY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

PROBLEM = {
    "steady": True,
    "tensors": [
        {"id": "w0", "nbytes": 453, "kind": "weight", "home": "host", "ratios": {"fp16": 0.5}},
        {"id": "a0", "nbytes": 10, "kind": "activation", "home": None, "ratios": {}},
    ],
    "ops": [
        {
            "id": "F0",
            "phase": "forward",
            "duration_us": 1200.0,
            "reads": ["w0"],
            "writes": ["a0"],
            "workspace_bytes": 0,
            "direct": {"w0": 1900.0},
            "host_duration_us": None,
            "recompute": False,
        }
    ],
}
MACHINE = {
    "tiers": [
        {"name": "device", "capacity_bytes": 8589934592},
        {"name": "host", "capacity_bytes": None},
    ],
    "lanes": [
        {
            "name": "h2d",
            "source": "host",
            "target": "device",
            "bytes_per_us": 12000.0,
            "latency_us": 10.0,
        }
    ],
    "codecs": [{"name": "fp16", "lossless": False, "bytes_per_us": 200000.0}],
}
PLAN = {
    "start": [{"tensor": "w0", "tier": "host"}],
    "moves": [
        {
            "id": "m0",
            "tensor": "w0",
            "source": "host",
            "target": "device",
            "lane": "h2d",
            "start_after": "F3",
            "ready_before": "F5",
            "wraps": False,
            "codec": None,
        }
    ],
    "drops": [{"tensor": "w0", "tier": "device", "after": "F0"}],
    "directs": [{"op": "F0", "tensor": "w0"}],
    "recomputes": [{"op": "F2", "before": "B2"}],
    "updates": [{"weight": "w0", "where": "host"}],
}
READERS = {"problem": problem_from_json, "machine": machine_from_json, "plan": plan_from_json}
GOOD = {"problem": PROBLEM, "machine": MACHINE, "plan": PLAN}


def refusals(read, obj):
    with pytest.raises(InvalidInput) as caught:
        read(obj)
    return [(v.rule, v.where, v.detail) for v in caught.value.violations]


def changed(noun, path, value="remove"):
    """A good example with one value replaced, added or removed."""
    obj = copy.deepcopy(GOOD[noun])
    *way, last = path
    at = obj
    for key in way:
        at = at[key]
    if value == "remove":
        del at[last]
    else:
        at[last] = value
    return obj


def test_the_contract_examples_read_and_write_back_in_its_order():
    problem, machine, plan = (READERS[n](GOOD[n]) for n in READERS)
    assert json.dumps(problem_to_json(problem)) == json.dumps(PROBLEM)
    assert json.dumps(machine_to_json(machine)) == json.dumps(MACHINE)
    assert json.dumps(plan_to_json(plan)) == json.dumps(PLAN)
    assert problem.ops[0].direct == {"w0": 1900.0}
    assert (plan.moves[0].start_after, plan.recomputes[0].id) == ("F3", "F2@B2")


def test_what_may_be_left_out():
    tensor = {"id": "w", "nbytes": 4e9, "kind": "weight"}
    op = {"id": "o", "phase": "update", "duration_us": 3, "reads": ["w"], "writes": []}
    problem = problem_from_json({"tensors": [tensor], "ops": [op]})
    expected = Problem((Tensor("w", 4_000_000_000, "weight"),), (Op("o", "update", 3.0, ("w",)),))
    assert problem == expected
    assert isinstance(problem.tensors[0].nbytes, int)
    assert machine_from_json({"tiers": [{"name": "device"}]}) == Machine((Tier("device"),))
    assert plan_from_json({}) == Plan()
    assert problem_from_json({}) == Problem((), ())
    lane = {"name": "up", "source": "host", "target": "device", "bytes_per_us": 1}
    assert machine_from_json(changed("machine", ["lanes"], [lane])).lanes[0].latency_us == 0
    codec = {"name": "bitmask", "bytes_per_us": 1}
    assert machine_from_json(changed("machine", ["codecs"], [codec])).codecs[0].lossless is False
    move = {k: v for k, v in PLAN["moves"][0].items() if k not in ("wraps", "codec")}
    assert plan_from_json(changed("plan", ["moves"], [move])) == plan_from_json(PLAN)


@EASY
@given(st.data())
def test_what_is_written_reads_back_equal(data):
    problem, machine = data.draw(problems_with_machines(readable=False))
    plan = data.draw(plans(problem, machine))
    assert loads_problem(json.dumps(problem_to_json(problem))) == problem
    assert loads_machine(json.dumps(machine_to_json(machine))) == machine
    assert loads_plan(json.dumps(plan_to_json(plan))) == plan
    assert check_homes(problem, machine) == ()


def test_equal_values_are_written_alike():
    ints = Op("o", "forward", 3, ("a", "b"), (), 0, {"a": 1, "b": 2}, 4)
    floats = Op("o", "forward", 3.0, ("a", "b"), (), 0, {"b": 2.0, "a": 1.0}, 4.0)
    assert ints == floats
    texts = [json.dumps(problem_to_json(Problem((), (op,)))) for op in (ints, floats)]
    assert texts[0] == texts[1]


TENSOR, OP = ["tensors", 0], ["ops", 0]
TIER, LANE, CODEC = ["tiers", 0], ["lanes", 0], ["codecs", 0]
MOVE = ["moves", 0]
T, F = "tensors[0] (w0)", "ops[0] (F0)"
L, C, M = "lanes[0] (h2d)", "codecs[0] (fp16)", "moves[0] (m0)"

BIG = 10**3000

#: noun, path, new value, rule, where, words that the detail must contain
MALFORMED = [
    ("problem", ["stedy"], True, "unknown-key", "stedy", 'did you mean "steady"?'),
    ("problem", [*TENSOR, "nbyte"], 1, "unknown-key", f"{T}.nbyte", 'did you mean "nbytes"?'),
    ("problem", [*OP, "qqq"], 1, "unknown-key", f"{F}.qqq", 'known: "id", "phase"'),
    ("machine", [*TIER, "bytes"], 1, "unknown-key", "tiers[0] (device).bytes", "capacity_bytes"),
    ("plan", [*MOVE, "start_afer"], 1, "unknown-key", f"{M}.start_afer", "start_after"),
    ("problem", [*TENSOR, "id"], "remove", "bad-value", "tensors[0].id", "missing"),
    ("problem", [*TENSOR, "nbytes"], "remove", "bad-value", f"{T}.nbytes", 'add "nbytes"'),
    ("problem", [*TENSOR, "kind"], "remove", "bad-value", f"{T}.kind", "missing"),
    ("problem", [*OP, "reads"], "remove", "bad-value", f"{F}.reads", "missing"),
    ("problem", [*OP, "writes"], "remove", "bad-value", f"{F}.writes", "missing"),
    ("problem", [*OP, "duration_us"], "remove", "bad-value", f"{F}.duration_us", "missing"),
    ("machine", [*LANE, "bytes_per_us"], "remove", "bad-value", f"{L}.bytes_per_us", "missing"),
    ("machine", [*CODEC, "bytes_per_us"], "remove", "bad-value", f"{C}.bytes_per_us", "missing"),
    ("plan", [*MOVE, "start_after"], "remove", "bad-value", f"{M}.start_after", "or null"),
    ("plan", [*MOVE, "ready_before"], "remove", "bad-value", f"{M}.ready_before", "or null"),
    ("plan", ["drops", 0, "tier"], "remove", "bad-value", "drops[0] (w0).tier", "missing"),
    ("plan", ["directs", 0, "op"], "remove", "bad-value", "directs[0].op", "missing"),
    ("plan", ["start", 0, "tier"], "remove", "bad-value", "start[0] (w0).tier", "missing"),
    ("problem", ["steady"], 1, "bad-value", "steady", "1 is not true or false"),
    ("problem", ["steady"], None, "bad-value", "steady", "null is not true or false"),
    ("problem", ["tensors"], {}, "bad-value", "tensors", "an object is not a list"),
    ("problem", TENSOR, [], "bad-value", "tensors[0]", "a list is not an object"),
    ("problem", [*TENSOR, "nbytes"], -5, "bad-value", f"{T}.nbytes", "-5 is not"),
    ("problem", [*TENSOR, "nbytes"], 1.5, "bad-value", f"{T}.nbytes", "1.5 is not a whole"),
    ("problem", [*TENSOR, "nbytes"], True, "bad-value", f"{T}.nbytes", "true is not a whole"),
    ("problem", [*TENSOR, "nbytes"], "4", "bad-value", f"{T}.nbytes", "without quotes"),
    ("problem", [*TENSOR, "nbytes"], math.inf, "bad-value", f"{T}.nbytes", "inf is not"),
    ("problem", [*TENSOR, "nbytes"], BIG, "bad-value", f"{T}.nbytes", "9966 bits"),
    ("problem", [*TENSOR, "kind"], "wieght", "bad-value", f"{T}.kind", '"weight"'),
    ("problem", [*TENSOR, "kind"], [], "bad-value", f"{T}.kind", "a list is not one of"),
    ("problem", [*TENSOR, "home"], "", "bad-value", f"{T}.home", "non-empty"),
    ("problem", [*TENSOR, "home"], 3, "bad-value", f"{T}.home", "or null"),
    ("problem", [*TENSOR, "id"], "\ud800", "bad-value", "tensors[0] (", "valid Unicode"),
    ("problem", [*TENSOR, "ratios"], [], "bad-value", f"{T}.ratios", "a list is not an object"),
    ("problem", [*TENSOR, "ratios", "fp16"], 0, "bad-value", f"{T}.ratios.fp16", "above 0"),
    ("problem", [*TENSOR, "ratios", "fp16"], None, "bad-value", f"{T}.ratios.fp16", "null is"),
    ("problem", [*TENSOR, "ratios"], {1: 0.5}, "bad-value", f"{T}.ratios", "1 is not a non-empty"),
    ("problem", [*OP, "phase"], "forwards", "bad-value", f"{F}.phase", '"forward"'),
    ("problem", [*OP, "duration_us"], math.nan, "bad-value", f"{F}.duration_us", "nan is not"),
    ("problem", [*OP, "duration_us"], -1, "bad-value", f"{F}.duration_us", "from 0"),
    ("problem", [*OP, "duration_us"], 10**400, "bad-value", f"{F}.duration_us", "finite"),
    ("problem", [*OP, "duration_us"], None, "bad-value", f"{F}.duration_us", "null is not"),
    ("problem", [*OP, "host_duration_us"], -1, "bad-value", f"{F}.host_duration_us", "or null"),
    ("problem", [*OP, "workspace_bytes"], -1, "bad-value", f"{F}.workspace_bytes", "-1 is not"),
    ("problem", [*OP, "recompute"], "yes", "bad-value", f"{F}.recompute", '"yes" is not true'),
    ("problem", [*OP, "reads"], "w0", "bad-value", f"{F}.reads", "is not a list"),
    ("problem", [*OP, "reads"], [["w0"]], "bad-value", f"{F}.reads[0]", "a list is not"),
    ("problem", [*OP, "reads"], [], "bad-value", f"{F}.direct.w0", "neither read nor written"),
    ("problem", [*OP, "direct", "w0"], -1, "bad-value", f"{F}.direct.w0", "-1 is not"),
    ("problem", [*OP, "direct"], {"w1": 1}, "unknown-id", f"{F}.direct.w1", '"w0"'),
    ("problem", [*OP, "reads"], ["w0", "w1"], "unknown-id", f"{F}.reads[1]", 'named "w1"'),
    ("problem", [*OP, "writes"], ["b"], "unknown-id", f"{F}.writes[0]", 'known: "w0", "a0"'),
    ("problem", [*TENSOR[:1], 1], PROBLEM["tensors"][0], "duplicate-id", "tensors[1] (w0).id", T),
    ("problem", ["ops"], PROBLEM["ops"] * 2, "duplicate-id", "ops[1] (F0).id", "rename"),
    ("machine", ["tiers"], [], "bad-value", "tiers", 'named "device"'),
    ("machine", [*TIER, "name"], "Device", "bad-value", "tiers", '"Device"'),
    ("machine", [*TIER, "capacity_bytes"], -1, "bad-value", "tiers[0] (device).cap", "or null"),
    ("machine", ["tiers"], MACHINE["tiers"] * 2, "duplicate-id", "tiers[2] (device).name", "tiers"),
    ("machine", [*LANE, "bytes_per_us"], 0, "bad-value", f"{L}.bytes_per_us", "above 0"),
    ("machine", [*LANE, "bytes_per_us"], 5e-324, "bad-value", f"{L}.bytes_per_us", "above 0"),
    ("machine", [*LANE, "bytes_per_us"], math.inf, "bad-value", f"{L}.bytes_per_us", "inf"),
    ("machine", [*LANE, "latency_us"], -1, "bad-value", f"{L}.latency_us", "-1"),
    ("machine", [*LANE, "target"], "host", "bad-value", f"{L}.target", "two different tiers"),
    ("machine", [*LANE, "source"], "hots", "unknown-id", f"{L}.source", 'did you mean "host"?'),
    ("machine", ["lanes"], MACHINE["lanes"] * 2, "duplicate-id", "lanes[1] (h2d).name", "h2d"),
    ("machine", ["codecs"], MACHINE["codecs"] * 2, "duplicate-id", "codecs[1] (fp16)", "fp16"),
    ("machine", [*CODEC, "bytes_per_us"], -2, "bad-value", f"{C}.bytes_per_us", "above 0"),
    ("machine", [*CODEC, "lossless"], 0, "bad-value", f"{C}.lossless", "0 is not true"),
    ("plan", ["moves"], PLAN["moves"] * 2, "duplicate-id", "moves[1] (m0).id", M),
    ("plan", [*MOVE, "codec"], "", "bad-value", f"{M}.codec", "or null"),
    ("plan", [*MOVE, "wraps"], None, "bad-value", f"{M}.wraps", "null is not true"),
    ("plan", ["updates", 0, "where"], "disk", "bad-value", "updates[0] (w0).where", '"device"'),
    ("plan", ["recomputes", 0, "before"], None, "bad-value", "recomputes[0] (F2).before", "null"),
    ("plan", ["start"], None, "bad-value", "start", "null is not a list"),
]


@pytest.mark.parametrize(("noun", "path", "value", "rule", "where", "says"), MALFORMED)
def test_malformed(noun, path, value, rule, where, says):
    found = refusals(READERS[noun], changed(noun, path, value))
    fitting = [f for f in found if f[0] == rule and f[1].startswith(where)]
    assert fitting, found
    assert says in fitting[0][2]


@pytest.mark.parametrize("noun", READERS)
@pytest.mark.parametrize("obj", [None, [], "x", 3, True, math.nan])
def test_not_an_object_at_all(noun, obj):
    [(rule, where, _)] = refusals(READERS[noun], obj)
    assert (rule, where) == ("bad-value", noun)


def test_one_reading_finds_every_fault():
    obj = copy.deepcopy(PROBLEM)
    obj["tensors"][0] |= {"nbytes": -1, "kind": 7, "color": 1}
    obj["ops"][0] |= {"reads": ["zz", "w0"], "phase": None}
    rules = {(rule, where) for rule, where, _ in refusals(problem_from_json, obj)}
    assert rules == {
        ("bad-value", f"{T}.nbytes"),
        ("bad-value", f"{T}.kind"),
        ("unknown-key", f"{T}.color"),
        ("unknown-id", f"{F}.reads[0]"),
        ("bad-value", f"{F}.phase"),
    }


def test_the_text_must_be_strict_json():
    text = '{"tensors": [{"id": "w0", "nbytes": 1, "nbytes": 2, "kind": "weight"}]}'
    [(rule, where, detail)] = refusals(loads_problem, text)
    assert (rule, where) == ("bad-value", f"{T}.nbytes")
    assert 'key "nbytes" is written twice' in detail
    text = json.dumps(PROBLEM).replace('"w0": 1900.0', '"w0": 1, "w0": 2')
    assert refusals(loads_problem, text)[0][1] == f"{F}.direct.w0"
    for literal in ("NaN", "Infinity", "-Infinity", "1e999"):
        text = json.dumps(MACHINE).replace("12000.0", literal)
        [(rule, where, _)] = refusals(loads_machine, text)
        assert (rule, where) == ("bad-value", f"{L}.bytes_per_us")
    [(rule, where, detail)] = refusals(loads_plan, '{"moves":\n [}')
    assert (rule, where) == ("bad-value", "line 2 column 3")
    assert "not JSON" in detail


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"tensors": [' + '{"id":' * 50_000,
        "1" * 10_000,
        "\ufeff{}",
        '{"a": "\t"}',
    ],
)
@pytest.mark.parametrize("loads", [loads_problem, loads_machine, loads_plan])
def test_hostile_text_is_refused_in_words(loads, text):
    assert refusals(loads, text)[0][0] == "bad-value"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(EASY, max_examples=150)
@given(st.data())
def test_junk_anywhere_gives_nothing_worse_than_a_refusal(data):
    noun = data.draw(st.sampled_from(sorted(READERS)))
    obj = copy.deepcopy(GOOD[noun])
    at = obj
    while True:
        inner = list(at) if isinstance(at, dict) else range(len(at))
        key = data.draw(st.sampled_from(inner))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(JUNK | st.sampled_from([10**400, -0.0, {1: 2}, (), b"w0", {"w0"}]))
    try:
        read = READERS[noun](obj)
    except InvalidInput as error:
        assert all(v.where and v.detail for v in error.violations)
    else:
        write = {"problem": problem_to_json, "machine": machine_to_json, "plan": plan_to_json}
        assert READERS[noun](write[noun](read)) == read


def test_homes_must_be_tiers_of_the_machine():
    machine = machine_from_json(MACHINE)
    problem = problem_from_json(changed("problem", [*TENSOR, "home"], "hosts"))
    [violation] = check_homes(problem, machine)
    assert (violation.rule, violation.where) == ("unknown-id", f"{T}.home")
    assert 'did you mean "host"?' in violation.detail
    assert check_homes(problem_from_json(PROBLEM), machine) == ()


def test_machines_may_be_toml():
    text = """
        tiers = [{name = "device", capacity_bytes = 8589934592}, {name = "host"}]
        codecs = [{name = "fp16", lossless = false, bytes_per_us = 200000}]
        [[lanes]]
        name = "h2d"
        source = "host"
        target = "device"
        bytes_per_us = 12_000.0
        latency_us = 10
    """
    assert machine_from_toml(text) == machine_from_json(MACHINE)
    refused = refusals(machine_from_toml, text.replace("12_000.0", "inf"))
    assert refused[0][:2] == ("bad-value", f"{L}.bytes_per_us")
    assert "not TOML" in refusals(machine_from_toml, "tiers = [")[0][2]


def test_many_faults_stay_quick_and_readable():
    names = [f"tensor{i}" for i in range(3000)]
    op = {"id": "o", "phase": "forward", "duration_us": 1, "reads": names, "writes": []}
    with pytest.raises(InvalidInput) as caught:
        problem_from_json({"ops": [op], "tensors": []})
    assert len(caught.value.violations) == 3000
    assert str(caught.value).endswith("… and 2990 more")


def test_the_largest_figures_that_are_read_can_be_simulated():
    tensor = {"id": "w", "nbytes": 1e30, "kind": "weight", "home": "host", "ratios": {"c": 1e6}}
    op = {"id": "o", "phase": "update", "duration_us": 1e30, "reads": [], "writes": ["w"]}
    link = {"name": "d", "source": "device", "target": "host", "bytes_per_us": 1e-30}
    machine = machine_from_json(
        {
            "tiers": [{"name": "device"}, {"name": "host"}],
            "lanes": [link | {"latency_us": 1e30}],
            "codecs": [{"name": "c", "bytes_per_us": 1e-30}],
        }
    )
    problem = problem_from_json({"tensors": [tensor], "ops": [op]})
    plan = Plan(
        (Start("w", "host"),), (Move("m", "w", "device", "host", "d", "o", None, False, "c"),)
    )
    timeline = simulate(problem, machine, plan)
    assert timeline.valid, timeline.violations
    assert 1e66 <= timeline.makespan_us < 1.1e66
    assert refusals(problem_from_json, {"ops": [op | {"duration_us": 1.1e30, "writes": []}]})
