"""`Spool.verify`: every recorded row is there; with ``deep``, it is what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import crc32c
import numpy as np

from spool.audit.cold import ColdPacks, Pack, split
from spool.audit.extents import Whole, named_rows
from spool.audit.metadata import check_metadata
from spool.audit.records import check_records, known_problem
from spool.audit.report import Finding, Findings, Report
from spool.audit.streams import Stream, Streams, group_key
from spool.audit.units import NamedUnits, check_units
from spool.catalog import LogState, PackState
from spool.errors import SpoolError
from spool.formats import experts
from spool.formats.values import Array
from spool.logs import Problem
from spool.logs.keys import is_fact_stream
from spool.logs.packs import has_left
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
        states: in which tier each pack is.
        problems: what of the logs and manifests could not be taken in.
        units: the multimodal units.
    """

    events: Iterable[Event]
    packs: Mapping[Pack, LogState]
    states: Mapping[Pack, PackState]
    problems: Sequence[Problem]
    units: NamedUnits = NamedUnits({}, ())


def verify(
    store: HotStore | None,
    cold: ColdPacks | None,
    recorded: Recorded,
    *,
    deep: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compare what is in the roots with what was recorded; deleted packs are nobody's loss.

    Args:
        store: reads the hot root; None where there is none.
        cold: the packs of the cold root; None where there is none.
        recorded: what should be there. Take it before this call: a live writer goes on.
        deep: read everything again, check every checksum, and lint the routing.
        progress: called with bytes done and bytes in all where ``deep``.
    """
    named, findings = named_rows(recorded.events), Findings()
    for problem in recorded.problems:
        findings.add(known_problem("" if store is None else store.root, problem))
    tiers = _Tiers(Streams(store) if store is not None else None, cold, recorded.states)
    hot, there = split(named.extents, tiers.pack_of, tiers.is_hot)
    n_packs = n_extents = n_bytes = 0
    if store is not None:
        chosen = {whole: named.extents[whole] for whole in hot}
        n_packs, n_extents, n_bytes = _verify_hot(store, tiers, chosen, recorded, findings, deep, progress)
    if cold is not None:
        cold.check(there, named.extents, findings, deep=deep)
        n_packs += len([pack for pack in cold.entries if tiers.is_hot(pack) is False])
        wholes = [whole for rows in there.values() for runs in rows.values() for whole in runs]
        n_extents, n_bytes = n_extents + len(wholes), n_bytes + sum(map(tiers.n_bytes, wholes))
    root, objects = None if store is None else store.root, None if cold is None else cold.objects
    units = check_units(root, objects, recorded.units, findings, deep=deep)
    return Report(deep, named.n_sessions, n_packs, n_extents, n_bytes, findings.all(), *units)


class _Tiers:
    """Where packs are, and how their streams lie."""

    def __init__(self, streams: Streams | None, cold: ColdPacks | None, states: Mapping[Pack, PackState]) -> None:
        self.streams = streams
        self._cold = cold
        self._states = states
        self._here = frozenset(() if streams is None else streams.names())

    def pack_of(self, whole: Whole) -> Pack | None:
        """Return the pack that an extent lies in; None where its stream does not say."""
        layout = self._layout(whole)
        return None if layout is None else (whole.stream, whole.row // layout[0])

    def n_bytes(self, whole: Whole) -> int:
        """Return the bytes of an extent."""
        layout = self._layout(whole)
        return 0 if layout is None else whole.n * layout[1]

    def _layout(self, whole: Whole) -> tuple[int, int] | None:
        """Return the rows of a pack and the bytes of a row."""
        if self.streams is not None and (whole.stream in self._here or self._cold is None):
            stream = self.streams.get(whole.stream)
            if isinstance(stream, SpoolError) or whole.array not in stream.arrays:
                return None
            return stream.layout.shard_rows[whole.array], stream.arrays[whole.array].row_bytes
        assert self._cold is not None
        found = self._cold.stream(whole.stream)
        if isinstance(found, SpoolError) or whole.array not in found.layouts:
            return None
        return found.layouts[whole.array].shard_rows, found.layouts[whole.array].spec.row_bytes

    def is_hot(self, pack: Pack) -> bool | None:
        """Whether a pack is to be in the hot root; None where it was deleted."""
        state = self._states.get(pack)
        if state == "gone":
            return None
        return pack[0] in self._here and (state != "evicted" or self._cold is None)

    def is_known_hot(self, pack: Pack) -> bool:
        """Whether records are to be in the hot root; where it is all there is, those of lost streams too."""
        lost = self._cold is None and pack[0] not in self._here and not is_fact_stream(pack[0])
        return self.is_hot(pack) is True or (lost and self._states.get(pack) != "gone")

    def elsewhere(self, stream: str) -> set[int]:
        """Return the packs of a stream that are no longer in the hot root."""
        return {pack for (name, pack), state in self._states.items() if name == stream and state in ("evicted", "gone")}


def _verify_hot(
    store: HotStore,
    tiers: _Tiers,
    extents: Mapping[Whole, Sequence[str]],
    recorded: Recorded,
    findings: Findings,
    deep: bool,
    progress: Progress | None,
) -> tuple[int, int, int]:
    """Check what is to be in the hot root; return how many packs, extents and bytes that are."""
    streams = tiers.streams
    assert streams is not None
    rows = _Rows(streams, findings, deep=deep)
    places = sorted(filter(None, map(rows.place, extents)), key=lambda place: place.whole)
    total, done = sum(place.length for place in places), 0
    for place in places:
        rows.check(place, extents[place.whole])
        done += place.length
        if progress is not None and deep:
            progress(done, total)
    for whole, steps in sorted(extents.items()):
        rows.check_named(whole, steps)
    n_packs, ends = 0, _ends(places)
    known = {pack for pack in recorded.packs if tiers.is_known_hot(pack)}
    for name in sorted({*streams.names(), *(stream for stream, _ in known)}):
        away = tiers.elsewhere(name)
        packs = check_metadata(streams, name, ends.get(name, {}), findings, skip=rows.files, elsewhere=away)
        packs |= {pack for stream, pack in known if stream == name}
        states = {pack: recorded.packs.get((name, pack), LogState()) for pack in sorted(packs - away)}
        told = {problem.pack for problem in recorded.problems if problem.stream == name}
        check_records(store.root, name, states, findings, deep=deep, told=told)
        n_packs += len(states)
    return n_packs, len(places), total


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
        """Check that the rows are there, and what they are, unless the pack leaves the hot root meanwhile."""
        wrong = self._what_is_wrong(place, steps)
        pack = place.whole.row // place.stream.layout.shard_rows[place.array.name]
        if wrong is not None and not has_left(self._store.root, place.stream.name, pack, self._store.path(place.key)):
            self._report(place, wrong, steps)

    def _what_is_wrong(self, place: _Place, steps: Sequence[str]) -> str | None:
        size, end = self._size(place.key), place.start + place.length
        if size == 0:
            return "the file is missing"
        if size < end:
            return f"the file has only {size} bytes: these rows are cut off"
        if not self._deep:
            return None
        try:
            if self._checksum(place, steps) != place.whole.crc:
                return "the bytes were altered: their crc32c is not the one that was recorded"
        except SpoolError as error:
            return str(error)
        return None

    def _size(self, key: str) -> int:
        if key not in self._sizes:
            try:
                self._sizes[key] = self._store.size(key)
            except SpoolError:
                self._sizes[key] = 0
        return self._sizes[key]

    def _checksum(self, place: _Place, steps: Sequence[str]) -> int:
        """Return the CRC-32C of the rows; routing is linted on the way."""
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
        return crc

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
