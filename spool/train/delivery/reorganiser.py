"""The process that reads for all ranks of a place: each micro-batch once, in order, into memory that they all map."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import count

import msgspec

from spool.errors import RankError, SpoolError
from spool.handle import Spool
from spool.handle import open as open_spool
from spool.observe import Read, Retried
from spool.train.delivery.filling import Prepared, fill, prepare
from spool.train.delivery.group import Group, Over, Rank
from spool.train.delivery.memory import Room, ran_out
from spool.train.delivery.messages import Bye, Failed, Failure, Finish, Hello, Ready, Released, Submit
from spool.train.delivery.transport import Link, Listener, Memory
from spool.train.delivery.waiting import PULSE_S
from spool.train.delivery.work import Settings, Work

log = logging.getLogger("spool.train.delivery")

_decode = msgspec.msgpack.Decoder(Work).decode


class Reorganiser:
    """Serves the ranks that come until all have left.

    Args:
        listener: where they come in; closed when all have come, so that its name is free again.
        memory: where micro-batches are made.
        settings: what the ranks want.
    """

    def __init__(self, listener: Listener, memory: Memory, settings: Settings) -> None:
        self._listener, self._memory, self._settings = listener, memory, settings
        self._group = Group(settings.n_ranks, settings.depth)
        self._fetched_bytes = 0
        self._trouble = ""
        self._recent: deque[int] = deque(maxlen=settings.depth - 1)

    def run(self) -> bool:
        """Serve; return whether all went well."""
        reading = threading.Thread(target=self._guarded(self._produce), name="spool-feed-read", daemon=True)
        reading.start()
        ended = threading.Event()
        threading.Thread(target=self._pulse, args=(ended,), name="spool-feed-pulse", daemon=True).start()
        with closing(self._listener):
            self._guarded(self._accept_all)()
        self._group.wait_until_left()
        ended.set()
        return not self._group.failed

    def _pulse(self, ended: threading.Event) -> None:
        while not ended.wait(PULSE_S):
            self._group.pulse(self._trouble)

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return ``work`` such that whatever is wrong with it reaches the ranks."""

        def guarded() -> None:
            try:
                work()
            except Over:
                pass
            except BaseException as error:
                short = ran_out(error)
                if not isinstance(error, SpoolError) and short is None:
                    log.exception("a feed's reorganiser failed")
                self._group.fail(short or error)

        return guarded

    # -- ranks -------------------------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        """Let ranks in until all are there, or those that came have left.

        Raises:
            RankError: one did not come in time.
        """
        deadline = time.monotonic() + self._settings.join_timeout_s
        while self._waits_for_ranks or self._accept(0.0):  # who stands at the door when all is over is answered, too
            if not self._waits_for_ranks:
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                left = f", and tp={self._group.left} came and left" if self._group.left else ""
                raise RankError(
                    f"of the {self._group.n_ranks} ranks that share this feed only tp={self._group.came} came within "
                    f"{self._settings.join_timeout_s:g} s{left}: do all call connect with the same name, spool, mesh "
                    "and place, and stay until all have come? Say how many ranks are on this node (connect(n_ranks=))"
                )
            self._accept(min(left_s, 0.5))

    @property
    def _waits_for_ranks(self) -> bool:
        return not (self._group.complete or self._group.deserted)

    def _accept(self, timeout_s: float) -> bool:
        link = self._listener.accept(timeout_s)
        if link is not None:
            self._admit(link)
        return link is not None

    def _admit(self, link: Link) -> None:
        """Let a rank in, or tell it why not."""
        try:
            hello, _ = link.receive()
        except (EOFError, RankError, msgspec.MsgspecError):
            hello = None
        if not isinstance(hello, Hello):
            link.close()
            return
        rank = Rank(hello.tp, hello.pid, link)
        try:
            self._check(rank, hello.settings)
        except RankError as error:
            self._group.fail(error)  # the others would wait for it
            self._refuse(link, error)
            return
        try:
            self._group.join(rank)
        except RankError as error:
            self._refuse(link, error)
            return
        threading.Thread(target=self._serve, args=(rank,), name=f"spool-feed-tp{rank.tp}", daemon=True).start()

    def _refuse(self, link: Link, error: RankError) -> None:
        link.send(Failure.of(error))
        link.close()

    def _check(self, rank: Rank, settings: Settings) -> None:
        ours, theirs = msgspec.structs.asdict(self._settings), msgspec.structs.asdict(settings)
        differ = [
            f"{name}={theirs[name]!r}, the first one {ours[name]!r}" for name in ours if ours[name] != theirs[name]
        ]
        if differ:
            raise RankError(
                f"{rank} wants {'; '.join(differ)}: the ranks of a place have to call connect with the same arguments"
            )

    def _serve(self, rank: Rank) -> None:
        """Listen to a rank until it is gone; one that contradicts another is told so before it goes."""
        self._guarded(lambda: self._listen(rank))()
        with suppress(EOFError):
            while True:
                rank.link.receive()
        self._group.leave(rank)
        rank.link.close()

    def _listen(self, rank: Rank) -> None:
        """Take in what a rank says, until it leaves.

        Raises:
            RankError: it died, or says that it failed, or what it says contradicts another one.
        """
        try:
            while True:
                message, _ = rank.link.receive()
                if isinstance(message, Submit):
                    self._group.submit(rank, message.number, message.work)
                elif isinstance(message, Finish):
                    self._group.finish(rank, message.n)
                elif isinstance(message, Released):
                    self._group.released(rank, message.serial)
                elif isinstance(message, Failed):
                    raise RankError(f"{rank} of this feed failed: {message.reason}")
                elif isinstance(message, Bye):
                    return
        except EOFError:
            if not self._group.over:
                raise RankError(f"{rank} of this feed died") from None

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        """Make all micro-batches, in order."""
        spool = open_spool(self._settings.uri, create=False, readonly=True, observer=self._observe)
        serials = count()
        for number in count():
            work = self._group.work(number)
            if work is None:
                self._group.end()
                return
            if (mini_batch := _decode(work)).shares:  # of none nobody can say what its fields are
                self._make_all(spool, mini_batch, number, serials)

    def _make_all(self, spool: Spool, work: Work, number: int, serials: Iterator[int]) -> None:
        prepared = prepare(spool, work, self._settings, self._room, self._recent)
        for micro in range(len(prepared.arrangements)):
            self._group.wait_for_room()
            self._recent.append(prepared.arrangements[micro].n_bytes)
            self._make(spool, prepared, next(serials), number, micro)

    def _make(self, spool: Spool, prepared: Prepared, serial: int, mini_batch: int, number: int) -> None:
        (arrays, n_bytes), before = prepared.arrangements[number], self._fetched_bytes
        with self._memory.made(n_bytes, partial(fill, spool, prepared, number, self._settings)) as made:
            fetched = self._fetched_bytes - before
            self._group.hand_out(Ready(serial, mini_batch, number, arrays, n_bytes, fetched), made)

    def _room(self, need_bytes: int) -> Room:
        """Return what micro-batches may take: what is free, and what those have that will be gone by then."""
        held_bytes = self._group.held_bytes
        found = self._memory.room(need_bytes - held_bytes)
        return Room(found.n_bytes + held_bytes, found.place)

    def _observe(self, event: object) -> None:
        if isinstance(event, Read):
            self._fetched_bytes += sum(event.fetched_bytes.values())
            self._trouble = ""
        elif isinstance(event, Retried):
            self._trouble = f"requests to the cold root fail and are tried again, the last one for {event.key}"
