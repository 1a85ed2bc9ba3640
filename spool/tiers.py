"""What a handle does between its tiers: publishing, being the spiller, deleting, looking how all that is doing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from spool import audit, locks, status
from spool.catalog import Catalog, PackRow
from spool.config import Config
from spool.errors import ConfigError
from spool.feeds import Feeds
from spool.known import Known
from spool.model.refs import Ref
from spool.observe import Deleted, Observer, Waited, tell
from spool.publishing import Publisher
from spool.recorder import Recorder
from spool.retention import Decision, Policy, held_units, over
from spool.spiller.collect import Collected, Collector
from spool.spiller.elect import require_lock
from spool.spiller.keeper import Keeper
from spool.spiller.loop import STALE_UPLOAD_S, Spiller
from spool.spiller.rollup import roll_up
from spool.spiller.status import Status as SpillerStatus
from spool.spiller.status import read_status
from spool.spiller.unit_collect import UnitCollector, UnitDecision
from spool.stores.hot import HotStore
from spool.stores.units import ACCOUNT
from spool.units import Units

T = TypeVar("T")
Progress = Callable[[int, int], object]

UNITS_S, LOCAL_UNITS_S, LEAST_UNITS_S = 600.0, 20.0, 1.0
"""Between two looks of a spiller at the units that there are: with a cold root, without; less where they age fast."""


class Tiers:
    """The tiers of one handle.

    Args:
        config: where they are.
        catalog: the index.
        feeds: bring it up to date; have the cold root.
        known: checks references.
        recorder: this process's streams.
        keeper: starts a spiller; None where nothing is recorded here.
        store: the hot root's bytes; None where there is none here.
        expire: ends idle sessions of dead writers.
        withdraw: records that sessions are withdrawn.
        units: the multimodal units of the handle.
        observer: told of what happens; None for nobody.
    """

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        feeds: Feeds,
        known: Known,
        recorder: Recorder,
        keeper: Keeper | None,
        store: HotStore | None,
        units: Units,
        *,
        expire: Callable[[], object],
        withdraw: Callable[[Sequence[str]], object],
        observer: Observer | None,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._feeds = feeds
        self._known = known
        self._recorder = recorder
        self._keeper = keeper
        self._store = store
        self._units = units
        self._units_at = float("-inf")
        self._n_units_waiting = 0
        self._expire = expire
        self._withdraw = withdraw
        self._observer = observer
        self._publisher: Publisher | None = None
        if feeds.cold is not None:
            self._publisher = Publisher(catalog, feeds, nudge=self._nudge, status=self._spiller_status)

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, refs: Sequence[Ref], timeout_s: float) -> None:
        """See `Spool.publish`."""
        publisher = self._asking(refs)
        with self._waiting():
            publisher.publish(refs, timeout_s)
            self._units.publish(refs)

    async def publish_async(
        self,
        refs: Sequence[Ref],
        timeout_s: float,
        on_thread: Callable[[Callable[[], float | None]], Awaitable[float | None]],
    ) -> None:
        """See `Spool.publish_async`."""
        publisher = self._asking(refs)
        with self._waiting():
            await publisher.publish_async(refs, timeout_s, on_thread)
            await on_thread(lambda: self._units.publish(refs))

    def unpublished(self, refs: Sequence[Ref]) -> list[tuple[str, int]]:
        """See `Spool.unpublished`."""
        publisher = self._publishing(refs)
        self._feeds.catch_up(fresh=True)
        return sorted(publisher.missing(refs)[1])

    def _publishing(self, refs: Sequence[Ref]) -> Publisher:
        for ref in refs:
            self._known.own(ref)
        self._known.settled(refs)
        if self._publisher is None:
            raise self._no_cold_root("publish")
        return self._publisher

    def _asking(self, refs: Sequence[Ref]) -> Publisher:
        """Return what publishes, for who may ask the hot root's writers to seal."""
        publisher = self._publishing(refs)
        if self._config.root is not None:
            self._recorder.check_writable()
        return publisher

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            tell(self._observer, Waited(time.monotonic() - began, "publish"))

    def _nudge(self) -> None:
        if self._keeper is not None:
            self._keeper.keep_running()

    def _spiller_status(self) -> SpillerStatus | None:
        return None if self._config.root is None else read_status(self._config.root)

    # -- spilling and deleting ---------------------------------------------------------------------------------------

    def spill(
        self,
        *,
        follow: bool,
        until_idle: bool,
        dry_run: bool,
        stop: threading.Event | None,
        lock_fd: int | None,
        progress: Progress | None,
    ) -> list[PackRow]:
        """See `Spool.spill`."""
        root = self.hot_root("a spiller works on")
        if self._feeds.cold is None and not until_idle:
            raise self._no_cold_root("spill")
        if dry_run:
            self._feeds.catch_up(fresh=True)
            with contextlib.closing(self.spiller()) as spiller:
                return spiller.sealed()
        fd = require_lock(root) if lock_fd is None else locks.adopt(lock_fd)
        try:
            with contextlib.closing(self.spiller()) as spiller:
                if not follow and not until_idle:
                    return spiller.once(progress)
                spiller.run(stop or threading.Event(), until_idle=until_idle)
                return []
        finally:
            locks.release(fd)

    def spiller(self) -> Spiller:
        """Return a spiller of the hot root; whoever lets it work holds the lock, and closes it."""
        self.hot_root("a spiller works on")
        assert self._store is not None
        return Spiller(
            self._config,
            self._catalog,
            self._feeds.hot,
            self._feeds.cold,
            self._store,
            own=self._recorder.stream_names,
            expire=self._expire,
            collect=self._collect,
            observer=self._observer,
        )

    def gc(self, *, dry_run: bool, progress: Progress | None) -> list[Decision]:
        """See `Spool.gc`."""
        if self._feeds.cold is not None:
            self._feeds.cold.confirm()
        self._feeds.catch_up(whole=True)
        packs = self.collector()
        plan = packs.plan()
        with contextlib.closing(self.unit_collector()) as units:
            if dry_run:
                return [*plan, *_of_units(units.plan())]
            self._collect_packs(packs, plan, progress)
            aged, _ = units.run()
        if self._config.root is None and self._feeds.cold is not None:
            roll_up(self._feeds.cold)
        if self._feeds.cold is not None:
            self._feeds.cold.objects.abort_stale_uploads(STALE_UPLOAD_S)
        return [*plan, *_of_units(aged)]

    def collector(self) -> Collector:
        """Return what deletes packs of the root that was opened."""
        config = self._config
        return Collector(
            config.root,
            self._catalog,
            self._feeds.cold,
            _policy(config),
            grace_s=config.grace_s,
            withdraw=self._withdraw,
            refresh=self._feeds.hot.catch_up,
        )

    def unit_collector(self) -> UnitCollector:
        """Return what deletes multimodal units that nobody names."""
        config, cold = self._config, self._feeds.cold
        return UnitCollector(
            config.root,
            self._catalog,
            None if cold is None else cold.objects,
            _policy(config),
            age_s=config.units_age_s,
            grace_s=config.grace_s,
            refresh=lambda: self._feeds.catch_up(whole=True),
            is_whole=self._feeds.are_whole,
        )

    def _collect(self) -> Collected:
        """Delete what may go; what a spiller does again and again."""
        packs = self.collector()
        done = self._collect_packs(packs, packs.plan())
        if time.monotonic() - self._units_at >= self._units_s():
            with contextlib.closing(self.unit_collector()) as units:
                self._n_units_waiting = units.run()[1]
            self._units_at = time.monotonic()
        return done._replace(n_waiting=done.n_waiting + self._n_units_waiting)

    def _units_s(self) -> float:
        """Return how long after one look at the units the next one is due."""
        if self._n_units_waiting:
            return max(self._config.grace_s, LEAST_UNITS_S)
        most_s = LOCAL_UNITS_S if self._feeds.cold is None else UNITS_S
        return min(max(self._config.units_age_s / 8, LEAST_UNITS_S), most_s)

    def _collect_packs(
        self, collector: Collector, plan: Sequence[Decision], progress: Progress | None = None
    ) -> Collected:
        done = collector.run(_with_progress(plan, progress))
        if done.n_gone:
            tell(self._observer, Deleted(done.n_gone, sum(item.n_bytes for item in plan if item.go)))
        return done

    # -- looking -----------------------------------------------------------------------------------------------------

    def status(self, spool_id: str) -> status.Status:
        """See `Spool.status`."""
        self._feeds.catch_up(fresh=True)
        cold = self._feeds.cold
        return status.look(self._config, spool_id, self._catalog, None if cold is None else cold.objects)

    def named_units(self) -> audit.NamedUnits:
        """Return which sessions name which units, and which of those are needed."""
        named, policy = self._catalog.units.named(), _policy(self._config)
        ended = over(self._catalog.packs.sessions(), now=time.time(), failed_keep_s=policy.failed_keep_s)
        return audit.NamedUnits(named, held_units(named, ended, policy))

    def cold_packs(self, states: Mapping[tuple[str, int], str]) -> audit.ColdPacks | None:
        """Return what the cold root has of packs, by (stream, number), that are not gone; None where there is none."""
        cold = self._feeds.cold
        if cold is None:
            return None
        entries = {pack: entry for pack, entry in cold.entries().items() if states.get(pack) != "gone"}
        return audit.ColdPacks(cold.objects, entries)

    def hot_root(self, what: str) -> str:
        """Return the hot root.

        Raises:
            ConfigError: the spool was opened from its cold one.
        """
        if self._config.root is None:
            raise ConfigError(f"{what} a hot root; {self._config.url} was opened, which is a cold one")
        return self._config.root

    def _no_cold_root(self, verb: str) -> ConfigError:
        return ConfigError(
            f"the spool at {self._config.url} has no cold root to {verb} to: open it with ?spill=s3://bucket/prefix"
        )


def _policy(config: Config) -> Policy:
    return Policy(released=config.retention.released, age_s=config.retention.age_s)


def _of_units(units: Sequence[UnitDecision]) -> list[Decision]:
    """Return units that go as one decision, as those about packs are listed."""
    if not units:
        return []
    n_bytes = sum(unit.n_bytes for unit in units)
    return [Decision(stream=ACCOUNT, pack=len(units), n_bytes=n_bytes, go=True, why=units[0].why)]


def _with_progress(plan: Sequence[Decision], progress: Progress | None) -> Iterator[Decision]:
    total, done = sum(item.n_bytes for item in plan if item.go), 0
    for item in plan:
        yield item
        if item.go and progress is not None:
            done += item.n_bytes
            progress(done, total)
