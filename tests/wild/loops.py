"""Training loops as people write them around a compiled model."""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils

from .parts import Gpt, conv_net, images, labels, mlp, next_word_loss, points, words
from .program import Run, family

program = family("loops")


@program()
def accumulates_gradients(run: Run) -> None:
    model = Gpt()
    forward = run.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for part in range(3):
            given = words(3 * step + part)
            (next_word_loss(forward(given), given) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.keep_state(model)


@program()
def clips_gradients_and_schedules_the_rate(run: Run) -> None:
    model = mlp()
    forward = run.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=5)
    for n in range(4):
        optimizer.zero_grad()
        F.cross_entropy(forward(points(n)), labels(n)).backward()
        run.keep(f"norm {n}", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        schedule.step()
    run.keep_state(model)


@program()
def keeps_gradient_tensors(run: Run) -> None:
    """`zero_grad(set_to_none=False)`: gradients are added to in place."""
    model = mlp()
    forward = run.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(3):
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(forward(points(n)), labels(n)).backward()
        optimizer.step()
    run.keep_state(model)


@program()
def allocates_gradients_itself(run: Run) -> None:
    """Gradients are views of one flat buffer, as in distributed trainers."""
    model = mlp()
    forward = run.compile(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    for n in range(3):
        flat.zero_()
        F.cross_entropy(forward(points(n)), labels(n)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        run.keep(f"flat gradient {n}", flat)
    run.keep_state(model)


@program()
def steps_by_hand(run: Run) -> None:
    """No optimizer: gradients are asked for and subtracted."""
    model = mlp()
    forward = run.compile(model)
    for n in range(3):
        loss = F.cross_entropy(forward(points(n)), labels(n))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.sub_(gradient, alpha=0.1)
        run.keep(f"loss {n}", loss)
    run.keep_state(model)


@program()
def averages_weights_exponentially(run: Run) -> None:
    model = conv_net()
    forward = run.compile(model)
    average = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for n in range(3):
        optimizer.zero_grad()
        F.cross_entropy(forward(images(n)), labels(n, 4)).backward()
        optimizer.step()
        average.update_parameters(model)
    run.keep_state(model)
    run.keep_state(average, "average ")


@program()
def averages_weights_stochastically(run: Run) -> None:
    """SWA: batch statistics of the average are made anew in the end."""
    model = conv_net()
    forward = run.compile(model)
    average = swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.05)
    for n in range(3):
        optimizer.zero_grad()
        F.cross_entropy(forward(images(n)), labels(n, 4)).backward()
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
    swa_utils.update_bn([images(n) for n in range(3)], average)
    run.keep_state(average)


@program()
def averages_by_hand(run: Run) -> None:
    model = mlp()
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)
        return F.cross_entropy(forward(points(n)), labels(n))

    run.train(model, step)
    for name, value in shadow.items():
        run.keep(f"average of {name}", value)


@program()
def evaluates_between_steps(run: Run) -> None:
    model = conv_net()
    forward = run.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for n in range(3):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(forward(images(n)), labels(n, 4)).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            run.keep(f"scores {n}", forward(images(10 + n)))
        with torch.inference_mode():
            run.keep(f"scores inferred {n}", forward(images(20 + n)))
    run.keep_state(model)


@program()
def keeps_the_best_model(run: Run) -> None:
    model = mlp()
    forward = run.compile(model)
    best: tuple[float, dict[str, Tensor]] | None = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for n in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(points(n)), labels(n))
        if best is None or loss.item() < best[0]:
            best = loss.item(), copy.deepcopy(model.state_dict())
        loss.backward()
        optimizer.step()
    assert best is not None
    model.load_state_dict(best[1])
    run.keep_state(model)
    run.keep("loss of the best", F.cross_entropy(forward(points(9)), labels(9)))


@program()
def resumes_from_a_checkpoint(run: Run) -> None:
    saved = io.BytesIO()
    for part in range(2):
        model = Gpt(dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        forward = run.compile(model)
        if part:
            saved.seek(0)
            state = torch.load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        run.train(
            model,
            lambda n, part=part, forward=forward: next_word_loss(
                forward(words(n + 2 * part)), words(n + 2 * part)
            ),
            optimizer=optimizer,
            steps=2,
            keep=bool(part),
        )
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)


@program()
def saves_the_compiled_model(run: Run) -> None:
    """Its state_dict carries the prefix of the wrapper, and is loaded into a plain model."""
    model = mlp()
    compiled = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(compiled(points(n)), labels(n)))
    fresh = mlp()
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(
        state := dict(compiled.state_dict()), "_orig_mod."
    )
    fresh.load_state_dict(state)
    run.keep("scores of the loaded", fresh(points(5)))


@program()
def trains_with_lbfgs(run: Run) -> None:
    model = mlp()
    forward = run.compile(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(points(0)), labels(0))
        loss.backward()
        return loss

    for n in range(2):
        run.keep(f"loss {n}", optimizer.step(closure))
    run.keep_state(model)


@program()
def climbs_before_it_descends(run: Run) -> None:
    """Sharpness-aware minimization: two backward passes, weights perturbed between them."""
    model = mlp()
    forward = run.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(2):
        F.cross_entropy(forward(points(n)), labels(n)).backward()
        with torch.no_grad():
            size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            steps = [0.05 * p.grad / size for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), steps)
        optimizer.zero_grad()
        F.cross_entropy(forward(points(n)), labels(n)).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), steps)
        optimizer.step()
        optimizer.zero_grad()
    run.keep_state(model)


@program()
def looks_ahead(run: Run) -> None:
    """Slow weights follow fast ones, and are copied back through `.data`."""
    model = mlp()
    forward = run.compile(model)
    slow = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for n in range(4):
        optimizer.zero_grad()
        F.cross_entropy(forward(points(n)), labels(n)).backward()
        optimizer.step()
        if n % 2:
            for kept, p in zip(slow, model.parameters(), strict=True):
                kept.add_(p.data - kept, alpha=0.5)
                p.data.copy_(kept)
    run.keep_state(model)


@program()
def mixes_inputs(run: Run) -> None:
    model = conv_net()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        share, order = torch.rand(()), torch.randperm(4)
        x, y = images(n), labels(n, 4)
        scores = forward(share * x + (1 - share) * x[order])
        ours = F.cross_entropy(scores, y, label_smoothing=0.1)
        theirs = F.cross_entropy(scores, y[order], label_smoothing=0.1)
        return share * ours + (1 - share) * theirs

    run.train(model, step)


@program()
def trains_in_bfloat16_by_autocast(run: Run) -> None:
    model = Gpt()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return next_word_loss(forward(words(n)), words(n))

    run.train(model, step)


@program()
def scales_gradients(run: Run) -> None:
    model = mlp()
    forward = run.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for n in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(forward(points(n)), labels(n))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    run.keep_state(model)


@program()
def trains_wholly_in_bfloat16(run: Run) -> None:
    model = Gpt().to(torch.bfloat16)
    forward = run.compile(model)
    run.train(model, lambda n: next_word_loss(forward(words(n)).float(), words(n)))


@program()
def ends_with_a_smaller_batch(run: Run) -> None:
    model = conv_net()
    forward = run.compile(model)
    for rows in (4, 4, 2, 4):
        run.train(
            model,
            lambda n, rows=rows: F.cross_entropy(forward(images(n, rows)), labels(n, rows)),
            steps=1,
            keep=False,
        )
    run.keep_state(model)


@program()
def takes_sequences_of_any_length(run: Run) -> None:
    model = Gpt()
    forward = run.compile(model, dynamic=True)
    for length in (8, 5, 7, 8):
        run.train(
            model,
            lambda n, length=length: next_word_loss(
                forward(words(n, length=length)), words(n, length=length)
            ),
            steps=1,
            keep=False,
        )
    run.keep_state(model)


@program()
def recovers_from_an_interrupted_step(run: Run) -> None:
    """A batch that makes the loss raise is skipped, between forward and backward."""
    model = mlp()
    forward = run.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for n in range(4):
        optimizer.zero_grad()
        try:
            F.cross_entropy(forward(points(n)), labels(n, rows=6 - n % 2)).backward()
        except ValueError:
            continue
        optimizer.step()
    run.keep_state(model)


@program()
def uses_two_optimizers_for_one_model(run: Run) -> None:
    """A matrix optimizer for weights, another for the rest, in turn."""
    model = Gpt(tied=False)
    forward = run.compile(model)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.Adam(others)
    for n in range(3):
        next_word_loss(forward(words(n)), words(n)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run.keep_state(model)


@program()
def compares_optimizers_one_after_another(run: Run) -> None:
    """A notebook's cell: the same model trained by each, made anew each time."""
    for kind in ("Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adafactor"):
        torch.manual_seed(1)
        model = mlp()
        forward = run.compile(model)
        run.train(
            model,
            lambda n, forward=forward: F.cross_entropy(forward(points(n)), labels(n)),
            optimizer=getattr(torch.optim, kind)(model.parameters(), lr=1e-2),
            steps=2,
            keep=False,
        )
        run.keep_state(model, f"{kind}: ")


@program()
def makes_and_drops_twenty_models(run: Run) -> None:
    for k in range(20):
        model = nn.Sequential(nn.Linear(24, 32 + k), nn.Tanh(), nn.Linear(32 + k, 5))
        forward = run.compile(model)
        run.train(
            model,
            lambda n, forward=forward: F.cross_entropy(forward(points(n)), labels(n)),
            steps=1,
            keep=False,
        )
        run.keep_state(model, f"{k}: ")
        del model, forward
        torch._dynamo.reset()
