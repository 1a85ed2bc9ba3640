"""How a spool is doing: where its bytes are, what waits, and whether its spiller works."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from msgspec import Struct

from spool.catalog import Catalog, PackRow
from spool.catalog.schema import STATES
from spool.config import Config
from spool.errors import StorageError
from spool.logs.keys import is_fact_stream
from spool.logs.streams import is_live, measure, stream_names
from spool.model.units import UNITS, parse_unit_path
from spool.spiller import elect
from spool.spiller.plan import watermarks
from spool.spiller.status import read_status
from spool.stores.objects import ObjectInfo, Objects
from spool.stores.retry import hurried
from spool.stores.units import HotUnits

log = logging.getLogger("spool.status")

PackPlace = Literal["open", "sealed", "spilled", "evicted", "cold", "gone"]
"""States of packs; ``cold`` where a cold root itself was opened, from which nothing is evicted."""

PATIENCE_S = 5.0
"""How long a cold root is asked what units it has."""


class PackTotal(Struct, frozen=True):
    """Packs of one state.

    Attributes:
        n_packs: how many.
        hot_bytes: what they take in the hot tier.
        cold_bytes: what they take in the cold tier.
    """

    n_packs: int
    hot_bytes: int
    cold_bytes: int


class Backlog(Struct, frozen=True):
    """Sealed packs that are not in the cold root yet.

    Attributes:
        n_packs: how many.
        n_bytes: what they take in the hot tier.
        oldest_at: when the oldest was sealed, seconds since the epoch; None where there is none.
    """

    n_packs: int
    n_bytes: int
    oldest_at: float | None


class HotTier(Struct, frozen=True):
    """The room of a hot root.

    Attributes:
        used_bytes: what its streams and units take on disk.
        reserved_bytes: what writers have reserved, which is what the limit is about; None where there is no limit.
        limit_bytes: ``hot_bytes``; None where there is no limit.
        high_bytes, low_bytes: above the first packs are evicted until below the second.
    """

    used_bytes: int
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    high_bytes: int | None = None
    low_bytes: int | None = None


class UnitTotal(Struct, frozen=True):
    """Multimodal units.

    Attributes:
        n_hot, hot_bytes: in the hot tier; None where there is none here.
        n_cold, cold_bytes: in the cold tier; None where there is none, or it cannot be reached.
    """

    n_hot: int | None = None
    hot_bytes: int | None = None
    n_cold: int | None = None
    cold_bytes: int | None = None


class SpillerStatus(Struct, frozen=True):
    """The last spiller of a hot root.

    Attributes:
        running: a process holds its lock at this moment.
        pid: its process; None where none ever said anything.
        at: when it last said something, seconds since the epoch.
        n_spilled, spilled_bytes: packs that it brought over since it started, and their bytes in the cold root.
        bytes_per_s: of them while it was uploading.
        n_evicted, n_deleted: packs that it took out of the hot root.
        damaged: packs that are not as they were recorded and stay where they are, in words.
        error: why its last round failed; None where it did not.
    """

    running: bool
    pid: int | None = None
    at: float | None = None
    n_spilled: int = 0
    spilled_bytes: int = 0
    bytes_per_s: float = 0.0
    n_evicted: int = 0
    n_deleted: int = 0
    damaged: tuple[str, ...] = ()
    error: str | None = None


class Status(Struct, frozen=True, kw_only=True):
    """What `Spool.status` returns.

    Attributes:
        root: the hot root, or the URL of the cold one where that was opened.
        spill: URL of the cold root behind a hot one; None where there is none, or a cold root was opened.
        id: of the spool.
        packs: by state: ``open``, ``sealed``, ``spilled`` (in both tiers), ``evicted`` (in the cold one only; those
            of other nodes are), ``gone``; where a cold root was opened its packs are ``cold``.
        facts: fact files in the cold root, the late facts of processes without a hot root.
        backlog: what is still to be brought over; of a spool without cold root nothing.
        units: multimodal units by tier; None where nothing has to do with units.
        hot: the room of the hot root; None where there is none here.
        n_live: writers of the hot root that live.
        seal_requests: packs that publishers wait for: the last one by stream.
        spiller: None where there is no hot root here.
    """

    root: str
    spill: str | None
    id: str
    packs: dict[PackPlace, PackTotal]
    facts: PackTotal
    backlog: Backlog
    units: UnitTotal | None = None
    hot: HotTier | None = None
    n_live: int = 0
    seal_requests: dict[str, int] = {}
    spiller: SpillerStatus | None = None


def look(config: Config, spool_id: str, catalog: Catalog, objects: Objects | None = None) -> Status:
    """Return how a spool is doing; the catalog has caught up.

    Args:
        config: of the spool.
        spool_id: its identity.
        catalog: its index.
        objects: the cold root; None where there is none.

    Raises:
        StorageError: the root or the catalog cannot be read.
    """
    root = config.root
    streams = [] if root is None else stream_names(root)
    units = _units(config, catalog, objects)
    used = 0 if root is None else sum(measure(root, name) for name in streams)
    facts, packs = _split(catalog.packs.rows())
    return Status(
        root=config.url if root is None else root,
        spill=None if root is None else config.spill,
        id=spool_id,
        packs=_totals(packs, used, from_cold=root is None),
        facts=_total([row for row in facts if row.state != "gone"]),
        backlog=_backlog(config, catalog),
        units=units,
        hot=None if root is None else _hot(config, catalog, used + (units.hot_bytes or 0 if units is not None else 0)),
        n_live=0 if root is None else sum(is_live(root, name) for name in streams),
        seal_requests={} if root is None else catalog.packs.seal_requests(),
        spiller=None if root is None else _spiller(root),
    )


def _units(config: Config, catalog: Catalog, objects: Objects | None) -> UnitTotal | None:
    """Return what units there are; a cold root is listed for them only where something was put or named."""
    hot = [unit.size for unit in HotUnits(config.root).all()] if config.root is not None else []
    if not hot and not catalog.units.any():
        return None
    here = (None, None) if config.root is None else (len(hot), sum(hot))
    listed: Sequence[ObjectInfo]
    try:
        with hurried(PATIENCE_S):
            listed = objects.list(UNITS) if objects is not None else ()
    except StorageError as error:
        log.warning("what units the cold root has is left out: %s", error)
        objects, listed = None, ()
    cold = [info.size for info in listed if parse_unit_path(info.key) is not None]
    return UnitTotal(*here, *((None, None) if objects is None else (len(cold), sum(cold))))


def _split(rows: Iterable[PackRow]) -> tuple[list[PackRow], list[PackRow]]:
    """Return fact files, which the index takes for packs, and packs."""
    found: tuple[list[PackRow], list[PackRow]] = [], []
    for row in rows:
        found[not is_fact_stream(row.stream)].append(row)
    return found


def _total(rows: Collection[PackRow]) -> PackTotal:
    return PackTotal(len(rows), sum(row.hot_bytes or 0 for row in rows), sum(row.stored_bytes or 0 for row in rows))


def _totals(packs: Iterable[PackRow], used: int, *, from_cold: bool) -> dict[PackPlace, PackTotal]:
    by_state: dict[PackPlace, list[PackRow]] = {}
    for row in packs:
        by_state.setdefault("cold" if from_cold and row.state == "evicted" else row.state, []).append(row)
    order: tuple[PackPlace, ...] = (*STATES, "cold")
    found = {state: _total(by_state[state]) for state in order if state in by_state}
    known = sum(total.hot_bytes for state, total in found.items() if state in ("sealed", "spilled"))
    here = {"open": max(used - known, 0), "evicted": 0, "cold": 0, "gone": 0}
    return {
        state: PackTotal(total.n_packs, here.get(state, total.hot_bytes), 0 if state == "gone" else total.cold_bytes)
        for state, total in found.items()
    }


def _backlog(config: Config, catalog: Catalog) -> Backlog:
    rows = list(catalog.packs.rows("sealed")) if config.root is not None and config.spill is not None else []
    times = [row.sealed_at for row in rows if row.sealed_at is not None]
    return Backlog(len(rows), sum(row.hot_bytes or 0 for row in rows), min(times, default=None))


def _hot(config: Config, catalog: Catalog, used: int) -> HotTier:
    limit = config.hot_bytes
    if limit is None:
        return HotTier(used)
    return HotTier(used, sum(catalog.usage().values()), limit, *watermarks(limit))


def _spiller(root: str) -> SpillerStatus:
    running, said = elect.is_running(root), read_status(root)
    if said is None:
        return SpillerStatus(running)
    return SpillerStatus(
        running,
        said.pid,
        said.at,
        said.n_spilled,
        said.spilled_bytes,
        said.bytes_per_s,
        said.n_evicted,
        said.n_deleted,
        tuple(map(str, said.damaged)),
        said.error,
    )
