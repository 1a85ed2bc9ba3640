"""What a planner knows of a sequence: lengths and units, never payload."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf, nan
from numbers import Integral
from typing import Any

import numpy as np
from msgspec import Struct

from spool.arguments import integer, listed, refused
from spool.errors import InputError
from spool.model.refs import Ref
from spool.model.rows import MOST

Range = tuple[int, int]
"""Half-open: tokens, rows or layers."""

Cost = Callable[[int], float] | Sequence[float] | None
"""What a sequence costs: by its rows, one number for each, or its rows themselves."""


class Item(Struct, frozen=True, array_like=True, gc=False):
    """A sequence to be trained.

    Attributes:
        n_tokens: its tokens, a multimodal placeholder counted once.
        units: ``(position, n_rows)`` of its placeholders, ascending: the token there expands to so many rows.
        cost: what it costs, in any unit that all items share; None where ``plan(cost=)`` says it.
    """

    n_tokens: int
    units: tuple[tuple[int, int], ...] = ()
    cost: float | None = None

    @property
    def n_rows(self) -> int:
        """Rows that the tokens expand to; ``forward`` fields have one less."""
        return self.n_tokens + sum(n - 1 for _, n in self.units)

    def token_of(self, row: int) -> Range:
        """Return the token that ``row`` belongs to, and the first row of that token."""
        index = bisect_right(self.unit_rows, row) - 1
        if index < 0:
            return row, row
        position, n_rows = self.units[index]
        begin = self.unit_rows[index]
        return (position, begin) if row < begin + n_rows else (position + 1 + row - begin - n_rows, row)

    @property
    def unit_rows(self) -> list[int]:
        """The first row of each unit."""
        before = accumulate((n - 1 for _, n in self.units), initial=0)
        return [position + shift for (position, _), shift in zip(self.units, before, strict=False)]


class Piece(Struct, frozen=True, array_like=True, gc=False):
    """A run of rows of one sequence, and where they go in the rank's share of a micro-batch.

    Attributes:
        item: number of the sequence in the plan.
        start: first token to read.
        stop: one past the last.
        row: the first row, counted in the sequence with its placeholders expanded.
        n_rows: rows, all real ones.
        to: row of the share that takes the first one.
        skip: forward rows of the token ``start`` that belong to another piece: a unit may be cut.
        n_forward: rows that forward fields have here: ``n_rows``, or one less at the end of the sequence.
        units: ``(offset, n)``: the token ``start + offset`` stands for ``n`` rows of this piece.
    """

    item: int
    start: int
    stop: int
    row: int
    n_rows: int
    to: int
    skip: int
    n_forward: int
    units: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> slice:
        """The tokens, as ``tokens=`` of `Spool.read` takes them."""
        return slice(self.start, self.stop)

    def repeats(self) -> np.ndarray:
        """Return int64 ``[stop - start]``: how many rows of the piece each token stands for."""
        counts = np.ones(self.stop - self.start, np.int64)
        for offset, n in self.units:
            counts[offset] = n
        return counts


def cut(item: Item, number: int, rows: Range, to: int) -> Piece:
    """Return the piece with ``rows`` of an item; they must be real rows, at least one."""
    start, stop = rows
    n_forward = min(stop, item.n_rows - 1) - start
    if not item.units:
        return Piece(number, start, stop, start, stop - start, to, 0, n_forward)
    first, begin = item.token_of(start)
    last, _ = item.token_of(stop - 1)
    units = []
    for (position, n), row in zip(item.units, item.unit_rows, strict=True):
        if first <= position <= last:
            units.append((position - first, min(row + n, stop) - max(row, start)))
    return Piece(number, first, last + 1, start, stop - start, to, start - begin, n_forward, tuple(units))


def items_of(values: object) -> list[Item]:
    """Return an item for each reference, length or item.

    Raises:
        InputError: something else, a negative length, or units that do not fit; names the entry.
    """
    found = listed("items", values, (Integral, Ref, Item), "references, lengths or Items")
    return [_item(value, number) for number, value in enumerate(found)]


def _item(value: Any, number: int) -> Item:
    if isinstance(value, bool) or (isinstance(value, Integral) and not 0 <= int(value) < 1 << 63):
        raise refused("items", "references, lengths of at least 0 or Items", value, entry=number)
    if isinstance(value, Integral):
        return _checked(Item(int(value)), number)
    if not isinstance(value, Ref):
        return _checked(value, number)
    item = _checked(Item(value.n_tokens, tuple((unit.position, unit.n_rows) for unit in value.units)), number)
    if item.n_rows != value.n_rows:
        raise InputError(
            f"entry {number} of items says n_rows={value.n_rows}, but its tokens and units are {item.n_rows} rows: "
            "this reference is damaged",
            item=number, expected=item.n_rows, got=value.n_rows,
        )  # fmt: skip
    return item


def _checked(item: Item, number: int) -> Item:
    stops = [-1, *(position for position, _ in item.units), integer("n_tokens", item.n_tokens)]
    if item.n_tokens < 0 or any(a >= b for a, b in pairwise(stops)) or any(n < 1 for _, n in item.units):
        raise InputError(
            f"entry {number} of items has {item.n_tokens} tokens and units {item.units}: they must be "
            "(position, n_rows) with ascending positions inside the tokens and at least one row each",
            item=number,
        )
    if item.n_rows >= MOST:
        raise refused("items", f"of fewer than {MOST} rows each", item.n_rows, entry=number)
    return item


def _as_float(cost: Any) -> float:
    """Return a cost as a float: infinite where it is an integer that none holds, NaN where it is no number."""
    try:
        return float(cost)
    except OverflowError:
        return inf
    except (TypeError, ValueError):
        return nan


def costs_of(items: Sequence[Item], cost: Cost, *, what: str = "items") -> np.ndarray:
    """Return float64 ``[len(items)]``: what each costs; its own cost goes before ``cost``.

    Args:
        items: what is to be shared out.
        cost: for all of them.
        what: what errors call them.

    Raises:
        InputError: a cost is missing, negative or not finite, and names the entry; or no float holds their sum.
    """
    if cost is None:
        general = [float(item.n_rows) for item in items]
    elif callable(cost):
        general = [cost(item.n_rows) for item in items]
    else:
        numbers: Any = (int, float, np.number)
        general = listed("cost", cost, numbers, f"a function of rows, or a number for each of {what}")
        if len(general) != len(items):
            raise InputError(f"cost has {len(general)} numbers for {len(items)} {what}: give one for each")
    own = [given if item.cost is None else item.cost for item, given in zip(items, general, strict=True)]
    costs = np.array([_as_float(each) for each in own], np.float64)
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(wrong):
        number = int(wrong[0])
        shown = f"{own[number]!r:.80}" if costs[number] != inf else "more than a float holds"
        raise InputError(
            f"entry {number} of {what} costs {shown}; costs must be finite numbers, at least 0", item=number
        )
    if sum(costs.tolist()) == inf:
        raise InputError(
            f"the costs of {what} are more than a float holds, added up: give smaller ones, in another unit",
            argument="cost",
        )
    return costs
