"""Programs over sequences, sets, graphs and tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .parts import CLASSES, WIDTH, WORDS, Gpt, images, labels, mlp, next_word_loss, points, words
from .program import Run, family, trained

program = family("sequences")


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cell = getattr(nn, kind)(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)
        self.lasts = kind == "LSTMCell"

    def forward(
        self, given: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        scores = []
        for word in self.words(given).unbind(1):
            found = self.cell(word, state if self.lasts else state[0])
            state = found if self.lasts else (found,)
            scores.append(self.out(state[0]))
        return torch.stack(scores, 1), state


def _truncated(run: Run, kind: str) -> None:
    """Backpropagation through time, cut at each piece: the state goes on without its history."""
    model = Recurrent(kind)
    forward = run.compile(model)
    state = tuple(torch.zeros(3, WIDTH) for _ in range(1 + model.lasts))

    def step(n: int) -> Tensor:
        nonlocal state
        scores, after = forward(words(n), state)
        state = tuple(s.detach() for s in after)
        return next_word_loss(scores, words(n))

    run.train(model, step)


@program()
def truncates_lstm(run: Run) -> None:
    _truncated(run, "LSTMCell")


@program()
def truncates_gru(run: Run) -> None:
    _truncated(run, "GRUCell")


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, 8, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, given: Tensor) -> Tensor:
        scores: Tensor = self.out(self.lstm(self.words(given))[0])
        return scores


@program()
def tags_with_a_bidirectional_lstm(run: Run) -> None:
    model = Tagger()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(words(n)).flatten(0, 1), labels(n, 24)))


@program()
def recognizes_with_ctc(run: Run) -> None:
    model = Tagger()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        scores = forward(words(n)).log_softmax(-1).transpose(0, 1)
        goal = labels(n, 9, CLASSES - 1).view(3, 3) + 1
        return F.ctc_loss(scores, goal, torch.full((3,), 8), torch.tensor([3, 2, 1]))

    run.train(model, step)


@program()
def translates_with_nn_transformer(run: Run) -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.body = nn.Transformer(WIDTH, 4, 1, 1, 32, 0.1, batch_first=True)
            self.out = nn.Linear(WIDTH, WORDS)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            padded = source == 0
            x = self.body(
                self.words(source),
                self.words(target),
                tgt_mask=mask,
                tgt_is_causal=True,
                src_key_padding_mask=padded.float().masked_fill(padded, -1e9),
            )
            scores: Tensor = self.out(x)
            return scores

    model = Translator()
    forward = run.compile(model)
    run.train(model, lambda n: next_word_loss(forward(words(n), words(n + 9)), words(n + 9)))


@program()
def attends_with_nn_encoder(run: Run) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    forward = run.compile(model)
    x = [torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    run.train(model, lambda n: forward(x[n]).square().mean())


@program()
def checkpoints_each_block(run: Run) -> None:
    class Checkpointed(Gpt):
        def forward(self, words: Tensor) -> Tensor:
            x = self.words(words) + self.places.weight
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            scores: Tensor = self.head(self.norm(x))
            return scores

    model = Checkpointed(layers=3, dropout=0.1)
    forward = run.compile(model)
    run.train(model, lambda n: next_word_loss(forward(words(n)), words(n)))


@program()
def drops_layers_at_random(run: Run) -> None:
    """LayerDrop decides in Python: each pattern is a graph of its own."""

    class Dropped(Gpt):
        def forward(self, words: Tensor, kept: tuple[bool, ...]) -> Tensor:
            x = self.words(words) + self.places.weight
            for block, stays in zip(self.blocks, kept, strict=True):
                x = block(x) if stays else x
            scores: Tensor = self.head(x)
            return scores

    model = Dropped(layers=3)
    forward = run.compile(model)
    patterns = (True, True, False), (False, True, True), (True, True, False), (True, True, True)
    run.train(model, lambda n: next_word_loss(forward(words(n), patterns[n]), words(n)), steps=4)


class Mixture(nn.Module):
    """Two of four experts for each token; how many tokens an expert gets is not known before."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.gate, self.dense = nn.Linear(WIDTH, 4), dense
        self.experts = nn.ModuleList(mlp(out=WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            if self.dense:
                weight = (share * (chosen == k)).sum(-1, keepdim=True)
                out = out + weight * expert(x)
            else:
                rows, slots = torch.where(chosen == k)
                out = out.index_add(0, rows, share[rows, slots, None] * expert(x[rows]))
        return out


@program()
def mixes_experts_densely(run: Run) -> None:
    model = nn.Sequential(Mixture(True), nn.Linear(WIDTH, CLASSES))
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


def _mixed_by_tokens(run: Run) -> None:
    model = nn.Sequential(Mixture(False), nn.Linear(WIDTH, CLASSES))
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


@program(moves=False)
def mixes_experts_by_tokens_uncompiled(run: Run) -> None:
    """Dynamo leaves a loop alone that would break its graph within."""
    _mixed_by_tokens(run)


@program()
def mixes_experts_by_tokens(run: Run) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        _mixed_by_tokens(run)


class Graph(nn.Module):
    """Messages along edges, summed where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = mlp(into=48, out=WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, goal = edges
        for _ in range(2):
            sent = self.message(torch.cat([x[source], x[goal]], -1))
            x = self.update(torch.zeros_like(x).index_add(0, goal, sent), x)
        scores: Tensor = self.out(x)
        return scores


@program()
def passes_messages_on_graphs_of_any_size(run: Run) -> None:
    model = Graph()
    forward = run.compile(model, dynamic=True)

    def step(n: int) -> Tensor:
        rows = 6 + n
        edges = torch.randint(rows, (2, 3 * rows))
        return F.cross_entropy(forward(points(n, rows), edges), labels(n, rows))

    run.train(model, step)


class Recommender(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(WORDS, 8, mode="mean", sparse=sparse)
        self.users = nn.Embedding(30, 8, sparse=sparse)
        self.net = mlp(into=16, out=1)

    def forward(self, user: Tensor, bag: Tensor) -> Tensor:
        scores: Tensor = self.net(torch.cat([self.users(user), self.items(bag)], 1)).squeeze(1)
        return scores


@program()
def recommends_items(run: Run) -> None:
    model = Recommender(False)
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        user = torch.randint(30, (6,))
        goal = labels(n, classes=2).float()
        return F.binary_cross_entropy_with_logits(forward(user, words(n, 6)), goal)

    run.train(model, step)


@program()
def updates_embeddings_sparsely(run: Run) -> None:
    model = Recommender(True)
    forward = run.compile(model)
    tables = [*model.items.parameters(), *model.users.parameters()]
    optimizers = torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(model.net.parameters())
    for n in range(3):
        goal = labels(n, classes=2).float()
        scores = forward(torch.arange(6), words(n, 6))
        F.binary_cross_entropy_with_logits(scores, goal).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run.keep_state(model)


@program()
def embeds_periods_by_fft(run: Run) -> None:
    """A Fourier neural operator: complex weights in the frequency domain."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 1, 1)
            self.weights = nn.Parameter(torch.randn(8, 8, 5, dtype=torch.cfloat) / 8)
            self.beside = nn.Conv1d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            low = torch.fft.rfft(x)[:, :, :5]
            mixed = torch.einsum("bim,iom->bom", low, self.weights)
            again: Tensor = self.out(F.gelu(torch.fft.irfft(mixed, 24) + self.beside(x)))
            return again

    model = Spectral()
    forward = run.compile(model)
    run.train(model, lambda n: F.mse_loss(forward(points(n)[:, None]), points(n)[:, None].sin()))


@program()
def integrates_an_ode(run: Run) -> None:
    field = mlp(out=WIDTH)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = field

        def forward(self, x: Tensor, steps: int) -> Tensor:
            for _ in range(steps):  # Runge and Kutta's second order
                half = x + 0.05 * self.field(x)
                x = x + 0.1 * self.field(half)
            return x

    model = Flow()
    forward = run.compile(model)
    run.train(model, lambda n: F.mse_loss(forward(points(n), 4), points(n + 1)))


@program()
def finds_a_fixed_point(run: Run) -> None:
    """A deep equilibrium: iterated without gradients, differentiated through its last step."""
    model = mlp(out=WIDTH)
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        z = torch.zeros(6, WIDTH)
        with torch.no_grad():
            for _ in range(5):
                z = forward(z + points(n)).tanh()
        return F.mse_loss(forward(z + points(n)).tanh(), points(n + 1))

    run.train(model, step)


@program()
def detects_objects_by_masks(run: Run) -> None:
    """A loss over the cells that hold an object, chosen by a boolean mask outside of the graph."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 5 + CLASSES, 1))
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        found = forward(images(n)).movedim(1, -1)
        held = torch.rand(4, 12, 12) > 0.9
        boxes, kinds = found[held][:, 1:5], found[held][:, 5:]
        here = F.binary_cross_entropy_with_logits(found[..., 0], held.float())
        return here + boxes.square().mean() + F.cross_entropy(kinds, labels(n, len(kinds)))

    run.train(model, step)


@program()
def segments_with_auxiliary_heads(run: Run) -> None:
    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            self.second = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
            self.main, self.aside = nn.Conv2d(16, CLASSES, 1), nn.Conv2d(8, CLASSES, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            low = self.first(x)
            out = F.interpolate(self.main(self.second(low)), x.shape[2:], mode="bilinear")
            return {"out": out, "aux": self.aside(low)} if self.training else {"out": out}

    model = Segmenter()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        found, goal = forward(images(n)), labels(n, 4 * 144).view(4, 12, 12)
        return F.cross_entropy(found["out"], goal) + 0.4 * F.cross_entropy(found["aux"], goal)

    run.train(model, step, optimizer=torch.optim.SGD(trained(model), lr=0.1, momentum=0.9))


@program()
def reads_point_clouds(run: Run) -> None:
    class Cloud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
            self.all = nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.all(self.each(x).amax(-1))
            return scores

    model = Cloud()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n).view(6, 3, 8)), labels(n)))


@program()
def ranks_by_preference(run: Run) -> None:
    """DPO by hand: a policy and its frozen reference, log-likelihoods of whole answers."""
    policy, reference = Gpt(), Gpt().requires_grad_(False)
    reference.load_state_dict(policy.state_dict())
    forward, referred = run.compile(policy), run.compile(reference)

    def likely(scores: Tensor, given: Tensor) -> Tensor:
        chosen = scores[:, :-1].log_softmax(-1).gather(-1, given[:, 1:, None])
        return chosen.squeeze(-1).sum(-1)

    def step(n: int) -> Tensor:
        both = torch.cat([words(n), words(n + 30)])
        with torch.no_grad():
            base = likely(referred(both), both)
        better, worse = (likely(forward(both), both) - base).chunk(2)
        return -F.logsigmoid(0.1 * (better - worse)).mean()

    run.train(policy, step)
