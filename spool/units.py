"""Multimodal units: what `Spool.put_unit` and `Spool.read_units` do."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from numpy.typing import NDArray

from spool.config import Config
from spool.errors import CapacityError, NotFoundError, ReleasedError
from spool.feeds import Feeds
from spool.formats.units import Encoded, decode, encode
from spool.logs.units import Deletions
from spool.model.refs import Ref
from spool.model.units import is_unit_key, own_keys, unit_path
from spool.patience import with_room, with_room_async
from spool.recorder import Recorder
from spool.sizes import format_size, format_time
from spool.spiller.units import UnitUploader
from spool.stores.shared import SharedFolder
from spool.stores.threads import Threads
from spool.stores.units import ACCOUNT, HotUnits, disk_bytes

log = logging.getLogger("spool.units")


class Units:
    """The units of one handle.

    Args:
        config: where the roots are.
        feeds: have the cold root.
        recorder: this process's room in the hot root.
    """

    def __init__(self, config: Config, feeds: Feeds, recorder: Recorder) -> None:
        self._config = config
        self._recorder = recorder
        self._hot = None if config.root is None else HotUnits(config.root)
        self._objects = None if feeds.cold is None else feeds.cold.objects
        self._threads = Threads(config.cold_concurrency)
        self._uploader: UnitUploader | None = None
        if self._hot is not None and self._objects is not None:
            self._uploader = UnitUploader(self._hot, self._objects)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.close()
        if self._uploader is not None:
            self._uploader.close()

    # -- storing -----------------------------------------------------------------------------------------------------

    def put(self, array: object) -> str:
        """See `Spool.put_unit`."""
        self._recorder.check_recording()
        unit = encode(array)
        with_room(self._recorder, lambda: self._store(unit))
        return unit.key

    async def put_async(self, array: object, on_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> str:
        """See `Spool.put_unit_async`; waiting for room holds no thread."""
        self._recorder.check_recording()
        unit: Encoded = await on_thread(lambda: encode(array))
        await with_room_async(self._recorder, on_thread, lambda: self._store(unit))
        return unit.key

    def _store(self, unit: Encoded) -> None:
        hot, sync = self._hot, self._config.durability == "disk"
        assert hot is not None
        parts = (unit.head, unit.body)
        if hot.touch(unit.key) and hot.holds(unit.key, parts):
            with suppress(NotFoundError):  # it was evicted just now
                if sync:  # who stored it may have been content with less
                    hot.make_durable(unit.key)
                return
        room, n_bytes, stored = self._recorder.room, disk_bytes(unit.size), False
        with hot.changing():
            if not room.reserve(ACCOUNT, n_bytes):
                raise self._refused(n_bytes)
            try:
                stored = hot.store(unit.key, parts, sync=sync, direct=self._config.direct)
            finally:
                if not stored:
                    room.settle(ACCOUNT, n_bytes)

    def _refused(self, n_bytes: int) -> CapacityError:
        limit, taken = self._recorder.room.totals()
        all_of = "" if limit is None else f" of {format_size(limit)}"
        return CapacityError(
            f"the hot tier has no room for a unit of {format_size(n_bytes)}: {format_size(taken)}{all_of} are taken; "
            "room returns as packs and units are evicted that are safe in the cold root or, where there is none, as "
            "sessions are released and units age: see `spool status`, raise hot_bytes, or record into another root",
            need=n_bytes,
            limit=limit,
            taken=taken,
        )

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, refs: Sequence[Ref]) -> None:
        """Have the units in the cold root that references name and this node has, also those put after their packs.

        Raises:
            IntegrityError: one is damaged.
            StorageError: a root failed.
        """
        if self._uploader is None:
            return
        for key in self._uploader.bring(key for ref in refs for key in own_keys(ref.units)):
            log.warning("%s is named by what is published, and is neither here nor in the cold root: put it again", key)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[str]) -> list[NDArray[Any]]:
        """See `Spool.read_units`."""
        unique = list(dict.fromkeys(keys))
        found = dict(zip(unique, self._threads.map(self._load, unique), strict=True))
        arrays, given = [], set[str]()
        for key in keys:
            arrays.append(found[key].copy() if key in given else found[key])
            given.add(key)
        return arrays

    def _load(self, key: str) -> NDArray[Any]:
        if not is_unit_key(key):
            raise NotFoundError(f"{key!r:.80} is no key of put_unit: nothing is stored under it", unit=key)
        data, where = None if self._hot is None else self._hot.read(key), ""
        if data is not None and self._hot is not None:
            where = self._hot.path(key)
        elif self._objects is not None:
            where = f"{self._objects.url}/{unit_path(key)}"
            data = self._from_cold(key)
        if data is None:
            raise self._missing(key)
        return decode(data, key, where=where)

    def raw(self, key: str) -> bytearray | None:
        """Return a unit's file from whichever tier has it, not checked; None where neither has.

        Raises:
            StorageError: a root failed.
        """
        data = None if self._hot is None else self._hot.read(key)
        return data if data is not None or self._objects is None else self._from_cold(key)

    def _from_cold(self, key: str) -> bytearray | None:
        assert self._objects is not None
        try:
            return bytearray(self._objects.get(unit_path(key)))
        except NotFoundError:
            return None

    def _missing(self, key: str) -> NotFoundError:
        objects = self._objects
        if objects is None:
            objects = SharedFolder(str(self._config.root))
        gone_at = Deletions(objects).find(key)
        if gone_at is not None:
            return ReleasedError(
                f"unit {key} was deleted at {format_time(gone_at)}: no live session named it any more, and it was last "
                "put or named longer ago than units_age_s; put it again",
                unit=key,
            )
        return NotFoundError(
            f"unit {key} is in no tier of {self._config.url}: it was never put, or another node has it and has not "
            "published it",
            unit=key,
        )
