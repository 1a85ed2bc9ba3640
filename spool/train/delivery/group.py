"""What the ranks that share a reorganiser have in common: who is there, what is to come, who holds what, what failed.

One lock; whoever waits hears of every change.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import xxhash

from spool.errors import RankError
from spool.train.delivery.messages import End, Failure, Planned, Pulse, Ready, Welcome
from spool.train.delivery.transport import Link

log = logging.getLogger("spool.train.delivery")

REMIND_S = 30.0
"""How often a log says what is waited for."""


class Rank:
    """A rank that takes part.

    Attributes:
        tp: which one.
        pid: its process.
        link: to it.
        gone: whether it left, or died.
    """

    def __init__(self, tp: int, pid: int, link: Link) -> None:
        self.tp, self.pid, self.link = tp, pid, link
        self.gone = False

    def __str__(self) -> str:
        return f"rank tp={self.tp} (process {self.pid})"


class Over(Exception):  # noqa: N818 - nothing is wrong
    """Nothing more is to be made: something failed, or all ranks left."""


class Group:
    """The state that a reorganiser's threads share.

    Args:
        n_ranks: how many ranks take part.
        depth: micro-batches that may be held at a time.

    Attributes:
        over: whether everything was handed out, so that ranks may go without a word.
    """

    def __init__(self, n_ranks: int, depth: int) -> None:
        self.n_ranks, self._depth = n_ranks, depth
        self._changed = threading.Condition()
        self._ranks: dict[int, Rank] = {}
        self._came = False
        self._works: dict[int, bytes] = {}
        self._submitted: list[tuple[bytes, Rank]] = []
        self._n_works: int | None = None
        self._held: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}
        self._failure: Failure | None = None
        self._waits_for: Callable[[], str | None] = lambda: None
        self._left: set[int] = set()
        self.over = False

    # -- who takes part ----------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether something went wrong."""
        return self._failure is not None

    @property
    def complete(self) -> bool:
        """Whether all ranks have come."""
        return len(self._ranks) == self.n_ranks

    @property
    def deserted(self) -> bool:
        """Whether ranks came, and all of them have left."""
        return self._came and all(rank.gone for rank in self._ranks.values())

    @property
    def came(self) -> list[int]:
        """Which ranks have come."""
        return sorted(self._ranks)

    @property
    def left(self) -> list[int]:
        """Which ranks came and left before all had come."""
        return sorted(self._left - self._ranks.keys())

    def join(self, rank: Rank) -> None:
        """Let a rank take part; it is told of what was planned before, or of what went wrong.

        Raises:
            RankError: it takes part already, or as many ranks do as were said to come.
        """
        with self._changed:
            if self.complete and rank.tp not in self._ranks:
                raise RankError(
                    f"{rank} is one more than the {self.n_ranks} ranks that were to share this feed, tp={self.came}: "
                    "say how many are on this node (connect(n_ranks=))"
                )
            known = self._ranks.get(rank.tp)
            if known is not None and known.gone:
                raise RankError(f"{known} has left this feed, which is about to end: connect anew in a second or two")
            if known is not None:
                raise RankError(
                    f"{known} takes part in this feed already, and {rank} wants its place: give "
                    "each job a name of its own (connect(name=))"
                )
            self._ranks[rank.tp], self._came = rank, True
            rank.link.send(Welcome(os.getpid()))
            for number, work in self._works.items():
                rank.link.send(Planned(number, work))
            if self._failure is not None:
                rank.link.send(self._failure)
            self._changed.notify_all()

    def leave(self, rank: Rank) -> None:
        """Take a rank out, and what it held."""
        with self._changed:
            rank.gone = True
            if not self.complete:  # it may come again, and is waited for
                del self._ranks[rank.tp]
                self._left.add(rank.tp)
            for holders in self._held.values():
                holders.discard(rank.tp)
            self._forget_held()

    def wait_until_left(self) -> None:
        """Return when all ranks that came have left."""
        with self._changed:
            self._changed.wait_for(lambda: self.deserted or not self._came)

    def fail(self, error: BaseException) -> None:
        """Tell all ranks what went wrong; what goes wrong afterwards follows from it, and is told nobody."""
        with self._changed:
            if self._failure is None:
                self._failure = Failure.of(error)
                log.error("a feed fails: %s", error)
                self._tell(self._failure)
            self._changed.notify_all()

    def pulse(self, trouble: str = "") -> None:
        """Tell all ranks that this process lives, what it waits for, and what keeps it from reading."""
        with self._changed:
            self._tell(Pulse(self._waits_for() or "", trouble))

    def _tell(self, message: Planned | Pulse | End | Failure) -> None:
        for rank in self._ranks.values():
            if not rank.gone:
                rank.link.send(message)

    # -- what is to come ---------------------------------------------------------------------------------------------

    def submit(self, rank: Rank, number: int, work: bytes) -> None:
        """Take in what a rank says mini-batch ``number`` is.

        Raises:
            RankError: another one said otherwise, or that there is none.
        """
        with self._changed:
            digest = xxhash.xxh3_128_digest(work)
            if number < len(self._submitted):
                known, first = self._submitted[number]
                if known != digest:
                    raise RankError(
                        f"{first} and {rank} submitted different plans, references or versions as mini-batch {number} "
                        "of this feed: the ranks of a place have to submit the same, in the same order"
                    )
                return
            if self._n_works is not None and number >= self._n_works:
                raise RankError(f"{rank} submits mini-batch {number}, and another rank finished at {self._n_works}")
            self._submitted.append((digest, rank))
            self._works[number] = work
            self._tell(Planned(number, work))
            self._changed.notify_all()

    def finish(self, rank: Rank, n: int) -> None:
        """Take in that there are ``n`` mini-batches.

        Raises:
            RankError: more were submitted, or another rank said otherwise.
        """
        with self._changed:
            if n < len(self._submitted) or self._n_works not in (None, n):
                known = len(self._submitted) if self._n_works is None else self._n_works
                raise RankError(f"{rank} finished after {n} mini-batches, and other ranks know of {known}")
            self._n_works = n
            self._changed.notify_all()

    def work(self, number: int) -> bytes | None:
        """Return mini-batch ``number`` once it is known; None where there is none. Earlier ones are forgotten.

        Raises:
            Over: nothing more is to be made.
        """
        with self._changed:
            self._wait(lambda: number in self._works or self._n_works == number, lambda: None)
            if self.complete:  # else there are ranks who have to be told of all
                self._works = {each: work for each, work in self._works.items() if each >= number}
            return self._works.get(number)

    def end(self) -> None:
        """Tell all ranks that there is nothing more."""
        with self._changed:
            self._wait(lambda: self.complete, self._missing)
            self.over = True
            self._tell(End())

    # -- who holds what ----------------------------------------------------------------------------------------------

    def wait_for_room(self) -> None:
        """Return when another micro-batch may be made.

        Raises:
            Over: nothing more is to be made.
        """
        with self._changed:
            self._wait(lambda: len(self._held) < self._depth, self._holders)

    def hand_out(self, ready: Ready, memory: Any) -> None:
        """Send a micro-batch to all ranks, once all are there.

        Raises:
            Over: nothing more is to be made.
        """
        with self._changed:
            self._held[ready.serial] = {-1}  # counts until it is handed out
            self._sizes[ready.serial] = ready.n_bytes
            self._wait(lambda: self.complete, self._missing)
            present = [rank for rank in self._ranks.values() if not rank.gone]
            self._held[ready.serial] = {rank.tp for rank in present}
            for rank in present:
                rank.link.send(ready, memory)

    @property
    def held_bytes(self) -> int:
        """Bytes of the micro-batches that somebody holds."""
        with self._changed:
            return sum(self._sizes.values())

    def released(self, rank: Rank, serial: int) -> None:
        """Take in that a rank let go of a micro-batch."""
        with self._changed:
            self._held.get(serial, set()).discard(rank.tp)
            self._forget_held()

    def _forget_held(self) -> None:
        self._held = {serial: holders for serial, holders in self._held.items() if holders}
        self._sizes = {serial: self._sizes[serial] for serial in self._held}
        self._changed.notify_all()

    def _holders(self) -> str:
        """Return who holds which micro-batches, in words."""
        held: dict[int, list[int]] = {}
        for serial, holders in sorted(self._held.items()):
            for tp in holders:
                held.setdefault(tp, []).append(serial)
        ranks = [f"{self._ranks[tp]}, of {', '.join(map(str, serials))}" for tp, serials in sorted(held.items())]
        return f"ranks to let go of micro-batches of this feed: {'; '.join(ranks)}"

    def _missing(self) -> str:
        """Return which ranks have come, in words."""
        return f"the {self.n_ranks} ranks of this feed, of which only tp={self.came} came"

    def _wait(self, done: Callable[[], bool], what: Callable[[], str | None]) -> None:
        """Wait for something, under the lock; say what for to ranks, and from time to time in the log."""
        since, self._waits_for = time.monotonic(), what
        try:
            self._wait_for(done, what, since)
        finally:
            self._waits_for = lambda: None

    def _wait_for(self, done: Callable[[], bool], what: Callable[[], str | None], since: float) -> None:
        while not done():
            if self._failure is not None or (self.complete and self.deserted):
                raise Over
            if not self._changed.wait(REMIND_S) and (words := what()) is not None:
                log.warning("waiting for %s, since %.0f s", words, time.monotonic() - since)
