"""What an observer is told, that it can do no harm, and the metrics that are made of it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from kit import SHAPE, add, session
from prometheus_client import CollectorRegistry, generate_latest
from tiers import record, wait_for

import spool
from spool import observe
from spool.integrations.prometheus import PrometheusObserver
from spool.observe import (
    Appended,
    Deleted,
    Evicted,
    IntegrityFailed,
    Read,
    Retried,
    Spilled,
    Waited,
)
from spool.spiller.elect import is_running


class Seen(list):
    """Collects events; `of` returns those of a kind."""

    __call__ = list.append

    def of(self, kind):
        return [event for event in self if isinstance(event, kind)]


@pytest.fixture
def seen():
    return Seen()


def test_appends_and_reads_are_told_with_their_bytes(spool_uri, seen):
    with spool.open(spool_uri, observer=seen) as sp:
        s = session(sp)
        add(s, [1, 2, 3], [4, 5], step_id="a")
        per_token = 4 + 2 * 2
        assert seen == [Appended(5 * 4 + 4 * 4 + 2 * 4, 1, seen[0].seconds)] and per_token == 8
        add(s, [1, 2, 3], [4, 5], step_id="a")
        with pytest.raises(spool.PayloadError):
            s.append(prompt_token_ids=[1], response_token_ids=[2], logprobs=[1.0, 2.0])
        assert len(seen) == 1
        (ref,) = s.finalize()
        sp.read(ref, fields=["token_ids"], tokens=slice(1, 3))
        assert seen[-1] == Read(8, {"hot": 8}, seen[-1].seconds)
        assert 0 < seen[-1].seconds < 60
        sp.read([ref, ref], fields=["token_ids"])
        assert (seen[-1].requested_bytes, seen[-1].fetched_bytes) == (40, {"hot": 20})
        sp.read(ref, fields=["routed_experts"], layers=slice(0, 2))
        assert seen[-1].requested_bytes == 4 * 2
        with pytest.raises(spool.NotFoundError):
            sp.read(ref, fields=["nothing"])
        assert len(seen) == 4


def test_ragged_fields_count_offsets_and_values(spool_uri, seen):
    kept = spool.FieldSpec(name="kept", dtype="int16", align="token", ragged=True)
    with spool.open(spool_uri, observer=seen) as sp:
        s = sp.session("s", fields=[kept])
        step = s.append(prompt_token_ids=[1], response_token_ids=[2], fields={"kept": [[1, 2, 3], [4]]})
        sp.read(step, fields=["kept"])
    assert seen.of(Appended)[0].n_bytes == 2 * 4 + 2 * 8 + 4 * 2
    assert seen.of(Read)[0].requested_bytes == 2 * 8 + 4 * 2


def test_both_tiers_are_told_apart(tmp_path, s3_root, seen):
    from spool.spiller.evict import evict

    with spool.open(f"file://{tmp_path}/hot?spill={s3_root}", observer=seen) as sp:
        segments = record(sp, "a")
        sp.publish(segments, timeout_s=120)
        assert [event.reason for event in seen.of(Waited)] == ["publish"]
        (row,) = sp._catalog.packs.rows("spilled")
        evict(str(tmp_path / "hot"), sp._catalog, row.stream, row.pack)
        segments += record(sp, "b")
        sp.read(segments)
        last = seen.of(Read)[-1]
        assert last.fetched_bytes.keys() == {"hot", "cold"}
        assert last.requested_bytes == sum(event.n_bytes for event in seen.of(Appended))
        sp.read(segments[0], fields=["logprobs"])
        last = seen.of(Read)[-1]
        assert last.requested_bytes <= last.fetched_bytes["cold"] < 1.1 * last.requested_bytes + 64


def test_damage_is_told(spool_uri, tmp_path, seen):
    with spool.open(spool_uri, observer=seen) as sp:
        (ref,) = record(sp, "a")
        sp.flush()
        (stream,) = sp._feeder.stream_names()
        path = tmp_path / "spool" / "streams" / stream / "token_ids" / "c" / "0"
        data = bytearray(path.read_bytes())
        data[8] ^= 1
        path.write_bytes(data)
        with pytest.raises(spool.IntegrityError) as caught:
            sp.read(ref)
        (event,) = seen.of(IntegrityFailed)
        assert event == IntegrityFailed(str(caught.value), stream, "token_ids", str(path))
        assert seen.of(Read) == []


def test_waiting_for_room_is_told(spool_uri, seen):
    with spool.open(f"{spool_uri}?hot_bytes=32MiB&append_timeout_s=0.2", observer=seen) as sp:
        s = sp.session("s")
        with pytest.raises(spool.CapacityError):
            for number in range(20):
                s.append(prompt_token_ids=np.full(10**6, number), response_token_ids=[1])
    waited = seen.of(Waited)
    assert waited and {event.reason for event in waited} == {"room"}
    assert waited[-1].seconds > 0.05


def test_spilling_evicting_and_deleting_are_told_by_who_does_it(tmp_path, seen, by_hand):
    uri = f"file://{tmp_path}/hot?grace_s=0.001"
    with spool.open(uri) as sp:
        segments = record(sp, "a")
        sp.flush()
        record(sp, "b")
    with spool.open(f"{uri}&spill=file://{tmp_path}/cold&hot_bytes=32MiB", observer=seen) as sp:
        rows = sp.spill()
        assert {row.state for row in rows} == {"spilled"} and len(rows) == 2
        told = seen.of(Spilled)
        assert sum(event.n_packs for event in told) == 2
        assert sum(event.n_bytes for event in told) == sum(row.stored_bytes for row in rows)
        (tmp_path / "hot" / "streams" / rows[0].stream / "token_ids" / "more").write_bytes(bytes(31 << 20))
        sp.spill()
        (evicted,) = seen.of(Evicted)
        assert evicted.n_packs == 2 and evicted.n_bytes == sum(row.hot_bytes for row in rows)
        sp.release(segments)
        assert [item.go for item in sp.gc()][:2] == [True, False]
        (deleted,) = seen.of(Deleted)
        assert deleted == Deleted(1, next(row.stored_bytes for row in rows if row.pack == 0))


def test_retries_are_told(tmp_path, hostile, s3_root, seen):
    with spool.open(f"file://{tmp_path}/hot?spill={s3_root}") as sp:
        sp.publish(record(sp, "a"), timeout_s=120)
    wait_for(lambda: not is_running(f"{tmp_path}/hot"), what="the spiller's end")  # else the faults are for it
    hostile.fault(503, "GET", times=2)
    with spool.open(s3_root, observer=seen) as there:
        assert len(list(there.segments())) == 1
    assert len(seen.of(Retried)) >= 2
    assert all("@" not in event.key for event in seen.of(Retried))


def test_an_observer_that_raises_does_no_harm_and_is_logged_once(spool_uri, caplog):
    def broken(event):
        raise ZeroDivisionError("mine")

    observe._told.clear()
    with spool.open(spool_uri, observer=broken) as sp:
        s = session(sp)
        add(s, [1], [2])
        add(s, [1, 2, 3], [4])
        assert len(sp.read(s.finalize()[0])["token_ids"]) == 4
    assert len([found for found in caplog.records if found.name == "spool.observe"]) == 1


def test_something_that_cannot_be_called_is_refused(spool_uri, tmp_path):
    with pytest.raises(spool.InputError, match="observer"):
        spool.open(spool_uri, observer=3)
    assert list(tmp_path.iterdir()) == []


def test_events_come_from_many_threads(spool_uri, seen):
    with spool.open(spool_uri, observer=seen) as sp:

        def work(number):
            s = sp.session(f"s{number}", experts=SHAPE)
            for step in range(5):
                add(s, [number, *range(step)], [step])
            sp.read(s.finalize())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen.of(Appended)) == 40 and len(seen.of(Read)) == 8


# -- Prometheus ------------------------------------------------------------------------------------------------------


def metrics(registry):
    """Return the samples of a scrape by name and labels."""
    found = {}
    for line in generate_latest(registry).decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def test_metrics_count_what_happens(tmp_path):
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    events = [
        Appended(100, 2, 0.5), Read(10, {"hot": 5, "cold": 7}, 0.25), Read(1, {"cold": 1}, 0.25), Waited(2.0, "room"),
        IntegrityFailed("x"), Retried("k"), Spilled(3, 30, 1.0), Evicted(2, 20), Deleted(1, 10),
    ]  # fmt: skip
    for event in events:
        observer(event)
    got = metrics(registry)
    for name, value in {
        "appended_bytes_total": 100, "appended_steps_total": 2, "append_seconds_total": 0.5, "reads_total": 2,
        "requested_bytes_total": 11, 'fetched_bytes_total{tier="hot"}': 5, 'fetched_bytes_total{tier="cold"}': 8,
        "read_seconds_total": 0.5, 'waited_seconds_total{reason="room"}': 2.0, "integrity_failures_total": 1,
        "cold_retries_total": 1, "spilled_packs_total": 3, "spilled_bytes_total": 30, "evicted_bytes_total": 20,
        "deleted_bytes_total": 10,
    }.items():  # fmt: skip
        assert got[f"spool_{name}"] == value, name


def test_a_watched_spool_is_asked_at_each_scrape(tmp_path, by_hand):
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    sp = spool.open(f"file://{tmp_path}/hot?hot_bytes=64MiB", observer=observer)
    observer.watch(sp)
    with sp:
        record(sp, "a")
        sp.flush()
    with spool.open(f"file://{tmp_path}/hot?hot_bytes=64MiB&spill=file://{tmp_path}/cold", observer=observer) as sp:
        observer.watch(sp)
        label = f'{{spool="{sp.spool_id}"}}'
        got = metrics(registry)
        assert got[f"spool_backlog_packs{label}"] == 1
        assert got[f"spool_backlog_bytes{label}"] == sp.status().backlog.n_bytes > 0
        assert got[f"spool_hot_limit_bytes{label}"] == 64 << 20
        assert got[f"spool_spiller_up{label}"] == 0
        sp.spill()
        got = metrics(registry)
        assert got[f"spool_backlog_packs{label}"] == 0
        assert got[f"spool_cold_bytes{label}"] == got["spool_spilled_bytes_total"] > 0
        assert got[f'spool_packs{{spool="{sp.spool_id}",state="spilled"}}'] == 1
    del sp
    gc.collect()
    assert not [name for name in metrics(registry) if "backlog" in name]


def test_without_the_client_there_is_a_hint(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(spool.ConfigError, match="spool-store\\[prometheus\\]"):
        PrometheusObserver()
