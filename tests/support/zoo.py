"""Small models of the kinds people train, for holding a compiled run against a plain one.

Every specimen takes its weights from seed 0 and its batch from the seed it is given, so that two
runs differ in nothing but how the model was compiled. Steps take a few tens of milliseconds and
save activations of tens of KiB to a few MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Specimen:
    """A model with its batches and its loss. `breaks` says that Dynamo cuts it into graphs."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[Any], Tensor]
    breaks: bool = False

    def __str__(self) -> str:
        return self.name

    def fresh(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def double(self) -> Specimen:
        """The same in float64, where sums in another order differ by next to nothing."""
        return replace(
            self,
            build=lambda: self.build().double(),
            inputs=lambda s: tuple(
                x.double() if x.is_floating_point() else x for x in self.inputs(s)
            ),
        )


class MLP(nn.Module):
    """ReLU layers: the output of one ReLU is the saved input of the next Linear."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class ConvNet(nn.Module):
    """Residual blocks of convolution, BatchNorm and ReLU, with running statistics."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(16 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(F.avg_pool2d(x, 8).flatten(1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        hidden = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """Gives its own loss, as most training code has it; `tied` shares embedding and head."""

    def __init__(
        self, vocabulary: int, width: int, depth: int, heads: int, length: int, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    """Dropout after attention and MLP: the masks must be those of the plain run."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, False, 0.1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class LSTM(nn.Module):
    """A cell in a loop: weights read at every time step, many small activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = state = x.new_zeros(x.shape[0], x.shape[2])
        outputs = []
        for step in range(x.shape[1]):
            hidden, state = self.cell(x[:, step], (hidden, state))
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1))


class FusedLSTM(nn.Module):
    """nn.LSTM, which Dynamo refuses to trace: compiled before and after it, eager inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.after = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.recur(self.before(x)))

    @torch.compiler.disable
    def recur(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Mixture(nn.Module):
    """The batch as a whole goes to one expert: a branch on data, hence a graph break."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.gate = nn.Linear(width, 1)
        self.left = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.trunk(x)
        gate = torch.sigmoid(self.gate(x))
        x = gate * self.left(x) if x.mean() > 0 else (1 - gate) * self.right(x)
        return F.layer_norm(x, x.shape[-1:])


class Routed(nn.Module):
    """Each row goes to its own expert: graph breaks and sizes that differ from step to step."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()),
                *(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)),
            )
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in range(len(self.experts)):
            out = self.add_share(out, x, weight, choice, number)
        return x + out

    def add_share(self, out: Tensor, x: Tensor, weight: Tensor, choice: Tensor, n: int) -> Tensor:
        # a function of its own: Dynamo gives up a frame that breaks inside a loop
        rows = (choice == n).nonzero()[:, 0]
        return out.index_add(0, rows, self.experts[n](x[rows]) * weight[rows, None])


class Dictionary(nn.Module):
    """Takes and returns nested structures with values that are no tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = F.gelu(self.first(x))
        logits = self.second(hidden * torch.tanh(x))
        return {
            "logits": logits,
            "extra": {"hidden": hidden, "name": "gelu", "depth": 2, "nothing": None},
            "pair": (logits.detach().amax(), [hidden.mean(), x]),
        }


def _noise(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _tokens(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 96, (4, 129), generator=generator),)


def _mean_square(outputs: Any) -> Tensor:
    return outputs.square().mean()


def _shifted(seed: int) -> tuple[Tensor, ...]:
    """Rows whose mean changes sign with the seed, so that the branch is taken both ways."""
    return (_noise(seed, 1024, 128) + (0.5 if seed % 2 else -0.5),)


def _dictionary_loss(outputs: dict[str, Any]) -> Tensor:
    top, (mean, x) = outputs["pair"]
    assert outputs["extra"]["name"] == "gelu" and outputs["extra"]["nothing"] is None
    assert not top.requires_grad and x.shape == outputs["logits"].shape
    return outputs["logits"].square().mean() / outputs["extra"]["depth"] + mean


ZOO = (
    Specimen("mlp", lambda: MLP(128, 8), lambda s: (_noise(s, 1024, 128),), _mean_square),
    Specimen("conv", lambda: ConvNet(16, 2), lambda s: (_noise(s, 8, 3, 32, 32),), _mean_square),
    Specimen("gpt", lambda: GPT(96, 64, 2, 4, 128), _tokens, lambda loss: loss),
    Specimen("encoder", lambda: Encoder(64, 2, 4), lambda s: (_noise(s, 4, 96, 64),), _mean_square),
    Specimen("lstm", lambda: LSTM(64), lambda s: (_noise(s, 128, 5, 64),), _mean_square),
    Specimen(
        "fused_lstm", lambda: FusedLSTM(64), lambda s: (_noise(s, 256, 16, 64),), _mean_square, True
    ),
    Specimen("mixture", lambda: Mixture(128), _shifted, _mean_square, True),
    Specimen("routed", lambda: Routed(64, 2), lambda s: (_noise(s, 2048, 64),), _mean_square, True),
    Specimen(
        "dictionary", lambda: Dictionary(128), lambda s: (_noise(s, 1024, 128),), _dictionary_loss
    ),
    Specimen("tied", lambda: GPT(96, 64, 2, 4, 128, tied=True), _tokens, lambda loss: loss),
)
BY_NAME = {specimen.name: specimen for specimen in ZOO}


@dataclass(frozen=True)
class Trace:
    """Losses and gradients of each step of a run, and the weights at its end, by name."""

    losses: tuple[Tensor, ...]
    gradients: tuple[dict[str, Tensor], ...]
    weights: dict[str, Tensor]

    def differences(self, other: Trace) -> list[str]:
        """Names of the tensors that differ from `other` in any bit."""
        found = [f"loss {n}" for n, _ in _unequal(_numbered(self.losses), _numbered(other.losses))]
        for step, (mine, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            found += [f"gradient of {n} in step {step}" for n, _ in _unequal(mine, theirs)]
        return found + [f"weight {n}" for n, _ in _unequal(self.weights, other.weights)]

    def distance(self, other: Trace) -> float:
        """The largest error of any tensor against `other`, as a share of its largest value."""
        pairs = [*zip(self.losses, other.losses, strict=True)]
        for mine, theirs in zip(self.gradients, other.gradients, strict=True):
            pairs += [(mine[n], theirs[n]) for n in theirs]
        pairs += [(self.weights[n], w) for n, w in other.weights.items() if w.is_floating_point()]
        return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def _numbered(values: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {str(n): value for n, value in enumerate(values)}


def _unequal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    assert mine.keys() == theirs.keys()
    return [(n, v) for n, v in mine.items() if not torch.equal(v, theirs[n])]


def train(
    specimen: Specimen,
    compiler: Callable[[nn.Module], Callable[..., Any]] = lambda model: model,
    steps: int = 3,
) -> Trace:
    """Train a fresh model with SGD and momentum, compiled by `compiler` (default: eager)."""
    torch._dynamo.reset()
    model = specimen.fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    forward = compiler(model)
    losses, gradients = [], []
    for step in range(steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        loss = specimen.loss(forward(*specimen.inputs(step)))
        loss.backward()
        losses.append(loss.detach().clone())
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
    weights = {n: value.clone() for n, value in model.state_dict().items()}
    return Trace(tuple(losses), tuple(gradients), weights)
