"""Reads checkpoint files tensor by tensor: safetensors, and files written by `torch.save`.

A safetensors file is eight bytes with the length of a JSON header, that header, and the tensors'
bytes one after the other. It is read into a small buffer by plain reads, never mapped.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.ir._read import show
from offcompile.ir.reading import read_bounded

#: most bytes read at once
CHUNK_BYTES = 8 << 20
_MOST_HEADER_BYTES = 100 << 20
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_INDEX = ".index.json"
#: limit on the commas and brackets of a JSON file, which bound its number of values
_MOST_PARTS = 10_000_000
_MOST_DIMENSIONS = 64


class CheckpointEntry(ABC):
    """One tensor of a file."""

    shape: tuple[int, ...]

    @abstractmethod
    def copy_to(self, target: torch.Tensor) -> None:
        """Fill `target`, of the same shape, converting to its type."""


@dataclass(frozen=True)
class _Saved(CheckpointEntry):
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.tensor.shape)

    def copy_to(self, target: torch.Tensor) -> None:
        target.copy_(self.tensor)


@dataclass(frozen=True)
class _Raw(CheckpointEntry):
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def copy_to(self, target: torch.Tensor) -> None:
        # row by row; a contiguous target is read as one flat run of elements
        rows = target.view(-1) if target.is_contiguous() else target
        row_bytes = math.prod(rows.shape[1:]) * self.dtype.itemsize
        if not rows.numel():
            return
        at_once = min(max(1, CHUNK_BYTES // row_bytes), len(rows))
        buffer = torch.empty(at_once * row_bytes, dtype=torch.uint8, device="cpu")
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, len(rows), at_once):
                part = rows[start : start + at_once]
                raw = buffer[: len(part) * row_bytes]
                self._fill(file.fileno(), raw.numpy().data)
                part.copy_(raw.view(self.dtype).view(part.shape))

    def _fill(self, descriptor: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.readv(descriptor, [view[done:]])
            if not count:
                raise OffloadError(f"{self.path} became shorter while it was read.")
            done += count


def entries(path: str | os.PathLike[str]) -> dict[str, CheckpointEntry]:
    """Returns the tensors of a file, or of a folder's files, by name, without reading them yet.

    A folder must have an index (`*.index.json`, with a `weight_map`) or one file of weights.
    """
    place = Path(path)
    if place.is_dir():
        return _folder(place)
    if place.name.endswith(_INDEX):
        return _indexed(place)
    return _file(place)


def _folder(place: Path) -> dict[str, CheckpointEntry]:
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        indices = sorted(place.glob(pattern + _INDEX))
        found = indices or sorted(place.glob(pattern))
        if len(found) > 1:
            names = ", ".join(f.name for f in found[:5])
            raise OffloadError(
                f"{place} has {len(found)} files of weights ({names}) and no index that says what"
                " is where: name one of them."
            )
        if found:
            return entries(found[0])
    raise OffloadError(f"{place} has no weights: no .safetensors, .bin, .pt or .pth file.")


def _indexed(index: Path) -> dict[str, CheckpointEntry]:
    try:
        text = read_bounded(index, _MOST_HEADER_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise OffloadError(
            f"the index {index} cannot be read ({error}): fetch it again."
        ) from error
    parsed = _json(text, f"the index {index}")
    where = parsed.get("weight_map")
    if not isinstance(where, dict):
        raise OffloadError(f'{index} has no "weight_map", so it is no index of weights.')
    files: dict[str, dict[str, CheckpointEntry]] = {}
    for name in where.values():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise OffloadError(f"{index} names {show(name)}, which is no file beside it.")
        if name not in files:
            files[name] = _file(index.parent / name)
    missing = [key for key, name in where.items() if key not in files[name]]
    if missing:
        key = missing[0]
        raise OffloadError(
            f"{index} says that {where[key]} holds {show(key)}, and it does not (nor"
            f" {len(missing) - 1} others): fetch the files again."
        )
    return {key: files[name][key] for key, name in where.items()}


def _file(path: Path) -> dict[str, CheckpointEntry]:
    try:
        is_file = path.is_file()
    except OSError:  # such as a name that is too long
        is_file = False
    if not is_file:
        raise OffloadError(f"{path} is no file: name a file or folder of weights.")
    return _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)


def _torch_file(path: Path) -> dict[str, CheckpointEntry]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # pickle, zip and torch raise all kinds
        raise OffloadError(
            f"{path} cannot be read tensor by tensor ({error}): save it again with"
            " torch.save(model.state_dict(), path), or as .safetensors."
        ) from error
    if not isinstance(loaded, Mapping) or not loaded:
        raise OffloadError(f"{path} holds a {type(loaded).__name__}, not a state_dict.")
    strange = [k for k, v in loaded.items() if not isinstance(v, torch.Tensor)]
    if strange:
        raise OffloadError(
            f"{path} is not a state_dict: {strange[0]!r} is a {type(loaded[strange[0]]).__name__},"
            " not a tensor. Save model.state_dict() on its own."
        )
    return {str(k): _Saved(v) for k, v in loaded.items()}


def _safetensors(path: Path) -> dict[str, CheckpointEntry]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
            raise _broken(path, f"its header would be {length} bytes of {size}")
        header = _json(file.read(length).decode("utf-8", "replace"), f"the header of {path}")
    header.pop("__metadata__", None)
    return {name: _raw(path, 8 + length, size, name, told) for name, told in header.items()}


def _raw(path: Path, base: int, size: int, name: str, told: Any) -> _Raw:
    shown = show(name)
    try:
        kind, shape, (start, end) = told["dtype"], told["shape"], told["data_offsets"]
        dtype = _DTYPES.get(kind)
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"{shown} is described as {show(told)}") from error
    if dtype is None:
        raise OffloadError(
            f"{path}: {shown} is of type {kind!s:.60}, which is not read here; known are"
            f" {', '.join(_DTYPES)}."
        )
    if not (_is_size(start) and _is_size(end) and start <= end <= size - base):
        where = f"{show(start)} to {show(end)} of {size - base} bytes"
        raise _broken(path, f"{shown} would lie at {where}")
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_DIMENSIONS
        or not all(map(_is_size, shape))
    ):
        raise _broken(path, f"{shown} has the shape {show(shape)}")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise _broken(path, f"{shown} has {end - start} bytes for {tuple(shape)} of {kind}")
    return _Raw(path, tuple(shape), dtype, base + start)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _json(text: str, what: str) -> dict[str, Any]:
    parts = sum(map(text.count, ",[{"))
    if parts > _MOST_PARTS:
        raise OffloadError(f"{what} has {parts} parts, and {_MOST_PARTS} at most are read.")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OffloadError(f"{what} is no JSON ({error}): fetch the file again.") from error
    if not isinstance(parsed, dict):
        raise OffloadError(f"{what} is a JSON {type(parsed).__name__}, not an object.")
    return parsed


def _broken(path: Path, why: str) -> OffloadError:
    return OffloadError(f"{path} is no whole safetensors file: {why}. Fetch it again.")
