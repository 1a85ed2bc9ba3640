"""Publishing: waiting until all that references need is in the cold root.

Whoever publishes leaves a request for each stream in the catalog and looks until it is served. The stream's owner, or
the spiller where that is dead, rolls one pack for all requests that wait; the spiller brings it over. All that wait in
one process look together: a look costs one question to the index, however many they are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from spool.catalog import Catalog
from spool.errors import IntegrityError, NotFoundError, ReleasedError, SpoolError, StorageError
from spool.feeds import Feeds
from spool.model.refs import Ref
from spool.sizes import format_time
from spool.spiller.status import SILENT_S, Status

log = logging.getLogger("spool.publishing")

Pack = tuple[str, int]
OnThread = Callable[[Callable[[], "float | None"]], Awaitable["float | None"]]

LOOK_S = 0.05
"""Between two looks of a process."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 0.25
NEWS_S = 1.0
"""Between two looks at what the spiller says, and at what other nodes published."""
AGAIN_S = 15.0
"""Between two looks at what a reference needs, once it is known."""
SHOWN = 3


class Publisher:
    """Waits for packs to be durable in the cold root; safe from many threads, and after a fork.

    Args:
        catalog: the index; knows which packs a session needs, and where they are.
        feeds: bring it up to date.
        nudge: makes sure that a spiller works; called while a pack of this root is waited for.
        status: what the root's spiller last said of itself.
    """

    def __init__(
        self, catalog: Catalog, feeds: Feeds, *, nudge: Callable[[], None], status: Callable[[], Status | None]
    ) -> None:
        self._catalog = catalog
        self._feeds = feeds
        self._nudge = nudge
        self._status = status
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._feeding = threading.Lock()
        self._fed_at = float("-inf")
        self._looked_at = float("-inf")
        self._waiting: Counter[Pack] = Counter()
        self._there: set[Pack] = set()
        self._heard_at = float("-inf")
        self._heard: Status | None = None

    def _own(self) -> threading.Lock:
        if self._pid != os.getpid():
            self._reset()
        return self._lock

    def publish(self, refs: Sequence[Ref], timeout_s: float) -> None:
        """See `Spool.publish`."""
        wait = _Wait(self, refs, timeout_s)
        try:
            while (wait_s := wait.look()) is not None:
                time.sleep(wait_s)
        finally:
            wait.end()

    async def publish_async(self, refs: Sequence[Ref], timeout_s: float, on_thread: OnThread) -> None:
        """See `Spool.publish_async`; waiting holds no thread."""
        wait = _Wait(self, refs, timeout_s)
        try:
            while (wait_s := await on_thread(wait.look)) is not None:
                await asyncio.sleep(wait_s)
                while self.is_idle() and (wait_s := wait.rest_s()) is not None:
                    await asyncio.sleep(wait_s)
        finally:
            wait.end()

    # -- what all that wait share --------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether the last look was just now, so that another would tell nothing."""
        return time.monotonic() - self._looked_at < LOOK_S

    def look(self) -> None:
        """See which of the packs that are waited for are there, and ask for the others, unless that was done just now.

        Raises:
            StorageError: the index cannot be used.
        """
        with self._own():
            if self.is_idle():
                return
            waiting = set(self._waiting)
            self._there = {pack for pack in waiting if self._is_there(*pack)}
            self._ask(waiting - self._there)
            self._looked_at = time.monotonic()

    def heard(self, *, fresh: bool = False) -> Status | None:
        """Return what the spiller said of itself, a second ago at most."""
        if fresh or time.monotonic() - self._heard_at >= NEWS_S:
            self._heard, self._heard_at = self._status(), time.monotonic()
        return self._heard

    def _is_there(self, stream: str, pack: int) -> bool:
        row = self._catalog.packs.get(stream, pack)
        return row is not None and row.state not in ("open", "sealed")

    def _ask(self, missing: set[Pack]) -> None:
        """Ask the owners of streams of this root to seal what is missing."""
        own = set(self._feeds.hot.stream_names()) if missing else ()
        last: dict[str, int] = {}
        for stream, pack in missing:
            if stream in own:
                last[stream] = max(pack, last.get(stream, pack))
        for stream, pack in last.items():
            self._catalog.packs.request_seal(stream, pack)
        if last:
            self._nudge()

    def are_there(self, packs: set[Pack]) -> bool:
        """Whether the last look found all of ``packs``."""
        return self._there.issuperset(packs)

    def wait_for(self, packs: set[Pack]) -> None:
        """Have `look` look for packs too."""
        with self._own():
            self._waiting.update(packs)

    def give_up(self, packs: set[Pack]) -> None:
        """Take back `wait_for`."""
        with self._own():
            self._waiting.subtract(packs)
            self._waiting = +self._waiting

    def take_in(self, since: float, *, far: bool) -> None:
        """Look for news, in this root and, where ``far``, in the cold one, unless somebody did after ``since``.

        Raises:
            StorageError: a root cannot be read.
        """
        self._own()
        with self._feeding:
            if self._fed_at < since:
                began = time.monotonic()
                self._feeds.hot.catch_up()
                self._fed_at = began
        if far and self._feeds.cold is not None:
            self._feeds.cold.catch_up(after_s=NEWS_S)

    # -- what one needs ------------------------------------------------------------------------------------------------

    def missing(self, refs: Sequence[Ref]) -> tuple[list[str], set[Pack]]:
        """Return the sessions that are known nowhere, and the packs that are not yet in the cold root.

        Raises:
            ReleasedError: one of the packs was deleted.
        """
        sessions = sorted({ref.session_id for ref in refs})
        unknown = [name for name in sessions if self._catalog.session(name) is None]
        missing = set()
        for stream, pack in self._catalog.packs.of(sessions) | self._named(refs):
            row = self._catalog.packs.get(stream, pack)
            if row is not None and row.state == "gone":
                at = "" if row.gone_at is None else f" at {format_time(row.gone_at)}"
                raise ReleasedError(
                    f"pack {pack} of stream {stream} was deleted{at}: {row.reason}", stream=stream, pack=pack
                )
            if row is None or row.state not in ("spilled", "evicted"):
                missing.add((stream, pack))
        return unknown, missing

    def _named(self, refs: Sequence[Ref]) -> set[Pack]:
        """Return the packs whose rows references name; of a stream that is known nowhere yet, pack -1."""
        packs: set[Pack] = set()
        for ref in refs:
            for array, extents in ref.extents.items():
                for extent in extents:
                    size = (self._feeds.hot.sizes(extent.stream) or {}).get(array)
                    packs.add((extent.stream, extent.row // size.shard_rows if size is not None else -1))
        return packs

    def is_far(self, missing: set[Pack]) -> bool:
        """Whether some of ``missing`` is not of this root."""
        own = set(self._feeds.hot.stream_names())
        return any(stream not in own for stream, _ in missing)


class _Wait:
    """One publish on its way."""

    def __init__(self, publisher: Publisher, refs: Sequence[Ref], timeout_s: float) -> None:
        self._publisher = publisher
        self._refs = refs
        self._timeout_s = timeout_s
        self._since = time.monotonic()
        self._began_at = time.time()
        self._news_at = self._since
        self._wait_s = FIRST_WAIT_S
        self._unknown: list[str] = []
        self._missing: set[Pack] = set()
        self._far = False
        self._told: str | None = None

    def look(self) -> float | None:
        """Return how long to wait before the next look; None where all is there."""
        known = self._missing and not self._unknown and not self._far
        if known and time.monotonic() - self._news_at < AGAIN_S:
            self._publisher.look()
            if not self._publisher.are_there(self._missing):
                return self._next_s()
        return self._look_closely()

    def _look_closely(self) -> float | None:
        """Look at all that the references need: at first, for news now and then, and at last."""
        publisher = self._publisher
        publisher.take_in(time.monotonic() - NEWS_S if self._missing else self._since, far=self._far)
        self._news_at = time.monotonic()
        self._unknown, missing = publisher.missing(self._refs)
        self._expect(missing)
        if not self._unknown and not missing:
            return None
        self._far = bool(self._unknown) or publisher.is_far(missing)
        publisher.look()
        return self._next_s()

    def rest_s(self) -> float | None:
        """Return how long to wait on; None where there may be something to see."""
        late = time.monotonic() + self._wait_s - self._since > self._timeout_s
        return None if late or self._far or self._publisher.are_there(self._missing) else self._wait_s

    def end(self) -> None:
        """Wait for nothing any more."""
        self._expect(set())

    def _expect(self, missing: set[Pack]) -> None:
        self._publisher.wait_for(missing)
        self._publisher.give_up(self._missing)
        self._missing = missing

    def _next_s(self) -> float:
        self._listen()
        if time.monotonic() + self._wait_s - self._since > self._timeout_s:
            raise self._late()
        self._wait_s = min(1.5 * self._wait_s, LONGEST_WAIT_S)
        return self._wait_s

    def _listen(self) -> None:
        """Raise for a pack that the spiller found damaged since this wait began; log what else it says."""
        status = self._publisher.heard()
        if status is None or status.at < self._began_at:
            return
        if status.error is not None and status.error != self._told:
            log.warning("publish waits; the spiller says: %s", status.error)
        self._told = status.error
        for found in status.damaged:
            if (found.stream, found.pack) in self._missing:
                raise IntegrityError(
                    f"pack {found.pack} of stream {found.stream} stays in the hot root and cannot be published: "
                    f"{found.why}",
                    stream=found.stream,
                    pack=found.pack,
                )

    def _late(self) -> SpoolError:
        """Return the error of a wait that is over."""
        if self._unknown:
            name = self._unknown[0]
            return NotFoundError(f"session {name!r} was not published in {self._timeout_s:g} s", session_id=name)
        packs = ", ".join(f"{pack} of stream {stream}" for stream, pack in sorted(self._missing)[:SHOWN])
        status = self._publisher.heard(fresh=True)
        trouble = None
        if status is not None and status.error is not None:
            trouble = (
                f"the spiller, process {status.pid}, says: {status.error} (it has the environment of the process that "
                "started it: where that was wrong, end it, and the next publish starts another)"
            )
        elif status is not None and time.time() - status.at > SILENT_S:
            silent_s = time.time() - status.at
            trouble = f"the spiller, process {status.pid}, has said nothing for {silent_s:.0f} s: is it stopped?"
        return StorageError(
            f"{len(self._missing)} packs are not in the cold root after {self._timeout_s:g} s (pack {packs}"
            f"{', ...' if len(self._missing) > SHOWN else ''}); {trouble or 'the spiller is still at work'}; nothing "
            "is lost: publish again, and see `spool status`",
            missing=sorted(self._missing),
        )
