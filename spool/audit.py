"""What is on disk against what was recorded: `Spool.verify`, ``usage`` and ``info``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import crc32c
import numpy as np
from msgspec import Struct

from spool.errors import IntegrityError, NotFoundError, SpoolError
from spool.formats import experts, shard
from spool.model.events import Attached, StepCommitted
from spool.model.fields import ROUTED_EXPERTS, ArraySpec, FieldSpec, Layout, Schema
from spool.model.refs import Extent
from spool.stores.hot import HotStore

PIECE_BYTES = 8 << 20


class Finding(Struct, frozen=True):
    """Something that is not as it should be.

    Attributes:
        kind: ``integrity`` (bytes are missing, short or altered) or ``lint`` (faithfully stored, but implausible).
        where: a file, or an extent.
        text: what is wrong.
    """

    kind: str
    where: str
    text: str


class Report(Struct, frozen=True):
    """What `verify` looked at and found."""

    deep: bool
    n_sessions: int
    n_extents: int
    n_bytes: int
    findings: tuple[Finding, ...]

    def summary(self) -> str:
        """Return the report as one line."""
        done = "re-read and checked" if self.deep else "found in place"
        problems = f"{len(self.findings)} findings" if self.findings else "nothing wrong"
        return f"{self.n_sessions} sessions, {self.n_extents} extents, {self.n_bytes} bytes {done}: {problems}"


class Whole(NamedTuple):
    """A whole extent: rows ``[row, row + n)`` of a stored array and their checksum."""

    stream: str
    array: str
    row: int
    n: int
    crc: int


class Stream(NamedTuple):
    """What a stream's group says."""

    schema: Schema
    layout: Layout
    arrays: dict[str, ArraySpec]
    fields: dict[str, FieldSpec]


class Audit:
    """Compares files with events.

    Args:
        root: the hot root.
        store: reads it.
        events: all recorded events of all sessions.
    """

    def __init__(self, root: str, store: HotStore, events: Iterable[Any]) -> None:
        self._root = root
        self._store = store
        self._streams: dict[str, Stream] = {}
        self._sessions: set[str] = set()
        self._extents: set[Whole] = set()
        self._findings: list[Finding] = []
        for event in events:
            self._note(event)

    def _note(self, event: Any) -> None:
        if hasattr(event, "session_id"):
            self._sessions.add(event.session_id)
        if isinstance(event, StepCommitted | Attached):
            for array, extents in event.extents.items():
                for extent in extents:
                    if extent.n:
                        self._extents.add(_whole(array, extent))

    def verify(
        self, problems: Iterable[tuple[str, str]], *, deep: bool, progress: Callable[[int, int], None] | None
    ) -> Report:
        """Check that every recorded row is there; with ``deep`` that it is what was written."""
        self._findings = [Finding("integrity", where, text) for where, text in problems]
        known = sorted(whole for whole in self._extents if self._check_stream(whole))
        total = sum(self._bytes(whole) for whole in known)
        done = 0
        for whole in known:
            self._check(whole, deep=deep)
            done += self._bytes(whole)
            if progress is not None and deep:
                progress(done, total)
        for name in self.stream_names():
            self._check_sealed(name)
        return Report(deep, len(self._sessions), len(known), total, tuple(self._findings))

    def usage(self) -> list[dict[str, Any]]:
        """Return rows and bytes by stream and stored array; ``sent_bytes`` as engines send them (routing as int32)."""
        rows: dict[tuple[str, str], int] = {}
        for whole in self._extents:
            rows[whole.stream, whole.array] = rows.get((whole.stream, whole.array), 0) + whole.n
        usage = []
        for name in self.stream_names():
            stream = self._stream(name)
            for array in stream.schema.arrays:
                n_rows = rows.get((name, array.name), 0)
                width = _sent_row_bytes(stream.fields[array.name], array)
                usage.append({
                    "stream": name, "field": array.name, "rows": n_rows, "stored_bytes": n_rows * array.row_bytes,
                    "sent_bytes": n_rows * width, "file_bytes": _disk_bytes(self._path(name, array.name)),
                })  # fmt: skip
            usage.append({
                "stream": name, "field": "records", "rows": None, "stored_bytes": None, "sent_bytes": None,
                "file_bytes": _disk_bytes(self._path(name, "records")),
            })  # fmt: skip
        return usage

    def stream_names(self) -> list[str]:
        """Return the streams of the root."""
        folder = os.path.join(self._root, "streams")
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))

    def _path(self, *parts: str) -> str:
        return os.path.join(self._root, "streams", *parts)

    def _stream(self, name: str) -> Stream:
        stream = self._streams.get(name)
        if stream is None:
            schema, layout = shard.parse_group(self._store.read(f"streams/{name}/zarr.json"))
            fields = {array.name: spec for spec in schema.fields for array in spec.arrays}
            stream = Stream(schema, layout, {array.name: array for array in schema.arrays}, fields)
            self._streams[name] = stream
        return stream

    def _bytes(self, whole: Whole) -> int:
        return whole.n * self._stream(whole.stream).arrays[whole.array].row_bytes

    def _check_stream(self, whole: Whole) -> bool:
        try:
            if whole.array in self._stream(whole.stream).arrays:
                return True
            text = "is named by a step, but is no array of the stream"
        except SpoolError as error:
            text = str(error)
        finding = Finding("integrity", f"{whole.stream}/{whole.array}", text)
        if finding not in self._findings:
            self._findings.append(finding)
        return False

    def _check(self, whole: Whole, *, deep: bool) -> None:
        stream = self._stream(whole.stream)
        array, shard_rows = stream.arrays[whole.array], stream.layout.shard_rows[whole.array]
        pack, first = divmod(whole.row, shard_rows)
        key = f"streams/{whole.stream}/{shard.shard_key(array.name, 1 + len(array.shape), pack)}"
        where = f"{self._store.path(key)} rows [{whole.row}, {whole.row + whole.n})"
        start, length = first * array.row_bytes, whole.n * array.row_bytes
        try:
            if deep:
                self._check_bytes(whole, stream.fields[whole.array], array, (key, start, length), where)
            elif self._store.size(key) < start + length:
                self._find(where, f"the file has {self._store.size(key)} bytes, the rows end at {start + length}")
        except (IntegrityError, NotFoundError) as error:
            self._find(where, str(error))

    def _check_bytes(
        self, whole: Whole, spec: FieldSpec, array: ArraySpec, place: tuple[str, int, int], where: str
    ) -> None:
        key, start, length = place
        step = max(PIECE_BYTES // array.row_bytes, 1) * array.row_bytes
        crc = 0
        for offset in range(0, length, step):
            with self._store.borrow(key, start + offset, min(step, length - offset)) as view:
                crc = crc32c.crc32c(view, crc)
                if spec.name == ROUTED_EXPERTS:
                    self._lint(view, spec, array, offset // array.row_bytes, where)
        if crc != whole.crc:
            self._find(where, f"crc32c is {crc:08x}, {whole.crc:08x} was recorded: the bytes were altered")

    def _lint(self, view: memoryview, spec: FieldSpec, array: ArraySpec, position: int, where: str) -> None:
        rows = np.frombuffer(view, np.dtype(array.dtype)).reshape(-1, *array.shape)
        for found in experts.lint(rows, spec, position=position):
            self._findings.append(Finding("lint", where, found.message))

    def _find(self, where: str, text: str) -> None:
        self._findings.append(Finding("integrity", where, text))

    def _check_sealed(self, name: str) -> None:
        """Check that sealed shards have the index that Zarr readers need."""
        try:
            stream = self._stream(name)
        except SpoolError as error:
            self._find(self._path(name), str(error))
            return
        for array in stream.schema.arrays:
            chunk_rows, shard_rows = stream.layout.chunk_rows[array.name], stream.layout.shard_rows[array.name]
            try:
                valid = shard.parse_rows(self._store.read(f"streams/{name}/{array.name}/zarr.json"))[1]
            except SpoolError as error:
                self._find(self._path(name, array.name, "zarr.json"), str(error))
                continue
            for first, count in valid:
                key = f"streams/{name}/{shard.shard_key(array.name, 1 + len(array.shape), first // shard_rows)}"
                expected = shard.shard_index(
                    count * array.row_bytes, chunk_bytes=chunk_rows * array.row_bytes, n_chunks=shard_rows // chunk_rows
                )
                if count and self._index(key, len(expected)) != expected:
                    self._find(self._store.path(key), "the shard's index is missing or damaged; its rows are not")

    def _index(self, key: str, n_bytes: int) -> bytes:
        try:
            size = self._store.size(key)
            with self._store.borrow(key, max(size - n_bytes, 0), min(size, n_bytes)) as view:
                return bytes(view)
        except SpoolError:
            return b""


def _whole(array: str, extent: Extent) -> Whole:
    return Whole(extent.stream, array, extent.row - extent.before, extent.before + extent.n + extent.after, extent.crc)


def _sent_row_bytes(spec: FieldSpec, array: ArraySpec) -> int:
    return 4 * math.prod(spec.row_shape) if spec.name == ROUTED_EXPERTS else array.row_bytes


def _disk_bytes(folder: str) -> int:
    return sum(_file_bytes(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names)


def _file_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
