"""Programs of generative modelling: adversaries, autoencoders, diffusion, flows."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .parts import Gpt, conv_net, images, mlp, next_word_loss, points, words
from .program import Run, family

program = family("generative")


@program()
def trains_adversaries_with_two_optimizers(run: Run) -> None:
    maker = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 24))
    judge = mlp(out=1)
    make, judged = run.compile(maker), run.compile(judge)
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.5, 0.9)) for m in (maker, judge)
    ]
    for n in range(3):
        noise, real = points(n, width=8), points(50 + n)
        optimizers[1].zero_grad()
        loss = F.softplus(judged(make(noise).detach())).mean() + F.softplus(-judged(real)).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-judged(make(noise))).mean().backward()
        optimizers[0].step()
        run.keep(f"loss {n}", loss)
    run.keep_state(maker, "maker ")
    run.keep_state(judge, "judge ")


@program()
def normalizes_its_critic_spectrally(run: Run) -> None:
    layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(24, 24)) for _ in range(2)]
    critic = nn.Sequential(layers[0], nn.LeakyReLU(0.2), layers[1], nn.Linear(24, 1))
    forward = run.compile(critic)
    run.train(
        critic,
        lambda n: F.relu(1 - forward(points(n))).mean() + F.relu(1 + forward(points(-n))).mean(),
    )


@program(plain_fails=True)
def penalizes_gradients(run: Run) -> None:
    """WGAN-GP differentiates twice, which torch.compile does not."""
    critic = mlp(out=1)
    forward = run.compile(critic)
    x = points(0).requires_grad_()
    (gradient,) = torch.autograd.grad(forward(x).sum(), x, create_graph=True)
    ((gradient.norm(dim=1) - 1) ** 2).mean().backward()
    run.keep_state(critic)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(out=16), mlp(out=24, into=8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
        return self.decoder(drawn), mean, spread


@program()
def trains_a_variational_autoencoder(run: Run) -> None:
    model = Autoencoder()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        again, mean, spread = forward(points(n))
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum()
        return F.mse_loss(again, points(n), reduction="sum") + 0.1 * divergence

    run.train(model, step)


class Quantized(nn.Module):
    """VQ-VAE: the nearest code, passed straight through, and codes that follow in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(out=8), mlp(out=24, into=8)
        self.register_buffer("codes", torch.randn(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.encoder(x)
        nearest = torch.cdist(found.detach(), self.codes).argmin(1)
        code = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.codes.index_copy_(0, nearest, 0.9 * code + 0.1 * found)
        return self.decoder(found + (code - found).detach()), F.mse_loss(found, code.detach())


@program()
def quantizes_codes(run: Run) -> None:
    model = Quantized()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        again, commitment = forward(points(n))
        return F.mse_loss(again, points(n)) + 0.25 * commitment

    run.train(model, step)


class Unet(nn.Module):
    """Two levels, skips between them, and the time added in."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, wide), nn.SiLU(), nn.Linear(wide, 2 * wide))
        self.into = nn.Conv2d(3, wide, 3, padding=1)
        self.down = nn.Conv2d(wide, 2 * wide, 3, stride=2, padding=1)
        self.middle = nn.Sequential(
            nn.GroupNorm(4, 2 * wide), nn.SiLU(), nn.Conv2d(2 * wide, 2 * wide, 3, padding=1)
        )
        self.up = nn.ConvTranspose2d(2 * wide, wide, 4, stride=2, padding=1)
        self.out = nn.Sequential(nn.GroupNorm(4, 2 * wide), nn.SiLU(), nn.Conv2d(2 * wide, 3, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        angles = t[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.into(x)
        low = self.down(first) + time[:, :, None, None]
        low = low + self.middle(low)
        found: Tensor = self.out(torch.cat([self.up(low), first], 1))
        return found


@program()
def denoises_by_diffusion(run: Run) -> None:
    model = Unet()
    forward = run.compile(model)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)

    def step(n: int) -> Tensor:
        t, noise = torch.randint(100, (4,)), torch.randn(4, 3, 12, 12)
        share = kept[t][:, None, None, None]
        noisy = share.sqrt() * images(n) + (1 - share).sqrt() * noise
        return F.mse_loss(forward(noisy, t.float()), noise)

    run.train(model, step)
    with torch.no_grad():  # a few steps of sampling
        x = torch.randn(4, 3, 12, 12)
        for t in (90, 50, 10):
            x = x - 0.1 * forward(x, torch.full((4,), float(t)))
    run.keep("sample", x)


@program()
def matches_flows(run: Run) -> None:
    """Rectified flow: the velocity between noise and data."""
    model = Unet()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        t, noise = torch.rand(4), torch.randn(4, 3, 12, 12)
        between = torch.lerp(noise, images(n), t[:, None, None, None])
        return F.mse_loss(forward(between, t), images(n) - noise)

    run.train(model, step)


class Coupling(nn.Module):
    """RealNVP: half of the values scale and shift the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(out=24, into=12) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, -1)
            scale, shift = net(a).chunk(2, -1)
            scale = scale.tanh()
            x = torch.cat([b * scale.exp() + shift, a], -1)
            volume = volume + scale.sum(-1)
        return x, volume


@program()
def normalizes_flows(run: Run) -> None:
    model = Coupling()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        x, volume = forward(points(n))
        return (0.5 * (x**2).sum(-1) - volume).mean()

    run.train(model, step)


@program()
def optimizes_an_image(run: Run) -> None:
    """Style transfer: the network is frozen, the image is the parameter."""
    net = conv_net(out=16).requires_grad_(False).eval()
    forward = run.compile(net)
    image = nn.Parameter(images(0, rows=1))
    goal = net(images(1, rows=1)).detach()
    optimizer = torch.optim.Adam([image], lr=0.1)
    for n in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(forward(image), goal)
        loss.backward()
        optimizer.step()
        run.keep(f"loss {n}", loss)
    run.keep("image", image)


@program()
def samples_words_while_training(run: Run) -> None:
    model = Gpt()
    forward = run.compile(model)
    for epoch in range(2):
        run.train(model, lambda n: next_word_loss(forward(words(n)), words(n)), steps=2, keep=False)
        said = words(0, 1, 2)
        with torch.no_grad():
            for _ in range(4):
                drawn = torch.multinomial(forward(said)[:, -1].softmax(-1), 1)
                said = torch.cat([said, drawn], 1)
        run.keep(f"said {epoch}", said)
    run.keep_state(model)


class EnergyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(out=1)

    def forward(self, x: Tensor) -> Tensor:
        energy: Tensor = self.net(x).squeeze(-1)
        return energy


@program()
def samples_by_langevin_dynamics(run: Run) -> None:
    """An energy-based model: inputs need gradients for sampling, weights for training."""
    model = EnergyNet()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        x = torch.randn(6, 24).requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(forward(x).sum(), x)
            x = (x - 0.1 * slope + 0.01 * torch.randn_like(x)).detach().requires_grad_()
        return forward(points(n)).mean() - forward(x.detach()).mean()

    run.train(model, step)
