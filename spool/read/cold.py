"""The cold tier: ranged GETs that carry what is needed, several at a time.

Where chunks are raw a row lies where its number says, and rows are fetched as rows. Where they are compressed the
shard's index is read once and kept, and chunks are fetched: those of all layers of a row group are neighbours, so a
read of some layers fetches their part of it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from spool.errors import NotFoundError
from spool.formats import cold
from spool.formats.cold_arrays import parse_cold_group
from spool.formats.layers import stored_layers
from spool.formats.shard import group_key
from spool.model.fields import numpy_dtype
from spool.read.fetch import Workers, spread
from spool.read.plan import Fetch, Piece, plan
from spool.read.sample import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spool.formats.cold import ChunkSpan, Index
    from spool.formats.cold_arrays import ColdLayout
    from spool.read.assemble import Array
    from spool.read.fetch import Batch
    from spool.read.select import Run
    from spool.read.streams import Source
    from spool.read.tier import Deletion
    from spool.stores.objects import Objects

GAP_BYTES = 32 << 10
"""Unwanted bytes that are rather fetched than a request made for what is behind them."""
FETCH_BYTES = 8 << 20
"""Most stored bytes of one request; that many are held for each request under way."""
INDEX_BYTES = 64 << 20
"""Indexes of compressed shards that are kept."""


class ColdTier:
    """A cold root as a reader sees it. Thread-safe, and usable after a fork.

    Args:
        objects: its bytes; closed with the tier.
        deletion: returns when and why a pack was deleted, where the root says so.
        concurrency: fetches under way at a time; their waiting is what costs, so they have threads of their own.
    """

    def __init__(
        self,
        objects: Objects,
        deletion: Callable[[str, int], Deletion | None] = lambda *_: None,
        *,
        concurrency: int = 16,
    ) -> None:
        self.objects = objects
        self.deletion = deletion
        self._workers = Workers(concurrency)
        self._lock = threading.Lock()
        self._layouts: dict[str, dict[str, ColdLayout]] = {}
        self._indexes: OrderedDict[str, Index] = OrderedDict()
        _tiers.add(self)

    def read(self, key: str) -> bytes | None:
        """See `Tier.read`."""
        try:
            return self.objects.get(key)
        except NotFoundError:
            return None

    def bring(self, pieces: Sequence[Piece], batch: Batch, workers: Workers) -> list[Piece]:  # noqa: ARG002
        """See `Tier.bring`."""
        raw: list[Piece] = []
        compressed: list[Piece] = []
        absent: list[Piece] = []
        for piece in pieces:
            layout = self._layout(batch.sources[piece.key])
            (absent if layout is None else raw if layout.codec == "raw" else compressed).append(piece)
        fetches = [*plan(raw, gap=GAP_BYTES, limit=FETCH_BYTES), *self._whole_groups(compressed, batch)]

        def fetch_one(fetch: Fetch) -> None:
            try:
                self._fetch(fetch, batch)
            except NotFoundError:
                absent.extend(fetch.pieces)

        if len(fetches) > 1:
            self._workers.each(fetch_one, fetches)
        elif fetches:
            fetch_one(fetches[0])
        return absent

    def _fetch(self, fetch: Fetch, batch: Batch) -> None:
        source = batch.sources[fetch.key]
        layout = self._layouts[source.stream][source.name]
        row, n = fetch.offset // source.row_bytes, fetch.length // source.row_bytes
        if layout.codec == "raw":
            start, stop = cold.raw_span(layout, row, n)
            rows = cold.raw_rows(layout, self.objects.get_range(fetch.key, start, stop), row, n)
            batch.fetched.append(("cold", stop - start))
            spread(fetch.pieces, fetch.offset, np.frombuffer(rows, np.uint8), batch, self)
            return
        layers = _wanted_layers(source, fetch.pieces, batch)
        stored = self._compressed_rows(fetch.key, layout, row, n, layers, batch)
        if layers is None:
            spread(fetch.pieces, fetch.offset, stored.reshape(-1).view(np.uint8), batch, self)
            return
        # the checksum of an extent is over all layers; that of each chunk was checked
        for piece in fetch.pieces:
            first = piece.offset // source.row_bytes - row
            part = stored[first : first + piece.length // source.row_bytes]
            batch.targets[piece.target].put_rows(source, piece.row, part)

    def _compressed_rows(
        self, key: str, layout: ColdLayout, row: int, n: int, layers: slice | None, batch: Batch
    ) -> Array:
        """Return rows ``[row, row + n)`` of a compressed shard: ``[n, layers, ...]``, or ``[n, *shape]``."""
        spans = cold.zstd_spans(layout, self._index(key, layout, batch), row, n, layers)
        runs = list(_neighbours(spans))
        found = self.objects.get_ranges([(key, run[0].start, run[-1].stop) for run in runs])
        batch.fetched.append(("cold", sum(map(len, found))))
        shape = layout.spec.shape if layers is None else (layers.stop - layers.start, *layout.spec.shape[1:])
        rows = np.empty((n, *shape), numpy_dtype(layout.spec.dtype))
        chunks = (
            (span, memoryview(data)[span.start - run[0].start : span.stop - run[0].start])
            for run, data in zip(runs, found, strict=True)
            for span in run
        )
        cold.place_chunks(layout, chunks, rows, row, layers)
        return rows

    def _layout(self, source: Source) -> ColdLayout | None:
        """Return how a stored array lies here; None where its stream does not."""
        known = self._layouts.get(source.stream)
        if known is None:
            data = self.read(group_key(source.stream))
            if data is None:
                return None
            known = self._layouts[source.stream] = parse_cold_group(data)[1]
        return known[source.name]

    def _index(self, key: str, layout: ColdLayout, batch: Batch | None = None) -> Index:
        with self._lock:
            known = self._indexes.get(key)
            if known is not None:
                self._indexes.move_to_end(key)
                return known
        index = cold.parse_index(layout, self.objects.get_range(key, 0, layout.index_bytes))
        if batch is not None:
            batch.fetched.append(("cold", layout.index_bytes))
        with self._lock:
            self._indexes[key] = index
            while sum(kept.nbytes for kept in self._indexes.values()) > INDEX_BYTES and len(self._indexes) > 1:
                self._indexes.popitem(last=False)
        return index

    def _whole_groups(self, pieces: Iterable[Piece], batch: Batch) -> Iterator[Fetch]:
        """Yield fetches of pieces of compressed shards such that no row group is fetched twice."""
        for key, own in groupby(sorted(piece for piece in pieces if piece.length), attrgetter("key")):
            source = batch.sources[key]
            group_bytes = self._layouts[source.stream][source.name].chunk_rows * source.row_bytes
            step = max(1, FETCH_BYTES // group_bytes) * group_bytes
            for run in _runs(own, group_bytes):
                start = run[0].offset // group_bytes * group_bytes
                parts: dict[int, list[Piece]] = {}
                for piece in run:
                    for number, part in _cut(piece, start, step):
                        parts.setdefault(number, []).append(part)
                for inside in parts.values():
                    first, end = inside[0].offset, max(piece.offset + piece.length for piece in inside)
                    yield Fetch(key, first, end - first, inside)

    def locate(self, source: Source, run: Run) -> list[ByteRange] | None:
        """See `Tier.locate`; of a compressed shard the chunks that hold the rows, each with its checksum."""
        layout = self._layout(source)
        if layout is None or not run.n:
            return None if layout is None else []
        key, base = source.locate(run.extent)
        row = run.row - base
        try:
            if layout.codec == "raw":
                return list(self._raw_ranges(layout, key, source, row, run.n))
            spans = cold.zstd_spans(layout, self._index(key, layout), row, run.n)
        except NotFoundError:
            return None
        ranges = []
        for part in _neighbours(spans):
            first, last = part[0].group * layout.chunk_rows, (part[-1].group + 1) * layout.chunk_rows
            rows = base + max(first, row), base + min(last, row + run.n)
            length = part[-1].stop - part[0].start
            ranges.append(ByteRange(self.path(key), part[0].start, length, source.field.name, rows, source.stream))
        return ranges

    def _raw_ranges(self, layout: ColdLayout, key: str, source: Source, row: int, n: int) -> Iterator[ByteRange]:
        if self.objects.info(key) is None:
            raise NotFoundError(f"{self.path(key)} is missing", file=self.path(key))
        at = row + source.pack_of(key) * source.shard_rows
        for start, stop in cold.raw_pieces(layout, row, n):
            rows = at, at + (stop - start) // source.row_bytes
            yield ByteRange(self.path(key), start, stop - start, source.field.name, rows, source.stream)
            at = rows[1]

    def path(self, key: str) -> str:
        """See `Tier.path`."""
        return f"{self.objects.url}/{key}"

    def close(self) -> None:
        """See `Tier.close`."""
        self.objects.close()

    def forked(self) -> None:
        """Replace the lock in a forked child; another thread may have held it."""
        self._lock = threading.Lock()


def _wanted_layers(source: Source, pieces: Iterable[Piece], batch: Batch) -> slice | None:
    """Return the stored layers that all of ``pieces`` together want; None for whole rows."""
    low, high = source.shape[0] if source.shape else 0, 0
    for piece in pieces:
        layers = batch.targets[piece.target].layers if piece.target >= 0 else None
        if layers is None:
            return None
        chosen = stored_layers(source.field, layers)
        low, high = min(low, chosen.start), max(high, chosen.stop)
    return slice(low, max(high, low))


def _neighbours(spans: Sequence[ChunkSpan]) -> Iterator[list[ChunkSpan]]:
    """Yield runs of chunks with little between them, of `FETCH_BYTES` or one chunk at most."""
    run: list[ChunkSpan] = []
    for span in spans:
        if run and (span.start - run[-1].stop > GAP_BYTES or span.stop - run[0].start > FETCH_BYTES):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _runs(pieces: Iterable[Piece], group_bytes: int) -> Iterator[list[Piece]]:
    """Yield runs of sorted pieces whose row groups overlap or follow on each other."""
    run: list[Piece] = []
    last = -1
    for piece in pieces:
        if run and piece.offset // group_bytes > last + 1:
            yield run
            run, last = [], -1
        run.append(piece)
        last = max(last, (piece.offset + piece.length - 1) // group_bytes)
    if run:
        yield run


def _cut(piece: Piece, start: int, step: int) -> Iterator[tuple[int, Piece]]:
    """Yield the parts of a piece in windows of ``step`` bytes from ``start`` on, and the numbers of these."""
    at, stop = piece.offset, piece.offset + piece.length
    while at < stop:
        number = (at - start) // step
        end = min(stop, start + (number + 1) * step)
        row = piece.row + (at - piece.offset) // piece.row_bytes
        yield number, piece._replace(offset=at, length=end - at, row=row)
        at = end


_tiers: weakref.WeakSet[ColdTier] = weakref.WeakSet()


def _after_fork() -> None:
    for tier in _tiers:
        tier.forked()


os.register_at_fork(after_in_child=_after_fork)
