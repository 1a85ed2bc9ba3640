"""A micro-batch, and what each context-parallel rank holds of it: exact rows, and where they go. Pure.

A micro-batch lays its sequences one behind the other, each padded; the last one is followed by what pads the whole.
Token, response and forward fields share that layout, so that row *i* of a share is the same position in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Literal, get_args

import msgspec
import numpy as np
from msgspec import Struct

from spool.arguments import one_of
from spool.errors import InputError
from spool.train.planning.items import Item, Piece, Range, cut
from spool.train.planning.placement import placement
from spool.train.planning.ranks import equal_parts

SplitName = Literal["zigzag", "contiguous", "micro_batch"]
SplitFunction = Callable[[int, int], Sequence[Sequence[Range]]]
Split = SplitName | SplitFunction

Table = dict[int, tuple[tuple[Range, ...], ...]]
"""For a padded length the ranges of each CP rank: what a user's split function said."""

SPLITS = get_args(SplitName)
PLACED = ("token", "response", "forward")


class MicroBatch(Struct, frozen=True, array_like=True):
    """What the CP and TP ranks of one data-parallel rank consume in one forward and backward pass.

    Attributes:
        items: numbers of its sequences in the plan, in the order they lie in.
        rows: rows of each.
        padded: rows that each takes with its padding.
        n_rows: rows altogether, with what pads the whole.
        cost: of its sequences.
    """

    items: tuple[int, ...]
    rows: tuple[int, ...]
    padded: tuple[int, ...]
    n_rows: int
    cost: float

    @property
    def tail(self) -> int:
        """Rows behind the last sequence that pad the whole."""
        return self.n_rows - sum(self.padded)


class Share(Struct, frozen=True, kw_only=True):
    """What one CP rank holds of a micro-batch; its TP ranks hold the same.

    Attributes:
        n_rows: rows of the share, padding included; the same for all CP ranks.
        items: numbers of the micro-batch's sequences, in the order they lie in.
        pieces: real rows, ascending in ``to``; all other rows are padding.
        positions: ``[start, stop)`` positions in their sequence that the share's rows stand for, padding included.
        sequences: for each of ``positions`` which of ``items`` that is; ``len(items)`` for the padding of the whole.
        rows, padded: of each sequence of the whole micro-batch, as in `MicroBatch`.
        tail: rows that pad the whole micro-batch.
    """

    n_rows: int
    items: tuple[int, ...]
    pieces: tuple[Piece, ...]
    positions: tuple[Range, ...]
    sequences: tuple[int, ...]
    rows: tuple[int, ...]
    padded: tuple[int, ...]
    tail: int

    @property
    def cu_seqlens(self) -> np.ndarray:
        """int32: real rows of the whole micro-batch before each sequence; the padding of the whole is an empty one."""
        return _cumulated((*self.rows, 0) if self.tail else self.rows)

    @property
    def cu_seqlens_padded(self) -> np.ndarray:
        """int32: where each sequence of the whole micro-batch begins; the padding of the whole is one of its own.

        Of the whole, as Megatron's ``PackedSeqParams`` takes it: where sequences are split, a share has each of them
        at these numbers divided by ``cp``.
        """
        return _cumulated((*self.padded, self.tail) if self.tail else self.padded)

    def position_ids(self) -> np.ndarray:
        """Return int64 ``[n_rows]``: the position of each row in its sequence; padding counts on."""
        parts = [np.arange(start, stop) for start, stop in self.positions]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def place(self, values: Sequence[np.ndarray], out: np.ndarray, *, align: str = "token") -> np.ndarray:
        """Put rows that were read where they belong; what is padding stays as it is in ``out``.

        Args:
            values: for each piece the rows of the field, as ``Spool.read(refs, tokens=[piece.tokens, ...])`` gives
                them. A placeholder's value of a ``token`` or ``response`` field is repeated over its rows.
            out: ``[n_rows, ...]``, filled with what stands for padding.
            align: ``token``, ``response`` or ``forward``.

        Returns:
            ``out``.

        Raises:
            InputError: another number of arrays or rows than the plan says.
        """
        one_of("align", align, PLACED)
        if len(values) != len(self.pieces) or len(out) != self.n_rows:
            raise InputError(
                f"place takes an array for each of the {len(self.pieces)} pieces and out= of {self.n_rows} rows; "
                f"got {len(values)} arrays and {len(out)} rows"
            )
        for piece, rows in zip(self.pieces, values, strict=True):
            _place(piece, rows, out, align)
        return out


def _place(piece: Piece, rows: np.ndarray, out: np.ndarray, align: str) -> None:
    n_tokens = piece.stop - piece.start
    if align == "forward":
        least, most = piece.skip + piece.n_forward, None if piece.units else piece.n_forward
    else:
        least, most = 0 if align == "response" else n_tokens, n_tokens
    if len(rows) < least or (most is not None and len(rows) > most):
        raise InputError(
            f"tokens [{piece.start}, {piece.stop}) of item {piece.item} have {least} rows of this {align} field; "
            f"got {len(rows)}: read them with tokens=piece.tokens",
            item=piece.item, expected=least, got=len(rows),
        )  # fmt: skip
    if not np.can_cast(rows.dtype, out.dtype, "safe"):
        raise InputError(f"out= is {out.dtype}, which does not hold every {rows.dtype}: make it {rows.dtype}")
    placement(piece, align, absent=n_tokens - len(rows)).put(out, rows)


def share_of(batch: MicroBatch, items: Sequence[Item], split: str, table: Table, cp: int, rank: int) -> Share:
    """Return what CP rank ``rank`` of ``cp`` holds of a micro-batch."""
    n_rows = batch.n_rows // cp
    pieces, positions, sequences, to = [], [], [], 0
    begins = accumulate(batch.padded, initial=0)
    lengths = (*batch.padded, batch.tail)
    for number, (begin, padded) in enumerate(zip(begins, lengths, strict=True)):
        if split == "micro_batch":
            ranges = _clipped(rank * n_rows - begin, (rank + 1) * n_rows - begin, padded)
        else:
            ranges = table[padded][rank] if split == "custom" and padded else _ranges(split, padded, cp, rank)
        for start, stop in ranges:
            if number < len(batch.items) and start < batch.rows[number] and start < stop:
                item = batch.items[number]
                pieces.append(cut(items[item], item, (start, min(stop, batch.rows[number])), to))
            positions.append((start, stop))
            sequences.append(number)
            to += stop - start
    if to != n_rows:
        raise InputError(f"this plan is damaged: rank {rank} of {cp} has {to} rows of a micro-batch, not {n_rows}")
    return Share(
        n_rows=n_rows, items=batch.items, pieces=tuple(pieces), positions=tuple(positions),
        sequences=tuple(sequences), rows=batch.rows, padded=batch.padded, tail=batch.tail,
    )  # fmt: skip


def _clipped(start: int, stop: int, n_rows: int) -> tuple[Range, ...]:
    start, stop = max(start, 0), min(stop, n_rows)
    return ((start, stop),) if start < stop else ()


def _ranges(split: str, n_rows: int, cp: int, rank: int) -> tuple[Range, ...]:
    if not n_rows:
        return ()
    parts = equal_parts(n_rows, rank, cp, "zigzag" if split == "zigzag" else "contiguous")
    if len(parts) == 2 and parts[0][1] == parts[1][0]:
        return ((parts[0][0], parts[1][1]),)
    return tuple(parts)


def table_of(split: SplitFunction, lengths: Iterable[int], cp: int) -> Table:
    """Return what ``split(n_rows, cp)`` says of each padded length.

    Raises:
        InputError: the ranges of a length are no partition into ``cp`` equal shares; names it.
    """
    return {n_rows: _checked(split(n_rows, cp), n_rows, cp) for n_rows in sorted(set(lengths))}


def _checked(given: object, n_rows: int, cp: int) -> tuple[tuple[Range, ...], ...]:
    try:
        ranks = msgspec.convert(given, tuple[tuple[Range, ...], ...])
    except msgspec.ValidationError:
        ranks = ()
    covered = sorted(part for ranges in ranks for part in ranges)
    follow = all(before[1] == after[0] for before, after in pairwise([(0, 0), *covered, (n_rows, n_rows)]))
    even = all(sum(stop - start for start, stop in ranges) == n_rows // cp for ranges in ranks)
    if len(ranks) != cp or not follow or not even or any(start >= stop for start, stop in covered):
        raise InputError(
            f"split({n_rows}, {cp}) must return, for each of {cp} ranks, ranges (start, stop) that together cover "
            f"[0, {n_rows}) once, {n_rows // cp} rows a rank and none of them empty; got {given!r:.200}",
            n_rows=n_rows,
        )
    return ranks


def _cumulated(lengths: Iterable[int]) -> np.ndarray:
    return np.array([*accumulate(lengths, initial=0)], np.int32)
