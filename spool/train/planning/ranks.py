"""Which tokens and layers of a sequence one rank consumes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from spool.arguments import instance, integer, refused
from spool.read.select import Range, token_ranges

Split = Literal["zigzag", "contiguous"] | Callable[[int, int, int], Sequence[slice]]
"""How context-parallel ranks share a sequence; a function gets its length, the rank and the number of ranks."""


class RankSlice(Struct, frozen=True, kw_only=True):
    """What one rank consumes of every sequence.

    A function for ``split`` returns slices, as `Spool.read` takes them.

    Attributes:
        cp_rank: its context-parallel rank.
        cp_size: how many of these there are.
        split: ``zigzag``: the rank's and the mirrored one of ``2 * cp_size`` equal parts, so that causal attention
            costs all ranks the same. ``contiguous``: one of ``cp_size`` equal parts. Or a function.
        layers: absolute layers of its pipeline stage; all for None.
    """

    cp_rank: int = 0
    cp_size: int = 1
    split: Split = "zigzag"
    layers: slice | None = None

    def __post_init__(self) -> None:
        check_rank("cp", self.cp_rank, self.cp_size)
        if self.split not in ("zigzag", "contiguous") and not callable(self.split):
            raise refused("split", "zigzag, contiguous, or a function of length, rank and ranks", self.split)
        if self.layers is not None and not isinstance(self.layers, slice):
            raise refused("layers", "a slice of absolute layers, as slice(start, stop)", self.layers)

    def parts(self, n: int) -> list[Range]:
        """Return the rank's parts of ``n`` positions, as long as every other rank's: the last ones may pass the end."""
        if callable(self.split):
            return token_ranges(self.split(n, self.cp_rank, self.cp_size), n)
        return equal_parts(n, self.cp_rank, self.cp_size, self.split)

    def ranges(self, n: int) -> list[Range]:
        """Return the rank's parts of ``n`` positions, half-open, none past the end."""
        return [(min(start, n), min(max(start, stop), n)) for start, stop in self.parts(n)]


def equal_parts(n: int, cp_rank: int, cp_size: int, split: Literal["zigzag", "contiguous"]) -> list[Range]:
    """Return a rank's parts of ``n`` positions, as long as every other rank's: the last ones may pass the end."""
    if cp_size == 1:
        return [(0, n)]
    numbers = [cp_rank, 2 * cp_size - 1 - cp_rank] if split == "zigzag" else [cp_rank]
    width = -(-n // (len(numbers) * cp_size))
    return [(number * width, (number + 1) * width) for number in numbers]


def check_rank(kind: str, rank: object, size: object) -> None:
    """Refuse a rank that is not one of so many.

    Raises:
        InputError: names them.
    """
    if integer(f"{kind}_size", size) < 1:
        raise refused(f"{kind}_size", "at least 1", size)
    if not 0 <= integer(f"{kind}_rank", rank) < integer(f"{kind}_size", size):
        raise refused(f"{kind}_rank", f"one of 0 to {kind}_size - 1", rank)


def rank_of(rank_slice: object) -> RankSlice:
    """Return ``rank_slice``; all of every sequence for None.

    Raises:
        InputError: it is something else.
    """
    return RankSlice() if rank_slice is None else instance("rank_slice", rank_slice, RankSlice, "a RankSlice")
