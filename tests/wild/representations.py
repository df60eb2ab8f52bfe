"""Programs that learn representations, and those that learn from another model."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .parts import Block, conv_net, images, labels, mlp, points
from .program import Run, family, trained

program = family("representations")


@program()
def calls_siamese_twins(run: Run) -> None:
    """One network, called for both sides, with a contrastive loss."""
    model = mlp(out=16)
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        apart = (forward(points(n)) - forward(points(n + 20))).norm(dim=1)
        alike = labels(n, classes=2).float()
        return (alike * apart**2 + (1 - alike) * F.relu(1 - apart) ** 2).mean()

    run.train(model, step)


@program()
def calls_triplets(run: Run) -> None:
    model = conv_net(out=16)
    forward = run.compile(model)
    loss = nn.TripletMarginLoss(margin=0.5)
    run.train(model, lambda n: loss(*(forward(images(3 * n + k)) for k in range(3))))


@program()
def contrasts_two_views(run: Run) -> None:
    """SimCLR: both views in one batch, a projection head, cosine similarities."""
    body, head = conv_net(out=16), mlp(16, 8)
    model = nn.Sequential(body, head)
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        x = torch.cat([images(n), images(n).flip(-1) + 0.1 * torch.randn(4, 3, 12, 12)])
        z = F.normalize(forward(x), dim=1)
        alike = (z @ z.T / 0.5).masked_fill(torch.eye(8, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(alike, torch.arange(8).roll(4))

    run.train(model, step)


@program()
def predicts_its_own_average(run: Run) -> None:
    """BYOL: the target network follows by moving average, and is compiled too."""
    online, predictor = mlp(out=16), mlp(16, 16)
    target = copy.deepcopy(online).requires_grad_(False)
    model = nn.ModuleList([online, predictor])
    forward, predict, aim = run.compile(online), run.compile(predictor), run.compile(target)

    def step(n: int) -> Tensor:
        with torch.no_grad():
            for slow, p in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(p, 0.05)
            goal = F.normalize(aim(points(n) + 0.1), dim=1)
        return 2 - 2 * (F.normalize(predict(forward(points(n))), dim=1) * goal).sum(1).mean()

    run.train(model, step)
    run.keep_state(target, "target ")


class Queue(nn.Module):
    """MoCo: negatives wait in a buffer that forward overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(out=16)
        self.register_buffer("queue", F.normalize(torch.randn(16, 18), dim=0))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        q = F.normalize(self.net(x), dim=1)
        positive = (q * keys).sum(1, keepdim=True)
        scores = torch.cat([positive, q @ self.queue.clone()], 1) / 0.2
        with torch.no_grad():
            columns = (self.at + torch.arange(len(keys))) % self.queue.shape[1]
            self.queue[:, columns] = keys.T
            self.at.add_(len(keys)).remainder_(self.queue.shape[1])
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


@program()
def keeps_a_queue_of_negatives(run: Run) -> None:
    model = Queue()
    forward = run.compile(model)
    run.train(model, lambda n: forward(points(n), F.normalize(points(30 + n, width=16), dim=1)))


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.read = conv_net(out=16), mlp(out=16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = F.normalize(self.seen(image), dim=1), F.normalize(self.read(text), dim=1)
        scores = self.scale.exp() * a @ b.T
        own = torch.arange(len(a))
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


@program()
def pairs_images_and_texts(run: Run) -> None:
    model = Clip()
    forward = run.compile(model)
    run.train(model, lambda n: forward(images(n), points(n, rows=4)))


@program()
def crops_many_views(run: Run) -> None:
    """DINO: crops of two sizes through one backbone; centre and teacher follow."""
    student = conv_net(out=12)
    teacher = copy.deepcopy(student).requires_grad_(False)
    forward, taught = run.compile(student), run.compile(teacher)
    centre = torch.zeros(12)

    def step(n: int) -> Tensor:
        nonlocal centre
        with torch.no_grad():
            goal = taught(images(n))
            centre = 0.9 * centre + 0.1 * goal.mean(0)
            share = ((goal - centre) / 0.04).softmax(-1)
        views = forward(images(n)), forward(images(40 + n, side=8)), forward(images(n + 60, side=8))
        return -sum((share * (v / 0.1).log_softmax(-1)).sum(-1).mean() for v in views)

    run.train(student, step)


class Masked(nn.Module):
    """A masked autoencoder: most patches are left out by index, and guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.block, self.decoder = nn.Linear(27, 24), Block(), Block()
        self.blank, self.out = nn.Parameter(torch.zeros(24)), nn.Linear(24, 27)

    def forward(self, patches: Tensor, order: Tensor) -> Tensor:
        seen, kept = self.into(patches), order[:, :4]
        x = self.block(seen.gather(1, kept[..., None].expand(-1, -1, 24)), causal=False)
        filled = self.blank.expand_as(seen).scatter(1, kept[..., None].expand(-1, -1, 24), x)
        return F.mse_loss(self.out(self.decoder(filled, causal=False)), patches)


@program()
def guesses_masked_patches(run: Run) -> None:
    model = Masked()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        patches = F.unfold(images(n), 3, stride=3).transpose(1, 2)
        return forward(patches, torch.rand(4, 16).argsort(1))

    run.train(model, step)


@program()
def distils_a_teacher(run: Run) -> None:
    teacher, student = mlp(48, into=24).eval().requires_grad_(False), mlp()
    taught, forward = run.compile(teacher), run.compile(student)

    def step(n: int) -> Tensor:
        with torch.no_grad():
            goal = taught(points(n))
        scores = forward(points(n))
        soft = F.kl_div((scores / 2).log_softmax(-1), (goal / 2).softmax(-1), reduction="batchmean")
        return 4 * soft + F.cross_entropy(scores, labels(n))

    run.train(student, step)


@program()
def teaches_both_ways(run: Run) -> None:
    """Mutual learning: two models, each the other's teacher, one optimizer over both."""
    pair = nn.ModuleList([mlp(), conv_net(channels=1)])
    first, second = run.compile(pair[0]), run.compile(pair[1])

    def step(n: int) -> Tensor:
        a, b = first(points(n)), second(points(n).view(-1, 1, 4, 6))
        apart = F.kl_div(a.log_softmax(-1), b.softmax(-1).detach(), reduction="batchmean")
        apart = apart + F.kl_div(b.log_softmax(-1), a.softmax(-1).detach(), reduction="batchmean")
        return F.cross_entropy(a, labels(n)) + F.cross_entropy(b, labels(n)) + apart

    run.train(pair, step)


@program()
def fools_itself(run: Run) -> None:
    """Adversarial training: the attack differentiates the compiled model by its input."""
    model = conv_net()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        x = images(n).requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(forward(x), labels(n, 4)), x)
        return F.cross_entropy(forward((x + 0.03 * slope.sign()).detach()), labels(n, 4))

    run.train(model, step)


@program()
def tunes_only_biases(run: Run) -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(24, 5)).requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    forward = run.compile(model)
    run.train(
        model,
        lambda n: F.cross_entropy(forward(points(n)[:, None].expand(-1, 4, -1))[:, 0], labels(n)),
        optimizer=torch.optim.SGD(trained(model), lr=0.1),
    )


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block()).requires_grad_(False)
        self.prompt, self.head = nn.Parameter(torch.randn(3, 24)), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(x), -1, -1), x[:, None]], 1)
        scores: Tensor = self.head(self.body(x)[:, -1])
        return scores


@program()
def tunes_a_prompt(run: Run) -> None:
    model = Prompted()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


class Adapted(nn.Module):
    """LoRA by hand: a frozen matrix and two thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return found


@program()
def adapts_low_ranks_and_merges_them(run: Run) -> None:
    model = nn.Sequential(Adapted(nn.Linear(24, 24)), nn.GELU(), Adapted(nn.Linear(24, 5)))
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.base.weight += layer.up @ layer.down
            layer.up.zero_()
        run.keep("scores of the merged", forward(points(7)))
