"""Finds equal layers of a model, in one list or several, and makes the same model with fewer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

#: equal layers are traced with this many periods, and with one less
PERIODS = 4
#: periods more if lists are shortened together: gradients that a whole decoder adds to the
#: encoder's result repeat from the third period on
MORE_TOGETHER = 1
#: shorter lists are traced whole, or shortened alone
FEWEST_PERIODS, FEWEST_TOGETHER = 6, 10
#: most kinds of layers that may alternate
LONGEST_PERIOD = 8
#: modules of two traces of two shorter lists, as a share of those of the whole model, at most
MOST_OF_TWO = 0.94

_HOOKS = tuple(k for k in vars(nn.Module()) if "hooks" in k)
_OF_MODULES = frozenset({*vars(nn.Module()), "_modules", "_parameters", "_buffers"})


@dataclass(frozen=True)
class Layers:
    """Lists of `count` layers in a model, of which every `period`-th is equal, except for the
    `first` and the `last` layers of each. Encoder and decoder are two lists."""

    paths: tuple[str, ...]
    count: int
    period: int
    #: number of layers at the beginning and at the end that may differ from all others
    first: int = 0
    last: int = 0

    @property
    def traced(self) -> int:
        """Number of periods that stand for all."""
        return PERIODS + MORE_TOGETHER * (len(self.paths) > 1)

    @property
    def repeated(self) -> int:
        """Number of layers in a list that repeat."""
        return self.count - self.first - self.last

    @property
    def beyond(self) -> int:
        """Number of periods left out of each list."""
        return (self.count - self.kept(self.traced)) // self.period

    def kept(self, periods: int) -> int:
        """Number of layers of a list in that many periods, plus the remainder, plus those that do
        not repeat."""
        return self.first + periods * self.period + self.repeated % self.period + self.last

    def __str__(self) -> str:
        return " and ".join(path or "the model" for path in self.paths)


def find_layers(model: nn.Module) -> Layers | None:
    """Find the lists of equal layers of which most are left out; None if no list is worth
    shortening. Lists that are equally long and repeat alike are shortened together."""
    found: dict[Layers, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            layers = list(module)
            alike = _repetition(layers, _told_of_each(model, len(layers)))
            if alike is not None and not any(_is_inside(path, p) for p in found.get(alike, ())):
                found.setdefault(alike, []).append(path)
    ways = [way for alike, paths in found.items() for way in _ways_to_shorten(alike, paths)]
    best = max(ways, key=lambda f: len(f.paths) * f.beyond * f.period, default=None)
    return best if best is not None and _traces_less(model, best) else None


def _traces_less(model: nn.Module, layers: Layers) -> bool:
    """True if the two traces of few layers have fewer modules than one trace of all; for two lists,
    much fewer, since extrapolating both takes as long as tracing some layers."""
    found = sum(1 for _ in model.modules())
    left_out = 0
    for path in layers.paths:
        of_list = list(model.get_submodule(path).children())
        for periods in (layers.traced, layers.traced - 1):
            behind = layers.kept(periods) - layers.last
            few = of_list[behind : layers.count - layers.last]
            left_out += sum(1 for layer in few for _ in layer.modules())
    most = 1.0 if len(layers.paths) == 1 else MOST_OF_TWO
    return 2 * found - left_out < most * found


def _ways_to_shorten(alike: Layers, paths: list[str]) -> Iterator[Layers]:
    yield replace(alike, paths=(paths[0],))
    if len(paths) > 1 and alike.repeated >= FEWEST_TOGETHER * alike.period:
        yield replace(alike, paths=tuple(paths))


def _repetition(layers: list[nn.Module], told: list[list[Any]]) -> Layers | None:
    """Find the period by which most layers are left out; of several, the shortest."""
    best, left_out = None, 0
    for period in range(1, LONGEST_PERIOD + 1):
        most = len(layers) - PERIODS * period
        if len(layers) < FEWEST_PERIODS * period or left_out >= most:
            break
        found = _longest_repetition(layers, told, period)
        if found is not None and found.beyond * period > left_out:
            best, left_out = found, found.beyond * period
    return best


def _is_inside(path: str, other: str) -> bool:
    return not other or path.startswith(f"{other}.")


def shortened(model: nn.Module, layers: Layers, periods: int) -> nn.Module:
    """Make the model with only the first `periods` periods of layers. It shares everything with
    the given model, which is unchanged."""
    for path in layers.paths:
        whole = model.get_submodule(path)
        assert isinstance(whole, nn.ModuleList | nn.Sequential)
        all_of_them, kept = list(whole), layers.kept(periods) - layers.last
        few = all_of_them[:kept] + all_of_them[layers.count - layers.last :]
        shorter = copy.copy(whole)
        shorter._modules = {str(i): layer for i, layer in enumerate(few)}
        model = _with(model, path.split(".") if path else [], shorter)
    return model


def _with(module: nn.Module, path: list[str], new: nn.Module) -> nn.Module:
    if not path:
        return new
    made = copy.copy(module)
    made._modules = dict(module._modules)
    child = made._modules[path[0]]
    assert child is not None
    made._modules[path[0]] = _with(child, path[1:], new)
    return made


# --- equality of layers ----------------------------------------------------------------------


def _longest_repetition(
    layers: list[nn.Module], told: list[list[Any]], period: int
) -> Layers | None:
    count, told_alike, alike = len(layers), [], []
    for i in range(count - period):
        told_alike.append(all(values[i] == values[i + period] for values in told))
        alike.append(told_alike[i] and _equal(layers[i], layers[i + period], i, i + period))
    first, end = _longest_run(alike)
    found = Layers((), count, period, first, count - period - end)
    # the last layers are traced at other positions, where they must be told the same
    if found.repeated < FEWEST_PERIODS * period or not all(told_alike[end:]):
        return None
    return found if _share_alike(layers, found) else None


def _share_alike(layers: list[nn.Module], found: Layers) -> bool:
    """True if a tensor that two layers share belongs to every layer that repeats one of them."""
    owners: dict[int, set[int]] = {}
    for i, layer in enumerate(layers):
        for t in (*layer.parameters(), *layer.buffers()):
            owners.setdefault(id(t), set()).add(i)
    shared = [among for among in owners.values() if len(among) > 1]
    repeating = range(found.first, found.count - found.last - found.period)
    return all((i in among) == (i + found.period in among) for among in shared for i in repeating)


def _longest_run(values: list[bool]) -> tuple[int, int]:
    """Find the start and the end of the longest run of True; of several, the first."""
    best, start = (0, 0), 0
    for i, value in enumerate([*values, False]):
        if not value:
            best, start = max(best, (start, i), key=lambda run: run[1] - run[0]), i + 1
    return best


def _told_of_each(model: nn.Module, count: int) -> list[list[Any]]:
    """Find lists with one value per layer, such as attention types in a configuration."""
    found: list[list[Any]] = []
    for module in model.modules():
        for value in _attributes(module).values():
            inside = vars(value).values() if hasattr(value, "__dict__") else (value,)
            found += [list(x) for x in inside if isinstance(x, list | tuple) and len(x) == count]
    return [values for values in found if all(_is_plain(v) for v in values)]


def _equal(a: nn.Module, b: nn.Module, i: int, j: int) -> bool:
    """True if two layers provably compute alike; incomparable values count as different."""
    ours, theirs = list(a.named_modules()), list(b.named_modules())
    if len(ours) != len(theirs):
        return False
    return all(
        path == other and _alike(one, two, i, j)
        for (path, one), (other, two) in zip(ours, theirs, strict=True)
    )


def _alike(a: nn.Module, b: nn.Module, i: int, j: int) -> bool:
    if type(a) is not type(b) or any(vars(m).get(k) for m in (a, b) for k in _HOOKS):
        return False
    if a.training != b.training or list(_tensors(a)) != list(_tensors(b)):
        return False
    mine, theirs = _attributes(a), _attributes(b)
    if mine.keys() != theirs.keys():
        return False
    return all(_same(value, theirs[key], i, j) for key, value in mine.items())


def _tensors(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    for kind in (module._parameters, module._buffers):
        for name, t in kind.items():
            if t is None:
                yield name, None
            else:
                layout = tuple(t.shape), t.stride(), t.dtype, t.device.type
                yield name, type(t), layout, t.requires_grad


def _attributes(module: nn.Module) -> Mapping[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in _OF_MODULES}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _same(a: Any, b: Any, i: int, j: int) -> bool:
    """Compare two attribute values; a layer's own index may differ."""
    if a is b or (type(a) is int and (a, b) == (i, j)):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, i, j) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k], i, j) for k in a)
    return _is_plain(a) and bool(a == b)
