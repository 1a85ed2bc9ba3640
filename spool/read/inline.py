"""Payload that travels inside a reference: sliced and cast as if it had been read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spool.errors import InputError, IntegrityError
from spool.model.fields import LOGPROBS, LOSS_MASK, ROUTED_EXPERTS, TOKEN_IDS, Align, numpy_dtype
from spool.read.select import Range, origin, positions
from spool.read.sound import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spool.model.refs import Ref
    from spool.read.assemble import Array

ALIGN: dict[str, Align] = {
    TOKEN_IDS.name: "token", LOSS_MASK.name: "token", LOGPROBS.name: "response", ROUTED_EXPERTS: "forward",
}  # fmt: skip


def payload(ref: Ref, name: str) -> Array:
    """Return the array that ``ref`` carries as ``name``: read-only, all positions, all layers, a trainer's dtype.

    Raises:
        IntegrityError: its bytes are not what its shape and dtype say.
    """
    carried = ref.inline[name]
    try:
        return np.frombuffer(carried.data, numpy_dtype(carried.dtype)).reshape(carried.shape)
    except (TypeError, ValueError) as error:
        raise IntegrityError(
            f"{name_of(ref)} carries {len(carried.data)} bytes of {name}, which are not {carried.dtype}"
            f"{list(carried.shape)}; take the reference from the catalog again",
            field=name, ref=name_of(ref),
        ) from error  # fmt: skip


def rows(ref: Ref, name: str, align: Align | None, ranges: Sequence[Range]) -> Array:
    """Return the carried rows for the token ``ranges``; perhaps a read-only view.

    Args:
        ref: the reference.
        name: the field.
        align: what its rows stand for, where it is not a built-in field.
        ranges: tokens.

    Raises:
        InputError: no one knows what the rows stand for.
        IntegrityError: there are not as many as the reference says.
    """
    array, align = payload(ref, name), ALIGN.get(name, align)
    if align == "step" or (align is None and list(ranges) == [(0, ref.n_tokens)]):
        return array
    if align is None:
        raise InputError(f"{name_of(ref)} carries {name}, but no stream says what its rows stand for; read all tokens")
    first = origin(align, ref)
    ((start, stop),) = positions(align, ref, [(0, ref.n_tokens)])
    if stop - start != len(array):
        raise IntegrityError(
            f"{name_of(ref)} carries {len(array)} rows of {name}, expected {stop - start}; "
            "take the reference from the catalog again",
            field=name, ref=name_of(ref), expected=stop - start, got=len(array),
        )  # fmt: skip
    parts = [array[low - first : high - first] for low, high in positions(align, ref, ranges)]
    return np.concatenate(parts or [array[:0]])
