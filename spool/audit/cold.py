"""The objects of a cold root: each is as large as its pack's manifest says; deep, each row as it was recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import crc32c
import numpy as np

from spool.audit.extents import Whole
from spool.audit.report import Finding, Findings
from spool.errors import IntegrityError, NotFoundError
from spool.formats import cold, experts, records
from spool.formats.cold_arrays import ColdLayout, parse_cold_array, parse_cold_group
from spool.formats.frames import decode_event
from spool.formats.manifest import PackEntry
from spool.formats.shard import group_key, shard_key
from spool.logs.keys import gone_key, parse_pack_key, records_key
from spool.logs.packs import parse_tombstone
from spool.model.fields import ROUTED_EXPERTS, FieldSpec, numpy_dtype
from spool.stores.objects import ObjectInfo, Objects

Pack = tuple[str, int]
LEFT_S = 3600.0
"""A pack that no manifest lists so long after its last object was put is not on its way any more."""

Rows = Mapping[str, list[Whole]]
"""Extents that lie in a pack, by array."""


class ColdStream(NamedTuple):
    """A stream as its group in the cold root says.

    Attributes:
        layouts: how its arrays lie there, by name.
        fields: the field that an array belongs to, by the array's name.
    """

    layouts: Mapping[str, ColdLayout]
    fields: Mapping[str, FieldSpec]


class ColdPacks:
    """What manifests say is in a cold root, compared with what is.

    Args:
        objects: the cold root.
        entries: of the packs that are not deleted.
    """

    def __init__(self, objects: Objects, entries: Mapping[Pack, PackEntry]) -> None:
        self.entries = dict(entries)
        self._objects = objects
        self._streams: dict[str, ColdStream | IntegrityError] = {}

    @property
    def objects(self) -> Objects:
        """The cold root."""
        return self._objects

    def path(self, key: str) -> str:
        """Return an object's URL."""
        return f"{self._objects.url}/{key}"

    def stream(self, name: str) -> ColdStream | IntegrityError:
        """Return a stream, or why it cannot be read.

        Raises:
            StorageError: the cold root cannot be reached.
        """
        if name not in self._streams:
            try:
                key = group_key(name)
                schema, layouts = parse_cold_group(self._objects.get(key), self.path(key))
                fields = {array.name: spec for spec in schema.fields for array in spec.arrays}
                self._streams[name] = ColdStream(layouts, fields)
            except NotFoundError:
                self._streams[name] = IntegrityError("the stream's group is missing: nobody can tell where rows lie")
            except IntegrityError as error:
                self._streams[name] = error
        return self._streams[name]

    def is_gone(self, pack: Pack) -> bool:
        """Whether a pack was deleted, perhaps just now."""
        return self._objects.info(gone_key(*pack)) is not None

    def is_done_with(self, pack: Pack) -> bool:
        """Whether a pack was deleted so long ago that its objects went, too."""
        try:
            return parse_tombstone(self._objects.get(gone_key(*pack)), gone_key(*pack)).done
        except (NotFoundError, IntegrityError):
            return False

    def check(
        self, rows: Mapping[Pack, Rows], steps: Mapping[Whole, Sequence[str]], findings: Findings, *, deep: bool
    ) -> None:
        """Check all packs.

        Args:
            rows: extents that are to be found here, by pack.
            steps: who names them.
            findings: takes what is wrong.
            deep: read everything.

        Raises:
            StorageError: the cold root cannot be reached.
        """
        by_stream: dict[str, list[Pack]] = {}
        for pack in sorted({*self.entries, *rows}):
            by_stream.setdefault(pack[0], []).append(pack)
        there = self._objects.list("streams/")
        sizes: dict[str, dict[str, int]] = {}
        for info in there:
            sizes.setdefault(info.key.split("/")[1], {})[info.key] = info.size
        for name, packs in by_stream.items():
            checked = _Stream(self, self._objects, name, sizes.get(name, {}), steps, deep=deep)
            for pack in packs:
                found = [*checked.pack(pack, self.entries.get(pack), rows.get(pack, {}))]
                if found and not self.is_gone(pack):
                    for finding, named in found:
                        findings.add(finding, named)
            for finding in checked.documents([entry for pack in packs if (entry := self.entries.get(pack))]):
                findings.add(finding)
        for pack, objects in self._left(there).items():
            findings.add(_unlisted(pack, self.path(objects[0].key), len(objects)))

    def _left(self, there: Iterable[ObjectInfo]) -> dict[Pack, list[ObjectInfo]]:
        """Return the objects of packs that no manifest lists and that are not on their way, nor being deleted."""
        left: dict[Pack, list[ObjectInfo]] = {}
        for found in there:
            pack = parse_pack_key(found.key)
            if pack is not None and pack not in self.entries:
                left.setdefault(pack, []).append(found)
        latest = time.time() - LEFT_S
        old = {pack: objects for pack, objects in left.items() if max(info.modified for info in objects) < latest}
        return {pack: objects for pack, objects in sorted(old.items()) if not self.is_gone(pack)}


def _unlisted(pack: Pack, file: str, n_objects: int) -> Finding:
    text = (
        f"{n_objects} objects of pack {pack[1]}, and no manifest that can be read lists it: its spiller died on the "
        f"way. The next one of its hot root goes on; where that is lost, delete streams/{pack[0]}/*/c/{pack[1]} and "
        f"streams/{pack[0]}/records/{pack[1]}.arrow with the store's own tools"
    )
    return Finding(kind="unfinished", text=text, stream=pack[0], file=file, tier="cold")


Found = Iterable[tuple[Finding, Sequence[str]]]


class _Stream:
    """Checks the packs of one stream."""

    def __init__(
        self,
        cold_packs: ColdPacks,
        objects: Objects,
        name: str,
        sizes: Mapping[str, int],
        steps: Mapping[Whole, Sequence[str]],
        *,
        deep: bool,
    ) -> None:
        self._packs = cold_packs
        self._objects = objects
        self._name = name
        self._sizes = sizes
        self._steps = steps
        self._deep = deep

    def pack(self, pack: Pack, entry: PackEntry | None, rows: Rows) -> Found:
        """Yield what is wrong with a pack."""
        stream = self._packs.stream(self._name)
        if isinstance(stream, IntegrityError):
            yield self._finding(str(stream), group_key(self._name)), self._named(rows)
            return
        if entry is None:
            text = f"pack {pack[1]} is neither in a hot root nor listed by a manifest: its rows are lost"
            yield self._finding(text, records_key(*pack)), self._named(rows)
            return
        for key, size in entry.objects.items():
            array = self._array_of(key)
            named = self._named({array: rows.get(array, [])})
            wrong = self._wrong_size(key, size)
            if wrong is not None:
                yield self._finding(wrong, key, array), named
            elif self._deep and array == "records":
                yield from self._check_records(key, entry)
            elif self._deep:
                yield from self._check_shard(key, stream, entry, array, rows.get(array, ()))
        yield from self._beyond(stream, entry, rows)

    def documents(self, entries: Sequence[PackEntry]) -> Iterable[Finding]:
        """Yield what is wrong with the documents by which any Zarr reader finds the rows."""
        stream = self._packs.stream(self._name)
        if isinstance(stream, IntegrityError):
            return
        for array, layout in stream.layouts.items():
            key = f"streams/{self._name}/{array}/zarr.json"
            try:
                valid = dict(parse_cold_array(layout, self._objects.get(key), self._packs.path(key))[1])
            except NotFoundError:
                valid = {}
            except IntegrityError as error:
                yield self._finding(str(error), key, array)
                continue
            expected = {entry.pack * layout.shard_rows: entry.rows[array] for entry in entries if entry.rows.get(array)}
            missing = [first for first, n in expected.items() if valid.get(first) != n]
            if missing and not self._packs.is_gone((self._name, missing[0] // layout.shard_rows)):
                yield self._finding(
                    f"it does not list the rows from {missing[0]} on: Zarr readers miss them; `spool spill` by hand at "
                    "the hot root of the stream puts it again",
                    key, array,
                )  # fmt: skip
            for first in valid.keys() - expected.keys():
                if self._packs.is_done_with((self._name, first // layout.shard_rows)):
                    yield self._finding(
                        f"it lists rows from {first} on, which were deleted: Zarr readers take them for zeros; `spool "
                        "spill` by hand at the hot root of the stream puts it again",
                        key, array,
                    )  # fmt: skip

    def _wrong_size(self, key: str, size: int) -> str | None:
        if key not in self._sizes:
            return "the object is missing"
        found = self._sizes[key]
        return (
            None if found == size else f"the object has {found} bytes, its manifest says {size}: it was cut or altered"
        )

    def _beyond(self, stream: ColdStream, entry: PackEntry, rows: Rows) -> Found:
        """Yield extents that are not in the pack's objects at all."""
        for array, wholes in rows.items():
            first = entry.pack * stream.layouts[array].shard_rows if array in stream.layouts else 0
            for whole in wholes:
                if whole.row + whole.n - first > entry.rows.get(array, 0):
                    text = f"the pack has {entry.rows.get(array, 0)} rows here, and steps name others"
                    yield self._finding(text, self._key(stream, array, entry.pack), array, whole), self._steps[whole]

    def _check_records(self, key: str, entry: PackEntry) -> Found:
        try:
            payloads = records.decode(self._objects.get(key))
            for payload in payloads:
                decode_event(payload)
            if len(payloads) != entry.n_events:
                text = f"there are {len(payloads)} events, the manifest has {entry.n_events}"
                yield self._finding(text, key, "records"), ()
        except (IntegrityError, NotFoundError) as error:
            yield self._finding(str(error), key, "records"), ()

    def _check_shard(
        self, key: str, stream: ColdStream, entry: PackEntry, array: str, wholes: Sequence[Whole]
    ) -> Found:
        layout = stream.layouts[array]
        try:
            rows = _decoded(layout, self._objects.get(key), entry.rows.get(array, 0))
        except (IntegrityError, NotFoundError) as error:
            yield self._finding(str(error), key, array), self._named({array: list(wholes)})
            return
        first, width = entry.pack * layout.shard_rows, layout.spec.row_bytes
        for whole in wholes:
            part = rows[(whole.row - first) * width : (whole.row - first + whole.n) * width]
            if crc32c.crc32c(part) != whole.crc:
                text = "the bytes were altered: their crc32c is not the one that was recorded"
                yield self._finding(text, key, array, whole), self._steps[whole]
            if stream.fields[array].name == ROUTED_EXPERTS and len(part) == whole.n * width:
                table = np.frombuffer(part, numpy_dtype(layout.spec.dtype)).reshape(-1, *layout.spec.shape)
                for found in experts.lint(table, stream.fields[array], position=whole.row):
                    yield self._finding(found.message, key, array, whole, kind="lint"), self._steps[whole]

    def _array_of(self, key: str) -> str:
        return key.split("/")[2]

    def _key(self, stream: ColdStream, array: str, pack: int) -> str:
        rank = len(stream.layouts[array].spec.shape) + 1 if array in stream.layouts else 1
        return f"streams/{self._name}/{shard_key(array, rank, pack)}"

    def _named(self, rows: Rows) -> list[str]:
        return [step for wholes in rows.values() for whole in wholes for step in self._steps[whole]]

    def _finding(
        self, text: str, key: str, array: str | None = None, whole: Whole | None = None, *, kind: Any = "integrity"
    ) -> Finding:
        rows = None if whole is None else (whole.row, whole.row + whole.n)
        return Finding(
            kind=kind,
            text=text,
            stream=self._name,
            field=array,
            rows=rows,
            file=self._packs.path(key),
            tier="cold",
        )


def _decoded(layout: ColdLayout, data: bytes, n: int) -> memoryview:
    """Return the first ``n`` rows of a shard, every chunk checked.

    Raises:
        IntegrityError: index or a chunk is damaged.
    """
    view = memoryview(data)
    index = cold.parse_index(layout, view[: layout.index_bytes])
    if layout.codec == "raw":
        start, stop = cold.raw_span(layout, 0, n, verify=True)
        return cold.raw_rows(layout, view[start:stop], 0, n, verify=True)
    rows = np.empty((n, *layout.spec.shape), numpy_dtype(layout.spec.dtype))
    spans = cold.zstd_spans(layout, index, 0, n)
    cold.place_chunks(layout, ((span, view[span.start : span.stop]) for span in spans), rows, 0)
    return rows.reshape(-1).view(np.uint8).data


def split(
    extents: Iterable[Whole], pack_of: Callable[[Whole], Pack | None], is_hot: Callable[[Pack], bool | None]
) -> tuple[list[Whole], dict[Pack, dict[str, list[Whole]]]]:
    """Return the extents to look for in the hot root, and those for the cold one by pack and array.

    Args:
        extents: of all steps.
        pack_of: returns the pack of an extent; None where nothing says how its stream lies.
        is_hot: whether a pack is to be in the hot root; None where it was deleted, and then its extents are left out.
    """
    hot: list[Whole] = []
    there: dict[Pack, dict[str, list[Whole]]] = {}
    for whole in extents:
        pack = pack_of(whole)
        tier = True if pack is None else is_hot(pack)
        if tier:
            hot.append(whole)
        elif tier is not None and pack is not None:
            there.setdefault(pack, {}).setdefault(whole.array, []).append(whole)
    return hot, there
