"""Sealed packs -> objects of the cold root.

Order: shards and records, the documents of the arrays, the manifest. Until the manifest is there nobody lists the pack,
and until its marker is in the hot root the hot copy is the one that counts. Each step may be repeated: the same pack
gives the same keys and bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from spool.errors import IntegrityError, NotFoundError
from spool.formats import cold, cold_arrays, manifest, records
from spool.formats.cold_arrays import Codec, ColdLayout
from spool.formats.manifest import PackEntry
from spool.formats.shard import group_key, parse_attributes, parse_rows, shard_key
from spool.logs.cold import manifest_key, records_key
from spool.logs.packs import marker_path, read_entry, write_cold
from spool.logs.streams import records_path
from spool.model.fields import ArraySpec
from spool.points import reach
from spool.spiller.evict import disk_bytes
from spool.spiller.turns import turn
from spool.stores.hot import HotStore
from spool.stores.local import read_file
from spool.stores.objects import Objects
from spool.write.folder import Folder, open_folder
from spool.write.seal import packs_of

UPLOADS = 4
"""Objects on their way at a time; each is held twice, as it is stored and as it is sent."""


class Sent(NamedTuple):
    """A pack whose shards and records are in the cold root, and whose manifest is not."""

    entry: PackEntry
    events: list[bytes]


class Stream(NamedTuple):
    """A stream on its way to the cold root.

    Attributes:
        folder: in the hot root.
        layouts: how its arrays lie in the cold root, by name.
        entries: of its packs that are there, by number.
    """

    folder: Folder
    layouts: Mapping[str, ColdLayout]
    entries: dict[int, PackEntry]


class Uploader:
    """Brings packs of a hot root to a cold one.

    Args:
        root: the hot root.
        store: its bytes.
        objects: the cold root.
    """

    def __init__(self, root: str, store: HotStore, objects: Objects) -> None:
        self._root = root
        self._store = store
        self._objects = objects
        self._threads = ThreadPoolExecutor(UPLOADS, thread_name_prefix="spool-upload")
        self._streams: dict[str, Stream] = {}

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def upload(self, name: str, packs: Sequence[int]) -> list[PackEntry]:
        """Bring sealed packs of one stream to the cold root, those left out that are deleted; return what is there now.

        Raises:
            IntegrityError: what is on disk is not what was recorded; the pack stays where it is.
            StorageError: a root failed; what is there already is written again next time.
        """
        with turn(self._root):
            left = [pack for pack in packs if not os.path.exists(marker_path(self._root, name, pack, "gone"))]
            return self._upload(name, left) if left else []

    def _upload(self, name: str, packs: Sequence[int]) -> list[PackEntry]:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = self._open(name, packs[0])
        self._look(stream)
        sent = [self._send(stream, pack) for pack in packs]
        reach("spill.objects")
        self._describe(stream, [pack.entry for pack in sent])
        reach("spill.documents")
        for pack in sent:
            self._objects.put(manifest_key(pack.entry), manifest.encode([pack]))
        reach("spill.manifest")
        for pack in sent:
            write_cold(self._root, pack.entry)
            reach("spill.marked")
            stream.entries[pack.entry.pack] = pack.entry
        return [pack.entry for pack in sent]

    # -- a stream ----------------------------------------------------------------------------------------------------

    def _open(self, name: str, first: int) -> Stream:
        """Return a stream; its codecs are chosen by the pack ``first``, once and for all, unless they were before."""
        folder, _ = open_folder(self._root, name)
        try:
            data = self._objects.get(group_key(name))
        except NotFoundError:
            data = self._group(folder, first)
            self._objects.put(group_key(name), data)
        return Stream(folder, cold_arrays.parse_cold_group(data)[1], {})

    def _look(self, stream: Stream) -> None:
        """Learn which packs are in the cold root now: others may have been deleted since."""
        there = set(packs_of(stream.folder, ".cold")).difference(packs_of(stream.folder, ".gone"))
        for pack in stream.entries.keys() - there:
            del stream.entries[pack]
        for pack in there - stream.entries.keys():
            with suppress(IntegrityError):  # a torn one is mended when the next spiller starts
                entry = read_entry(self._root, stream.folder.name, pack)
                if entry is not None:
                    stream.entries[pack] = entry

    def _group(self, folder: Folder, pack: int) -> bytes:
        codecs: dict[str, Codec] = {}
        for field in folder.schema.fields:
            for spec in field.arrays:
                layered = field.num_layers is not None
                sample = min(self._rows_on_disk(folder, spec, pack) * spec.row_bytes, cold.SAMPLE_BYTES)
                sample -= sample % spec.row_bytes
                with self._store.borrow(_shard_key(folder, spec, pack), 0, sample) as view:
                    codecs[spec.name] = cold.choose_codec(spec, view, layered=layered)
        created = parse_attributes(read_file(f"{folder.path}/zarr.json"))["created"]
        return cold_arrays.cold_group_metadata(
            folder.schema, folder.layout, codecs, stream=folder.name, created=float(created)
        )

    def _describe(self, stream: Stream, new: Sequence[PackEntry]) -> None:
        """Say in the documents of the arrays which rows are there, the ``new`` packs' among them."""
        entries = {**stream.entries, **{entry.pack: entry for entry in new}}
        documents = []
        for name, layout in stream.layouts.items():
            valid = [
                (pack * layout.shard_rows, entry.rows[name])
                for pack, entry in sorted(entries.items())
                if entry.rows.get(name)
            ]
            n_rows = sum(valid[-1]) if valid else 0
            data = cold_arrays.cold_array_metadata(layout, n_rows=n_rows, valid_rows=valid)
            documents.append((f"streams/{stream.folder.name}/{name}/zarr.json", data))
        list(self._threads.map(lambda document: self._objects.put(*document), documents))

    # -- a pack ------------------------------------------------------------------------------------------------------

    def _send(self, stream: Stream, pack: int) -> Sent:
        folder = stream.folder
        path = records_path(self._root, folder.name, pack)
        table = read_file(path)
        events = records.decode(table)
        jobs: list[Callable[[], tuple[str, int] | None]] = [
            partial(self._send_shard, stream, spec, pack) for spec in folder.schema.arrays
        ]
        jobs.append(partial(self._put, records_key(folder.name, pack), table))
        sizes = dict(filter(None, self._threads.map(lambda job: job(), jobs)))
        rows = {spec.name: self._valid_rows(folder, spec, pack) for spec in folder.schema.arrays}
        entry = PackEntry(
            stream=folder.name,
            pack=pack,
            n_events=len(events),
            sealed_at=os.stat(path).st_mtime,
            rows={name: n for name, n in rows.items() if n},
            objects=sizes,
            stored_bytes=sum(sizes.values()),
            hot_bytes=self._hot_bytes(folder, pack),
            codecs={name: layout.codec for name, layout in stream.layouts.items()},
        )
        return Sent(entry, events)

    def _send_shard(self, stream: Stream, spec: ArraySpec, pack: int) -> tuple[str, int] | None:
        n_rows, key = self._rows_on_disk(stream.folder, spec, pack), _shard_key(stream.folder, spec, pack)
        if not n_rows:
            return None
        with self._store.borrow(key, 0, n_rows * spec.row_bytes) as view:
            data = cold.encode_shard(stream.layouts[spec.name], view)
        return self._put(key, data)

    def _put(self, key: str, data: bytes | memoryview) -> tuple[str, int]:
        self._objects.put(key, data)
        reach("spill.shard")
        return key, len(data)

    def _valid_rows(self, folder: Folder, spec: ArraySpec, pack: int) -> int:
        """Return the rows of a pack that its array's document calls valid."""
        start = pack * folder.layout.shard_rows[spec.name]
        return dict(parse_rows(read_file(f"{folder.path}/{spec.name}/zarr.json"))[1]).get(start, 0)

    def _rows_on_disk(self, folder: Folder, spec: ArraySpec, pack: int) -> int:
        """Return the rows of a sealed pack; where some are missing, those that are there."""
        n_rows = self._valid_rows(folder, spec, pack)
        if n_rows:
            return n_rows
        try:
            return os.stat(folder.shard_path(spec, pack)).st_size // spec.row_bytes
        except FileNotFoundError:
            return 0

    def _hot_bytes(self, folder: Folder, pack: int) -> int:
        paths = [folder.shard_path(spec, pack) for spec in folder.schema.arrays]
        return sum(map(disk_bytes, [*paths, records_path(self._root, folder.name, pack)]))


def _shard_key(folder: Folder, spec: ArraySpec, pack: int) -> str:
    return f"streams/{folder.name}/{shard_key(spec.name, len(spec.shape) + 1, pack)}"
