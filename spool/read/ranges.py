"""What is fetched of the objects of a cold root: few ranges, and little in them that nobody asked for. Pure."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from spool.formats.cold import zstd_spans
from spool.read.plan import Fetch, Piece, plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from spool.formats.cold import ChunkSpan, Index
    from spool.formats.cold_arrays import ColdLayout

WASTE = 1 / 16
"""Unwanted bytes that are fetched at most, over those wanted: they save requests."""
GAP_BYTES = 1 << 20
"""A request is cheaper than more unwanted bytes than these."""
FETCH_BYTES = 8 << 20
"""Most bytes of a request, and most that its rows take when they are decoded."""
SHARE_BYTES = 4 << 20
"""A request is not made smaller than this only to have more of them under way."""


class ChunkFetch(NamedTuple):
    """One range of a compressed shard, and the pieces whose rows its chunks hold.

    Attributes:
        key: the object.
        spans: its chunks, in the order in which they lie; none where the wanted layers are not stored.
        row: first wanted row, in the shard.
        n: rows from there on to the last wanted one.
        layers: the stored layers that the chunks hold; all for None.
        pieces: in these rows.
    """

    key: str
    spans: Sequence[ChunkSpan]
    row: int
    n: int
    layers: slice | None
    pieces: Sequence[Piece]


def widest_gap(spans: Iterable[tuple[int, int]]) -> int:
    """Return how wide a gap between ranges may be such that fetching all those makes good on `WASTE`.

    Narrow gaps go first: each saves one request, whatever it costs.

    Args:
        spans: half-open ranges, ascending by their start; they may overlap.
    """
    gaps: list[int] = []
    needed = end = 0
    for start, stop in spans:
        if needed and start > end:
            gaps.append(start - end)
        needed += max(0, stop - max(start, end))
        end = max(end, stop)
    widest = wasted = 0
    for gap, equal in groupby(sorted(gaps)):
        wasted += sum(equal)
        if wasted > needed * WASTE or gap > GAP_BYTES:
            break
        widest = gap
    return widest


def raw_fetches(pieces: Iterable[Piece], *, parallel: int) -> list[Fetch]:
    """Return the ranges of rows to fetch for ``pieces`` of objects whose rows lie as they are.

    Args:
        pieces: in any order.
        parallel: requests that may be under way; few large ones are cut so that there are as many.
    """
    by_key = {key: list(own) for key, own in groupby(sorted(pieces), attrgetter("key"))}
    total = sum(piece.length for own in by_key.values() for piece in own)
    limit = min(max(total // parallel, SHARE_BYTES), FETCH_BYTES)
    return [
        fetch
        for own in by_key.values()
        for fetch in plan(
            own, gap=widest_gap((piece.offset, piece.offset + piece.length) for piece in own), limit=limit
        )
    ]


def checked_fetches(pieces: Iterable[Piece], layouts: Mapping[str, ColdLayout]) -> list[Fetch]:
    """Return the ranges of rows to fetch for ``pieces`` of raw objects, each of whole chunks.

    Args:
        pieces: in any order.
        layouts: by object.
    """
    fetches = []
    for key, own in groupby(sorted(pieces), attrgetter("key")):
        wanted = list(own)
        chunk_bytes = layouts[key].chunk_bytes
        whole = [_widened(piece, chunk_bytes) for piece in wanted]
        fetches += plan([*wanted, *whole], gap=0, limit=max(1, FETCH_BYTES // chunk_bytes) * chunk_bytes)
    return fetches


def _widened(piece: Piece, chunk_bytes: int) -> Piece:
    """Return the chunks that ``piece`` touches, as a piece that nothing becomes of."""
    start = piece.offset // chunk_bytes * chunk_bytes
    stop = -(-(piece.offset + piece.length) // chunk_bytes) * chunk_bytes
    return piece._replace(offset=start, length=stop - start, target=-1, check=-1)


def chunk_fetches(
    pieces: Sequence[Piece], layout: ColdLayout, index: Index, layers: slice | None, *, parallel: int
) -> list[ChunkFetch]:
    """Return the ranges of one compressed shard to fetch for ``pieces``; no chunk is in two of them.

    Args:
        pieces: of the shard, sorted; none is empty.
        layout: of its array.
        index: of the shard.
        layers: the stored layers that are wanted.
        parallel: requests that may be under way.

    Raises:
        IntegrityError: such a chunk is not in the shard.
    """
    group_bytes = layout.chunk_rows * layout.spec.row_bytes
    runs = [_groups(run, layout, index, layers) for run in _touched(pieces, group_bytes)]
    gap = widest_gap((group.start, group.stop) for run in runs for group in run)
    decoded = layout.chunk_bytes * (layout.n_layers if layers is None else layers.stop - layers.start)
    share = min(max(decoded * sum(map(len, runs)) // parallel, SHARE_BYTES), FETCH_BYTES)
    windows = [window for run in runs for window in _windows(run, gap, max(1, share // max(decoded, 1)))]
    return _filled(pieces, windows, layout, layers)


class _Group(NamedTuple):
    """The wanted chunks of a row group, which are neighbours: bytes ``[start, stop)``."""

    start: int
    stop: int
    number: int
    spans: Sequence[ChunkSpan]


def _touched(pieces: Iterable[Piece], group_bytes: int) -> Iterator[range]:
    """Yield the row groups that sorted pieces touch, in one range where they follow on each other."""
    run = range(0)
    for piece in pieces:
        first, stop = piece.offset // group_bytes, -(-(piece.offset + piece.length) // group_bytes)
        if run and first <= run.stop:
            run = range(run.start, max(run.stop, stop))
            continue
        if run:
            yield run
        run = range(first, stop)
    if run:
        yield run


def _groups(run: range, layout: ColdLayout, index: Index, layers: slice | None) -> list[_Group]:
    spans = zstd_spans(layout, index, run.start * layout.chunk_rows, len(run) * layout.chunk_rows, layers)
    if not spans:
        return [_Group(0, 0, number, ()) for number in run]
    by_number = [(number, list(own)) for number, own in groupby(spans, attrgetter("group"))]
    return [_Group(own[0].start, own[-1].stop, number, own) for number, own in by_number]


def _windows(run: Iterable[_Group], gap: int, most: int) -> Iterator[list[_Group]]:
    """Yield what one request brings: up to ``most`` groups with no more than ``gap`` between them."""
    window: list[_Group] = []
    for group in run:
        if window and (len(window) == most or group.start - window[-1].stop > gap):
            yield window
            window = []
        window.append(group)
    if window:
        yield window


def _filled(
    pieces: Iterable[Piece], windows: Sequence[list[_Group]], layout: ColdLayout, layers: slice | None
) -> list[ChunkFetch]:
    """Return the fetches of ``windows``, each with the parts of ``pieces`` that lie in it."""
    width = layout.spec.row_bytes
    stops = [(window[-1].number + 1) * layout.chunk_rows * width for window in windows]
    inside: list[list[Piece]] = [[] for _ in windows]
    for piece in pieces:
        number, at, end = bisect_right(stops, piece.offset), piece.offset, piece.offset + piece.length
        while at < end:
            stop = min(end, stops[number])
            row = piece.row + (at - piece.offset) // width
            inside[number].append(piece._replace(offset=at, length=stop - at, row=row))
            number, at = number + 1, stop
    fetches = []
    for window, own in zip(windows, inside, strict=True):
        row = own[0].offset // width
        n = max(piece.offset + piece.length for piece in own) // width - row
        spans = [span for group in window for span in group.spans]
        fetches.append(ChunkFetch(own[0].key, spans, row, n, layers, own))
    return fetches
