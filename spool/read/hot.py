"""The hot tier: each byte range is read once, into the result itself where stored and wanted bytes are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from spool.errors import AbsentError
from spool.read.fetch import note, spread
from spool.read.locate import byte_ranges
from spool.read.plan import Fetch, Piece, plan
from spool.read.tier import Deletion
from spool.read.valid import ValidRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spool.read.assemble import Target
    from spool.read.fetch import Batch, Workers
    from spool.read.sample import ByteRange
    from spool.read.select import Run
    from spool.read.streams import Source
    from spool.stores.hot import HotStore

GAP_BYTES = 4096
FETCH_BYTES = 8 << 20
THREAD_BYTES = 4 << 20

_DISCARD = memoryview(bytearray(GAP_BYTES))


class HotTier:
    """A hot root as a reader sees it.

    Args:
        store: its bytes; closed with the tier.
        deletion: returns when and why a pack was deleted, where the root says so.
    """

    def __init__(self, store: HotStore, deletion: Callable[[str, int], Deletion | None] = lambda *_: None) -> None:
        self.store = store
        self.deletion = deletion
        self._valid = ValidRows(store)

    def read(self, key: str) -> bytes | None:
        """See `Tier.read`."""
        try:
            return self.store.read(key)
        except AbsentError:
            return None

    def bring(self, pieces: Sequence[Piece], batch: Batch, workers: Workers) -> list[Piece]:
        """See `Tier.bring`."""
        pieces, lacking = self._valid.split(pieces, batch.sources)
        fetches = plan(pieces, gap=GAP_BYTES, limit=FETCH_BYTES)
        absent: dict[str, list[Piece]] = {}
        if len(fetches) > 1 and sum(fetch.length for fetch in fetches) > THREAD_BYTES:
            workers.each(lambda fetch: self._fetch(fetch, batch, absent), fetches)
        else:
            for fetch in fetches:
                self._fetch(fetch, batch, absent)
        return [*lacking, *(piece for pieces in absent.values() for piece in pieces)]

    def _fetch(self, fetch: Fetch, batch: Batch, absent: dict[str, list[Piece]]) -> None:
        if fetch.key in absent:  # looking for it once more may take as long as for a shard that is being written
            absent[fetch.key] += fetch.pieces
            return
        source = batch.sources[fetch.key]
        buffers = _scatter(fetch, source, batch.targets)
        try:
            if buffers is None:
                with self.store.borrow(fetch.key, fetch.offset, fetch.length) as view:
                    batch.fetched.append(("hot", fetch.length))
                    spread(fetch.pieces, fetch.offset, np.frombuffer(view, np.uint8), batch, self)
                return
            self.store.read_into(fetch.key, fetch.offset, buffers)
        except AbsentError:
            absent.setdefault(fetch.key, []).extend(fetch.pieces)
            return
        batch.fetched.append(("hot", fetch.length))
        for piece in fetch.pieces:
            if piece.check >= 0:
                slot = batch.targets[piece.target].slot(source, piece.row, piece.length)
                note(piece, crc32c(slot), batch, self)

    def locate(self, source: Source, run: Run) -> list[ByteRange] | None:
        """See `Tier.locate`."""
        key, base = source.locate(run.extent)
        if not self._valid.has(source, key, (run.row + run.n - base) * source.row_bytes):
            return None
        try:
            return byte_ranges(source, run, self.store)
        except AbsentError:
            return None

    def check(self) -> None:
        """See `Tier.check`; references name hot roots that are gone by right."""

    def path(self, key: str) -> str:
        """See `Tier.path`."""
        return self.store.path(key)

    def close(self) -> None:
        """See `Tier.close`."""
        self.store.close()


def _scatter(fetch: Fetch, source: Source, targets: Sequence[Target]) -> list[memoryview] | None:
    """Return the memory that ``fetch`` can be read into as it is, or None where rows must be converted or copied."""
    buffers: list[memoryview] = []
    at = fetch.offset
    for piece in fetch.pieces:
        if piece.target < 0 or piece.offset < at or not targets[piece.target].takes(source):
            return None
        if piece.offset > at:
            buffers.append(_DISCARD[: piece.offset - at])
        buffers.append(targets[piece.target].slot(source, piece.row, piece.length))
        at = piece.offset + piece.length
    return buffers
