"""Programs that do things to a model's parameters before, after and while it is compiled."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from .parts import Block, Gpt, conv_net, images, labels, mlp, next_word_loss, points, words
from .program import Run, family, trained

program = family("parameters")


#: rows of a batch whose activations outweigh the weights of `mlp`
MANY = 96


def _trained_on_points(run: Run, model: nn.Module, rows: int = 6) -> None:
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n, rows)), labels(n, rows)))


@program()
def normalizes_weights(run: Run) -> None:
    model = mlp()
    for n in (0, 3, 5):
        parametrizations.weight_norm(model[n])
    _trained_on_points(run, model)


@program()
def keeps_weights_orthogonal(run: Run) -> None:
    layer = parametrizations.orthogonal(nn.Linear(24, 24), orthogonal_map="householder")
    _trained_on_points(run, nn.Sequential(layer, nn.Tanh(), nn.Linear(24, 5)))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


@program()
def keeps_weights_symmetric(run: Run) -> None:
    layer = nn.Linear(24, 24)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    _trained_on_points(run, nn.Sequential(layer, nn.Tanh(), nn.Linear(24, 5)))


@program()
def normalizes_weights_the_old_way(run: Run) -> None:
    model = mlp()
    torch.nn.utils.weight_norm(model[0])
    _trained_on_points(run, model)


@program()
def prunes_while_training(run: Run) -> None:
    model = mlp()
    for part in range(2):
        for layer in (model[0], model[3]):
            prune.l1_unstructured(layer, "weight", 0.2)
        forward = run.compile(model)
        run.train(
            model,
            lambda n, forward=forward: F.cross_entropy(forward(points(n)), labels(n)),
            steps=2,
            keep=bool(part),
        )
    for layer in (model[0], model[3]):
        prune.remove(layer, "weight")
    run.keep("pruned", model[0].weight)


class FakeQuantized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax() / 127
        weight = torch.fake_quantize_per_tensor_affine(
            self.weight, scale, torch.zeros(1).int(), -128, 127
        )
        return F.linear(x, weight, self.bias)


@program()
def trains_for_quantization(run: Run) -> None:
    _trained_on_points(run, nn.Sequential(FakeQuantized(24, 48), nn.ReLU(), FakeQuantized(48, 5)))


@program()
def freezes_and_unfreezes(run: Run) -> None:
    model = nn.Sequential(mlp(out=24), nn.ReLU(), nn.Linear(24, 5))
    forward = run.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for frozen in (True, False, True):
        model[0].requires_grad_(not frozen)
        run.train(
            model,
            lambda n: F.cross_entropy(forward(points(n)), labels(n)),
            optimizer=optimizer,
            steps=2,
            keep=False,
        )
    run.keep_state(model)


@program()
def adds_parameter_groups(run: Run) -> None:
    model = nn.Sequential(mlp(out=24), nn.ReLU(), nn.Linear(24, 5))
    model[0].requires_grad_(False)
    forward = run.compile(model)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    for n in range(4):
        if n == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
        optimizer.zero_grad()
        F.cross_entropy(forward(points(n)), labels(n)).backward()
        optimizer.step()
    run.keep_state(model)


def _converted(run: Run) -> None:
    model = mlp()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)), keep=False)
    model.to(torch.float64)
    run.train(model, lambda n: F.cross_entropy(forward(points(n).double()), labels(n)), keep=False)
    run.keep_state(model)


@program()
def converts_after_compiling(run: Run) -> None:
    _converted(run)


@program()
def converts_in_place_of_swapping(run: Run) -> None:
    """`.to` swaps the parameters themselves instead of their data."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        _converted(run)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@program()
def assigns_loaded_tensors(run: Run) -> None:
    model, other = mlp(), mlp()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)), keep=False)
    model.load_state_dict(other.state_dict(), assign=True)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


@program()
def fills_meta_parameters(run: Run) -> None:
    with torch.device("meta"):
        model = mlp()
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    _trained_on_points(run, model)


@program()
def starts_anew_in_place(run: Run) -> None:
    """Weights are made anew by `nn.init` while the model stays compiled."""
    model = mlp()
    forward = run.compile(model)
    for _ in range(2):
        run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)), keep=False)
        for layer in (model[0], model[3]):
            nn.init.kaiming_normal_(layer.weight)
            layer.bias.data = torch.zeros_like(layer.bias)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


@program()
def grows_by_a_layer(run: Run) -> None:
    model = nn.Sequential(Block(), nn.Linear(24, 5))
    for layers in range(2):
        forward = run.compile(model)
        run.train(
            model,
            lambda n, forward=forward: F.cross_entropy(
                forward(points(n)[:, None])[:, 0], labels(n)
            ),
            keep=bool(layers),
        )
        model.insert(0, Block())


@program()
def ties_weights_transposed(run: Run) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(torch.randn(16, 24) / 5),
                nn.Parameter(torch.zeros(24)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.relu(F.linear(x, self.weight)), self.weight.T, self.bias)

    model = Tied()
    forward = run.compile(model)
    run.train(model, lambda n: F.mse_loss(forward(points(n)), points(n)))


@program()
def shares_a_layer_between_models(run: Run) -> None:
    shared = nn.Linear(24, 24)
    first = nn.Sequential(shared, nn.ReLU(), nn.Linear(24, 5))
    second = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), shared, nn.Linear(24, 5))
    both = nn.ModuleList([first, second])
    one, two = run.compile(first), run.compile(second)
    run.train(
        both,
        lambda n: (
            F.cross_entropy(one(points(n)), labels(n)) + F.cross_entropy(two(points(n)), labels(n))
        ),
    )


@program()
def shares_memory_with_workers(run: Run) -> None:
    model = mlp()
    model.share_memory()
    _trained_on_points(run, model, MANY)
    assert all(p.is_shared() for p in model.parameters())


@program()
def copies_a_compiled_model(run: Run) -> None:
    model = mlp()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)), keep=False)
    twin = copy.deepcopy(forward)
    run.train(twin, lambda n: F.cross_entropy(twin(points(n)), labels(n)), keep=False)
    run.keep_state(model)
    run.keep_state(twin, "twin ")


@program()
def hooks_gradients(run: Run) -> None:
    model = mlp()
    seen: list[Tensor] = []
    model[0].weight.register_hook(lambda g: g * 0.5)
    model[3].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    _trained_on_points(run, model, MANY)
    for n, value in enumerate(seen):
        run.keep(f"seen {n}", value)


@program(moves=False)
def hooks_modules(run: Run) -> None:
    """Dynamo leaves the loop over layers alone, as a hook would break its graph within."""
    model = mlp()
    seen: list[Tensor] = []
    model[1].register_full_backward_hook(lambda m, into, out: seen.append(out[0].sum()))
    model[2].register_forward_hook(lambda m, given, out: seen.append(out.detach().sum()))
    _trained_on_points(run, model)
    for n, value in enumerate(seen):
        run.keep(f"seen {n}", value)


@program()
def updates_in_backward(run: Run) -> None:
    """An optimizer for each parameter, stepped by its own hook; no gradient outlives its step."""
    model = Gpt()
    optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    forward = run.compile(model)
    for n in range(3):
        loss = next_word_loss(forward(words(n)), words(n))
        loss.backward()
        run.keep(f"loss {n}", loss)
    run.keep_state(model)


@program()
def generates_weights(run: Run) -> None:
    """A hypernetwork: one network's output is the other's weights."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.code = nn.Linear(8, 24 * 5 + 5), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            made = self.maker(self.code)
            return F.linear(x, made[:120].view(5, 24), made[120:])

    _trained_on_points(run, Hyper())


@program()
def calls_functionally(run: Run) -> None:
    model = mlp()
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def loss_of(given: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, given, (x,)), y)

    compiled = run.compile(loss_of)
    for n in range(3):
        loss = compiled(values, points(n, MANY), labels(n, MANY))
        gradients = torch.autograd.grad(loss, list(values.values()))
        with torch.no_grad():
            for value, gradient in zip(values.values(), gradients, strict=True):
                value -= 0.1 * gradient
    for name, value in values.items():
        run.keep(name, value)


@program(moves=False)
def differentiates_each_example(run: Run) -> None:
    """Per-sample gradients: `vmap` over `grad`, all within the compiled function."""
    model = mlp()
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(given: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, given, (x[None],)), y[None])

    each = run.compile(vmap(grad(loss_of), in_dims=(None, 0, 0)))
    for name, gradient in each(values, points(0), labels(0)).items():
        run.keep(name, gradient)


@program()
def trains_an_ensemble_at_once(run: Run) -> None:
    models = [mlp() for _ in range(3)]
    values, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def of_all(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return vmap(lambda v, b: functional_call(base, (v, b), (x,)))(given, buffers)

    forward = run.compile(of_all)
    optimizer = torch.optim.SGD(values.values(), lr=0.1)
    for n in range(3):
        optimizer.zero_grad()
        scores = forward(values, points(n, MANY)).flatten(0, 1)
        F.cross_entropy(scores, labels(n, MANY).repeat(3)).backward()
        optimizer.step()
    for name, value in values.items():
        run.keep(name, value)


@program(plain_fails=True)
def learns_to_learn(run: Run) -> None:
    """MAML differentiates through gradients, which torch.compile does not."""
    model = mlp()
    forward = run.compile(model)
    loss = F.cross_entropy(forward(points(0)), labels(0))
    inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(g.square().sum() for g in inner).backward()
    run.keep_state(model)


@program()
def learns_to_learn_to_first_order(run: Run) -> None:
    """Reptile: weights are saved, tuned on a task, and moved part of the way."""
    model = conv_net()
    forward = run.compile(model)
    for task in range(2):
        before = copy.deepcopy(model.state_dict())
        run.train(
            model,
            lambda n, task=task: F.cross_entropy(forward(images(3 * task + n)), labels(n, 4)),
            optimizer=torch.optim.SGD(trained(model), lr=0.1),
            steps=2,
            keep=False,
        )
        after = model.state_dict()
        model.load_state_dict(
            {k: b + 0.5 * (after[k] - b) if b.is_floating_point() else b for k, b in before.items()}
        )
    run.keep_state(model)


@program(moves=False)
def keeps_batch_statistics_by_accumulation(run: Run) -> None:
    """The count of batches is read in Python, within a loop that Dynamo then leaves alone."""
    model = conv_net()
    model[1].momentum = None
    model[5] = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(16)).eval()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(images(n)), labels(n, 4)))


@program()
def standardizes_weights(run: Run) -> None:
    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            spread, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True)
            weight = (self.weight - mean) * torch.rsqrt(spread + 1e-5)
            return F.conv2d(x, weight, self.bias, padding=1)

    layers = Standardized(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), Standardized(8, 5, 3)
    model = nn.Sequential(*layers)
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(images(n)).mean((2, 3)), labels(n, 4)))


@program()
def holds_lazy_layers(run: Run) -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(5))
    model(points(0))
    _trained_on_points(run, model)


@program()
def lays_channels_last(run: Run) -> None:
    model = conv_net().to(memory_format=torch.channels_last)
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        x = images(n).to(memory_format=torch.channels_last)
        return F.cross_entropy(forward(x), labels(n, 4))

    run.train(model, step)
