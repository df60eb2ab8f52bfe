"""The text form: what it looks like, that nothing is lost in it, and how refusals read."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from offcompile.ir import DEVICE, InvalidInput, Machine, Plan, Problem, Start, Tensor, Tier
from offcompile.ir.jsonio import (
    machine_from_json,
    machine_to_json,
    plan_from_json,
    plan_to_json,
    problem_from_json,
    problem_to_json,
)
from offcompile.ir.textio import (
    parse_machine,
    parse_plan,
    parse_problem,
    print_machine,
    print_plan,
    print_problem,
)
from offcompile.testing import plans, problems_with_machines

PROBLEM = """\
steady
tensor w0 453000000 weight home host ratio fp16 0.5
tensor x 16 input home device
tensor a0 0 activation
op F0 forward 1200.0 reads w0 x writes a0 workspace 10 direct w0 1900.0 host 0.0 recompute
op F1 forward 0.0005
"""
MACHINE = """\
tier device 8589934592
tier host unlimited
lane h2d host -> device 12000.0 latency 10.0
lane d2h device -> host 0.1
codec fp16 lossy 200000.0
codec bitmask lossless 1e+22
"""
PLAN = """\
start w0 host
move m0 w0 host -> device on h2d after F3 before F5 wraps codec fp16
move m1 w0 device -> host on d2h
drop w0 device after F0
drop w0 host
direct F0 w0
recompute F2 before B2
update w0 on host
"""
TEXTS = [
    (PROBLEM, parse_problem, print_problem),
    (MACHINE, parse_machine, print_machine),
    (PLAN, parse_plan, print_plan),
]


@pytest.mark.parametrize(("text", "parse", "write"), TEXTS)
def test_the_form_is_stable(text, parse, write):
    assert write(parse(text)) == text


@pytest.mark.parametrize(("text", "parse", "write"), TEXTS)
def test_comments_spaces_and_blank_lines_mean_nothing(text, parse, write):
    loose = "# a file\n\n" + text.replace(" ", " \t ").replace("\n", "   # so\r\n\n")
    assert parse(loose.rstrip("\n")) == parse(text)


def test_what_the_text_says():
    problem = parse_problem(PROBLEM)
    op = problem.ops[0]
    assert problem.steady
    assert (op.reads, op.writes, op.direct) == (("w0", "x"), ("a0",), {"w0": 1900.0})
    assert (op.workspace_bytes, op.host_duration_us, op.recompute) == (10, 0.0, True)
    assert parse_machine(MACHINE).tier["host"].capacity_bytes is None
    move = parse_plan(PLAN).moves[0]
    assert (move.start_after, move.ready_before, move.wraps, move.codec) == (
        ("F3", "F5", True, "fp16")
    )
    assert parse_problem("") == Problem((), ())
    assert parse_plan("# nothing") == Plan()


ODD = (
    *("reads", "writes", "host", "home", "ratio", "->", "on", "after", "before", "wraps", "codec"),
    *("unlimited", "lossy", "latency", "direct", "recompute", "steady", "tensor", "#", "a#b", '"'),
    *("two words", "line\nbreak", "\\", "naïve", "張量", "\u2028", "\x00", " ", "12", "null", "é"),
)
NAMES = st.sampled_from(ODD) | st.text(min_size=1, max_size=6)


def renamed(obj, names, mapping=False):
    """The JSON form with its ids replaced."""
    if isinstance(obj, dict):
        return {
            names.get(k, k) if mapping else k: v
            if k in ("kind", "phase", "where")
            else renamed(v, names, k in ("ratios", "direct"))
            for k, v in obj.items()
        }
    if isinstance(obj, list):
        return [renamed(x, names) for x in obj]
    return names.get(obj, obj) if isinstance(obj, str) else obj


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_nothing_is_lost(data):
    problem, machine = data.draw(problems_with_machines(readable=False))
    plan = data.draw(plans(problem, machine))
    ids = [*problem.tensor, *problem.op, *machine.lane, *machine.codec, "host", "disk"]
    ids += [m.id for m in plan.moves]
    fresh = st.lists(NAMES.filter(lambda x: x != DEVICE), min_size=len(ids), unique=True)
    names = dict(zip(ids, data.draw(fresh), strict=False)) if data.draw(st.booleans()) else {}
    problem = problem_from_json(renamed(problem_to_json(problem), names))
    machine = machine_from_json(renamed(machine_to_json(machine), names))
    plan = plan_from_json(renamed(plan_to_json(plan), names))
    assert parse_problem(print_problem(problem)) == problem
    assert parse_machine(print_machine(machine)) == machine
    assert parse_plan(print_plan(plan)) == plan


@settings(max_examples=200, deadline=None)
@given(NAMES)
@example("device")
def test_any_name_survives_and_keeps_to_its_line(name):
    problem = Problem((Tensor(name, 1, "weight", name, {name: 0.5}),), ())
    machine = Machine((Tier(DEVICE), *([Tier(name)] if name != DEVICE else [])))
    plan = Plan((Start(name, name),))
    assert parse_problem(print_problem(problem)) == problem
    assert parse_machine(print_machine(machine)) == machine
    assert parse_plan(print_plan(plan)) == plan
    assert len(print_problem(problem).splitlines()) == 1


def test_quotes_only_where_they_are_needed():
    ratios = {"ratio": 0.5}
    text = print_problem(Problem((Tensor("layers.0.w/q:1", 1, "weight", "host", ratios),), ()))
    assert text == 'tensor layers.0.w/q:1 1 weight home host ratio "ratio" 0.5\n'
    assert print_plan(Plan((Start("張量", "two words"),))) == 'start 張量 "two words"\n'


def refusals(parse, text):
    with pytest.raises(InvalidInput) as caught:
        parse(text)
    return [(v.rule, v.where, v.detail) for v in caught.value.violations]


#: parser, text, rule, where, words that the detail must contain
MALFORMED = [
    (parse_problem, "\ntensr w 1 weight", "unknown-key", "line 2", 'did you mean "tensor"?'),
    (parse_machine, PROBLEM, "unknown-key", "line 1", 'known: "tier"'),
    (parse_problem, '"tensor" w 1 weight', "unknown-key", "line 1", "no line begins"),
    (parse_problem, "steady yes", "bad-value", "line 1", '"yes"'),
    (parse_problem, "tensor w 1", "bad-value", "line 1", "ends too early; write ID NBYTES KIND"),
    (parse_problem, "tensor w 1 weight home", "bad-value", "line 1", "ends too early"),
    (parse_problem, "tensor w home host", "bad-value", "line 1", "in quotes if it is an id"),
    (parse_problem, "tensor w 1 weight house x", "unknown-key", "line 1", '"home", "ratio"'),
    (parse_problem, "tensor w 1 weight home a home b", "bad-value", "line 1", "twice"),
    (parse_problem, "tensor w 1 weight ratio c 1 ratio c 1", "bad-value", "line 1", "twice"),
    (parse_problem, 'tensor "w 1 weight', "bad-value", "line 1", "quote that does not end"),
    (parse_problem, 'tensor a"b" 1 weight', "bad-value", "line 1", "no space beside it"),
    (parse_problem, r'tensor "\x" 1 weight', "bad-value", "line 1", "not a JSON string"),
    (parse_problem, 'tensor "" 1 weight', "bad-value", "line 1: tensors[0].id", "non-empty"),
    (parse_problem, r'tensor "\ud800" 1 weight', "bad-value", "line 1: tensors[0]", "Unicode"),
    (parse_problem, "tensor w 1.5 weight", "bad-value", "line 1: tensors[0] (w).nbytes", "1.5"),
    (parse_problem, "tensor w many weight", "bad-value", "line 1: tensors[0] (w).nbytes", "many"),
    (parse_problem, 'tensor w "1" weight', "bad-value", "line 1: tensors[0] (w).nbytes", '"1"'),
    (parse_problem, "tensor w 1 wait", "bad-value", "line 1: tensors[0] (w).kind", '"weight"'),
    (parse_problem, "op o forward nan", "bad-value", "line 1: ops[0] (o).duration_us", "nan"),
    (parse_problem, f"op o forward {'9' * 5000}", "bad-value", "line 1: ops[0]", "inf"),
    (parse_problem, "op o forward 1 reads w", "unknown-id", "line 1: ops[0] (o).reads[0]", '"w"'),
    (parse_problem, "op o forward 1\nop o forward 1", "duplicate-id", "line 2: ops[1] (o)", "o"),
    (parse_machine, "tier host unlimited", "bad-value", "tiers", 'named "device"'),
    (parse_machine, "lane a host > device 1", "bad-value", "line 1", "where '->' belongs"),
    (parse_machine, "codec c exact 1", "bad-value", "line 1", '"lossless", "lossy"'),
    (parse_plan, "move m w a -> b on after F", "bad-value", "line 1", "in quotes if it is an id"),
    (parse_plan, "move m w a -> b", "bad-value", "line 1", "the end of the line"),
    (parse_plan, "drop w device after", "bad-value", "line 1", "ends too early"),
    (parse_plan, "direct F0 w0 now", "unknown-key", "line 1", "end it there"),
    (parse_plan, "update w on disk", "bad-value", "line 1: updates[0] (w).where", '"host"'),
]


@pytest.mark.parametrize(("parse", "text", "rule", "where", "says"), MALFORMED)
def test_malformed(parse, text, rule, where, says):
    found = refusals(parse, text)
    fitting = [f for f in found if f[0] == rule and f[1].startswith(where)]
    assert fitting, found
    assert says in fitting[0][2]


def test_every_faulty_line_is_named_once_and_in_order():
    text = "tensor w 1 weight hom host\nop F forward 1 reads w\nop G forwad 1\ntensor\n"
    found = [(rule, where) for rule, where, _ in refusals(parse_problem, text)]
    assert found == [
        ("unknown-key", "line 1"),  # the tensor is known all the same: no more about it
        ("bad-value", "line 3: ops[1] (G).phase"),
        ("bad-value", "line 4"),
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*' \n"\\#', "tensor", "op", "w", "1", "-1", "home", "->"])))
def test_no_text_gives_anything_worse_than_a_refusal(pieces):
    text = " ".join(pieces)
    for parse, write in ((p, w) for _, p, w in TEXTS):
        try:
            assert parse(write(parse(text))) == parse(text)
        except InvalidInput as error:
            assert error.violations
