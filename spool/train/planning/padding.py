"""Rows that a sequence and a micro-batch take: decided once for all fields, so that every rank gets as many. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Literal, NamedTuple, get_args

import numpy as np

from spool.arguments import integer, one_of
from spool.errors import InputError
from spool.model.rows import MOST
from spool.train.planning.balance import size_of
from spool.train.planning.items import Item
from spool.train.planning.mesh import Mesh
from spool.train.planning.shares import SPLITS, Split

Layout = Literal["packed", "padded"]


class Padding(NamedTuple):
    """The rule of a plan.

    Attributes:
        sequence: what the rows of a sequence are padded to a multiple of.
        micro: the same of a whole micro-batch.
        alike: sequences of a micro-batch are padded to the longest of them.
    """

    sequence: int
    micro: int
    alike: bool

    def sizes(self, items: Sequence[Item]) -> np.ndarray:
        """Return int64 ``[len(items)]``: padded rows of each, alone; never 0."""
        rows = np.array([item.n_rows for item in items], np.int64)
        return np.maximum(-(-rows // self.sequence), 1) * self.sequence

    def whole(self, sizes: np.ndarray) -> int:
        """Return the rows of a micro-batch with sequences of ``sizes``; never 0."""
        return max(-(-size_of(sizes, alike=self.alike) // self.micro), 1) * self.micro


def padding(
    mesh: Mesh, split: Split, layout: Layout, *, sequence_multiple: int | None, micro_multiple: int | None
) -> Padding:
    """Return the rule for a mesh; None stands for the least multiple that does.

    Raises:
        InputError: a name that is none, or a multiple that would give ranks different rows.
    """
    if not callable(split):
        one_of("split", split, SPLITS)
    one_of("layout", layout, get_args(Layout))
    padded = layout == "padded"
    if padded and (split == "micro_batch" or micro_multiple is not None):
        raise InputError(
            "layout='padded' pads every sequence to the longest: leave out micro_multiple= and split='micro_batch'"
        )
    tp = mesh.tp if mesh.sequence_parallel else 1
    if split == "micro_batch":
        sequence = _multiple("sequence_multiple", sequence_multiple, 1, 1)
        return Padding(sequence, _multiple("micro_multiple", micro_multiple, mesh.cp * tp, mesh.cp * tp), alike=False)
    unit = 2 * mesh.cp if split == "zigzag" and mesh.cp > 1 else mesh.cp
    sequence = _multiple("sequence_multiple", sequence_multiple, unit * tp if padded else unit, unit * tp)
    micro = sequence if padded else _multiple("micro_multiple", micro_multiple, unit * tp, lcm(unit * tp, sequence))
    return Padding(sequence, micro, alike=padded)


def _multiple(name: str, given: int | None, unit: int, default: int) -> int:
    if given is None:
        return default
    if not 1 <= integer(name, given) < MOST or given % unit:
        raise InputError(
            f"{name} must be a multiple of {unit}, below {MOST}, so that the ranks of this mesh get the same rows with "
            f"this split; got {given}",
            argument=name, got=given,
        )  # fmt: skip
    return given
