"""What a root says of the units that were deleted from it: so that who misses one can tell, and who brings one back.

A deletion is announced in an object that names the units. From then on they may go; whoever still needs one puts it
again, which shows in its object's time. After a while those go of which the time is still the same, and the object
says that it is done.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec import Struct

from spool.errors import NotFoundError
from spool.model.units import UNITS
from spool.stores.objects import ObjectInfo, Objects

GONE_UNITS = f"{UNITS}gone/"
MERGED = 64
"""So many deletions that are done become one object."""
REMEMBERED_S = 90 * 86_400.0
"""How long it is remembered which units were deleted, at least."""


class GoneUnits(Struct, frozen=True):
    """Units that are being deleted, or were.

    Attributes:
        at: when that was announced, seconds since the epoch.
        units: by key, the time of the unit's object in the cold root then; where it had none, 0. Of units that are
            gone, when that was announced.
        done: they are gone.
    """

    at: float
    units: dict[str, float]
    done: bool = False


class Deletion(NamedTuple):
    """An announced deletion, and the key of the object that it stands in."""

    key: str
    gone: GoneUnits


class Deletions:
    """The deletions of units in one root.

    Args:
        objects: the cold root; of a spool without one, the hot root's folder.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: dict[ObjectInfo, GoneUnits] = {}

    def announce(self, units: Mapping[str, float], *, done: bool = False) -> None:
        """Say, durably, that units are deleted from now on.

        Raises:
            StorageError: it cannot be said.
        """
        at = time.time()
        told = dict.fromkeys(units, at) if done else dict(units)
        self._write(GoneUnits(at, told, done))

    def all(self) -> list[Deletion]:
        """Return what is said, the latest last; a torn object says nothing.

        Raises:
            StorageError: the root cannot be read.
        """
        known, found = self._known, dict[ObjectInfo, GoneUnits]()
        for info in self._objects.list(GONE_UNITS):
            gone = known.get(info) or self._read(info)
            if gone is not None:
                found[info] = gone
        self._known = found
        return [Deletion(info.key, gone) for info, gone in found.items()]

    def pending(self) -> set[str]:
        """Return the units that may go at any moment.

        Raises:
            StorageError: the root cannot be read.
        """
        return {unit for _, gone in self.all() if not gone.done for unit in gone.units}

    def find(self, unit: str) -> float | None:
        """Return when a unit was deleted the last time; None where that is not remembered.

        Raises:
            StorageError: the root cannot be read.
        """
        return max((gone.at for _, gone in self.all() if unit in gone.units), default=None)

    def finish(self, deletion: Deletion, deleted: Iterable[str]) -> None:
        """Say that of the units of a deletion those that were to go are gone, and which those are.

        Raises:
            StorageError: it cannot be said.
        """
        units = dict.fromkeys(deleted, deletion.gone.at)
        if units:
            self._objects.put(deletion.key, msgspec.json.encode(GoneUnits(deletion.gone.at, units, done=True)))
        else:
            self._objects.delete([deletion.key])

    def merge(self) -> None:
        """Make one object of many deletions that are done; the oldest are forgotten.

        Raises:
            StorageError: the root failed; call it again.
        """
        done = [deletion for deletion in self.all() if deletion.gone.done]
        if len(done) < MERGED:
            return
        since = time.time() - REMEMBERED_S
        units: dict[str, float] = {}
        for _, gone in done:
            for unit, at in gone.units.items():
                if at >= since:
                    units[unit] = max(at, units.get(unit, at))
        if units:
            self._write(GoneUnits(max(units.values()), units, done=True))
        self._objects.delete([deletion.key for deletion in done])

    def _write(self, gone: GoneUnits) -> None:
        key = f"{GONE_UNITS}{int(gone.at * 1000):013d}-{secrets.token_hex(8)}.json"
        self._objects.put(key, msgspec.json.encode(gone))

    def _read(self, info: ObjectInfo) -> GoneUnits | None:
        with suppress(NotFoundError, msgspec.DecodeError):
            return msgspec.json.decode(self._objects.get(info.key), type=GoneUnits)
        return None
