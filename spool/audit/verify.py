"""`Spool.verify`: every recorded row is there; with ``deep``, it is what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import crc32c
import numpy as np

from spool.audit.extents import Whole, named_rows
from spool.audit.metadata import check_metadata
from spool.audit.records import check_records, known_problem
from spool.audit.report import Finding, Findings, Report
from spool.audit.streams import Stream, Streams, group_key
from spool.catalog import LogState
from spool.errors import SpoolError
from spool.formats import experts
from spool.formats.values import Array
from spool.logs import Problem
from spool.model.events import Event
from spool.model.fields import ROUTED_EXPERTS, ArraySpec, numpy_dtype
from spool.stores.hot import HotStore

PIECE_BYTES = 8 << 20
"""How much of an extent is in memory at once."""

Progress = Callable[[int, int], None]


class Recorded(NamedTuple):
    """What should be there.

    Attributes:
        events: of all sessions.
        packs: how far the log of each (stream, pack) is known.
        problems: what of the logs could not be taken in.
    """

    events: Iterable[Event]
    packs: Mapping[tuple[str, int], LogState]
    problems: Sequence[Problem]


def verify(store: HotStore, recorded: Recorded, *, deep: bool = False, progress: Progress | None = None) -> Report:
    """Compare the files of a root with what was recorded.

    Args:
        store: reads the root.
        recorded: what should be there. Take it before this call: a live writer goes on.
        deep: read everything again, check every checksum, and lint the routing.
        progress: called with bytes done and bytes in all where ``deep``.
    """
    named = named_rows(recorded.events)
    findings, streams = Findings(), Streams(store)
    for problem in recorded.problems:
        findings.add(known_problem(store.root, problem))
    rows = _Rows(streams, findings, deep=deep)
    places = sorted(filter(None, map(rows.place, named.extents)), key=lambda place: place.whole)
    total, done = sum(place.length for place in places), 0
    for place in places:
        rows.check(place, named.extents[place.whole])
        done += place.length
        if progress is not None and deep:
            progress(done, total)
    for whole, steps in sorted(named.extents.items()):
        rows.check_named(whole, steps)
    n_packs, ends = 0, _ends(places)
    for name in sorted({*streams.names(), *(stream for stream, _ in recorded.packs)}):
        packs = check_metadata(streams, name, ends.get(name, {}), findings, skip=rows.files)
        packs |= {pack for stream, pack in recorded.packs if stream == name}
        states = {pack: recorded.packs.get((name, pack), LogState()) for pack in sorted(packs)}
        told = {problem.pack for problem in recorded.problems if problem.stream == name}
        check_records(store.root, name, states, findings, deep=deep, told=told)
        n_packs += len(states)
    return Report(deep, named.n_sessions, n_packs, len(places), total, findings.all())


class _Place(NamedTuple):
    """Where a whole extent lies."""

    whole: Whole
    stream: Stream
    array: ArraySpec
    key: str
    start: int
    length: int


def _ends(places: Iterable[_Place]) -> dict[str, dict[str, dict[int, int]]]:
    """Return by stream, array and pack where the last of the rows in that pack ends."""
    ends: dict[str, dict[str, dict[int, int]]] = {}
    for place in places:
        pack, row = divmod(place.whole.row, place.stream.layout.shard_rows[place.array.name])
        packs = ends.setdefault(place.stream.name, {}).setdefault(place.array.name, {})
        packs[pack] = max(packs.get(pack, 0), row + place.whole.n)
    return ends


class _Rows:
    """Checks the rows of extents.

    Attributes:
        files: paths of the shards with findings.
    """

    def __init__(self, streams: Streams, findings: Findings, *, deep: bool) -> None:
        self._streams = streams
        self._store = streams.store
        self._findings = findings
        self._deep = deep
        self._sizes: dict[str, int] = {}
        self.files: set[str] = set()

    def place(self, whole: Whole) -> _Place | None:
        """Return where an extent lies, or None where its stream does not say."""
        stream = self._streams.get(whole.stream)
        if isinstance(stream, SpoolError) or whole.array not in stream.arrays:
            return None
        array = stream.arrays[whole.array]
        start = whole.row % stream.layout.shard_rows[whole.array] * array.row_bytes
        key = stream.shard_key(array, whole.row)
        return _Place(whole, stream, array, key, start, whole.n * array.row_bytes)

    def check_named(self, whole: Whole, steps: Sequence[str]) -> None:
        """Report an extent of which nobody knows where it lies."""
        stream = self._streams.get(whole.stream)
        if isinstance(stream, SpoolError):
            text, file = str(stream), self._store.path(group_key(whole.stream))
        elif whole.array not in stream.arrays:
            text, file = "steps name this array, and the stream has none of that name", None
        else:
            return
        rows = (whole.row, whole.row + whole.n)
        found = Finding(
            kind="integrity", text=text, stream=whole.stream, field=whole.array, rows=rows, file=file
        )  # fmt: skip
        self._findings.add(found, steps)

    def check(self, place: _Place, steps: Sequence[str]) -> None:
        """Check that the rows are there, and what they are."""
        size, end = self._size(place.key), place.start + place.length
        if size == 0:
            self._report(place, "the file is missing", steps)
        elif size < end:
            self._report(place, f"the file has only {size} bytes: these rows are cut off", steps)
        elif self._deep:
            try:
                self._check_bytes(place, steps)
            except SpoolError as error:
                self._report(place, str(error), steps)

    def _size(self, key: str) -> int:
        if key not in self._sizes:
            try:
                self._sizes[key] = self._store.size(key)
            except SpoolError:
                self._sizes[key] = 0
        return self._sizes[key]

    def _check_bytes(self, place: _Place, steps: Sequence[str]) -> None:
        width = place.array.row_bytes
        piece = max(PIECE_BYTES // width, 1) * width
        crc = 0
        for offset in range(0, place.length, piece):
            length = min(piece, place.length - offset)
            with self._store.borrow(place.key, place.start + offset, length) as view:
                crc = crc32c.crc32c(view, crc)
                if place.stream.fields[place.array.name].name == ROUTED_EXPERTS:
                    dtype = numpy_dtype(place.array.dtype)
                    rows = np.frombuffer(view, dtype).reshape(-1, *place.array.shape)
                    self._lint(place, rows, place.whole.row + offset // width, steps)
        if crc != place.whole.crc:
            self._report(place, "the bytes were altered: their crc32c is not the one that was recorded", steps)

    def _lint(self, place: _Place, rows: Array, first: int, steps: Sequence[str]) -> None:
        spec = place.stream.fields[place.array.name]
        for found in experts.lint(rows, spec, position=first):
            self._findings.add(self._finding(place, "lint", found.message), steps, group=found.kind)

    def _report(self, place: _Place, text: str, steps: Sequence[str]) -> None:
        found = self._finding(place, "integrity", text)
        self.files.add(str(found.file))
        self._findings.add(found, steps)

    def _finding(self, place: _Place, kind: str, text: str) -> Finding:
        whole = place.whole
        return Finding(
            kind=kind,  # type: ignore[arg-type]
            text=text,
            stream=whole.stream,
            field=whole.array,
            rows=(whole.row, whole.row + whole.n),
            file=self._store.path(place.key),
        )
