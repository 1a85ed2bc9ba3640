"""Deleting multimodal units that nobody names any more, by age.

In the hot root at once: who puts or names a unit says so in its file. In the cold one, which other nodes share, it is
announced first: a node that publishes a pack with such a unit looks for that and puts the unit again. So a unit goes
only if, when ``grace_s`` is over, its object is still the one that was to go, and no manifest names it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from spool.catalog import Catalog
from spool.errors import IntegrityError
from spool.logs.units import Deletion, Deletions
from spool.model.units import UNITS, parse_unit_path, unit_path
from spool.points import reach
from spool.retention import Policy, StoredUnit, aged_units, held_units, over
from spool.spiller.units import UnitUploader, renew
from spool.stores.objects import ObjectInfo, Objects
from spool.stores.shared import SharedFolder
from spool.stores.threads import Threads
from spool.stores.units import ACCOUNT, HotUnits

log = logging.getLogger("spool.spiller")

BATCH = 32
"""Objects that are looked at, and then deleted, together."""
THREADS = 16


class UnitDecision(NamedTuple):
    """A unit that goes.

    Attributes:
        key: the unit's.
        n_bytes: what it takes, in both tiers.
        why: in words.
    """

    key: str
    n_bytes: int
    why: str


class _Stock(NamedTuple):
    """The units that there are.

    Attributes:
        hot: in the hot root, by key.
        cold: objects in the cold root, by key.
    """

    hot: Mapping[str, StoredUnit]
    cold: Mapping[str, ObjectInfo]


class UnitCollector:
    """Deletes the units that may go. Units belong to no node: each one's collector looks at all in the cold root.

    Args:
        root: the hot root; None where there is none here.
        catalog: the index, up to date: who names what.
        objects: the cold root; None where there is none.
        policy: of sessions.
        age_s: how long a unit is kept that nobody names.
        grace_s: between announcing and deleting.
        refresh: brings the catalog up to date.
        is_whole: whether all that was published is known to the catalog.
    """

    def __init__(
        self,
        root: str | None,
        catalog: Catalog,
        objects: Objects | None,
        policy: Policy,
        *,
        age_s: float,
        grace_s: float,
        refresh: Callable[[], object],
        is_whole: Callable[[], bool],
    ) -> None:
        self._catalog = catalog
        self._objects = objects
        self._policy = policy
        self._age_s = age_s
        self._grace_s = grace_s
        self._refresh = refresh
        self._is_whole = is_whole
        self._threads = Threads(THREADS)
        self._units = None if root is None else HotUnits(root)
        self._uploader = UnitUploader(self._units, objects) if self._units is not None and objects is not None else None
        place = objects if objects is not None else SharedFolder(str(root))
        self._deletions = Deletions(place)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.close()
        if self._uploader is not None:
            self._uploader.close()

    def plan(self) -> list[UnitDecision]:
        """Return the units that may go.

        Raises:
            StorageError: a root cannot be read.
        """
        stock, held = self._look(), self._held()
        return [self._decision(stock, key) for key in self._aged(stock, held)] if self._may_delete() else []

    def run(self) -> tuple[list[UnitDecision], int]:
        """Delete what may go, and look after what stays; return what went or was announced, and what waits for grace.

        Raises:
            SpoolError: a root failed; call it again.
        """
        stock, held = self._look(), self._held()
        self._keep(stock, held)
        if not self._may_delete():
            return [], 0
        waiting = [item for item in self._deletions.all() if not item.gone.done]
        known = {key for _, gone in waiting for key in gone.units}
        due = [key for key in self._aged(stock, held) if key not in known]
        if due:
            times = {key: stock.cold[key].modified if key in stock.cold else 0.0 for key in due}
            self._deletions.announce(times, done=self._objects is None)
            reach("collect.units")
        went = [self._decision(stock, key) for key in due]
        self._delete_hot({*due, *known}.difference(held), stock)
        n_waiting = self._finish(waiting, stock, held) + bool(due and self._objects is not None)
        self._deletions.merge()
        return went, n_waiting

    def _decision(self, stock: _Stock, key: str) -> UnitDecision:
        why = f"units that no live session names, last put or named more than {self._age_s:g} s ago"
        return UnitDecision(key, stock_bytes(stock, key), why)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _may_delete(self) -> bool:
        if not self._policy.released and self._policy.age_s is None:
            return False
        if not self._is_whole():
            log.warning("no units are deleted for now: which ones are named is not known, as records cannot be read")
            return False
        return True

    def _look(self) -> _Stock:
        units = self._units.all() if self._units is not None else ()
        hot = {unit.key: StoredUnit(unit.key, unit.size, unit.used_at) for unit in units}
        found = self._objects.list(UNITS) if self._objects is not None else ()
        return _Stock(hot, {key: info for info in found if (key := parse_unit_path(info.key)) is not None})

    def _held(self) -> set[str]:
        """Return the units that are needed; asked after the roots were listed, so that nobody named one meanwhile."""
        self._refresh()
        ended = over(self._catalog.packs.sessions(), now=time.time(), failed_keep_s=self._policy.failed_keep_s)
        return held_units(self._catalog.units.named(), ended, self._policy)

    def _aged(self, stock: _Stock, held: Collection[str]) -> list[str]:
        """Return the units that may go; one that was used here lately stays in the cold root too."""
        latest = {key: StoredUnit(key, info.size, info.modified) for key, info in stock.cold.items()}
        for key, unit in stock.hot.items():
            if key not in latest or latest[key].used_at < unit.used_at:
                latest[key] = unit
        return [unit.key for unit in aged_units(latest.values(), held, age_s=self._age_s, now=time.time())]

    # -- what stays --------------------------------------------------------------------------------------------------

    def _keep(self, stock: _Stock, held: Collection[str]) -> None:
        """Bring back what the cold root lost and a session names, and renew what only this node knows to be needed.

        Other nodes cannot know which units a session names that is not published yet.
        """
        if self._uploader is None or self._objects is None:
            return
        unpublished = self._catalog.units.unpublished()
        lost = [key for key in stock.hot if key in held and key not in stock.cold and key not in unpublished]
        try:
            self._uploader.bring(lost)
            old = time.time() - self._age_s / 2
            for key in sorted(unpublished & stock.cold.keys() - stock.hot.keys()):
                if stock.cold[key].modified < old:
                    renew(self._objects, key)
        except IntegrityError as error:  # what goes does not wait for what somebody has to mend
            log.error("a unit cannot be kept in the cold root: %s", error)

    # -- what goes ---------------------------------------------------------------------------------------------------

    def _delete_hot(self, keys: Iterable[str], stock: _Stock) -> None:
        before = time.time() - self._age_s
        for key in sorted(stock.hot.keys() & set(keys)):
            assert self._units is not None
            with self._units.changing():
                self._catalog.settle(ACCOUNT, self._units.remove(key, unless_used_after=before))

    def _finish(self, waiting: Sequence[Deletion], stock: _Stock, held: Collection[str]) -> int:
        """Delete what was announced long enough ago; return how many announcements wait for that."""
        # a time far ahead is that of a clock that was wrong
        due = [item for item in waiting if abs(time.time() - item.gone.at) >= self._grace_s]
        for deletion in due:
            assert self._objects is not None
            going = [key for key, at in deletion.gone.units.items() if self._goes(key, at, stock, held)]
            there = [key for key in going if key in stock.cold]
            kept = set[str]()
            for start in range(0, len(there), BATCH):
                kept |= self._delete(self._objects, there[start : start + BATCH], deletion.gone.units)
            self._deletions.finish(deletion, [key for key in going if key not in kept])
        return len(waiting) - len(due)

    def _delete(self, objects: Objects, keys: Sequence[str], times: Mapping[str, float]) -> set[str]:
        """Delete objects unless they were put again just now; return the units that were."""
        found = self._threads.map(objects.info, map(unit_path, keys))
        again = {key for key, info in zip(keys, found, strict=True) if info and _is_newer(info, times[key])}
        objects.delete(unit_path(key) for key in keys if key not in again)
        reach("collect.unit")
        return again

    def _goes(self, key: str, at: float, stock: _Stock, held: Collection[str]) -> bool:
        info, here = stock.cold.get(key), stock.hot.get(key)
        fresh = here is not None and time.time() - here.used_at < self._age_s
        return key not in held and not fresh and (info is None or not _is_newer(info, at))


def _is_newer(info: ObjectInfo, at: float) -> bool:
    """Whether an object is another one than that of time ``at``; some stores tell times in whole seconds only."""
    return info.modified >= at + 1.0


def stock_bytes(stock: _Stock, key: str) -> int:
    """Return what a unit takes in both tiers."""
    hot, cold = stock.hot.get(key), stock.cold.get(key)
    return (hot.size if hot is not None else 0) + (cold.size if cold is not None else 0)
