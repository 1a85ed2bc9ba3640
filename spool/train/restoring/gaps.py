"""What stands for rows that were never sent, and which tokens cannot be trained for want of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from spool.errors import GapError
from spool.formats.layers import bounds
from spool.model.fields import TOKEN_IDS
from spool.read.sound import name_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spool.model.fields import FieldSpec
    from spool.model.refs import Ref
    from spool.read.sample import Coverage

BLOCK_ROWS = 4096

Missing = Literal["error", "arange", "mask"]
"""Refuse gaps; put consecutive experts for missing routing; or do that, and take what hangs on it out of training."""


def has_experts(spec: FieldSpec) -> bool:
    """Return whether a row holds expert ids of layers, for which consecutive ones can stand."""
    return spec.align == "forward" and spec.num_layers is not None and spec.bound is not None and not spec.ragged


def consecutive(spec: FieldSpec, rows: NDArray[np.int64], layers: slice | None = None) -> NDArray[np.int64]:
    """Return expert ids for missing rows: distinct ones in a layer, spread over all experts; int64 ``[n, layers, K]``.

    Row *p* of a model with L layers has ``(p * L * K + layer * K + k) % experts``, dense layers 0, so that every rank
    puts the same ids for a row.

    Args:
        spec: of a field that `has_experts`.
        rows: numbers of the rows, ``[n]``.
        layers: absolute layers; all for None.
    """
    assert spec.num_layers is not None
    assert spec.bound is not None
    start, stop = bounds(spec, layers)
    width = prod(spec.shape[1:])
    at = np.arange(start, stop)[:, None] * width + np.arange(width)
    ids = (rows[:, None, None] * (spec.num_layers * width) + at) % spec.bound
    if spec.layers is not None:
        ids[:, [layer - start for layer in range(start, stop) if layer not in spec.layers]] = 0
    return ids.reshape(len(rows), stop - start, *spec.shape[1:])


def check_gaps(ref: Ref, found: Coverage, missing: Missing) -> None:
    """Refuse gaps for which nothing may stand, wherever in the sequence they are, so that all ranks do.

    Raises:
        GapError: ``arange`` is for expert ids only; nothing stands for token ids, and for a step's value.
    """
    spec = found.spec
    hopeless = spec.name == TOKEN_IDS.name or spec.align == "step"
    ways = [] if hopeless else ["mask"]
    if has_experts(spec):
        ways.insert(0, "arange")
    if not found.gaps or missing in ways:
        return
    name, (start, stop) = name_of(ref), found.gaps[0]
    hint = f"pass missing={' or '.join(map(repr, ways))}, " if ways else ""
    raise GapError(
        f"{name}: {spec.name} was never sent for positions [{start}, {stop}){', ...' if len(found.gaps) > 1 else ''}; "
        f"{hint}leave the field out (fields=), or the segment",
        field=spec.name, ref=name, rows=[list(gap) for gap in found.gaps[:16]], n_gaps=len(found.gaps),
    )  # fmt: skip


def within(numbers: NDArray[np.int64], gaps: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which of ``numbers`` lie in one of the half-open ``gaps``, which are ascending and never overlap."""
    edges = np.array([edge for gap in gaps for edge in gap], np.int64)
    inside: NDArray[np.bool_] = np.searchsorted(edges, numbers, side="right") % 2 == 1
    return inside


def fill(part: Any, rows: NDArray[np.int64], found: Coverage, *, ids: bool, layers: slice | None) -> None:
    """Set the rows of ``part`` that lie in gaps.

    Args:
        part: the field's rows, ``[n, ...]``.
        rows: their positions, int64 ``[n]``.
        found: the field, and its gaps.
        ids: consecutive experts, where the field has some; -1 otherwise.
        layers: absolute layers that ``part`` has; all for None.
    """
    lost = np.flatnonzero(within(rows, found.gaps))
    if not has_experts(found.spec):
        part[lost] = 0
        return
    for first in range(0, len(lost), BLOCK_ROWS):
        some = lost[first : first + BLOCK_ROWS]
        part[some] = consecutive(found.spec, rows[some], layers) if ids else -1


def untrained(ref: Ref, found: Coverage) -> NDArray[np.bool_]:
    """Return which tokens cannot be trained because of gaps in a field; bool ``[T]``.

    Those that the field has no row for; of a field of the forward the tokens behind them, which that forward predicts.
    """
    tokens = np.arange(ref.n_tokens)
    if found.spec.align != "forward":
        return within(tokens, found.gaps)
    starts = first_rows(ref)
    lost = np.zeros(ref.n_tokens + 1, np.bool_)
    for start, stop in found.gaps:
        first, last = np.searchsorted(starts, [start, stop - 1], side="right")
        lost[first : last + 1] = True
    return lost[: ref.n_tokens]


def first_rows(ref: Ref) -> NDArray[np.int64]:
    """Return the first row of the forward of each token; int64 ``[T]``."""
    more = np.zeros(ref.n_tokens + 1, np.int64)
    for unit in ref.units:
        more[unit.position + 1] = unit.n_rows - 1
    starts: NDArray[np.int64] = np.arange(ref.n_tokens) + np.cumsum(more[:-1])
    return starts
