"""`connect`: a rank's micro-batches, in order, each before it is asked for.

::

    feed = spool.train.connect(uri, mesh, rank, fields=["token_ids", "loss_mask", "routed_experts"])
    feed.submit(plan, refs, version="41")
    feed.finish()
    for micro in feed:
        train(micro)
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import Struct

from spool.errors import InputError, RankError
from spool.train.delivery.arriving import Arriving, Nothing, Staged
from spool.train.delivery.messages import (
    Bye,
    End,
    Failed,
    Failure,
    Finish,
    Hello,
    Message,
    Planned,
    Pulse,
    Ready,
    Released,
    Submit,
    Welcome,
)
from spool.train.delivery.micro import Micro
from spool.train.delivery.staging import Stage
from spool.train.delivery.waiting import TICK_S, Waiting
from spool.train.delivery.work import Work, work_of

if TYPE_CHECKING:
    from spool.model.refs import SegmentRef, StepRef
    from spool.train.delivery.transport import RankLink
    from spool.train.delivery.work import Settings
    from spool.train.planning.planner import Mesh, Place, Plan

log = logging.getLogger("spool.train.delivery")

_decode = msgspec.msgpack.Decoder(Work).decode
_encode = msgspec.msgpack.Encoder().encode


class FeedStats(Struct, frozen=True, kw_only=True):
    """What a rank's feed did so far.

    Attributes:
        n_micro: micro-batches that were handed out.
        waited_s: time in which the consumer waited for one.
        n_bytes: of the micro-batches.
        fetched_bytes: read for them from hot and cold roots, by the one process that reads for all ranks of the place.
        held_bytes: of those that this rank holds now.
    """

    n_micro: int = 0
    waited_s: float = 0.0
    n_bytes: int = 0
    fetched_bytes: int = 0
    held_bytes: int = 0


class Feed:
    """The micro-batches of one rank; made by `connect`. For one thread; close it, or use ``with``."""

    def __init__(
        self,
        link: RankLink,
        *,
        mesh: Mesh,
        place: Place,
        chunk: int,
        settings: Settings,
        stage: Stage,
        ahead: int,
        timeout_s: float,
    ) -> None:
        self._link = link
        self._mesh, self._place, self._chunk = mesh, place, chunk
        self._settings, self._stage, self._timeout_s = settings, stage, timeout_s
        self._waiting = Waiting(time.monotonic(), join_timeout_s=settings.join_timeout_s, timeout_s=timeout_s)
        self._arriving = Arriving()
        self._closed = False
        self._mapped: dict[int, int] = {}
        self._n_taken = 0
        self._took_last = False
        self._pid = os.getpid()
        self._room = threading.Semaphore(ahead)
        self._stats = FeedStats()
        self._failure: Failure | None = None
        self._incoming: queue.SimpleQueue[Staged | Nothing | Failure | End] = queue.SimpleQueue()
        self._next: Staged | Nothing | End | None = None
        link.send(Hello(place.tp, os.getpid(), settings))
        threading.Thread(target=self._receive, name="spool-feed-receive", daemon=True).start()

    # -- what is to come ---------------------------------------------------------------------------------------------

    def submit(
        self,
        plan: Plan,
        refs: Sequence[StepRef | SegmentRef | None],
        *,
        version: str | int | Sequence[str] | None = None,
    ) -> None:
        """Say what the next mini-batch is. It is read while earlier ones train, as far as ``depth`` allows.

        Every rank may say so, or one of those that share the place; those that do must say the same. Reading begins at
        once; whatever is wrong with it is raised where micro-batches are asked for.

        Args:
            plan: of the mini-batch, on the mesh of this feed.
            refs: its sequences, all that were planned, in the same order; None for a sample that failed, which is
                padding with its planned length.
            version: of the current weights, for ``staleness``, as `restore` takes it. Where versions are no numbers,
                all of them, oldest first: numbers are the same on all ranks only then.

        Raises:
            InputError: the plan is of another mesh, the references are not those that were planned, or `finish` was
                called.
            RankError: the feed has failed.
        """
        self._check_usable()
        if self._waiting.finished:
            raise InputError("finish() said that there are no more mini-batches")
        work = work_of(plan, self._place, self._chunk, refs, version)
        if plan.mesh != self._mesh:
            raise InputError("the plan is of another mesh than this feed: make both with the same Mesh")
        self._link.send(Submit(self._waiting.n_submitted, _encode(work)))
        self._waiting.submitted(time.monotonic())

    def finish(self) -> None:
        """Say that no mini-batch follows those that were submitted: iteration ends behind them."""
        self._check_usable()
        if not self._waiting.finished:
            self._waiting.finish(time.monotonic())
            self._link.send(Finish(self._waiting.n_submitted))

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Micro]:
        """Yield micro-batches of one mini-batch after the other, until `finish`."""
        while not isinstance(self._peek(), End):
            if isinstance(self._next, Nothing):
                self._next = None
            else:
                yield self._take()

    def mini_batch(self) -> Iterator[Micro]:
        """Yield the micro-batches that come next, to the end of their mini-batch.

        There are none where that is planned with nothing in it, and behind the last mini-batch.

        Raises:
            RankError: another process of this feed failed, first; says which, and why. Nothing more comes.
            SpoolError: what was wrong with reading a mini-batch, on all ranks.
            InputError: this rank holds as many micro-batches as ``depth`` allows, and asks for another.
        """
        while isinstance(self._peek(), Staged):
            taken = [self._take()]
            last = self._took_last
            yield taken.pop()  # no name here may hold a micro-batch
            if last:
                return
        if isinstance(self._next, Nothing):
            self._next = None

    def _peek(self) -> Staged | Nothing | End:
        """Return what comes next, once it is there."""
        if self._next is None:
            self._check_usable()
            self._check_held()
            began = time.monotonic()
            found = self._wait()
            waited_s = self._stats.waited_s + time.monotonic() - began
            self._stats = msgspec.structs.replace(self._stats, waited_s=waited_s)
            if isinstance(found, Failure):
                raise found.error()
            self._next = found
        return self._next

    def _take(self) -> Micro:
        staged, self._next = self._peek(), None
        assert isinstance(staged, Staged)
        self._room.release()
        self._waiting.taken()
        ready, work, stats = staged.ready, staged.work, self._stats
        self._n_taken, self._took_last = ready.serial + 1, staged.last
        self._stats = msgspec.structs.replace(
            stats, n_micro=stats.n_micro + 1, n_bytes=stats.n_bytes + ready.n_bytes,
            fetched_bytes=stats.fetched_bytes + ready.fetched_bytes,
        )  # fmt: skip
        plan = msgspec.structs.replace(work.plan, place=self._place)
        share = plan.shares[ready.number]
        return Micro(
            staged.take(),
            plan,
            ready.number,
            refs=tuple(work.refs[item] for item in share.items),
            version_names=work.order.names,
            absent=ready.absent,
            n_bytes=ready.n_bytes,
            fetched_bytes=ready.fetched_bytes,
        )

    def _wait(self) -> Staged | Nothing | Failure | End:
        """Return what comes in next; raise what `Waiting.check` does where that takes too long."""
        self._waiting.begin(time.monotonic())
        while True:
            try:
                return self._incoming.get(timeout=min(TICK_S, self._timeout_s))
            except queue.Empty:
                self._waiting.check(time.monotonic())

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise InputError("this feed is the parent process's: connect in every process that trains")
        if self._failure is not None:
            raise self._failure.error()
        if self._closed:
            raise InputError("this feed is closed")

    def _check_held(self) -> None:
        """Refuse to wait for memory that only this rank can free."""
        if len(self._held()) >= self._settings.depth:
            gc.collect()
        if len(held := self._held()) >= self._settings.depth:
            raise InputError(
                f"this rank holds arrays of {len(held)} micro-batches, and depth={self._settings.depth} allows no "
                "more: let go of them (or copy what has to stay), or connect with a greater depth="
            )

    def _held(self) -> list[int]:
        """Return the bytes of each micro-batch that the consumer has memory of."""
        return [n_bytes for serial, n_bytes in self._mapped.copy().items() if serial < self._n_taken]

    @property
    def reader_pid(self) -> int | None:
        """The process that reads for all ranks of the place; None until it let this one in."""
        return self._waiting.reader

    @property
    def stats(self) -> FeedStats:
        """What this rank's feed did so far."""
        return msgspec.structs.replace(self._stats, held_bytes=sum(self._held()))

    # -- what comes in -----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take in what the reorganiser says, to the end; what comes behind that is let go of."""
        try:
            while not self._closed and self._failure is None:
                self._take_in(*self._link.receive())
        except EOFError:
            if not self._closed:
                self._fail(Failure.of(RankError(self._link.death(self.reader_pid))))
        except BaseException as error:
            log.exception("a feed cannot take in what comes")
            self._link.send(Failed(f"{type(error).__name__}: {error}"))
            self._fail(Failure.of(error, "this rank of the feed"))
        with suppress(EOFError, RankError):
            while True:
                self._link.drop(self._link.receive()[1])

    def _take_in(self, message: Message, memory: Any) -> None:
        """Take in one thing that the reorganiser says; map and stage a micro-batch."""
        incoming = self._incoming  # `close` drops it with what is put there while a micro-batch is staged
        self._waiting.heard(time.monotonic())
        if isinstance(message, Welcome):
            self._waiting.reader = message.pid
        elif isinstance(message, Pulse):
            self._waiting.pulse(message.waits_for, message.trouble)
        elif isinstance(message, Planned):
            work = _decode(message.work)
            self._waiting.planned(time.monotonic(), len(work.shares))
            _put_all(incoming, self._arriving.planned(message.number, work))
        elif isinstance(message, Ready):
            staged = self._staged(message, self._link.map(memory, message.n_bytes))
            _put_all(incoming, self._arriving.came(staged))
        elif isinstance(message, End):
            incoming.put(message)
        elif isinstance(message, Failure):
            self._fail(message)

    def _fail(self, failure: Failure) -> None:
        self._failure = failure
        self._incoming.put(failure)
        self._link.close()

    def _staged(self, ready: Ready, mapped: Any) -> Staged:
        self._mapped[ready.serial] = ready.n_bytes
        weakref.finalize(mapped, self._let_go, ready.serial).atexit = False
        self._room.acquire()
        return Staged(ready, self._arriving.work(ready.mini_batch), self._stage(_views(ready, mapped)))

    def _let_go(self, serial: int) -> None:
        del self._mapped[serial]
        self._link.send(Released(serial))

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave; arrays that were handed out stay as they are. The other ranks go on."""
        self._leave(Bye())

    def _leave(self, message: Bye | Failed) -> None:
        if self._closed:
            return
        self._closed = True
        self._link.send(message)
        self._link.close()
        self._room.release()
        self._next, self._incoming = None, queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(Bye() if error is None else Failed(f"{type(error).__name__}: {error}"))

    def __repr__(self) -> str:
        return f"<spool.train.Feed of {self._place}, {self._stats.n_micro} micro-batches so far>"


def _put_all(incoming: queue.SimpleQueue[Any], found: Iterable[Staged | Nothing]) -> None:
    for each in found:
        incoming.put(each)


def _views(ready: Ready, mapped: Any) -> dict[str, Any]:
    return {array.name: array.view(mapped) for array in ready.arrays}
