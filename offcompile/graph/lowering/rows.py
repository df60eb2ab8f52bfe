"""Teaches Inductor to write a piece into a whole tensor (`put_rows`), as one of its own kernels."""

from __future__ import annotations

import functools
from typing import Any

from offcompile.runtime.moves.row_ops import put_rows


@functools.cache
def teach_inductor() -> None:
    from torch._inductor.lowering import mutate_to, register_lowering, slice_

    @register_lowering(put_rows, type_promotion_kind=None)
    def lower_put_rows(whole: Any, piece: Any, start: int) -> Any:
        place = slice_(whole, 0, start, start + piece.get_size()[0])
        mutate_to(place, piece)  # type: ignore[no-untyped-call]
        return whole
