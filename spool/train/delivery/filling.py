"""A share of a micro-batch, read into its memory: rows land in their places; the rest is set there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spool.model.fields import LOSS_MASK, FieldSpec
from spool.train.delivery import arrays, memory
from spool.train.delivery.arrays import Arrangement, arrange, behind, check_fields, pad
from spool.train.delivery.work import Settings, Work
from spool.train.planning.items import Piece
from spool.train.planning.placement import Placement, before_response, placement, rebased, uncovered
from spool.train.restoring import gaps
from spool.train.restoring.entries import entries_of
from spool.train.restoring.fields import expert_spec
from spool.train.restoring.layouts import STALENESS, VERSIONS
from spool.train.restoring.reading import make_plan
from spool.train.restoring.versions import VersionOrder, masked_versions, staleness, token_versions

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.read.sample import Coverage

_DERIVED = (VERSIONS.name, STALENESS.name)


class Prepared(NamedTuple):
    """A mini-batch about to be read.

    Attributes:
        work: the mini-batch.
        specs: of its fields, by name.
        covers: for each sequence, by its number in the plan, what is missing of each field.
        order: of weight versions.
        arrangements: of each micro-batch.
    """

    work: Work
    specs: dict[str, FieldSpec]
    covers: dict[int, dict[str, Coverage]]
    order: VersionOrder
    arrangements: tuple[Arrangement, ...]


def prepare(
    spool: Spool,
    work: Work,
    settings: Settings,
    room: Callable[[int], memory.Room] | None = None,
    before: Iterable[int] = (),
) -> Prepared:
    """Find out what a mini-batch's fields are, and what of them is missing; no payload is read.

    Args:
        spool: that has them.
        work: the mini-batch.
        settings: what ranks want of it.
        room: called with the bytes that it takes, returns what there is; what this process may take where None.
        before: bytes of micro-batches that may still be held when its first ones are made.

    Raises:
        InputError: fields do not fit a micro-batch, or nobody says what one is.
        GapError: rows were never sent for which nothing may stand.
        CapacityError: its micro-batches take more memory than there is.
        NotFoundError, StorageError: as `Spool.coverage`.
    """
    numbers = [number for number, ref in work.refs.items() if ref is not None]
    entries = entries_of([work.refs[number] for number in numbers], None)
    asked = None if settings.fields is None else list(settings.fields)
    order = work.order
    plan = make_plan(spool, entries, asked, expert_spec(settings.experts), settings.missing, order, packed=True)
    check_fields(plan.specs.values(), split=work.split)
    arrangements = tuple(arrange(share, plan.specs, work.layers, settings.dtype) for share in work.shares)
    sizes = [*before, *(arrangement.n_bytes for arrangement in arrangements)]
    _check_memory(sizes, settings, room or memory.Memfds().room)
    return Prepared(work, plan.specs, dict(zip(numbers, plan.covers, strict=True)), order, arrangements)


def _check_memory(sizes: Iterable[int], settings: Settings, room: Callable[[int], memory.Room]) -> None:
    largest = sorted(sizes, reverse=True)[: settings.depth]
    need = sum(largest)
    found = room(need)
    if settings.memory_bytes is not None:
        found = min(found, memory.Room(settings.memory_bytes, "memory_bytes="))
    if need > found.n_bytes:
        raise memory.too_little(need, found, why=f"holding {len(largest)} micro-batches (depth={settings.depth})")


def fill(spool: Spool, prepared: Prepared, number: int, settings: Settings, into: Any) -> None:
    """Read a micro-batch into ``into``, a writable buffer of the bytes that its arrangement takes.

    Raises:
        ReleasedError, IntegrityError, StorageError: as `Spool.read`.
    """
    work = prepared.work
    share = work.shares[number]
    views = {array.name: array.view(into) for array in prepared.arrangements[number].arrays}
    for name, array in zip(
        arrays.ADDED, (share.position_ids(), share.cu_seqlens, share.cu_seqlens_padded), strict=True
    ):
        views[name][:] = array
    parts = [_Part(piece, prepared, settings) for piece in share.pieces if work.refs[piece.item] is not None]
    lengths = [0 if work.refs[item] is None else rows for item, rows in zip(share.items, share.rows, strict=True)]
    columns = {name: [part.placement(spec) for part in parts] for name, spec in prepared.specs.items()}
    numbers = behind(share, lengths)
    for name, spec in prepared.specs.items():
        rows = uncovered(share.n_rows, columns[name])
        pad(views[name], spec, rows, numbers, layers=work.layers, token=settings.pad_token_id)
    _read(spool, parts, columns, views, prepared, settings)
    for number, part in enumerate(parts):
        for name, spec in prepared.specs.items():
            part.finish(spec, columns[name][number], views[name])


def _read(
    spool: Spool,
    parts: Sequence[_Part],
    columns: Mapping[str, Sequence[Placement]],
    views: Mapping[str, NDArray[Any]],
    prepared: Prepared,
    settings: Settings,
) -> None:
    """Read the rows of all pieces in one pass, as far as possible into their places."""
    refs = [part.ref for part in parts]
    names = [name for name in prepared.specs if name not in _DERIVED and any(part.has(name) for part in parts)]
    for name in prepared.specs.keys() - {*names, *_DERIVED}:
        for place in columns[name]:
            views[name][place.first : place.last] = 0
    slots = [{name: columns[name][number].slot(views[name]) for name in names} for number in range(len(parts))]
    samples = spool.read(
        refs,
        fields=names,
        tokens=[part.piece.tokens for part in parts],
        layers=prepared.work.layers,
        dtype=settings.dtype,
        out=[{name: slot for name, slot in own.items() if slot is not None} for own in slots],
        missing=0,
        verify=settings.verify,
    )
    for number, sample in enumerate(samples):
        for name in names:
            if slots[number][name] is None:
                columns[name][number].put(views[name], sample[name])


class _Part:
    """A piece of a share, with what its reference says."""

    def __init__(self, piece: Piece, prepared: Prepared, settings: Settings) -> None:
        self.piece, self._settings, self._layers = piece, settings, prepared.work.layers
        self.ref: Any = prepared.work.refs[piece.item]
        self._covers, self._order = prepared.covers[piece.item], prepared.order
        self._begin = piece.to - piece.row
        self._versions: NDArray[np.int64] | None = None

    def has(self, name: str) -> bool:
        """Return whether the sequence has any row of a field."""
        cover = self._covers.get(name)
        if cover is None:
            return True
        n = {"forward": self.ref.n_rows - 1, "response": self.ref.response_length}.get(
            cover.spec.align, self.ref.n_tokens
        )
        return bool(sum(stop - start for start, stop in cover.gaps) < n)

    def placement(self, spec: FieldSpec) -> Placement:
        """Return where the rows of a field go."""
        if spec.align == "response":
            return placement(self.piece, "response", absent=before_response(self.piece, self.ref.response_start))
        return placement(self.piece, "forward" if spec.align == "forward" else "token")

    def finish(self, spec: FieldSpec, place: Placement, array: NDArray[Any]) -> None:
        """Set what was not read: rows that are missing, tokens that do not train, and whose weights they come from."""
        if spec.name == VERSIONS.name:
            place.put(array, self._own(self.versions))
        elif spec.name == STALENESS.name:
            place.put(array, self._own(staleness(self.versions, self._order)))
        elif spec.name == LOSS_MASK.name:
            self._clear(place, array)
        else:
            self._complete(spec, place, array)

    def _complete(self, spec: FieldSpec, place: Placement, array: NDArray[Any]) -> None:
        rows, cover = array[place.first : place.last], self._covers.get(spec.name)
        if cover is not None and cover.gaps:
            gaps.fill(rows, self._positions(spec, place), cover, ids=True, layers=self._layers)
        if spec.positions:
            rows[:] = rebased(rows, gaps.first_rows(self.ref) if self.ref.units else None, self._begin)

    def _positions(self, spec: FieldSpec, place: Placement) -> NDArray[np.int64]:
        """Return which positions of the field the placed rows have."""
        if spec.align == "forward":
            return np.arange(self.piece.row, self.piece.row + self.piece.n_forward)
        absent = before_response(self.piece, self.ref.response_start) if spec.align == "response" else 0
        at = np.arange(self.piece.start + absent, self.piece.stop)
        return at if place.repeats is None else np.repeat(at, place.repeats)

    def _clear(self, place: Placement, mask: NDArray[Any]) -> None:
        """Take tokens out of the loss mask: those of old weights, and those that lack rows."""
        untrained = [masked_versions(self.ref, self.versions, self._order, self._settings.mask_versions)]
        if self._settings.missing == "mask":
            untrained += [gaps.untrained(self.ref, cover) for cover in self._covers.values() if cover.gaps]
        for tokens in untrained:
            if tokens is not None:
                own = self._own(tokens)
                own = own if place.repeats is None else np.repeat(own, place.repeats)
                mask[place.first : place.last][own] = 0

    @property
    def versions(self) -> NDArray[np.int64]:
        """The version of each token of the whole sequence."""
        if self._versions is None:
            self._versions = token_versions(self.ref, self._order)
        return self._versions

    def _own(self, values: NDArray[Any]) -> NDArray[Any]:
        return values[self.piece.start : self.piece.stop]
