"""Sealed packs -> objects of the cold root.

Order: shards and records, the arrays' documents, the manifest. Until the manifest is there nobody lists the pack, and
until its marker is in the hot root the hot copy is the one that counts. Each step may be repeated: the same pack gives
the same keys and bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from spool.errors import NotFoundError
from spool.formats import cold, manifest, records
from spool.formats.manifest import PackEntry
from spool.formats.shard import parse_attributes, parse_rows
from spool.model.fields import ArraySpec, numpy_dtype
from spool.spiller.markers import write_spilled
from spool.stores.hot import HotStore
from spool.stores.local import read_file
from spool.stores.objects import Objects
from spool.write.folder import Folder, open_folder

UPLOADS = 4
"""Objects of one pack on their way at a time; each is held once as stored and once as sent."""


class Uploaded(NamedTuple):
    """A pack whose shards and records are in the cold root, and whose manifest is not."""

    entry: PackEntry
    events: list[bytes]


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
        self._streams: dict[str, _Stream] = {}

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def upload(self, stream: str, packs: Sequence[int]) -> list[PackEntry]:
        """Bring sealed packs of one stream to the cold root; return what is there now.

        Raises:
            IntegrityError: what was recorded is not what is on disk; the pack stays where it is.
            StorageError: the cold root failed; what is there already is written again next time.
        """
        folder = self._stream(stream, packs[0])
        done = [self._upload_one(folder, pack) for pack in packs]
        self._describe(folder, [pack.entry for pack in done])
        for pack in done:
            key = manifest_key(pack.entry)
            self._objects.put(key, manifest.encode([(pack.entry, pack.events)]))
        for pack in done:
            write_spilled(self._root, pack.entry)
            folder.entries[pack.entry.pack] = pack.entry
        return [pack.entry for pack in done]
