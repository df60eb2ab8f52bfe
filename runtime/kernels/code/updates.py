"""Kernels that update weights; always called through `Launch`.

Every byte is read once and written once, in coalesced accesses, so that any of the tensors may lie
in host memory. The notes in `movement` on tiles and on the rest of a unit apply here too.
"""

import triton
import triton.language as tl


@triton.jit
def _update(
    weight,
    low,
    gradient,
    exp_avg,
    exp_avg_sq,
    at,
    inside,
    coefficient,
    step_size,
    decay,
    beta1,
    beta2,
    rest1,
    rest2,
    root_correction2,
    eps,
    LOW: tl.constexpr,
    DECOUPLED: tl.constexpr,
):
    w = tl.load(weight + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
    g = tl.load(gradient + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
    m = tl.load(exp_avg + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
    g *= coefficient
    if DECOUPLED:
        w -= decay * w
    else:
        g += decay * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w -= step_size * m / (tl.sqrt(v) / root_correction2 + eps)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)
    if LOW:
        tl.store(low + at, w.to(low.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "tiles"])
def adam_blocks(
    weight,
    low,
    gradient,
    exp_avg,
    exp_avg_sq,
    coefficient,
    scale,
    step_size,
    decay,
    beta1,
    beta2,
    rest1,
    rest2,
    root_correction2,
    eps,
    length,
    tiles,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    SCALED: tl.constexpr,
    DECOUPLED: tl.constexpr,
):
    """One step of Adam for i < length, in float32. If LOW, `low` receives the rounded new weights;
    gradients are multiplied by `scale` and, if SCALED, by the value at `coefficient`."""
    factor = scale
    if SCALED:
        factor = scale * tl.load(coefficient).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    units_end = tl.cast(length, tl.int64) // UNIT * UNIT
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        at = tile * BLOCK + lanes
        _update(
            weight,
            low,
            gradient,
            exp_avg,
            exp_avg_sq,
            at,
            at < units_end,
            factor,
            step_size,
            decay,
            beta1,
            beta2,
            rest1,
            rest2,
            root_correction2,
            eps,
            LOW,
            DECOUPLED,
        )
        tile += tl.num_programs(0)
    # the rest, less than a unit
    if tl.program_id(0) == 0:
        at = units_end + tl.arange(0, UNIT)
        _update(
            weight,
            low,
            gradient,
            exp_avg,
            exp_avg_sq,
            at,
            at < length,
            factor,
            step_size,
            decay,
            beta1,
            beta2,
            rest1,
            rest2,
            root_correction2,
            eps,
            LOW,
            DECOUPLED,
        )
