"""Prometheus metrics of a spool.

::

    from spool.integrations.prometheus import PrometheusObserver

    metrics = PrometheusObserver()
    sp = spool.open(uri, observer=metrics)
    metrics.watch(sp)

Counters are what this process does. What a whole root looks like (backlog, bytes by tier, the spiller, which is
another process) is asked for at each scrape of a spool that is watched. Needs ``prometheus_client``: install
``spool-store[prometheus]``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from spool.errors import ConfigError, SpoolError
from spool.observe import (
    Appended,
    Deleted,
    Event,
    Evicted,
    IntegrityFailed,
    Read,
    Retried,
    Spilled,
    Waited,
)

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.status import Status

log = logging.getLogger("spool.observe")


class PrometheusObserver:
    """Counts the events of one or many spools.

    Args:
        registry: a ``prometheus_client.CollectorRegistry``; the default one where None.

    Raises:
        ConfigError: ``prometheus_client`` is not installed.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError("prometheus_client is not installed: install spool-store[prometheus]") from None
        self._registry = prometheus_client.REGISTRY if registry is None else registry

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Any:
            return prometheus_client.Counter(f"spool_{name}", text, tuple(labels), registry=self._registry)

        self._appended_bytes = counter("appended_bytes", "Bytes of rows stored by appends.")
        self._appended_steps = counter("appended_steps", "Steps committed.")
        self._append_seconds = counter("append_seconds", "Time in appends, waiting for room left out.")
        self._requested_bytes = counter("requested_bytes", "Stored bytes of the rows that reads asked for.")
        self._fetched_bytes = counter("fetched_bytes", "Bytes that were read for them.", ["tier"])
        self._reads = counter("reads", "Calls of read.")
        self._read_seconds = counter("read_seconds", "Time in reads.")
        self._waited_seconds = counter("waited_seconds", "Time that calls waited.", ["reason"])
        self._integrity_failures = counter("integrity_failures", "Reads of missing or altered bytes.")
        self._retries = counter("cold_retries", "Requests to the cold root that were tried again.")
        self._spilled_bytes = counter("spilled_bytes", "Bytes this process's spiller brought to the cold root.")
        self._spilled_packs = counter("spilled_packs", "Packs this process's spiller brought to the cold root.")
        self._evicted_bytes = counter("evicted_bytes", "Bytes this process's spiller took out of the hot tier.")
        self._deleted_bytes = counter("deleted_bytes", "Bytes this process deleted, in both tiers.")

    def __call__(self, event: Event) -> None:
        """Count an event."""
        match event:
            case Appended():
                self._appended_bytes.inc(event.n_bytes)
                self._appended_steps.inc(event.n_steps)
                self._append_seconds.inc(event.seconds)
            case Read():
                self._reads.inc()
                self._read_seconds.inc(event.seconds)
                self._requested_bytes.inc(event.requested_bytes)
                for tier, n_bytes in event.fetched_bytes.items():
                    self._fetched_bytes.labels(tier).inc(n_bytes)
            case Waited():
                self._waited_seconds.labels(event.reason).inc(event.seconds)
            case IntegrityFailed():
                self._integrity_failures.inc()
            case Retried():
                self._retries.inc()
            case Spilled():
                self._spilled_packs.inc(event.n_packs)
                self._spilled_bytes.inc(event.n_bytes)
            case Evicted():
                self._evicted_bytes.inc(event.n_bytes)
            case Deleted():
                self._deleted_bytes.inc(event.n_bytes)

    def watch(self, sp: Spool) -> None:
        """Add gauges of a spool's `Status` to each scrape, as long as somebody holds the spool.

        A scrape then looks at the root; of one with very many files choose a scrape interval of some seconds.
        """
        self._registry.register(_Gauges(sp))


class _Gauges:
    """Asks a spool at each scrape; what cannot be asked now is left out.

    Args:
        sp: the spool; not kept alive by this.
    """

    def __init__(self, sp: Spool) -> None:
        self._spool = weakref.ref(sp)
        self._url = sp.config.url

    def describe(self) -> Iterable[Any]:
        """Name nothing, so that registering does not look at the spool; see ``Collector.describe``."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the gauges; see ``Collector.collect``."""
        from prometheus_client.core import GaugeMetricFamily

        sp = self._spool()
        if sp is None:
            return
        try:
            status = sp.status()
        except SpoolError as error:
            log.warning("no metrics of %s this time: %s", self._url, error)
            return
        for name, text, labels, values in _gauges(status):
            family = GaugeMetricFamily(f"spool_{name}", text, labels=["spool", *labels])
            for label, value in values:
                family.add_metric([status.id, *label], value)
            yield family


_Gauge = tuple[str, str, tuple[str, ...], list[tuple[tuple[str, ...], float]]]


def _gauges(status: Status) -> Iterator[_Gauge]:
    hot, spiller, backlog = status.hot, status.spiller, status.backlog
    totals = list(status.packs.items())
    yield "packs", "Packs by state.", ("state",), [((state,), total.n_packs) for state, total in totals]
    if hot is not None:
        yield "backlog_bytes", "Bytes of sealed packs not in the cold root yet.", (), [((), backlog.n_bytes)]
        yield "backlog_packs", "Sealed packs that are not in the cold root yet.", (), [((), backlog.n_packs)]
        yield "hot_used_bytes", "Bytes of the hot root on disk.", (), [((), hot.used_bytes)]
        yield "seal_requests", "Streams that publishers wait for.", (), [((), len(status.seal_requests))]
        yield "live_writers", "Writers that live.", (), [((), status.n_live)]
        if hot.limit_bytes is not None:
            yield "hot_limit_bytes", "What the hot root may take.", (), [((), hot.limit_bytes)]
    if status.spill is not None:
        cold_bytes = sum(total.cold_bytes for _, total in totals)
        yield "cold_bytes", "Bytes of packs in the cold root.", (), [((), cold_bytes)]
    if status.units is not None:
        tiers = (("hot", status.units.hot_bytes), ("cold", status.units.cold_bytes))
        yield "unit_bytes", "Bytes of multimodal units.", ("tier",), [((n,), v) for n, v in tiers if v is not None]
    if spiller is not None:
        yield "spiller_up", "Whether a spiller works.", (), [((), spiller.running)]
        yield "spiller_damaged_packs", "Packs that cannot be spilled.", (), [((), len(spiller.damaged))]
