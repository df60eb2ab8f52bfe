"""Programs of reinforcement learning, physics and probability."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from .parts import mlp, points
from .program import Run, family

program = family("decisions")


@program()
def follows_policy_gradients(run: Run) -> None:
    policy = mlp()
    forward = run.compile(policy)

    def step(n: int) -> Tensor:
        chances = Categorical(logits=forward(points(n)))
        action = chances.sample()
        return -(chances.log_prob(action) * action.float()).mean() - 0.01 * chances.entropy().mean()

    run.train(policy, step)


@program()
def learns_values_from_a_slow_copy(run: Run) -> None:
    """DQN: the target network is a copy, loaded every other step."""
    online = mlp()
    slow = copy.deepcopy(online)
    forward, aim = run.compile(online), run.compile(slow)

    def step(n: int) -> Tensor:
        if n % 2 == 0:
            slow.load_state_dict(online.state_dict())
        action = torch.randint(5, (6, 1))
        with torch.no_grad():
            goal = torch.rand(6) + 0.9 * aim(points(n + 1)).amax(1)
        return F.smooth_l1_loss(forward(points(n)).gather(1, action).squeeze(1), goal)

    run.train(online, step, steps=4)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = mlp(out=24), nn.Linear(24, 5), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).relu()
        return self.actor(x), self.critic(x).squeeze(-1)


@program()
def clips_its_policy(run: Run) -> None:
    """PPO: a rollout without gradients, then several epochs over its pieces."""
    model = ActorCritic()
    forward = run.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for n in range(2):
        with torch.no_grad():
            scores, value = forward(points(n, rows=8))
            action = Categorical(logits=scores).sample()
            before = Categorical(logits=scores).log_prob(action)
            gain = torch.rand(8) - value
        for part in torch.randperm(8).chunk(2):
            scores, value = forward(points(n, rows=8)[part])
            chances = Categorical(logits=scores)
            ratio = (chances.log_prob(action[part]) - before[part]).exp()
            won = torch.minimum(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part])
            loss = -won.mean() + F.mse_loss(value, gain[part]) - 0.01 * chances.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    run.keep_state(model)


@program()
def learns_softly_with_two_critics(run: Run) -> None:
    """SAC: the actor's loss goes through critics whose own gradients are dropped."""
    actor = mlp(out=8)
    critics = nn.ModuleList(mlp(into=28, out=1) for _ in range(2))
    act, values = run.compile(actor), [run.compile(c) for c in critics]
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (actor, critics)]

    def draw(n: int) -> tuple[Tensor, Tensor]:
        mean, spread = act(points(n)).chunk(2, -1)
        normal = Normal(mean, spread.clamp(-5, 2).exp())
        action = normal.rsample()
        return action.tanh(), normal.log_prob(action).sum(-1)

    for n in range(3):
        with torch.no_grad():
            action, likely = draw(n)
        both = [v(torch.cat([points(n), action], 1)).squeeze(1) for v in values]
        optimizers[1].zero_grad()
        sum(F.mse_loss(b, torch.rand(6) - 0.2 * likely) for b in both).backward()
        optimizers[1].step()
        action, likely = draw(n)
        both = [v(torch.cat([points(n), action], 1)).squeeze(1) for v in values]
        optimizers[0].zero_grad()
        (0.2 * likely - torch.minimum(*both)).mean().backward()
        optimizers[0].step()
    run.keep_state(actor, "actor ")
    run.keep_state(critics, "critics ")


@program(plain_fails=True)
def solves_an_equation_inside_the_graph(run: Run) -> None:
    """A physics-informed loss needs second derivatives of the compiled model."""
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    forward = run.compile(model)
    x = torch.linspace(0, 1, 8)[:, None].requires_grad_()
    u = forward(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (slope - u).square().mean().backward()
    run.keep_state(model)


@program()
def solves_an_equation_with_func(run: Run) -> None:
    """The same, with `torch.func` inside of what is compiled: one derivative is traced."""
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    @run.compile
    def residue(x: Tensor) -> Tensor:
        u, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return (slope + u - x.sin()).square().mean()

    run.train(model, lambda n: residue(torch.rand(8, 1)))


@program()
def conserves_energy(run: Run) -> None:
    """A Hamiltonian's gradient by formula; steps of leapfrog unrolled in the graph."""

    class Leapfrog(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.force = mlp(out=12, into=12)

        def forward(self, x: Tensor) -> Tensor:
            q, p = x.chunk(2, -1)
            for _ in range(3):
                p = p + 0.05 * self.force(q)
                q = q + 0.1 * p
                p = p + 0.05 * self.force(q)
            return torch.cat([q, p], -1)

    model = Leapfrog()
    forward = run.compile(model)
    run.train(model, lambda n: F.mse_loss(forward(points(n)), points(n + 1)))


@program()
def infers_variationally(run: Run) -> None:
    """Bayes by backprop: each weight a distribution, drawn anew in every forward."""

    class Uncertain(nn.Module):
        def __init__(self, into: int, out: int) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.randn(out, into) / 5)
            self.spread = nn.Parameter(torch.full((out, into), -3.0))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.mean + F.softplus(self.spread) * torch.randn_like(self.mean))

    model = nn.Sequential(Uncertain(24, 32), nn.ReLU(), Uncertain(32, 5))
    forward = run.compile(model)
    run.train(model, lambda n: F.mse_loss(forward(points(n)), points(n)[:, :5]))


@program()
def guesses_uncertainty_by_dropout(run: Run) -> None:
    model = nn.Sequential(mlp(out=24), nn.Dropout(0.3), nn.Linear(24, 2))
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        mean, spread = forward(points(n)).unbind(1)
        return F.gaussian_nll_loss(mean, points(n)[:, 0], F.softplus(spread))

    run.train(model, step)
    with torch.no_grad():
        drawn = torch.stack([forward(points(0)) for _ in range(4)])
    run.keep("spread", drawn.std(0))


@program()
def renders_rays(run: Run) -> None:
    """A radiance field: encodings, cumulated products along rays, images as targets."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(into=18, out=4, wide=16)

        def forward(self, start: Tensor, way: Tensor) -> Tensor:
            far = torch.linspace(0, 1, 6)
            x = start[:, None] + way[:, None] * far[:, None]
            angles = (x[..., None] * torch.tensor([1.0, 2.0, 4.0])).flatten(-2)
            found = self.net(torch.cat([angles.sin(), angles.cos()], -1))
            thick = 1 - torch.exp(-F.relu(found[..., 3]) / 6)
            through = torch.cumprod(1 - thick + 1e-6, -1)
            return (found[..., :3].sigmoid() * (thick * through)[..., None]).sum(1)

    model = Field()
    forward = run.compile(model)
    run.train(
        model,
        lambda n: F.mse_loss(forward(points(n, width=3), points(n + 1, width=3)), torch.rand(6, 3)),
    )


@program()
def balances_losses_by_uncertainty(run: Run) -> None:
    """Several tasks, their weights learnt beside the model."""
    model = ActorCritic()
    model.balance = nn.Parameter(torch.zeros(2))
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        scores, value = forward(points(n))
        losses = torch.stack([F.cross_entropy(scores, torch.arange(6) % 5), value.square().mean()])
        return (losses * (-model.balance).exp() + model.balance).sum()

    run.train(model, step)


@program()
def sorts_softly(run: Run) -> None:
    """Sinkhorn normalization: a loop of logsumexp over a matrix of costs."""

    class Matching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(out=8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            costs = -torch.cdist(self.net(x), self.net(y))
            for _ in range(4):
                costs = costs - costs.logsumexp(-1, keepdim=True)
                costs = costs - costs.logsumexp(-2, keepdim=True)
            return costs

    model = Matching()
    forward = run.compile(model)
    run.train(model, lambda n: F.nll_loss(forward(points(n), points(n + 5)), torch.arange(6)))
