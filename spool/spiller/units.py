"""Multimodal units of a hot root -> objects of the cold one, and away from the hot one once they are safe there.

A unit is put where its key says, so it is the same object from whichever node and however often.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

from spool.catalog import Catalog
from spool.errors import IntegrityError, NotFoundError, StorageError
from spool.formats.frames import decode_event
from spool.formats.units import check
from spool.logs.units import Deletions
from spool.model.events import StepCommitted, parts
from spool.model.units import PREFIX, own_keys, unit_path
from spool.points import reach
from spool.stores.objects import Objects
from spool.stores.threads import PerProcess, Threads
from spool.stores.units import ACCOUNT, HotUnits

log = logging.getLogger("spool.spiller")

UPLOADS = 16
"""Units on their way at a time."""
LARGE_BYTES = 8 << 20
"""Of larger ones, one is in memory at a time."""


def named_units(payloads: Iterable[bytes]) -> Iterator[str]:
    """Yield the units that the events of a pack name, by keys that ``put_unit`` returned; some more than once."""
    mark = PREFIX.encode()
    for payload in payloads:
        if mark in payload:  # most packs name none: they are not decoded for this
            for event in parts(decode_event(payload)):
                if isinstance(event, StepCommitted):
                    yield from own_keys(event.units)


def renew(objects: Objects, key: str) -> None:
    """Put a unit of a cold root again, so that it is young; nothing where it is gone.

    Raises:
        IntegrityError: it is damaged.
        StorageError: the root failed.
    """
    try:
        data = objects.get(unit_path(key))
    except NotFoundError:
        return
    check(data, key, where=f"{objects.url}/{unit_path(key)}")
    objects.put(unit_path(key), data)


class UnitUploader:
    """Brings units of a hot root to a cold one; safe from many threads, and after a fork.

    Args:
        units: of the hot root.
        objects: the cold root.
    """

    def __init__(self, units: HotUnits, objects: Objects) -> None:
        self._units = units
        self._objects = objects
        self._deletions = Deletions(objects)
        self._threads = Threads(UPLOADS)
        self._large = PerProcess(threading.Lock)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.close()

    def bring(self, keys: Iterable[str]) -> list[str]:
        """Have those of the units that are here in the cold root; return those that are in neither.

        Raises:
            IntegrityError: one is not what its key says.
            StorageError: a root failed.
        """
        wanted = list(dict.fromkeys(keys))
        going = self._deletions.pending() if wanted else set()
        there = self._threads.map(lambda key: self._bring(key, again=key in going), wanted)
        return [key for key, is_there in zip(wanted, there, strict=True) if not is_there]

    def insist(self, keys: Iterable[str]) -> None:
        """Put again what somebody began to delete meanwhile, not knowing that a pack names it.

        Raises:
            IntegrityError, StorageError: as `bring`.
        """
        wanted = set(keys)
        if wanted and (going := wanted & self._deletions.pending()):
            self._threads.map(lambda key: self._bring(key, again=True), sorted(going))

    def evict(self, keys: Sequence[str], catalog: Catalog, *, renew_before: float) -> int:
        """Take units out of the hot root once they are in the cold one; return the bytes of room that this gives.

        Those that are damaged stay.

        Args:
            keys: the units.
            catalog: has the account of room.
            renew_before: objects in the cold root that are older are put again first: a node that names a unit, and
                has not published that, is protected by nothing else than the object's age.

        Raises:
            StorageError: a root failed.
        """
        going = self._deletions.pending() if keys else set()

        def evict(key: str) -> int:
            try:
                there = self._bring(key, again=key in going, renew_before=renew_before)
            except IntegrityError as error:
                log.error("a unit stays in the hot root: %s", error)
                return 0
            if not there:
                return 0
            with self._units.changing():
                freed = self._units.remove(key)
                reach("evict.unit")
                catalog.settle(ACCOUNT, freed)
            return freed

        return sum(self._threads.map(evict, keys))

    def _bring(self, key: str, *, again: bool, renew_before: float = 0.0) -> bool:
        """Return whether a unit is in the cold root now.

        Args:
            key: the unit's.
            again: put it even where it is: that object may go at any moment.
            renew_before: so too where the object is older.
        """
        here, there = self._units.info(key), self._objects.info(unit_path(key))
        if here is None:
            return there is not None
        if there is not None and there.size == here.size and there.modified >= renew_before and not again:
            return True
        with self._large.get() if here.size > LARGE_BYTES else nullcontext():
            data = self._units.read(key)
            if data is None:  # it was evicted or deleted just now
                return self._objects.info(unit_path(key)) is not None
            check(data, key, where=self._units.path(key))
            self._put(key, data)
        reach("spill.unit")
        return True

    def _put(self, key: str, data: bytearray) -> None:
        try:
            self._objects.put(unit_path(key), data)
        except IntegrityError as error:  # it is the cold root's fault
            raise StorageError(str(error), **error.details) from error
