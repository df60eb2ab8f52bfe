"""Writes gpt.json: one training step of a GPT-like model, as a problem for `offcompile plan`.

Twelve layers of width 2048 on 8 sequences of 1,024 tokens; bf16 weights, gradients and
activations, fp32 moments; an update right after each layer's backward pass. Durations are
arithmetic at half of an RTX 4090's 165 TFLOP/s, or bytes at its memory's rate.
Run `python examples/plans/make_gpt.py` to write it again.
"""

from __future__ import annotations

import json
from pathlib import Path

LAYERS, WIDTH, TOKENS, CONTEXT, VOCABULARY = 12, 2048, 8 * 1024, 1024, 50257
FLOP_PER_US = 0.5 * 165e6
MEMORY_BYTES_PER_US = 1.0e6
HOST_PARAMETERS_PER_US = 1.0e3  # a fused Adam on a few CPU cores
LINK_BYTES_PER_US = 25e3

tensors: list[dict[str, object]] = []
ops: list[dict[str, object]] = []


def tensor(name: str, kind: str, nbytes: int, home: str | None = None) -> str:
    tensors.append({"id": name, "nbytes": nbytes, "kind": kind, "home": home})
    return name


def op(
    name: str, phase: str, us: float, reads: list[str], writes: list[str], **more: object
) -> None:
    row = {"id": name, "phase": phase, "duration_us": round(us, 1), "reads": reads}
    ops.append({**row, "writes": writes, **more})


def parameter(name: str, count: int) -> None:
    """A weight, its gradient and its two moments."""
    tensor(f"{name}.w", "weight", 2 * count, "host")
    tensor(f"{name}.g", "gradient", 2 * count)
    tensor(f"{name}.m", "state", 8 * count, "host")


def update(name: str, count: int) -> None:
    """Adam reads weight, gradient and moments, and writes weight and moments: 22 bytes each."""
    op(
        f"U.{name}",
        "update",
        22 * count / MEMORY_BYTES_PER_US,
        [f"{name}.w", f"{name}.g", f"{name}.m"],
        [f"{name}.w", f"{name}.m"],
        host_duration_us=round(count / HOST_PARAMETERS_PER_US, 1),
    )


def build() -> dict[str, object]:
    row = 2 * TOKENS * WIDTH  # one bf16 activation of the model's width
    attention, mlp, embedding = 4 * WIDTH**2, 8 * WIDTH**2, VOCABULARY * WIDTH
    matmul_us = {n: 2 * TOKENS * n / FLOP_PER_US for n in (attention, mlp, embedding)}
    scores_us = 2 * TOKENS * CONTEXT * WIDTH / FLOP_PER_US

    tensor("tokens", "input", 8 * TOKENS, "host")
    parameter("embed", embedding)
    tensor("x0", "activation", row)
    gather_us = 2 * row / MEMORY_BYTES_PER_US
    in_place = {"embed.w": round(row / LINK_BYTES_PER_US, 1)}
    op("F.embed", "forward", gather_us, ["tokens", "embed.w"], ["x0"], direct=in_place)
    for i in range(LAYERS):
        parameter(f"a{i}", attention)
        parameter(f"m{i}", mlp)
        tensor(f"qkv{i}", "activation", 4 * row)  # query, key, value and the mixed values
        tensor(f"y{i}", "activation", row)
        tensor(f"h{i}", "activation", 8 * row)  # both sides of the non-linearity
        tensor(f"x{i + 1}", "activation", row)
        us = matmul_us[attention] + scores_us
        op(f"F.a{i}", "forward", us, [f"x{i}", f"a{i}.w"], [f"qkv{i}", f"y{i}"], recompute=True)
        us = matmul_us[mlp]
        op(f"F.m{i}", "forward", us, [f"y{i}", f"m{i}.w"], [f"h{i}", f"x{i + 1}"], recompute=True)
    last = f"x{LAYERS}"
    tensor("loss", "output", 4)
    tensor("d.x", "temporary", row)
    workspace = 4 * TOKENS * VOCABULARY // 8  # the logits, an eighth at a time
    op(
        "F.head",
        "backward",
        3 * matmul_us[embedding],
        [last, "embed.w"],
        ["loss", "d.x", "embed.g"],
        workspace_bytes=workspace,
    )
    for i in reversed(range(LAYERS)):
        us = 2 * matmul_us[mlp]
        reads, writes = ["d.x", f"h{i}", f"y{i}", f"m{i}.w"], ["d.x", f"m{i}.g"]
        op(f"B.m{i}", "backward", us, reads, writes, workspace_bytes=4 * row)
        update(f"m{i}", mlp)
        us = 2 * matmul_us[attention] + 2.5 * scores_us
        reads, writes = ["d.x", f"qkv{i}", f"x{i}", f"a{i}.w"], ["d.x", f"a{i}.g"]
        op(f"B.a{i}", "backward", us, reads, writes, workspace_bytes=3 * row)
        update(f"a{i}", attention)
    reads = ["d.x", "tokens", "embed.g"]
    op("B.embed", "backward", 3 * row / MEMORY_BYTES_PER_US, reads, ["embed.g"])
    update("embed", embedding)
    return {"steady": True, "tensors": tensors, "ops": ops}


if __name__ == "__main__":
    problem = build()
    lists = [
        f' "{key}": [\n  ' + ",\n  ".join(json.dumps(row) for row in problem[key]) + "\n ]"
        for key in ("tensors", "ops")
    ]
    text = '{"steady": true,\n' + ",\n".join(lists) + "\n}\n"
    Path(__file__).with_name("gpt.json").write_text(text)
