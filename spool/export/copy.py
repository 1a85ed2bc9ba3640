"""Whole sessions, moved into a new hot root: the same rows, bit for bit, and the same events about them.

Every run of rows that an append wrote is one run there too, with the checksum that it had; events and references name
the new places. Releases are left out: nothing in the new spool waits to be deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace
from numpy.typing import NDArray

from spool.errors import IntegrityError, NotFoundError, ReleasedError
from spool.export.source import Source
from spool.extents import together
from spool.formats.arrays import Ragged, copy_rows
from spool.formats.frames import encode_event
from spool.formats.units import check
from spool.model.events import Attached, SessionFinalized, Single, StepCommitted, ToolsStored
from spool.model.fields import ArraySpec, FieldSpec, Schema
from spool.model.refs import Extent, Ref, Span
from spool.model.units import own_keys
from spool.root import make_identity
from spool.stores.units import HotUnits
from spool.write.stream import Rows, Run, Runs, StreamWriter, create_stream

log = logging.getLogger("spool.export")

Extents = Mapping[str, tuple[Extent, ...]]


def copy_sessions(
    source: Source,
    sessions: Mapping[str, int],
    root: str,
    url: str,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Record sessions again in a new hot root.

    Args:
        source: the spool that has them.
        sessions: how much work each is, for ``progress``; by id.
        root: an empty folder.
        url: where the new root will be, for references.
        progress: called with what is done and what there is in all.

    Raises:
        SpoolError: something cannot be read, or written.
    """
    copier = _Copier(source, root, make_identity(root).id, url)
    total, done = sum(sessions.values()), 0
    try:
        for session_id, weight in sessions.items():
            copier.session(session_id)
            done += weight
            if progress is not None:
                progress(done, total)
    finally:
        copier.close()


def check_there(source: Source, session_ids: Iterable[str]) -> None:
    """Check that sessions can be copied whole.

    Raises:
        ReleasedError: one was withdrawn, or collected.
        NotFoundError: one is not recorded.
    """
    for session_id in session_ids:
        row = source.session(session_id)
        if row is not None and row.state == "discarded":
            raise ReleasedError(
                f"session {session_id!r} was withdrawn, or collected after its release: there is nothing to copy",
                session_id=session_id,
            )
        if row is None or not source.events(session_id):
            raise NotFoundError(
                f"there is no session {session_id!r} to copy: it is unknown here, or was collected",
                session_id=session_id,
            )


class _Unlimited:
    """Room without end: the disk's own."""

    def reserve(self, stream: str, n_bytes: int) -> bool:  # noqa: ARG002
        return True

    def settle(self, stream: str, n_bytes: int) -> None:
        pass

    def totals(self) -> tuple[int | None, int]:
        return None, 0


class _Whole(NamedTuple):
    """A whole run of rows of a field in the source.

    Attributes:
        field: its spec.
        extents: by array, standing for position 0 on; two where the field is ragged.
    """

    field: FieldSpec
    extents: dict[str, tuple[Extent, ...]]

    @property
    def n(self) -> int:
        """Rows."""
        return next(iter(self.extents.values()))[0].n


class _Copier:
    """Writes a new root.

    Args:
        source: the spool that is copied from.
        root: the new root.
        spool_id: its identity.
        url: where it will be.
    """

    def __init__(self, source: Source, root: str, spool_id: str, url: str) -> None:
        self._source = source
        self._root = root
        self._spool_id = spool_id
        self._url = url
        self._schemas: dict[str, Schema] = {}
        self._writers: dict[str, StreamWriter] = {}
        self._tools: set[tuple[str, str]] = set()
        self._moved: dict[tuple[str, str, int], tuple[str, int]] = {}
        self._units: set[str] = set()

    def close(self) -> None:
        """Seal all that was written."""
        for writer in self._writers.values():
            writer.close()

    def session(self, session_id: str) -> None:
        """Copy a session."""
        self._moved = {}  # rows are shared inside of a session only
        located = self._source.events(session_id)
        stream = next((item.stream for item in located if isinstance(item.event, StepCommitted)), located[0].stream)
        writer = self._writer(stream)
        for item in located:
            (event,) = self._source.whole([item])
            if isinstance(event, StepCommitted):
                self._copy_rows(event.extents)
                self._copy_units(event)
                moved = replace(event, extents=self._place(event.extents))
                writer.commit(encode_event(together(self._new_tools(event.tools_key, writer.name), moved)))
            else:
                writer.commit(encode_event(self._renamed(event)))
        for late in self._source.late(session_id):
            if isinstance(late, Attached):
                self._copy_rows(late.extents)
                late = replace(late, extents=self._place(late.extents))  # noqa: PLW2901
            writer.commit(encode_event(late))

    def _renamed(self, event: Single) -> Single:
        """Return an event whose references name the new spool."""
        if not isinstance(event, SessionFinalized):
            return event
        refs = (
            replace(ref, spool_id=self._spool_id, roots=(self._url,), extents=self._place(ref.extents))
            for ref in event.segments
        )
        return replace(event, segments=tuple(refs))

    def _new_tools(self, key: str | None, stream: str) -> ToolsStored | None:
        place = None if key is None or (stream, key) in self._tools else self._source.tools_at(key)
        if key is None or place is None:
            return None
        self._tools.add((stream, key))
        (stored,) = self._source.whole([place])
        assert isinstance(stored, ToolsStored)
        return stored

    # -- rows --------------------------------------------------------------------------------------------------------

    def _copy_rows(self, extents: Extents) -> None:
        """Copy the runs that ``extents`` are of, but for those that were copied already."""
        wholes = list(self._new(extents))
        refs = [_ref(self._source.spool_id, whole) for whole in wholes]
        samples = self._source.read(refs, "stored", [slice(0, whole.n) for whole in wholes]) if refs else []
        for whole, sample in zip(wholes, samples, strict=True):
            self._write(whole, sample[whole.field.name])

    def _new(self, extents: Extents) -> Iterator[_Whole]:
        seen = set(self._moved)
        for name in dict.fromkeys(array.partition(".")[0] for array in extents):
            arrays = [array for array in (name, f"{name}.offsets", f"{name}.values") if array in extents]
            for parts in zip(*(extents[array] for array in arrays), strict=True):
                first = parts[0]
                key = (first.stream, arrays[0], first.whole[0])
                if first.n and key not in seen:
                    seen.add(key)
                    pairs = zip(arrays, parts, strict=True)
                    found: dict[str, tuple[Extent, ...]] = {array: (_whole(part),) for array, part in pairs}
                    yield _Whole(self._schema(first.stream)[name], found)

    def _write(self, whole: _Whole, value: Any) -> None:
        old = {array: parts[0] for array, parts in whole.extents.items()}
        writer = self._writer(next(iter(old.values())).stream)
        rows = dict(zip(old, map(_rows, whole.field.arrays, _stored(whole.field, value)), strict=True))

        def check(runs: Runs) -> None:
            for array, extent in old.items():
                self._check(array, extent, runs[array])

        for array, runs in writer.append(rows, check).items():
            if runs:
                self._moved[old[array].stream, array, old[array].row] = (writer.name, runs[0].row)

    def _check(self, array: str, extent: Extent, runs: tuple[Run, ...]) -> None:
        """Refuse what is not, bit for bit, what was recorded."""
        if extent.n and [(run.n, run.crc) for run in runs] != [(extent.n, extent.crc)]:
            raise IntegrityError(
                f"rows [{extent.row}, {extent.row + extent.n}) of {array} in stream {extent.stream} are not what was "
                "recorded; run `spool verify --deep`",
                stream=extent.stream, field=array, rows=[extent.row, extent.row + extent.n],
            )  # fmt: skip

    def _place(self, extents: Extents) -> dict[str, tuple[Extent, ...]]:
        """Return where rows are in the new root."""
        return {array: tuple(self._place_one(array, part) for part in parts) for array, parts in extents.items()}

    def _place_one(self, array: str, part: Extent) -> Extent:
        if not part.whole[1]:
            return replace(part, stream=self._writer(part.stream).name, row=0)
        stream, row = self._moved[part.stream, array, part.whole[0]]
        return Extent(stream, row + part.before, part.n, part.position, part.crc, part.before, part.after)

    def _copy_units(self, step: StepCommitted) -> None:
        """Copy the multimodal units that a step names, but for those that are there, or nowhere."""
        for key in own_keys(step.units):
            if key in self._units:
                continue
            self._units.add(key)
            data = self._source.unit(key)
            if data is None:
                log.warning("%s is named by session %r and was not there to be exported", key, step.session_id)
                continue
            check(data, key, where=f"{key} of spool {self._source.spool_id}")
            HotUnits(self._root).store(key, [memoryview(data)], sync=False)

    # -- streams -----------------------------------------------------------------------------------------------------

    def _schema(self, stream: str) -> Schema:
        if stream not in self._schemas:
            self._schemas[stream] = self._source.schema(stream)
        return self._schemas[stream]

    def _writer(self, stream: str) -> StreamWriter:
        """Return the new stream for what is in a stream of the source: the same fields, so packs of the same rows."""
        schema = self._schema(stream)
        if schema.key not in self._writers:
            self._writers[schema.key] = create_stream(self._root, schema, space=_Unlimited())
        return self._writers[schema.key]


def _whole(part: Extent) -> Extent:
    row, n_rows = part.whole
    return Extent(part.stream, row, n_rows, 0, part.crc)


def _ref(spool_id: str, whole: _Whole) -> Ref:
    """Return a reference of one field, all of whose rows are those of a run, however it is aligned."""
    n = whole.n
    return Ref(
        spool_id=spool_id, session_id="", n_tokens=n + 1, n_rows=n + 1, spans=(Span(0, 0, n),), extents=whole.extents
    )  # fmt: skip


def _stored(spec: FieldSpec, value: Any) -> list[NDArray[Any]]:
    """Return what is stored of a field's rows: an array, or end offsets and values."""
    if isinstance(value, Ragged):
        return [value.offsets[1:], value.values]
    return [value if spec.layers is None else value[:, list(spec.layers)]]


def _rows(array: ArraySpec, values: NDArray[Any]) -> Rows:
    def fill(dst: NDArray[Any], first: int) -> None:
        copy_rows(dst, values[first : first + len(dst)])

    assert values.shape[1:] == array.shape
    return Rows(len(values), fill)
