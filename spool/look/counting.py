"""Counting experts, some rows at a time; no loop goes over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spool.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Counter:
    """Adds up the rows of one reference.

    Args:
        name: of the reference, for errors.
        shape: its layers, experts a layer and top-k.

    Attributes:
        load: int64 [L, E]: how often each expert was chosen.
        n_rows: rows that were counted.
        shared: int64 [L]: experts that a row has in common with the row before it, added up.
        n_pairs: pairs of neighbouring rows.
    """

    def __init__(self, name: str, shape: tuple[tuple[int, ...], int, int]) -> None:
        layers, self._num_experts, _ = shape
        self._name = name
        self.load = np.zeros((len(layers), self._num_experts), np.int64)
        self.shared = np.zeros(len(layers), np.int64)
        self.n_rows = self.n_pairs = 0
        self._before: NDArray[Any] | None = None
        self._position = -2

    def take(self, positions: NDArray[np.int64], experts: NDArray[Any]) -> None:
        """Count rows that lie behind all those before.

        Args:
            positions: [n], ascending.
            experts: [n, layers, topk]; -1 is no expert.

        Raises:
            IntegrityError: an expert is none of the layer's.
        """
        if not len(positions):
            return
        self._count(experts)
        if self._before is not None and positions[0] == self._position + 1:
            experts = np.concatenate((self._before, experts))
            positions = np.concatenate(([self._position], positions))
        neighbours = np.diff(positions) == 1
        columns = np.ascontiguousarray(experts.transpose(2, 0, 1))
        found = common(columns[:, :-1], columns[:, 1:])
        self.shared += (found if neighbours.all() else found[neighbours]).sum(axis=0, dtype=np.int64)
        self.n_pairs += int(np.count_nonzero(neighbours))
        # a copy: a view would keep the whole window
        self._before, self._position = experts[-1:].copy(), int(positions[-1])

    def _count(self, experts: NDArray[Any]) -> None:
        largest = int(experts.max(initial=0))
        if largest >= self._num_experts:
            raise IntegrityError(
                f"{self._name} names expert {largest}, but a layer has {self._num_experts}; run `spool verify --deep`",
                field="routed_experts",
            )
        slots = experts + np.arange(experts.shape[1])[:, np.newaxis] * self._num_experts
        chosen = slots[experts >= 0] if experts.dtype.kind == "i" else slots
        self.load += np.bincount(chosen.ravel(), minlength=self.load.size).reshape(self.load.shape)
        self.n_rows += len(experts)


def common(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.uint16]:
    """Return how many of the experts on the left are on the right as well: uint16 [n, layers].

    Args:
        left, right: [topk, n, layers], so that comparing one expert of each is one pass over memory; -1 is no expert.
    """
    found = np.zeros(left.shape[1:], np.uint16)
    for mine in left:
        seen = np.zeros(mine.shape, np.bool_)
        for theirs in right:
            seen |= mine == theirs
        found += seen & (mine >= 0)
    return found
