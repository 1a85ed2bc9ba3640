"""What stands for rows that were never sent, and which tokens cannot be trained for want of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from spool.arguments import instance
from spool.errors import GapError, InputError
from spool.formats.layers import bounds
from spool.model.fields import ROUTED_EXPERTS, TOKEN_IDS, FieldSpec, expert_field
from spool.model.moe import MoEShape, models
from spool.read.sample import Coverage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spool.handle import Spool
    from spool.model.refs import Ref

Missing = Literal["error", "arange", "mask"]
"""Refuse gaps; put consecutive experts for missing routing; or do that, and take what hangs on it out of training."""


def expert_spec(experts: object) -> FieldSpec | None:
    """Return the spec of the routing that ``experts`` names; None for None.

    Raises:
        InputError: it is no shape.
        NotFoundError: no model is called like that.
    """
    if experts is None:
        return None
    shape = models[experts] if isinstance(experts, str) else experts
    return expert_field(instance("experts", shape, MoEShape, "a MoEShape or the name of a model"))


def covers_of(
    spool: Spool, refs: Sequence[Ref], names: Sequence[str], experts: FieldSpec | None
) -> list[dict[str, Coverage]]:
    """Return what of each reference's fields was never sent; of routing, ``experts`` says what it is if nobody else.

    Raises:
        NotFoundError: nobody knows a field.
    """
    told = experts is not None and ROUTED_EXPERTS in names and not have_routing(refs)
    found = spool.coverage(refs, [name for name in names if not (told and name == ROUTED_EXPERTS)])
    if told and experts is not None:
        for ref, covers in zip(refs, found, strict=True):
            covers[ROUTED_EXPERTS] = Coverage(experts, ((0, ref.n_rows - 1),) if ref.n_rows > 1 else ())
    return found


def agreed(specs: Iterable[FieldSpec]) -> FieldSpec | None:
    """Return what a field of several references is: of specs that are alike that which has the most ids.

    Raises:
        InputError: no array holds the rows of all.
    """
    chosen: FieldSpec | None = None
    for spec in specs:
        if chosen is None:
            chosen = spec
        elif _form(spec) != _form(chosen):
            raise InputError(
                f"{spec.name} is {_form(spec)} in one reference and {_form(chosen)} in another; restore them apart",
                field=spec.name,
            )
        elif (spec.bound or 0, spec.missing is not None) > (chosen.bound or 0, chosen.missing is not None):
            chosen = spec
    return chosen


def _form(spec: FieldSpec) -> tuple[object, ...]:
    return spec.align, spec.ragged, spec.num_layers, spec.row_shape


def have_routing(refs: Iterable[Ref]) -> bool:
    """Return whether any of the references has rows of routing."""
    return any(ROUTED_EXPERTS in ref.extents or ROUTED_EXPERTS in ref.inline for ref in refs)


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
    name, (start, stop) = str(getattr(ref, "id", ref.session_id)), found.gaps[0]
    hint = f"pass missing={' or '.join(map(repr, ways))}, " if ways else ""
    raise GapError(
        f"{name}: {spec.name} was never sent for positions [{start}, {stop}){', ...' if len(found.gaps) > 1 else ''}; "
        f"{hint}leave the field out (fields=), or the segment",
        field=spec.name, ref=name, rows=[list(gap) for gap in found.gaps[:16]], n_gaps=len(found.gaps),
    )  # fmt: skip


def within(numbers: NDArray[np.int64], gaps: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which of ``numbers`` lie in one of the half-open ``gaps``."""
    inside = np.zeros(len(numbers), np.bool_)
    for start, stop in gaps:
        inside |= (numbers >= start) & (numbers < stop)
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
    lost = within(rows, found.gaps)
    if has_experts(found.spec):
        part[lost] = consecutive(found.spec, rows[lost], layers) if ids else -1
    else:
        part[lost] = 0


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
    starts = np.arange(ref.n_tokens, dtype=np.int64)
    for unit in ref.units:
        starts[unit.position + 1 :] += unit.n_rows - 1
    return starts
