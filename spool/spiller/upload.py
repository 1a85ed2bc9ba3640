"""Sealed packs -> objects of the cold root.

Order: records, shards, the documents of the arrays, the units that the pack names, the manifest. Until that is there
nobody lists the pack, and until its marker is in the hot root the hot copy is the one that counts. Each step may be
repeated: the same pack gives the same keys and bytes. Of two copies of one hot root that each have a pack of the same
name, the one whose records are there first brings it over, unless it dies on the way.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from typing import NamedTuple, TypeVar

from spool.errors import IntegrityError, NotFoundError, StorageError
from spool.formats import cold, cold_arrays, manifest, records
from spool.formats.cold_arrays import Codec, ColdLayout
from spool.formats.manifest import PackEntry
from spool.formats.shard import group_key, parse_attributes, parse_rows, shard_key
from spool.logs.keys import manifest_key, records_key
from spool.logs.packs import marker_path, pack_bytes, read_entry, write_cold
from spool.logs.streams import records_path
from spool.model.fields import ArraySpec
from spool.points import reach
from spool.spiller.buffers import Buffers
from spool.spiller.check import Checker, Named, named_in
from spool.spiller.claims import Claims, no_word_on_packs
from spool.spiller.turns import turn
from spool.spiller.units import UnitUploader, named_units
from spool.stores.hot import HotStore
from spool.stores.local import read_file
from spool.stores.objects import Objects
from spool.stores.units import HotUnits
from spool.write.folder import Folder, open_folder
from spool.write.seal import packs_of

T = TypeVar("T")

UPLOADS = 16
"""Objects on their way at a time: what is published is small, and waits for the network."""
PACKS = 6
"""Packs on their way at a time."""
ENCODED_BYTES = 100 << 20
"""Of shards that are encoded and on their way: mostly two large ones, one encoded while the other is sent."""
LARGE_BYTES = 8 << 20
"""Larger objects are sent one at a time: what is sent of one is copied once more, in parts, several at once."""
PIECE_BYTES = 4 << 20
"""Of a hot shard, what is read, checked and encoded at a time."""
LATE_S = 900.0
"""For so long after it was put a document is looked at: an older one that was given up may still arrive."""

log = logging.getLogger("spool.spiller")


class Sent(NamedTuple):
    """A pack whose shards and records are in the cold root, and whose ``manifest`` is not; ``units`` that it names."""

    entry: PackEntry
    manifest: bytes
    units: frozenset[str]


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
        confirm: called when all of a pack is put and before that counts; raises where the cold root is not, or no
            longer, the one that this root joined.

    Attributes:
        units: brings the units that packs name.
    """

    def __init__(
        self, root: str, store: HotStore, objects: Objects, confirm: Callable[[], object] = lambda: None
    ) -> None:
        self._root = root
        self._store = store
        self._objects = objects
        self.units = UnitUploader(HotUnits(root), objects)
        self._confirm = confirm
        self._threads = ThreadPoolExecutor(UPLOADS, thread_name_prefix="spool-upload")
        self._packs = ThreadPoolExecutor(PACKS, thread_name_prefix="spool-spill")
        self._buffers = Buffers(ENCODED_BYTES)
        self._large = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._described: dict[str, float] = {}
        self._claims = Claims(root, objects)

    def close(self) -> None:
        """End the threads."""
        self._packs.shutdown()
        self._threads.shutdown()
        self.units.close()

    def upload(self, name: str, packs: Sequence[int]) -> list[PackEntry]:
        """Bring sealed packs of one stream to the cold root, but for deleted ones; return what is there now.

        Of a stream once at a time.

        Raises:
            IntegrityError: what is on disk is not what was recorded; the pack stays where it is.
            StorageError: a root failed; what is there already is written again next time.
        """
        with turn(self._root, alone=False):
            left = [pack for pack in packs if not os.path.exists(marker_path(self._root, name, pack, "gone"))]
            return self._upload(name, left) if left else []

    def _upload(self, name: str, packs: Sequence[int]) -> list[PackEntry]:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = self._open(name, packs[0])
        sent = all_of([self._packs.submit(self._send, stream, pack) for pack in packs])
        reach("spill.objects")
        self._describe(stream, [pack.entry for pack in sent])
        reach("spill.documents")
        units = frozenset(key for pack in sent for key in pack.units)
        self.units.bring(units)
        all_of([self._threads.submit(self._claims.insist, name, pack.entry.pack) for pack in sent])
        self._put_all((manifest_key(pack.entry), pack.manifest) for pack in sent)
        reach("spill.manifest")
        self.units.insist(units)
        self._confirm()
        for pack in sent:
            write_cold(self._root, pack.entry, self._objects.url)
            reach("spill.marked")
            stream.entries[pack.entry.pack] = pack.entry
            self._claims.forget(name, pack.entry.pack)
        return [pack.entry for pack in sent]

    def is_there(self, name: str, pack: int) -> bool:
        """Whether every object of a pack that was brought over is in the cold root now, with the size that it had.

        Raises:
            StorageError: the cold root cannot be reached.
        """
        try:
            entry = read_entry(self._root, name, pack)
        except IntegrityError:  # mended when the next spiller starts
            return False
        if entry is None:
            return False
        found = all_of([self._threads.submit(self._objects.info, key) for key in entry.objects])
        return [info.size if info is not None else None for info in found] == list(entry.objects.values())

    # -- a stream ----------------------------------------------------------------------------------------------------

    def _open(self, name: str, first: int) -> Stream:
        """Return a stream; its codecs are chosen by the pack ``first``, once and for all, unless they were before."""
        folder, _ = open_folder(self._root, name)
        try:
            with no_word_on_packs():
                data = self._objects.get(group_key(name))
        except NotFoundError:
            own = self._group(folder, first)
            with no_word_on_packs():
                self._objects.create(group_key(name), own)
                data = self._objects.get(group_key(name))  # a copy of this root may have been first
        return Stream(folder, cold_arrays.parse_cold_group(data, self._url(group_key(name)))[1], {})

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
        self._store.close()  # samples are larger than what is read later
        path = f"{folder.path}/zarr.json"
        created = parse_attributes(read_file(path), path)["created"]
        return cold_arrays.cold_group_metadata(
            folder.schema, folder.layout, codecs, stream=folder.name, created=float(created)
        )

    def _describe(self, stream: Stream, new: Sequence[PackEntry]) -> None:
        """Say in the documents of the arrays which rows are there, the ``new`` packs' among them."""
        self._put_all(self._documents(stream, new))
        self._described[stream.folder.name] = time.monotonic()

    def mend_documents(self, more: Iterable[str] = ()) -> list[str]:
        """Put again the documents that do not list the rows of what was brought over lately; return their keys.

        A put that was given up, and tried again, may arrive after the next one: then the older document is there.

        Args:
            more: streams that are looked at too, however long ago something of them was brought over.

        Raises:
            StorageError: the cold root failed.
        """
        since = time.monotonic() - LATE_S
        self._described = {name: at for name, at in self._described.items() if at > since}
        mended = []
        for name in {**self._described, **dict.fromkeys(more)}:
            with turn(self._root, alone=False):
                stream = self._streams.get(name) or self._known(name)
                wanted = [] if stream is None else self._documents(stream)
                differing = self._threads.map(lambda document: self._differs(*document), wanted)
                again = [document for document, differs in zip(wanted, differing, strict=True) if differs]
                self._put_all(again)
                mended += [key for key, _ in again]
        return mended

    def _known(self, name: str) -> Stream | None:
        """Return a stream of which packs are in the cold root; None where none is."""
        try:
            folder, _ = open_folder(self._root, name)
            packs = set(packs_of(folder, ".cold")).difference(packs_of(folder, ".gone"))
            return self._open(name, min(packs)) if packs else None
        except IntegrityError:  # recovery, or `verify`, says what is wrong with it
            return None

    def _differs(self, key: str, wanted: bytes) -> bool:
        """Whether a document is not there, cannot be used, or lists other rows than ``wanted`` does."""
        try:
            there = parse_rows(self._objects.get(key), self._url(key))[1]
        except (NotFoundError, IntegrityError):
            return True
        return parse_rows(wanted)[1] != there

    def _documents(self, stream: Stream, new: Sequence[PackEntry] = ()) -> list[tuple[str, bytes]]:
        """Return the documents of the arrays, by key: of all packs in the cold root and the ``new`` ones."""
        self._look(stream)
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
        return documents

    def _put_all(self, documents: Iterable[tuple[str, bytes]]) -> None:
        all_of([self._threads.submit(self._put, *document) for document in documents])

    # -- a pack ------------------------------------------------------------------------------------------------------

    def _url(self, key: str) -> str:
        return f"{self._objects.url}/{key}"

    def _send(self, stream: Stream, pack: int) -> Sent:
        folder = stream.folder
        path = records_path(self._root, folder.name, pack)
        table = read_file(path)
        events = records.decode(table)
        self._claims.claim(folder.name, pack, table)
        reach("spill.claimed")
        named = named_in(events, folder.name, pack, folder.layout.shard_rows)
        jobs = [self._threads.submit(self._send_shard, stream, spec, pack, named) for spec in folder.schema.arrays]
        sizes = {**dict(filter(None, all_of(jobs))), records_key(folder.name, pack): len(table)}
        rows = {spec.name: self._valid_rows(folder, spec, pack) for spec in folder.schema.arrays}
        entry = PackEntry(
            stream=folder.name,
            pack=pack,
            n_events=len(events),
            sealed_at=os.stat(path).st_mtime,
            rows={name: n for name, n in rows.items() if n},
            objects=sizes,
            stored_bytes=sum(sizes.values()),
            hot_bytes=pack_bytes(self._root, folder.name, pack),
            codecs={name: layout.codec for name, layout in stream.layouts.items()},
        )
        return Sent(entry, manifest.encode([(entry, events)]), frozenset(named_units(events)))

    def _send_shard(
        self, stream: Stream, spec: ArraySpec, pack: int, named: Mapping[str, Sequence[Named]]
    ) -> tuple[str, int] | None:
        folder, key, wholes = stream.folder, _shard_key(stream.folder, spec, pack), named[spec.name]
        n_rows, layout = self._rows_on_disk(folder, spec, pack), stream.layouts[spec.name]
        checker = Checker(
            f"{spec.name} of pack {pack} of stream {folder.name} in {self._root}",
            wholes,
            spec.row_bytes,
            pack * layout.shard_rows,
        )
        if not n_rows:
            checker.end()
            return None
        with self._buffers.lend(layout.max_shard_bytes(n_rows)) as into:
            pieces = self._pieces(layout, key, n_rows, checker)
            data = cold.encode_pieces(layout, pieces, n_rows, into=into)
            checker.end()
            self._claims.renew(folder.name, pack)
            sent = self._put_object(key, data)
            if layout.codec != "raw":
                self._prove_index(key, data[: layout.index_bytes])
            data.release()
        self._store.let_go(key)
        return sent

    def _pieces(self, layout: ColdLayout, key: str, n_rows: int, checker: Checker) -> Iterator[memoryview]:
        """Yield the rows of a hot shard, checked, in pieces of whole chunks."""
        width = layout.spec.row_bytes
        step = -(-PIECE_BYTES // (layout.chunk_rows * width)) * layout.chunk_rows
        for row in range(0, n_rows, step):
            with self._store.borrow(key, row * width, min(step, n_rows - row) * width) as view:
                checker.feed(view)
                yield view

    def _prove_index(self, key: str, index: memoryview) -> None:
        """Read back the index of a compressed shard: without it nothing in the shard is found again."""
        with no_word_on_packs():
            found = self._objects.get_range(key, 0, len(index))
        if found != index:
            self._objects.delete([key])
            raise StorageError(
                f"the index of {self._objects.url}/{key} does not read back as it was written; the object was removed "
                "and is written again. Call the store's operator if that recurs",
                key=key,
            )

    def _put_object(self, key: str, data: bytes | memoryview) -> tuple[str, int]:
        self._put(key, data)
        reach("spill.shard")
        return key, len(data)

    def _put(self, key: str, data: bytes | memoryview) -> None:
        with no_word_on_packs(), self._large if len(data) > LARGE_BYTES else nullcontext():
            self._objects.put(key, data)

    def _valid_rows(self, folder: Folder, spec: ArraySpec, pack: int) -> int:
        """Return the rows of a pack that its array's document calls valid."""
        start = pack * folder.layout.shard_rows[spec.name]
        path = f"{folder.path}/{spec.name}/zarr.json"
        return dict(parse_rows(read_file(path), path)[1]).get(start, 0)

    def _rows_on_disk(self, folder: Folder, spec: ArraySpec, pack: int) -> int:
        """Return the rows of a sealed pack; where some are missing, those that are there."""
        n_rows = self._valid_rows(folder, spec, pack)
        if n_rows:
            return n_rows
        try:
            return os.stat(folder.shard_path(spec, pack)).st_size // spec.row_bytes
        except FileNotFoundError:
            return 0


def all_of(futures: Sequence[Future[T]]) -> list[T]:
    """Return the results of all; wait for all of them before the first failure is raised."""
    wait(futures)
    return [future.result() for future in futures]


def _shard_key(folder: Folder, spec: ArraySpec, pack: int) -> str:
    return f"streams/{folder.name}/{shard_key(spec.name, len(spec.shape) + 1, pack)}"
