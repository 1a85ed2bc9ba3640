"""Which units a mini-batch uses, and where: sample -> trajectories -> units. From references alone; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from spool.arguments import listed, refused
from spool.errors import InputError
from spool.model.refs import Ref
from spool.train.planning.items import Item, Piece, items_of

_row = attrgetter("row")


class UnitUse(Struct, frozen=True, array_like=True, gc=False):
    """One place where a trajectory uses a unit.

    Attributes:
        unit: its number in `UnitIndex.units`.
        position: the token that stands for it.
        row: the first row that this token expands to, in the sequence with its placeholders expanded.
    """

    unit: int
    position: int
    row: int


class IndexedUnit(Struct, frozen=True, array_like=True, gc=False):
    """A unit that a mini-batch uses, however often.

    Attributes:
        key: of the unit's content.
        n_rows: rows that it expands to.
        n_uses: places that use it.
    """

    key: str
    n_rows: int
    n_uses: int


class UnitTrajectory(Struct, frozen=True, array_like=True):
    """A sequence, and the units it uses.

    Attributes:
        item: number of its reference among those that were given, as in `Plan.items`.
        id: of its reference, as the command line takes it.
        uses: by position.
    """

    item: int
    id: str
    uses: tuple[UnitUse, ...]


class UnitSample(Struct, frozen=True, array_like=True):
    """A session, and the trajectories of it that are trained.

    Attributes:
        spool_id, session_id, group_id, sample_index: identity of the session.
        trajectories: in the order they were given.
    """

    spool_id: str
    session_id: str
    group_id: str | None
    sample_index: int | None
    trajectories: tuple[UnitTrajectory, ...]


class UnitIndex(Struct, frozen=True, kw_only=True):
    """The units of a mini-batch. Small, picklable, JSON-able; equal references give an equal index.

    Attributes:
        units: each unit once, by first use.
        samples: all samples, by first trajectory; those without units too.
        n_items: sequences that were given, those without a reference included: they are in no sample.
    """

    units: tuple[IndexedUnit, ...]
    samples: tuple[UnitSample, ...]
    n_items: int

    @property
    def trajectories(self) -> tuple[UnitTrajectory, ...]:
        """All trajectories by number of their item."""
        found = [trajectory for sample in self.samples for trajectory in sample.trajectories]
        return tuple(sorted(found, key=attrgetter("item")))

    @property
    def n_uses(self) -> int:
        """Places that use a unit: what would be encoded if nothing were shared."""
        return sum(unit.n_uses for unit in self.units)

    @property
    def n_rows(self) -> int:
        """Rows of all units, each counted once."""
        return sum(unit.n_rows for unit in self.units)

    def to_json(self) -> str:
        """Return the index as JSON; ``msgspec.json.decode(text, type=UnitIndex)`` reads it back."""
        return msgspec.json.encode(self).decode()


class UnitRows(Struct, frozen=True, array_like=True, gc=False):
    """Rows of a unit that a share of a micro-batch holds.

    Attributes:
        unit: its number in `UnitIndex.units`.
        start: first row of the unit; not 0 where a context-parallel boundary cuts it.
        stop: one past the last.
        to: row of the share that takes the first one.
    """

    unit: int
    start: int
    stop: int
    to: int


def unit_index(refs: Iterable[Ref | int | Item | None]) -> UnitIndex:
    """Return which units the references of a mini-batch use, and where.

    Args:
        refs: segments or steps, in the order that `plan` gets them. None stands for a sample that failed, and a length
            or an Item for one that has no units.

    Raises:
        InputError: an entry is none of these, its units do not fit its tokens or have no keys, or a unit has another
            number of rows elsewhere; says which.
    """
    wanted = "references, those that plan() gets, or None for a sample that failed"
    found = listed("refs", refs, (Ref, Integral, Item, type(None)), wanted)
    items = items_of([0 if ref is None else ref for ref in found])
    numbers: dict[str, int] = {}
    rows: list[int] = []
    samples: dict[tuple[str, str], list[UnitTrajectory]] = {}
    for item, ref in enumerate(found):
        if not isinstance(ref, Ref):
            if items[item].units:
                raise refused("refs", "a reference where an Item has units: that knows their keys", ref, entry=item)
            continue
        uses = []
        for unit, row in zip(ref.units, items[item].unit_rows, strict=True):
            number = numbers.setdefault(unit.key, len(numbers))
            if number == len(rows):
                rows.append(unit.n_rows)
            elif rows[number] != unit.n_rows:
                raise _uneven(unit.key, unit.n_rows, rows[number], ref, item)
            uses.append(UnitUse(number, unit.position, row))
        samples.setdefault((ref.spool_id, ref.session_id), []).append(UnitTrajectory(item, ref.id, tuple(uses)))
    return _index(found, numbers, rows, samples.values())


def _index(
    refs: Sequence[Any], numbers: dict[str, int], rows: Sequence[int], samples: Iterable[Sequence[UnitTrajectory]]
) -> UnitIndex:
    counts, made = [0] * len(numbers), []
    for trajectories in samples:
        first = refs[trajectories[0].item]
        made.append(
            UnitSample(first.spool_id, first.session_id, first.group_id, first.sample_index, tuple(trajectories))
        )
        for trajectory in trajectories:
            for use in trajectory.uses:
                counts[use.unit] += 1
    units = tuple(IndexedUnit(key, rows[number], counts[number]) for key, number in numbers.items())
    return UnitIndex(units=units, samples=tuple(made), n_items=len(refs))


def _uneven(key: str, n_rows: int, before: int, ref: Ref, item: int) -> InputError:
    return InputError(
        f"unit {key!r} has {n_rows} rows in {ref.id} (entry {item} of refs), but {before} rows in an entry before: "
        "one content expands to one number of rows; give what was processed otherwise a key of its own",
        unit=key, item=item, expected=before, got=n_rows,
    )  # fmt: skip


def rows_in(piece: Piece, uses: Sequence[UnitUse], units: Sequence[IndexedUnit]) -> Iterator[UnitRows]:
    """Yield the rows of units that a piece holds, ascending in ``to``; ``uses`` are those of its sequence."""
    stop = piece.row + piece.n_rows
    first = max(bisect_right(uses, piece.row, key=_row) - 1, 0)
    for use in uses[first:]:
        if use.row >= stop:
            break
        start, end = max(use.row, piece.row), min(use.row + units[use.unit].n_rows, stop)
        if start < end:
            yield UnitRows(use.unit, start - use.row, end - use.row, piece.to + start - piece.row)
