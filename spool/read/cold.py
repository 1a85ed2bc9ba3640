"""The cold tier: ranged GETs that carry what is needed, several at a time.

Where chunks are raw a row lies where its number says, and rows are fetched as rows. Where they are compressed the
shard's index is read once and kept, and chunks are fetched: those of all layers of a row group are neighbours, so a
read of some layers fetches their part of it. Every chunk of those that are decoded is checked by its own checksum.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from spool.errors import IntegrityError, NotFoundError
from spool.formats import cold
from spool.formats.cold_arrays import parse_cold_group
from spool.formats.layers import stored_layers
from spool.formats.shard import group_key
from spool.model.fields import numpy_dtype
from spool.read.fetch import Workers, note, spread
from spool.read.indexes import Indexes
from spool.read.plan import Fetch, Piece
from spool.read.ranges import ChunkFetch, checked_fetches, chunk_fetches, raw_fetches
from spool.read.sample import ByteRange
from spool.read.traffic import under_way
from spool.read.valid import ListedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spool.formats.cold import Index
    from spool.formats.cold_arrays import ColdLayout
    from spool.read.assemble import Array
    from spool.read.fetch import Batch
    from spool.read.select import Run
    from spool.read.streams import Source
    from spool.read.tier import Deletion
    from spool.stores.objects import Objects


class ColdTier:
    """A cold root as a reader sees it. Thread-safe, and usable after a fork.

    Args:
        objects: its bytes; closed with the tier.
        deletion: returns when and why a pack was deleted, where the root says so.
        confirm: raises `StorageError` where the root is not there, or is another one.
        concurrency: requests that this process has under way at a time, those of other cold tiers counted; their
            waiting is what costs, so they have threads of their own. Each holds up to two `ranges.FETCH_BYTES`.
    """

    def __init__(
        self,
        objects: Objects,
        deletion: Callable[[str, int], Deletion | None] = lambda *_: None,
        confirm: Callable[[], None] = lambda: None,
        *,
        concurrency: int = 16,
    ) -> None:
        self.objects = objects
        self.deletion = deletion
        self.check = confirm
        self._concurrency = concurrency
        self._workers = Workers(concurrency)
        self._documents: dict[str, bytes] = {}
        self._layouts: dict[str, dict[str, ColdLayout]] = {}
        self._indexes = Indexes(self._get_range)
        self._listed = ListedRows(self._get)

    def read(self, key: str) -> bytes | None:
        """See `Tier.read`; documents do not change, so those that were found are kept."""
        found = self._documents.get(key)
        if found is None:
            try:
                found = self._documents[key] = self._get(key)
            except NotFoundError:
                return None
        return found

    def _get(self, key: str) -> bytes:
        with under_way(self._concurrency):
            return self.objects.get(key)

    def _get_range(self, key: str, start: int, stop: int, batch: Batch | None = None) -> bytes:
        with under_way(self._concurrency):
            data = self.objects.get_range(key, start, stop)
        if batch is not None:
            batch.fetched.append(("cold", len(data)))
        return data

    def bring(self, pieces: Sequence[Piece], batch: Batch, workers: Workers) -> list[Piece]:  # noqa: ARG002
        """See `Tier.bring`."""
        absent: list[Piece] = []
        raw: list[Piece] = []
        packed: dict[str, list[Piece]] = {}
        for key, group in groupby(sorted(piece for piece in pieces if piece.length), attrgetter("key")):
            own, layout = list(group), self._layout(batch.sources[key])
            if layout is None:
                absent += own
            elif layout.codec == "raw":
                raw += own
            else:
                # only checked: the checksums of the chunks that are decoded anyway do that
                packed[key] = [piece for piece in own if piece.target >= 0]
        fetches: list[Fetch | ChunkFetch] = [*self._raw_fetches(raw, batch)]

        def look_up(key: str) -> None:
            try:
                fetches.extend(self._chunk_fetches(packed[key], batch))
            except NotFoundError:
                absent.extend(packed[key])

        def bring_one(fetch: Fetch | ChunkFetch) -> None:
            try:
                self._bring(fetch, batch)
            except NotFoundError:
                absent.extend(fetch.pieces)

        self._each(look_up, [key for key, own in packed.items() if own])
        self._each(bring_one, fetches)
        return absent + self._listed.past(pieces, batch)

    def _each(self, function: Callable[[Any], None], items: Sequence[Any]) -> None:
        if len(items) > 1:
            self._workers.each(function, items)
        elif items:
            function(items[0])

    # -- raw ---------------------------------------------------------------------------------------------------------

    def _raw_fetches(self, pieces: Sequence[Piece], batch: Batch) -> list[Fetch]:
        """Return what to fetch; objects with pieces that are only checked, by whole chunks."""
        widened = {piece.key for piece in pieces if piece.target < 0}
        plain = [piece for piece in pieces if piece.key not in widened]
        checked = [piece for piece in pieces if piece.key in widened and piece.target >= 0]
        layouts = {key: self._known_layout(batch.sources[key]) for key in widened}
        return [*raw_fetches(plain, parallel=self._concurrency), *checked_fetches(checked, layouts)]

    def _bring(self, fetch: Fetch | ChunkFetch, batch: Batch) -> None:
        source = batch.sources[fetch.key]
        layout = self._known_layout(source)
        try:
            if isinstance(fetch, ChunkFetch):
                self._bring_chunks(fetch, source, layout, batch)
            elif any(piece.target < 0 for piece in fetch.pieces):
                self._bring_checked(fetch, source, layout, batch)
            else:
                self._bring_raw(fetch, source, layout, batch)
        except IntegrityError as error:
            raise self._damaged(error, source, fetch.pieces) from error

    def _bring_raw(self, fetch: Fetch, source: Source, layout: ColdLayout, batch: Batch) -> None:
        """Fetch rows and put them where they belong, one copy each, past the checksums between chunks."""
        width = source.row_bytes
        start, stop = cold.raw_span(layout, fetch.offset // width, fetch.length // width)
        data = memoryview(self._get_range(fetch.key, start, stop, batch))
        for piece in fetch.pieces:
            crc, row = 0, piece.row
            for low, high in cold.raw_pieces(layout, piece.offset // width, piece.length // width):
                part = data[low - start : high - start]
                if piece.check >= 0:
                    crc = crc32c(part, crc)
                batch.targets[piece.target].put(source, row, np.frombuffer(part, np.uint8))
                row += (high - low) // width
            if piece.check >= 0:
                note(piece, crc, batch, self)

    def _bring_checked(self, fetch: Fetch, source: Source, layout: ColdLayout, batch: Batch) -> None:
        row, n = fetch.offset // source.row_bytes, fetch.length // source.row_bytes
        start, stop = cold.raw_span(layout, row, n, verify=True)
        rows = cold.raw_rows(layout, self._get_range(fetch.key, start, stop, batch), row, n, verify=True)
        spread(fetch.pieces, fetch.offset, np.frombuffer(rows, np.uint8), batch, self)

    # -- compressed --------------------------------------------------------------------------------------------------

    def _chunk_fetches(self, pieces: Sequence[Piece], batch: Batch) -> list[ChunkFetch]:
        """Return what to fetch for pieces of one compressed object."""
        key = pieces[0].key
        source = batch.sources[key]
        layout = self._known_layout(source)
        try:
            index = self._indexes.of(key, layout, batch)
            layers = _wanted_layers(source, pieces, batch)
            return chunk_fetches(pieces, layout, index, layers, parallel=self._concurrency)
        except IntegrityError as error:
            raise self._damaged(error, source, pieces) from error

    def _bring_chunks(self, fetch: ChunkFetch, source: Source, layout: ColdLayout, batch: Batch) -> None:
        """Fetch chunks, decode them, and put their rows where they belong, or decode them there."""
        only = fetch.pieces[0]
        direct = len(fetch.pieces) == 1 and batch.targets[only.target].takes(source)
        if direct:
            rows = batch.targets[only.target].array[only.row : only.row + fetch.n]
        else:
            n_layers = () if fetch.layers is None else (fetch.layers.stop - fetch.layers.start,)
            rows = np.empty((fetch.n, *n_layers, *layout.spec.shape[len(n_layers) :]), numpy_dtype(layout.spec.dtype))
        try:
            self._decode(fetch, layout, rows, batch)
        except IntegrityError:
            # a pack that is uploaded again holds the same rows, but its chunks need not have the same sizes
            if not self._indexes.renew(fetch.key, layout):
                raise
            for again in self._chunk_fetches(fetch.pieces, batch):
                self._bring_chunks(again, source, layout, batch)
            return
        for piece in fetch.pieces:
            first = piece.offset // source.row_bytes - fetch.row
            part = rows[first : first + piece.length // source.row_bytes]
            # the checksum of an extent is over all layers
            if piece.check >= 0 and fetch.layers is None:
                note(piece, crc32c(part.reshape(-1).view(np.uint8).data), batch, self)
            if not direct:
                batch.targets[piece.target].put_rows(source, piece.row, part)

    def _decode(self, fetch: ChunkFetch, layout: ColdLayout, rows: Array, batch: Batch) -> None:
        if not fetch.spans:
            return
        start = fetch.spans[0].start
        data = memoryview(self._get_range(fetch.key, start, fetch.spans[-1].stop, batch))
        chunks = ((span, data[span.start - start : span.stop - start]) for span in fetch.spans)
        cold.place_chunks(layout, chunks, rows, fetch.row, fetch.layers)

    # -- documents and places ----------------------------------------------------------------------------------------

    def _layout(self, source: Source) -> ColdLayout | None:
        """Return how a stored array lies here; None where its stream does not."""
        known = self._layouts.get(source.stream)
        if known is None:
            key = group_key(source.stream)
            data = self.read(key)
            if data is None:
                return None
            try:
                known = self._layouts[source.stream] = parse_cold_group(data, self.path(key))[1]
            finally:
                self._documents.pop(key, None)
        return known[source.name]

    def _known_layout(self, source: Source) -> ColdLayout:
        return self._layouts[source.stream][source.name]

    def _damaged(self, error: IntegrityError, source: Source, pieces: Sequence[Piece]) -> IntegrityError:
        """Return ``error`` with what was read and where, unless it says so."""
        if "stream" in error.details:
            return error
        base, width = source.pack_of(pieces[0].key) * source.shard_rows, source.row_bytes
        start = base + min(piece.offset for piece in pieces) // width
        stop = base + max(piece.offset + piece.length for piece in pieces) // width
        return self._unreadable(error, source, pieces[0].key, start, stop)

    def _unreadable(self, error: IntegrityError, source: Source, key: str, start: int, stop: int) -> IntegrityError:
        facts = {"stream": source.stream, "field": source.field.name, "rows": [start, stop], "file": self.path(key)}
        return IntegrityError(
            f"rows [{start}, {stop}) of {source.field.name} in stream {source.stream} cannot be read, {self.path(key)} "
            f"is damaged: {error}; restore it from a copy, or run `spool verify` to see what else is",
            **{**error.details, **facts},
        )

    def locate(self, source: Source, run: Run) -> list[ByteRange] | None:
        """See `Tier.locate`; of a compressed shard the chunks that hold the rows, each with its checksum."""
        layout = self._layout(source)
        if layout is None or not run.n:
            return None if layout is None else []
        key, base = source.locate(run.extent)
        if not self._listed.has(source, key, (run.row + run.n - base) * source.row_bytes):
            return None
        try:
            if layout.codec == "raw":
                if self.objects.info(key) is None:
                    return None
                parts = list(_raw_parts(layout, run.row - base, run.n))
            else:
                parts = list(_chunk_parts(layout, self._indexes.of(key, layout), run.row - base, run.n))
        except NotFoundError:
            return None
        except IntegrityError as error:
            raise self._unreadable(error, source, key, run.row, run.row + run.n) from error
        return [
            ByteRange(self.path(key), start, stop - start, source.field.name, (base + first, base + end), source.stream)
            for start, stop, first, end in parts
        ]

    def path(self, key: str) -> str:
        """See `Tier.path`."""
        return f"{self.objects.url}/{key}"

    def close(self) -> None:
        """See `Tier.close`."""
        self._workers.close()
        self.objects.close()


def _wanted_layers(source: Source, pieces: Iterable[Piece], batch: Batch) -> slice | None:
    """Return the stored layers that all of ``pieces`` together want; None for whole rows."""
    low, high = source.shape[0] if source.shape else 0, 0
    for piece in pieces:
        layers = batch.targets[piece.target].layers
        if layers is None:
            return None
        chosen = stored_layers(source.field, layers)
        low, high = min(low, chosen.start), max(high, chosen.stop)
    return slice(low, max(high, low))


def _raw_parts(layout: ColdLayout, row: int, n: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the bytes ``[start, stop)`` of a raw object that are rows ``[row, row + n)``, and which rows they are."""
    for start, stop in cold.raw_pieces(layout, row, n):
        end = row + (stop - start) // layout.spec.row_bytes
        yield start, stop, row, end
        row = end


def _chunk_parts(layout: ColdLayout, index: Index, row: int, n: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the bytes ``[start, stop)`` of each row group that holds rows ``[row, row + n)``, and which rows."""
    for number, group in groupby(cold.zstd_spans(layout, index, row, n), attrgetter("group")):
        spans = list(group)
        first = number * layout.chunk_rows
        yield spans[0].start, spans[-1].stop, max(first, row), min(first + layout.chunk_rows, row + n)
