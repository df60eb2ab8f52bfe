"""Losses over many words as people write them, and how to run them with a loss in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from offcompile.graph.lowering.lower import Lowering, lower
from offcompile.graph.split import Halves, Splits

WIDTH, WORDS = 12, 53
IGNORED = -100
Loss = Callable[["Head", torch.Tensor, torch.Tensor], Any]


class Head(nn.Module):
    """Something small, a head of many words, and a loss; a teacher for those that ask for one."""

    def __init__(self, loss: Loss, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.teacher = nn.Linear(WIDTH, WORDS).requires_grad_(False)
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self, torch.tanh(self.body(x)), labels)


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.view(-1, WORDS)


def in_single(logits: torch.Tensor) -> torch.Tensor:
    """Casts like `logits.float()`, without losing digits of float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def causal_lm(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """transformers' loss of today: logits in fp32, labels padded and shifted."""
    logits = in_single(m.head(h))
    shifted = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(flat(logits), shifted, ignore_index=IGNORED)


def causal_lm_by_count(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same with the number of items in a batch of several steps."""
    logits = in_single(m.head(h))
    shifted = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous().view(-1)
    summed = F.cross_entropy(flat(logits), shifted, ignore_index=IGNORED, reduction="sum")
    return summed / (y != IGNORED).sum()


def shifted_logits(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """transformers' loss of earlier: the logits are cut too."""
    logits = m.head(h)[..., :-1, :].contiguous()
    return F.cross_entropy(flat(logits), y[..., 1:].contiguous().view(-1))


def nano_gpt(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(m.head(h)), y.view(-1), ignore_index=-1)


def masked_lm(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Most labels are ignored."""
    kept = torch.arange(y.numel()).view_as(y) % 7 == 0
    return F.cross_entropy(flat(m.head(h)), torch.where(kept, y, IGNORED).view(-1))


def fairseq_smoothing(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = flat(F.log_softmax(m.head(h), -1))
    target = y.view(-1, 1)
    padded = target.eq(IGNORED)
    target = target.masked_fill(padded, 0)
    nll = -scores.gather(-1, target).masked_fill(padded, 0.0)
    smooth = -scores.sum(-1, keepdim=True).masked_fill(padded, 0.0)
    share = 0.1 / (WORDS - 1)
    return (0.9 - share) * nll.sum() + share * smooth.sum()


def smoothed(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(m.head(h)), y.view(-1), label_smoothing=0.1)


def chunked(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By the user already."""
    parts = zip(h.reshape(-1, WIDTH).chunk(3), y.view(-1).chunk(3), strict=True)
    losses = [F.cross_entropy(m.head(a), b, reduction="sum") for a, b in parts]
    return torch.stack(losses).sum() / y.numel()


def z_loss(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = flat(m.head(h))
    return F.cross_entropy(logits, y.view(-1)) + 1e-2 * logits.logsumexp(-1).square().mean()


def soft_capped(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = torch.tanh(m.head(h) / 3) * 3
    return F.cross_entropy(flat(logits), y.view(-1))


def scaled(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(m.head(h) * 0.7), y.view(-1))


def distilled(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    student = flat(F.log_softmax(m.head(h) / 2, -1))
    teacher = flat(F.softmax(m.teacher(h.detach()) / 2, -1))
    return F.kl_div(student, teacher, reduction="batchmean") * 4


def summed(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(m.head(h)), y.view(-1), reduction="sum")


def weighted(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.1, 2, WORDS, dtype=h.dtype)
    return F.cross_entropy(flat(m.head(h)), y.view(-1), weight=weights)


def masked_mean(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y.view(-1) != IGNORED).to(h.dtype)
    losses = F.cross_entropy(flat(m.head(h)), y.view(-1), reduction="none")
    return (losses * mask).sum() / mask.sum()


def by_hand(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = torch.log_softmax(m.head(h), -1)
    return -scores.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1).mean()


def by_index(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores, target = torch.log_softmax(flat(m.head(h)), -1), y.view(-1).clamp(min=0)
    return -scores[torch.arange(target.numel()), target].mean()


def one_hot(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = torch.log_softmax(flat(m.head(h)), -1)
    wanted = F.one_hot(y.view(-1).clamp(min=0), WORDS).to(scores.dtype)
    return -(wanted * scores).sum(-1).mean()


# --- backward runs forward again ------------------------------------------------------------


def per_token(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(m.head(h)), y.view(-1), reduction="none")


def perplexity(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Its gradient depends on the loss of all tokens."""
    return torch.exp(F.cross_entropy(flat(m.head(h)), y.view(-1)))


def two_losses(m: Head, h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = flat(m.head(h))
    return F.cross_entropy(logits, y.view(-1)), logits.logsumexp(-1).square().mean()


# --- the user gets the logits too -----------------------------------------------------------


def logits_too(m: Head, h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = m.head(h)
    return F.cross_entropy(flat(logits), y.view(-1)), logits


def causal_lm_with_logits(
    m: Head, h: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A model of transformers: the loss is that of the logits in fp32."""
    logits = m.head(h)
    shifted = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(flat(in_single(logits)), shifted, ignore_index=IGNORED), logits


def cast_logits_too(m: Head, h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cast of the product."""
    logits = in_single(m.head(h)) * 0.7
    return F.cross_entropy(flat(logits), y.view(-1)), logits


def capped_logits_too(
    m: Head, h: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A nonlinear function of the product."""
    logits = torch.tanh(m.head(h) / 3) * 3
    return F.cross_entropy(flat(logits), y.view(-1)), logits


def scores_too(
    m: Head, h: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two functions of the product, one of them in its own shape."""
    logits = m.head(h)
    scores = F.log_softmax(flat(logits), -1)
    return F.nll_loss(scores, y.view(-1)), logits, scores


def detached_logits_too(
    m: Head, h: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that need no gradient."""
    logits = m.head(h)
    return F.cross_entropy(flat(logits), y.view(-1)), logits.detach()


# --- left alone -----------------------------------------------------------------------------


def normalized(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By the largest logit of all tokens."""
    logits = m.head(h)
    return F.cross_entropy(flat(logits / logits.abs().amax()), y.view(-1))


def over_tokens(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A softmax along the tokens."""
    return F.cross_entropy(flat(F.softmax(m.head(h), 1)), y.view(-1))


def only_logits(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """All that is large is the user's."""
    return flat(m.head(h))  # type: ignore[no-any-return]


def shifted_logits_too(
    m: Head, h: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss of some tokens, and the logits of all."""
    logits = m.head(h)
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(flat(shifted), y[..., 1:].contiguous().view(-1)), logits


def unshifted_too(m: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss of some tokens, and one of all."""
    logits = m.head(h)
    loss = F.cross_entropy(flat(logits[:, :-1].contiguous()), y[:, 1:].contiguous().view(-1))
    return loss + 1e-2 * logits.logsumexp(-1).square().mean()


AT_ONCE: tuple[Loss, ...] = (
    causal_lm,
    causal_lm_by_count,
    shifted_logits,
    nano_gpt,
    masked_lm,
    fairseq_smoothing,
    smoothed,
    chunked,
    z_loss,
    soft_capped,
    scaled,
    distilled,
    summed,
    weighted,
    masked_mean,
    by_hand,
    by_index,
    one_hot,
)
IN_TWO_TURNS: tuple[Loss, ...] = (per_token, perplexity, two_losses)
RETURNING: tuple[Loss, ...] = (
    logits_too,
    causal_lm_with_logits,
    cast_logits_too,
    capped_logits_too,
    scores_too,
    detached_logits_too,
)
LEFT_ALONE: tuple[Loss, ...] = (
    normalized,
    over_tokens,
    unshifted_too,
    only_logits,
    shifted_logits_too,
)
#: whose labels may say to ignore a token
IGNORING = (
    causal_lm,
    causal_lm_by_count,
    causal_lm_with_logits,
    fairseq_smoothing,
    smoothed,
    weighted,
    masked_mean,
)


# --- running --------------------------------------------------------------------------------


@dataclass
class InPieces:
    """Hooks that put graphs in pieces wherever they can be."""

    pieces: int
    seen: list[Splits] = field(default_factory=list)
    made: list[Halves] = field(default_factory=list)
    no_buffer_reuse: bool = False

    def may_split(self, splits: Splits) -> None:
        self.seen.append(splits)

    def training(self, forward: Any, backward: Any, num_outputs: int, inputs: Any) -> Any:
        if self.pieces == 1 or not self.seen[-1].most_pieces:
            self.made.append((forward, backward))
            return None
        self.made.append(self.seen[-1].into(self.pieces))
        return self.made[-1]

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        return None

    def ready(self, phase: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return compiled

    @property
    def splits(self) -> bool:
        return self.seen[-1].most_pieces > 0

    @property
    def said(self) -> str:
        """Describe what was split, in words."""
        return "; ".join(part.words() for part in self.seen[-1].parts(self.pieces))

    @property
    def largest_elements(self) -> int:
        """Count the elements of the largest tensor that the graphs compute."""
        return max(
            node.meta["val"].numel()
            for halves in self.made
            for half in halves
            for node in half.graph.nodes
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
        )


def compiled(
    model: Callable[..., Any], pieces: int, lowering: Lowering = "aot_eager"
) -> tuple[Callable[..., Any], InPieces]:
    hooks = InPieces(pieces)
    torch._dynamo.reset()
    run = torch.compile(
        model, backend=lambda gm, inputs: lower(gm, inputs, lowering, hooks), dynamic=False
    )
    return run, hooks


def gradients(
    run: Callable[..., Any], model: Head, x: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    """Losses, and gradients of a sum of them that does not weigh all alike."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    found = run(x, labels)
    outputs = found if isinstance(found, tuple) else (found,)
    weights = [torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view_as(o) for o in outputs]
    pairs = [(o, w) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
    torch.stack([(o * w).sum().double() for o, w in pairs]).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(o.detach() for o in outputs), *grads, x.grad]  # type: ignore[list-item]


def furthest(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest element beside it."""
    assert len(found) == len(wanted)
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-12))
        for a, b in zip(found, wanted, strict=True)
    )
