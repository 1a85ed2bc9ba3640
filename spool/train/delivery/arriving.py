"""What comes to a rank, in the order in which it is consumed: micro-batches, and mini-batches that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from spool.train.delivery.messages import Ready
from spool.train.delivery.work import Work


class Staged(NamedTuple):
    """A micro-batch that is there: ``take`` gives its arrays."""

    ready: Ready
    work: Work
    take: Callable[[], dict[str, Any]]

    @property
    def last(self) -> bool:
        """Whether its mini-batch ends with it."""
        return self.ready.number == len(self.work.shares) - 1


class Nothing(NamedTuple):
    """A whole mini-batch, of no micro-batches."""


class Arriving:
    """The mini-batches of which something is still to come.

    The reader says at once what is planned, and sends micro-batches later: it says nothing more of a mini-batch without
    any. That has its turn where the one before it ends.
    """

    def __init__(self) -> None:
        self._works: dict[int, Work] = {}
        self._number = 0

    def planned(self, number: int, work: Work) -> Iterator[Nothing]:
        """Take in what mini-batch ``number`` is; yield those of nothing whose turn it is now."""
        self._works[number] = work
        yield from self._empty()

    def work(self, number: int) -> Work:
        """Return what a mini-batch is of which a micro-batch came."""
        return self._works[number]

    def came(self, staged: Staged) -> Iterator[Staged | Nothing]:
        """Yield a micro-batch, and behind the last one of its mini-batch those of nothing that follow."""
        yield staged
        if staged.last:
            del self._works[self._number]
            self._number += 1
            yield from self._empty()

    def _empty(self) -> Iterator[Nothing]:
        while (work := self._works.get(self._number)) is not None and not work.shares:
            del self._works[self._number]
            self._number += 1
            yield Nothing()
