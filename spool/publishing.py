"""Publishing: waiting until all that references need is in the cold root.

Whoever publishes leaves a request for each stream in the catalog and looks until it is served. The stream's owner, or
the spiller where that is dead, rolls one pack for all requests that wait; the spiller brings it over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from spool.catalog import Catalog
from spool.errors import NotFoundError, ReleasedError, SpoolError, StorageError
from spool.feeds import Feeds
from spool.model.refs import Ref

Pack = tuple[str, int]

FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 0.25
SHOWN = 3


class Publisher:
    """Waits for packs to be durable in the cold root.

    Args:
        catalog: the index; knows which packs a session needs, and where they are.
        feeds: bring it up to date.
        nudge: makes sure that a spiller works; called while a pack of this root is waited for.
        trouble: what keeps the spiller from its work; None where nothing does.
    """

    def __init__(
        self, catalog: Catalog, feeds: Feeds, *, nudge: Callable[[], None], trouble: Callable[[], str | None]
    ) -> None:
        self._catalog = catalog
        self._feeds = feeds
        self._nudge = nudge
        self._trouble = trouble

    def publish(self, refs: Sequence[Ref], timeout_s: float) -> None:
        """See `Spool.publish`."""
        wait = _Wait(self, refs, timeout_s)
        while (wait_s := wait.look()) is not None:
            time.sleep(wait_s)

    async def publish_async(
        self,
        refs: Sequence[Ref],
        timeout_s: float,
        on_thread: Callable[[Callable[[], float | None]], Awaitable[float | None]],
    ) -> None:
        """See `Spool.publish_async`; waiting holds no thread."""
        wait = _Wait(self, refs, timeout_s)
        while (wait_s := await on_thread(wait.look)) is not None:
            await asyncio.sleep(wait_s)

    def missing(self, refs: Sequence[Ref]) -> tuple[list[str], set[Pack]]:
        """Return the sessions that are known nowhere, and the packs that are not yet in the cold root.

        Raises:
            ReleasedError: one of the packs was deleted.
        """
        sessions = sorted({ref.session_id for ref in refs})
        unknown = [name for name in sessions if self._catalog.session(name) is None]
        needed = self._catalog.packs.of(sessions) | self._named(refs)
        missing = set()
        for stream, pack in needed:
            row = self._catalog.packs.get(stream, pack)
            if row is not None and row.state == "gone":
                raise ReleasedError(
                    f"pack {pack} of stream {stream} was deleted: {row.reason}", stream=stream, pack=pack
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
                    n_rows = (self._feeds.hot.shard_rows(extent.stream) or {}).get(array)
                    packs.add((extent.stream, extent.row // n_rows if n_rows else -1))
        return packs

    def ask(self, missing: set[Pack]) -> None:
        """Ask the owners of streams of this root to seal what is missing."""
        own = set(self._feeds.hot.stream_names())
        for stream, pack in missing:
            if stream in own:
                self._catalog.packs.request_seal(stream, pack)
        if any(stream in own for stream, _ in missing):
            self._nudge()

    def catch_up(self, unknown: Sequence[str], missing: set[Pack]) -> None:
        """Look for news in this root, and in the cold one where something of other nodes is missing."""
        self._feeds.hot.catch_up()
        own = set(self._feeds.hot.stream_names())
        if self._feeds.cold is not None and (unknown or any(stream not in own for stream, _ in missing)):
            self._feeds.cold.catch_up()

    def late(self, unknown: Sequence[str], missing: set[Pack], timeout_s: float) -> SpoolError:
        """Return the error of a wait that is over."""
        if unknown:
            return NotFoundError(f"session {unknown[0]!r} was not published in {timeout_s:g} s", session_id=unknown[0])
        packs = ", ".join(f"{pack} of stream {stream}" for stream, pack in sorted(missing)[:SHOWN])
        trouble = self._trouble()
        return StorageError(
            f"{len(missing)} packs are not in the cold root after {timeout_s:g} s (pack {packs}"
            f"{', ...' if len(missing) > SHOWN else ''}); {trouble or 'the spiller is still at work'}; nothing is "
            "lost: publish again, and see `spool status`",
            missing=sorted(missing),
        )


class _Wait:
    """One publish on its way."""

    def __init__(self, publisher: Publisher, refs: Sequence[Ref], timeout_s: float) -> None:
        self._publisher = publisher
        self._refs = refs
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._wait_s = FIRST_LOOK_S
        self._unknown: list[str] = []
        self._missing: set[Pack] = set()

    def look(self) -> float | None:
        """Return how long to wait before the next look; None where all is there."""
        self._publisher.catch_up(self._unknown, self._missing)
        self._unknown, self._missing = self._publisher.missing(self._refs)
        if not self._unknown and not self._missing:
            return None
        if time.monotonic() + self._wait_s > self._until:
            raise self._publisher.late(self._unknown, self._missing, self._timeout_s)
        self._publisher.ask(self._missing)
        self._wait_s = min(1.5 * self._wait_s, LONGEST_LOOK_S)
        return self._wait_s
