"""The index: what it knows, in any order of feeding, under many processes, forks and damage."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import apsw
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import (
    ADVANTAGES,
    Annotated,
    Checkpointed,
    Released,
    SessionDiscarded,
    StepDiscarded,
    ToolsStored,
    Transaction,
    attached,
    feed,
    final,
    items,
    opened,
    segment,
    step,
)

import spool
from spool.catalog import Catalog, DamagedError, LogState, Release, Space, database, files, rivals, schema
from spool.errors import InputError, StorageError
from spool.formats.frames import encode_event
from spool.model.events import SessionOpened, StepCommitted
from spool.model.fields import ArraySize
from spool.model.refs import Extent, VersionSpan

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "catalog.sqlite")


@pytest.fixture
def catalog(path):
    catalog = Catalog.open(path)
    yield catalog
    catalog.close()


def ids(rows):
    return [row.session_id for row in rows]


def in_child(body):
    """Run ``body`` in a forked child; fail where it raises."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


# -- what it knows ---------------------------------------------------------------------------------------------------


def test_a_session_from_opening_to_end(catalog):
    metadata = {"task": "x", "n": [1, 2]}
    feed(
        catalog,
        [
            opened(
                "u",
                1.0,
                group_id="g",
                sample_index=3,
                rollout_step=40,
                source="swe",
                split="train",
                idle_s=5.0,
                metadata=metadata,
            ),
            step("u", 0, 2.0, n_nonfinite=1),
            step("u", 1, 3.0, finish_reason="tool_calls"),
            step("u", 2, 4.0, finish_reason="length", n_nonfinite=2),
            StepDiscarded("u", 2, 5.0),
        ],
    )
    row = catalog.session("u")
    assert (row.group_id, row.sample_index, row.rollout_step, row.source, row.split, row.attempt) == (
        "g",
        3,
        40,
        "swe",
        "train",
        0,
    )
    assert (row.state, row.outcome, row.view, row.finish_reason) == ("open", None, None, "tool_calls")
    assert (row.n_steps, row.n_tokens, row.n_generated, row.n_segments, row.n_nonfinite) == (2, 30, 10, 0, 1)
    assert (row.opened_at, row.last_at, row.finished_at, row.idle_s) == (1.0, 5.0, None, 5.0)
    assert (row.metadata, row.facts, row.reward, row.prefer, row.trim) == (metadata, {}, None, "first", 0)
    assert list(catalog.segments()) == []
    segments = (segment("u", 0, count=2), segment("u", 1, count=2, n_tokens=30))
    feed(catalog, [final("u", 9.0, segments=segments, outcome="truncated")], pack=1)
    row = catalog.session("u")
    assert (row.state, row.outcome, row.view, row.n_segments, row.finished_at) == (
        "final",
        "truncated",
        "lineage",
        2,
        9.0,
    )
    assert list(catalog.segments()) == list(segments)
    assert catalog.session("v") is None


def test_a_record_that_nobody_would_take_today_does_not_stop_the_index(catalog):
    digits, rows = ("9" * 4301, "8" * 5000), 2**63
    spans = tuple(VersionSpan(name, 10, 15) for name in digits)
    huge = msgspec.structs.replace(segment("bad", versions=digits), n_rows=rows)
    fresh, again = step("bad", 0, versions=spans, n_nonfinite=rows), step("bad", 1, versions=spans, n_nonfinite=rows)
    feed(catalog, [opened("good"), step("good", 0), final("good"), opened("bad"), fresh, again])
    feed(catalog, [final("bad", segments=(huge,)), final("bad", 10.0, segments=(huge,))], pack=1)
    assert {ref.session_id for ref in catalog.segments()} == {"good", "bad"}
    assert huge.version_span == digits and list(catalog.segments("n_rows > 1000000")) == [huge]
    feed(catalog, [StepDiscarded("bad", 1, 11.0), SessionDiscarded("bad", 12.0)], pack=2)
    assert catalog.session("bad").state == "discarded" and catalog.session("good").n_steps == 1


def test_sums_beyond_64_bits_are_bounded_and_do_not_stop_what_is_forgotten(catalog):
    feed(catalog, [opened("bad"), *(step("bad", index, n_nonfinite=2**62) for index in range(4))])
    feed(catalog, [step("bad", 4)], pack=1)
    catalog.forget("s", 1)
    assert (catalog.session("bad").n_steps, catalog.session("bad").n_nonfinite) == (4, 2**63 - 1)


def test_the_events_of_a_session_come_back_without_messages(catalog):
    steps = [step("u", 0, metadata={"k": 1}, versions=()), step("u", 1)]
    ending = final("u", segments=(segment("u"),))
    feed(catalog, [opened("other"), opened("u"), ToolsStored("key", b"[]"), *steps, StepDiscarded("u", 1, 4.0), ending])
    found = catalog.session_events("u")
    assert [item.event for item in found] == [
        opened("u"),
        *(msgspec.structs.replace(event, messages=b"") for event in steps),
        StepDiscarded("u", 1, 4.0),
        ending,
    ]
    assert [(item.seq, item.offset) for item in found] == [(1, 116), (3, 316), (4, 416), (5, 516), (6, 616)]
    assert {(item.stream, item.pack, item.inner) for item in found} == {("s", 0, 0)}
    assert catalog.session_events("nobody") == []
    place = catalog.tools_at("key")
    assert (place.stream, place.pack, place.seq, place.offset, place.inner) == ("s", 0, 2, 216, 0)
    assert catalog.tools_at("other key") is None


def test_the_events_of_a_transaction_share_their_frame(catalog):
    feed(catalog, [opened("u"), Transaction((ToolsStored("k", b"[]"), step("u", 0), step("u", 1)))])
    found = catalog.session_events("u")
    assert [(item.seq, item.inner, item.offset) for item in found] == [(0, 0, 16), (1, 1, 116), (1, 2, 116)]
    assert catalog.offsets() == {("s", 0): LogState(216, 2, False)}
    assert (catalog.tools_at("k").seq, catalog.tools_at("k").inner) == (1, 0)


def test_late_facts_are_merged_into_sessions_and_segments(catalog):
    feed(catalog, [opened("u"), final("u", segments=(segment("u", 0), segment("u", 1)))])
    feed(
        catalog,
        [
            Annotated("u", 20.0, {"reward": 0.25, "judge": "a", "nested": {"x": [None, True]}}),
            Annotated("u", 21.0, {"reward": 1, "judge": None}),
            Annotated("u", 22.0, {"reward": -1.0, "own": "b"}, "lineage:1:15"),
        ],
        stream="annotator",
    )
    row = catalog.session("u")
    assert row.facts == {"reward": 1, "judge": None, "nested": {"x": [None, True]}}
    assert row.reward == 1.0
    assert (catalog.facts("u"), catalog.facts("u", "lineage:1:15")) == (row.facts, {"reward": -1.0, "own": "b"})
    assert (catalog.facts("u", "lineage:0:15"), catalog.facts("v")) == ({}, {})
    first, second = catalog.segments()
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert first.facts == {"judge": None, "nested": {"x": [None, True]}}
    assert second.facts == {**first.facts, "own": "b"}
    assert [ref.index for ref in catalog.segments("reward > 0.5")] == [0]
    assert [ref.index for ref in catalog.segments("own = 'b' and judge is null")] == [1]
    assert ids(catalog.sessions("reward = 1 and own is null")) == ["u"]


def test_the_last_fact_wins_by_time_not_by_arrival(catalog):
    feed(catalog, [opened("u"), final("u")])
    feed(catalog, [Annotated("u", 30.0, {"reward": 3.0})], stream="b")
    feed(catalog, [Annotated("u", 20.0, {"reward": 2.0, "other": 1})], stream="c")
    feed(catalog, [Annotated("u", 30.0, {"reward": 1.0})], stream="a")
    assert catalog.facts("u") == {"reward": 3.0, "other": 1}


def test_late_arrays_join_the_extents(catalog):
    feed(catalog, [opened("u"), final("u", segments=(segment("u", 0), segment("u", 1)))])
    feed(catalog, [attached("u", 30.0, row=5), attached("u", 20.0, row=0), attached("u", target=":0")], stream="b")
    first, second = catalog.segments()
    assert first.extents == {**segment("u").extents, "advantages": (Extent("late", 5, 5, 10, 3),)}
    assert second == segment("u", 1)
    assert [(event.target, event.field) for event in catalog.attachments("u")] == [
        (":0", ADVANTAGES),
        ("lineage:0:15", ADVANTAGES),
    ]
    assert catalog.attachments("v") == ()


def test_releases_fall_due_with_their_checkpoint(catalog):
    feed(catalog, [opened("u"), final("u", segments=(segment("u", 0), segment("u", 1), segment("u", 2)))])
    released = [
        Released("u", 12.0, ("lineage:0:15", "lineage:1:15"), "ckpt-40"),
        Released("u", 11.0, ("lineage:0:15",), "ckpt-40"),
    ]
    feed(catalog, [*released, Released("u", 13.0, ("lineage:1:15",))], stream="t")
    assert catalog.released("u") == (
        Release("lineage:0:15", "ckpt-40", 11.0, due=False),
        Release("lineage:1:15", None, 13.0, due=True),
        Release("lineage:1:15", "ckpt-40", 12.0, due=False),
    )
    feed(catalog, [Checkpointed("ckpt-40", 14.0), Checkpointed("ckpt-41", 15.0)], stream="t", pack=1)
    assert [release.due for release in catalog.released("u")] == [True, True, True]
    assert [ref.index for ref in catalog.segments("not released")] == [2]
    feed(catalog, [Released("u", 16.0, ("lineage:2:15",), "ckpt-41")], stream="t", pack=2)
    assert list(catalog.segments("not released")) == [], "whose checkpoint is there already counts at once"
    assert catalog.released("v") == ()


def test_discarded_sessions_lose_their_segments(catalog):
    feed(catalog, [opened("u"), final("u"), opened("v"), final("v"), SessionDiscarded("u", 11.0)])
    assert ids(catalog.segments()) == ["v"]
    assert catalog.session("u").state == "discarded"
    assert ids(catalog.sessions("state != 'discarded'")) == ["v"]


def test_the_first_ending_counts_and_each_view_has_its_segments(catalog):
    feed(catalog, [opened("u"), final("u", 9.0, segments=(segment("u"),))])
    feed(catalog, [final("u", 8.0, outcome="timeout", segments=(segment("u", n_tokens=11),))], stream="b")
    feed(catalog, [final("u", 10.0, view="timeline", segments=(segment("u", view="timeline"),) * 1)], stream="c")
    assert (catalog.session("u").outcome, catalog.session("u").view) == ("timeout", "lineage")
    assert [ref.n_tokens for ref in catalog.segments(view="lineage")] == [11]
    assert len(list(catalog.segments(view="timeline"))) == 1
    assert len(list(catalog.segments())) == 2
    endings = [item.event for item in catalog.session_events("u")][1:]
    assert [(event.view, event.at) for event in endings] == [("lineage", 8.0), ("timeline", 10.0)]
    assert [len(event.segments) for event in endings] == [1, 1]


def test_idle_sessions(catalog):
    feed(
        catalog,
        [
            *(opened(name, 100.0, idle_s=10.0) for name in ("a", "b", "c", "d")),
            opened("never", 1.0),
            step("b", 0, 104.0),
            final("c", 101.0),
            SessionDiscarded("d", 101.0),
        ],
    )
    assert catalog.idle(110.0) == []
    assert catalog.idle(111.0) == ["a"]
    assert catalog.idle(1000.0) == ["a", "b"]


def test_totals(catalog):
    feed(
        catalog,
        [
            opened("a"),
            step("a", 0),
            final("a"),
            opened("b"),
            step("b", 0),
            step("b", 1),
            opened("c"),
            SessionDiscarded("c", 3.0),
        ],
    )
    assert catalog.ingest("t", 4, start=0, end=-1, items=[], sealed=True)
    totals = catalog.totals()
    assert (totals.n_streams, totals.n_packs, totals.n_sealed) == (2, 2, 1)
    assert (totals.n_sessions, totals.n_open, totals.n_final, totals.n_discarded) == (2, 1, 1, 1)
    assert (totals.n_steps, totals.n_tokens, totals.n_generated, totals.n_segments) == (3, 45, 15, 1)


def test_sessions_are_filtered_ordered_and_limited(catalog):
    for n in range(600):
        feed(catalog, [opened(f"s{n:03}", float(n % 7), attempt=n, source="even" if n % 2 == 0 else None)], pack=n)
    assert ids(catalog.sessions(order=("-attempt",), limit=3)) == ["s599", "s598", "s597"]
    assert len(ids(catalog.sessions("source = 'even' and attempt < 100"))) == 50
    found = list(catalog.sessions())
    assert [(row.opened_at, row.session_id) for row in found] == sorted(
        (row.opened_at, row.session_id) for row in found
    )
    assert len(found) == 600
    with pytest.raises(InputError, match="cannot order by 'no'"):
        catalog.sessions(order=("no",))
    for refused in (catalog.sessions, catalog.segments):
        with pytest.raises(InputError, match="columns: "):
            refused("attempt ==")


def test_every_column_can_be_filtered_on(catalog):
    feed(
        catalog,
        [
            opened("u", source="swe", group_id="g"),
            step("u", 0),
            final("u", segments=(segment("u", versions=("9", "12")),)),
        ],
    )
    for name in history_columns():
        list(catalog.sessions(f"{name} is null or {name} is not null"))
    assert ids(catalog.segments("first_version = 9 and last_version > 9 and last_version < 100")) == ["u"]
    assert ids(catalog.segments("index = 0 and count = 1 and not superseded and n_steps = 1 and view = 'lineage'")) == [
        "u"
    ]
    assert ids(catalog.segments("response_length = 5 and trainable_tokens = 5 and group_id = 'g'")) == ["u"]
    assert ids(catalog.sessions("rollout_step = 1")) == []


def history_columns():
    from spool.catalog.query import SESSION

    return SESSION.known


def test_writing_while_iterating(catalog):
    for n in range(520):
        feed(catalog, [opened(f"s{n:03}"), final(f"s{n:03}")], pack=n)
    seen = []
    for ref in catalog.segments():
        seen.append(ref.session_id)
        feed(catalog, [Annotated(ref.session_id, 50.0, {"seen": True})], stream=f"t{len(seen)}")
    assert seen == sorted(seen)
    assert len(seen) == 520
    assert len(list(catalog.sessions("seen"))) == 520


@pytest.mark.parametrize(
    "name", ["a" * 1024, "é" * 512, "nul\0inside", "../../etc", "'; DROP TABLE sessions; --", "%", "A", " a", "\n"]
)
def test_any_text_is_a_session_id(catalog, name):
    look_alikes = [name, name + " ", name + "\0", name.swapcase() + "x", "e\u0301", "\u00e9"]
    feed(
        catalog,
        [
            event
            for n in look_alikes
            for event in (opened(n, source=n), step(n, 0), final(n), Annotated(n, 20.0, {"id": n}))
        ],
    )
    for n in look_alikes:
        row = catalog.session(n)
        assert (row.session_id, row.source, row.n_steps, row.facts) == (n, n, 1, {"id": n})
        quoted = n.replace("'", "''")
        assert ids(catalog.sessions(f"session_id = '{quoted}' and id = '{quoted}'")) == [n]
        assert ids(catalog.segments(f"source = '{quoted}'")) == [n]
    assert catalog.totals().n_sessions == len(look_alikes)


def test_odd_facts_never_stop_the_feed(catalog):
    odd = {
        "huge": 2**64 - 1,
        "small": -(2**63),
        "nan": float("nan"),
        "inf": float("inf"),
        "": "empty name",
        "raw": b"\0\xff",
        "keys": {1: "one"},
        "deep": [[[[{"a": None}]]]],
        "reward": "not a number",
        "flag": True,
    }
    feed(catalog, [opened("u", sample_index=2**64 - 1), final("u"), Annotated("u", 20.0, odd)])
    facts = catalog.facts("u")
    assert facts.pop("nan") != facts.get("nan")
    assert facts == {key: value for key, value in odd.items() if key != "nan"}
    [ref] = catalog.segments()
    assert (ref.reward, ref.facts["reward"]) == (None, "not a number")
    assert ids(catalog.sessions("huge > 1e18 and nan is null and flag = true and inf > 1e300")) == ["u"]


# -- exactly once ----------------------------------------------------------------------------------------------------


def test_a_pack_is_taken_in_exactly_once(catalog):
    events = [opened("u"), step("u", 0), step("u", 1)]
    feed(catalog, events)
    before = catalog.dump()
    assert not catalog.ingest("s", 0, start=0, end=316, items=items(events))
    assert not catalog.ingest("s", 0, start=100, end=416, items=items([step("u", 2)], 3))
    assert not catalog.ingest("s", 0, start=316, end=416, items=items([step("u", 2)], 2))
    assert catalog.dump() == before
    assert catalog.ingest("s", 0, start=316, end=416, items=items([step("u", 2)], 3))
    assert catalog.ingest("s", 0, start=416, end=-1, items=[], sealed=True)
    assert not catalog.ingest("s", 0, start=-1, end=-1, items=items([step("u", 3)], 4))
    assert catalog.offsets() == {("s", 0): LogState(-1, 4, True)}
    assert catalog.offsets(["s"]) == catalog.offsets()
    assert catalog.offsets(["other"]) == {}
    assert catalog.session("u").n_steps == 3


class _Strange(msgspec.Struct):
    """An event of no known kind: it fails inside the transaction."""


def test_a_failing_ingest_leaves_nothing(catalog):
    feed(catalog, [opened("u")])
    before = catalog.dump()
    with pytest.raises(KeyError):
        catalog.ingest("s", 0, start=116, end=316, items=[*items([step("u", 0)], 1), *items([_Strange()], 2)])
    assert catalog.dump() == before
    assert catalog.ingest("s", 0, start=116, end=216, items=items([step("u", 0)], 1))


def _race(path, barrier, wins):
    catalog = Catalog.open(path)
    barrier.wait()
    for pack in range(12):
        events = [opened(f"u{pack}"), *(step(f"u{pack}", n) for n in range(20)), final(f"u{pack}")]
        if catalog.ingest("s", pack, start=0, end=9999, items=items(events)):
            wins.put(pack)
    wins.put(None)


def test_many_processes_feed_one_catalog(path):
    barrier, wins = FORK.Barrier(4), FORK.Queue()
    processes = [FORK.Process(target=_race, args=(path, barrier, wins)) for _ in range(4)]
    for process in processes:
        process.start()
    won, ended = [], 0
    while ended < 4:
        pack = wins.get(timeout=60)
        ended += pack is None
        won += [pack] if pack is not None else []
    for process in processes:
        process.join()
        assert process.exitcode == 0
    catalog = Catalog.open(path)
    assert sorted(won) == list(range(12))
    assert catalog.moved_aside is None
    assert [row.n_steps for row in catalog.sessions()] == [20] * 12
    assert catalog.check() == []


def test_threads_read_while_one_feeds(catalog):
    stop, failures = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                rows = list(catalog.sessions())
                assert all(row.n_steps == 2 for row in rows)
                assert len(list(catalog.segments())) >= len(rows)
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(60):
        feed(catalog, [opened(f"u{n}"), step(f"u{n}", 0), step(f"u{n}", 1), final(f"u{n}")], pack=n)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


# -- any order -------------------------------------------------------------------------------------------------------

_TIMES = st.integers(0, 4).map(float)
_NAMES = st.sampled_from(["u", "v"])
_EVENTS = st.one_of(
    st.builds(
        lambda s, t, r, g, a: opened(s, t, resumed=r, group_id=g, after=a),
        _NAMES,
        _TIMES,
        st.booleans(),
        st.sampled_from(["g", "h"]),
        st.none() | st.tuples(st.sampled_from(["s0", "s1"]), _TIMES),
    ),
    st.builds(
        lambda s, i, t, r, n: step(s, i, t, finish_reason=r, n_nonfinite=n),
        _NAMES,
        st.integers(0, 3),
        _TIMES,
        st.sampled_from(["stop", "length"]),
        st.integers(0, 2),
    ),
    st.builds(StepDiscarded, _NAMES, st.integers(0, 3), _TIMES),
    st.builds(
        lambda s, t, v, n: final(s, t, view=v, segments=tuple(segment(s, i, view=v, n_tokens=n) for i in range(n % 3))),
        _NAMES,
        _TIMES,
        st.sampled_from(["lineage", "timeline"]),
        st.integers(11, 13),
    ),
    st.builds(SessionDiscarded, _NAMES, _TIMES),
    st.builds(
        lambda s, t, v, k, g: Annotated(s, t, {k: v}, g),
        _NAMES,
        _TIMES,
        st.integers(0, 5),
        st.sampled_from(["reward", "x"]),
        st.sampled_from([None, "lineage:0:15"]),
    ),
    st.builds(lambda s, t, r: attached(s, t, row=r), _NAMES, _TIMES, st.integers(0, 5)),
    st.builds(Released, _NAMES, _TIMES, st.just(("lineage:0:15",)), st.sampled_from([None, "", "t"])),
    st.builds(Checkpointed, st.sampled_from(["t", ""]), _TIMES),
    st.builds(ToolsStored, st.sampled_from(["k", "l"]), st.just(b"[]")),
)
_LOGS = st.lists(st.lists(_EVENTS, min_size=1, max_size=7), min_size=2, max_size=4)


def _feed_in(order, logs):
    """Feed the logs (stream n // 2, pack n % 2) frame by frame or more, as ``order`` names them, then the rest."""
    catalog = Catalog.open("/nowhere/catalog.sqlite", readonly=True)
    done = [0] * len(logs)
    for n, count in [*order, *((n, 100) for n in range(len(logs)))]:
        n %= len(logs)
        chosen = logs[n][done[n] : done[n] + count]
        start = 16 + 100 * done[n] if done[n] else 0
        if chosen:
            end = 16 + 100 * (done[n] + len(chosen))
            assert catalog.ingest(f"s{n // 2}", n % 2, start=start, end=end, items=items(chosen, done[n]))
            done[n] += len(chosen)
    return catalog


@settings(max_examples=125)
@given(logs=_LOGS, order=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=14))
def test_any_order_of_feeding_gives_the_same(logs, order):
    expected, got = _feed_in([], logs), _feed_in(order, logs)
    backwards = _feed_in([(n, 100) for n in reversed(range(len(logs)))], logs)
    for other in (got, backwards):
        assert other.dump() == expected.dump()
        for name in ("u", "v"):
            assert other.session(name) == expected.session(name)
            assert other.session_events(name) == expected.session_events(name)
            assert other.released(name) == expected.released(name)
        assert list(other.segments()) == list(expected.segments())
        assert other.totals() == expected.totals()
        assert other.tools_at("k") == expected.tools_at("k")


@given(logs=_LOGS)
@settings(max_examples=100)
def test_the_counts_are_those_of_the_events(logs):
    catalog = _feed_in([(1, 1), (0, 2)], logs)
    events = [event for log in logs for event in log]
    for name in ("u", "v"):
        mine = [event for event in events if getattr(event, "session_id", None) == name]
        gone = {event.index for event in mine if isinstance(event, StepDiscarded)}
        live = {event.index for event in mine if isinstance(event, StepCommitted)} - gone
        row = catalog.session(name)
        assert (row is not None) == any(isinstance(event, SessionOpened) for event in mine)
        if row is not None:
            if catalog.is_contested(name):
                counted = [item.event for item in catalog.session_events(name)]
                gone = {event.index for event in counted if isinstance(event, StepDiscarded)}
                live = {event.index for event in counted if isinstance(event, StepCommitted)} - gone
            assert (row.n_steps, row.n_generated) == (len(live), 5 * len(live))
            assert (row.finish_reason is None) == (not live)


def _steps_of(catalog, name="u"):
    steps = (item for item in catalog.session_events(name) if isinstance(item.event, StepCommitted))
    return [(item.stream, item.event.index) for item in steps]


def test_steps_of_two_owners_are_never_mixed(catalog, caplog):
    feed(catalog, [opened("u", 1.0, group_id="g"), step("u", 0, 2.0), step("u", 1, 9.0)], stream="a")
    feed(catalog, [opened("u", 1.5, group_id="h"), step("u", 0, 3.0), step("u", 1, 4.0), step("u", 2, 5.0)], stream="b")
    assert "two owners at once" in caplog.text and catalog.is_contested("u")
    assert _steps_of(catalog) == [("a", 0), ("a", 1)]
    assert (catalog.session("u").n_steps, catalog.session("u").group_id) == (2, "g")
    # the one that ends counts, whoever began
    feed(catalog, [final("u", 12.0)], stream="b", pack=1)
    assert _steps_of(catalog) == [("b", 0), ("b", 1), ("b", 2)]
    assert (catalog.session("u").n_steps, catalog.session("u").group_id) == (3, "h")
    assert [item.stream for item in catalog.openings("u")] == ["a", "b"]
    # it goes with its packs, and the other is all there is
    for pack in (0, 1):
        catalog.forget("b", pack, at=20.0, reason="a test")
    assert _steps_of(catalog) == [("a", 0), ("a", 1)] and not catalog.is_contested("u")
    assert (catalog.session("u").n_steps, catalog.session("u").group_id) == (2, "g")


def test_one_token_resumed_twice_gives_one_record(catalog):
    first = ("a", 1.0)
    feed(catalog, [opened("u", 1.0), step("u", 0, 2.0)], stream="a")
    feed(catalog, [opened("u", 3.0, resumed=True, after=first), step("u", 1, 6.0)], stream="b")
    feed(catalog, [opened("u", 4.0, resumed=True, after=first), step("u", 1, 5.0), step("u", 2, 7.0)], stream="c")
    assert _steps_of(catalog) == [("a", 0), ("c", 1), ("c", 2)]
    # a session that moves on, behind clocks that differ, has no rivals
    feed(catalog, [opened("v", 5.0), step("v", 0, 6.0)], stream="a", pack=1)
    feed(catalog, [opened("v", 3.0, resumed=True, after=("a", 5.0)), step("v", 1, 3.5)], stream="b", pack=1)
    feed(catalog, [opened("v", 9.0, resumed=True, after=("b", 3.0)), step("v", 2, 9.5)], stream="a", pack=2)
    assert _steps_of(catalog, "v") == [("a", 0), ("b", 1), ("a", 2)] and not catalog.is_contested("v")
    assert [(item.stream, item.event.at) for item in catalog.openings("v")] == [("b", 3.0), ("a", 5.0), ("a", 9.0)]


def test_a_session_that_moved_keeps_its_steps_in_order(catalog):
    # the second owner's clock is behind, and its log is read first
    feed(
        catalog,
        [
            opened("u", 0.5, resumed=True),
            step("u", 2, 0.6),
            step("u", 3, 0.7),
            StepDiscarded("u", 1, 0.8),
            final("u", 0.9),
        ],
        stream="b",
    )
    feed(catalog, [opened("u", 10.0, group_id="g"), step("u", 0, 11.0), step("u", 1, 12.0)], stream="a")
    found = [item.event for item in catalog.session_events("u")]
    kinds = ["SessionOpened", "SessionOpened", *["StepCommitted"] * 4, "StepDiscarded", "SessionFinalized"]
    assert [type(event).__name__ for event in found] == kinds
    assert [event.resumed for event in found[:2]] == [False, True]
    assert [event.index for event in found[2:6]] == [0, 1, 2, 3]
    row = catalog.session("u")
    assert (row.group_id, row.opened_at, row.n_steps, row.state) == ("g", 10.0, 3, "final")


def test_facts_and_releases_before_their_session(catalog):
    feed(
        catalog,
        [Annotated("u", 5.0, {"reward": 2.0}), Released("u", 6.0, ("lineage:0:15",)), attached("u")],
        stream="late",
    )
    assert catalog.session("u") is None
    assert list(catalog.sessions()) == []
    assert catalog.idle(1e9) == []
    assert catalog.totals().n_sessions == 0
    feed(catalog, [opened("u"), final("u")])
    [ref] = catalog.segments("released and reward = 2.0")
    assert (ref.reward, set(ref.extents)) == (2.0, {"token_ids", "advantages"})


# -- speed that can be asserted --------------------------------------------------------------------------------------


def test_lookups_use_the_indexes(path, catalog):
    feed(catalog, [opened("u"), step("u", 0), final("u")])
    connection = apsw.Connection(path)
    queries = [
        ("SELECT sid FROM sessions WHERE session_id = ?", ("u",)),
        (rivals.EVENTS, (1,)),
        ("SELECT ref FROM segments WHERE sid = ? AND view = ? ORDER BY idx", (1, "lineage")),
        ("SELECT sid, target, key, packed FROM facts WHERE sid IN (?)", (1,)),
        ("SELECT sid, target, event FROM attachments WHERE sid IN (?)", (1,)),
        ("SELECT sid FROM sessions s WHERE s.group_id = ?", ("g",)),
    ]
    for sql, values in queries:
        plan = [row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        assert not any("SCAN" in text for text in plan), (sql, plan)
        assert any("SEARCH" in text for text in plan), (sql, plan)


def _cache_uses(connection):
    kinds = (apsw.SQLITE_DBSTATUS_CACHE_MISS, apsw.SQLITE_DBSTATUS_CACHE_HIT)
    return sum(connection.status(kind)[0] for kind in kinds)


def test_a_lookup_touches_no_more_pages_in_a_large_catalog(path, catalog):
    def pages(name):
        """Pages that SQLite asks its cache for while one session is looked up."""
        connection = apsw.Connection(path)
        sid = connection.execute("SELECT sid FROM sessions WHERE session_id = ?", (name,)).get
        before = _cache_uses(connection)
        connection.execute(rivals.EVENTS, (sid,)).fetchall()
        return _cache_uses(connection) - before

    feed(catalog, [opened("u"), *(step("u", n) for n in range(20))])
    small = pages("u")
    for pack in range(10):
        many = [
            event
            for n in range(50)
            for event in (opened(f"x{pack}-{n}"), *(step(f"x{pack}-{n}", i) for i in range(20)))
        ]
        feed(catalog, many, stream="t", pack=pack)
    assert catalog.totals().n_steps == 10_020
    assert small > 0
    assert pages("u") <= 2 * small


# -- damage ----------------------------------------------------------------------------------------------------------


def _spoil_not_a_database(path):
    with open(path, "wb") as file:
        file.write(b"this is not a database" * 1000)


def _spoil_cut(path):
    os.truncate(path, os.path.getsize(path) // 8192 * 4096)


def _spoil_middle(path):
    with open(path, "r+b") as file:
        for page in range(1, os.path.getsize(path) // 4096):
            file.seek(page * 4096)
            file.write(b"\xa5" * 64)


def _spoil_version(path):
    connection = apsw.Connection(path)
    connection.pragma("user_version", schema.VERSION + 1)
    connection.close()


def _spoil_other_application(path):
    os.unlink(path)
    connection = apsw.Connection(path)
    connection.execute("CREATE TABLE theirs(x)")
    connection.close()


SPOILS = [_spoil_not_a_database, _spoil_cut, _spoil_middle, _spoil_version, _spoil_other_application]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_a_damaged_file_is_moved_aside(path, spoil):
    catalog = Catalog.open(path)
    feed(catalog, [event for n in range(200) for event in (opened(f"u{n}"), step(f"u{n}", 0), final(f"u{n}"))])
    catalog.close()
    spoil(path)
    with open(path, "rb") as file:
        spoilt = file.read()
    catalog = Catalog.open(path)
    assert catalog.moved_aside == f"{path}.damaged-0"
    with open(catalog.moved_aside, "rb") as file:
        assert file.read() == spoilt
    assert catalog.offsets() == {}
    assert catalog.check() == []
    feed(catalog, [opened("again")])
    assert ids(Catalog.open(path).sessions()) == ["again"]
    assert not catalog.in_memory


def test_damaged_files_are_numbered_and_a_sound_one_stays(path):
    for n in range(3):
        _spoil_not_a_database(path)
        assert Catalog.open(path).moved_aside == f"{path}.damaged-{n}"
    assert Catalog.open(path).moved_aside is None


def test_an_empty_file_becomes_a_catalog(path):
    open(path, "wb").close()
    catalog = Catalog.open(path)
    assert catalog.moved_aside is None
    feed(catalog, [opened("u")])


def test_damage_found_later_is_a_condition_of_its_own(path):
    catalog = Catalog.open(path)
    feed(catalog, [event for n in range(300) for event in (opened(f"u{n}"), step(f"u{n}", 0))])
    catalog.close()
    catalog = Catalog.open(path)
    catalog.totals()
    catalog.close()
    _spoil_middle(path)
    with pytest.raises(DamagedError) as caught:
        list(catalog.sessions())
    assert caught.value.file == files.identity(path)
    catalog.reset(caught.value)
    feed(catalog, [opened("again")])
    assert ids(catalog.sessions()) == ["again"]
    # a second finder of the same damage must not move the new file
    catalog.reset(caught.value)
    assert ids(catalog.sessions()) == ["again"]
    assert not os.path.exists(f"{path}.damaged-1")


def _open_spoilt(path, barrier, found):
    barrier.wait()
    catalog = Catalog.open(path)
    feed(catalog, [opened(str(os.getpid()))], stream=str(os.getpid()))
    found.put((catalog.moved_aside, os.getpid()))


def test_processes_that_find_the_same_damage_move_it_once(path):
    _spoil_not_a_database(path)
    barrier, found = FORK.Barrier(4), FORK.Queue()
    processes = [FORK.Process(target=_open_spoilt, args=(path, barrier, found)) for _ in range(4)]
    for process in processes:
        process.start()
    results = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert [moved for moved, _ in results if moved] == [f"{path}.damaged-0"]
    assert not os.path.exists(f"{path}.damaged-1")
    assert sorted(ids(Catalog.open(path).sessions())) == sorted(str(pid) for _, pid in results)


@pytest.mark.parametrize("suffixes", [("",), ("", "-wal", "-shm")])
def test_a_deleted_file_is_noticed(path, catalog, suffixes):
    feed(catalog, [opened("u")])
    before = catalog.generation
    for suffix in suffixes:
        os.unlink(path + suffix)
    assert catalog.offsets() == {}
    assert catalog.generation != before
    feed(catalog, [opened("again")])
    assert ids(Catalog.open(path).sessions()) == ["again"]
    assert catalog.check() == []


def test_a_file_that_is_moved_aside_while_it_is_opened_is_opened_again(path, monkeypatch):
    """SQLite asks for the file by its path to make the WAL; another process may have moved it just then."""
    prepare, tries = files._prepare, []

    def overtaken(connection, *args):
        tries.append(connection)
        if len(tries) == 1:
            raise apsw.exception_for(apsw.SQLITE_IOERR_FSTAT)
        return prepare(connection, *args)

    monkeypatch.setattr(files, "_prepare", overtaken)
    feed(Catalog.open(path), [opened("u")])
    assert len(tries) > 1


# -- where it cannot write -------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_gives_an_index_in_memory(tmp_path):
    # relative to the folder, since the one that is no root any more may not walk there
    code = f"""
        import os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from recorded import feed, opened
        from spool.catalog import Catalog
        if os.getuid() == 0:
            os.setgid(65534), os.setuid(65534)
        catalog = Catalog.open("catalog.sqlite")
        feed(catalog, [opened("u")])
        assert catalog.in_memory
        assert [row.session_id for row in catalog.sessions()] == ["u"]
        assert os.listdir(".") == []
    """
    os.chmod(tmp_path, 0o555)
    try:
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, cwd=tmp_path)
    finally:
        os.chmod(tmp_path, 0o755)


def test_readonly_leaves_the_folder_alone(tmp_path, path):
    catalog = Catalog.open(path, readonly=True)
    feed(catalog, [opened("u")])
    assert ids(catalog.sessions()) == ["u"]
    assert os.listdir(tmp_path) == []
    with pytest.raises(StorageError, match="no folder"):
        Catalog.open(f"{path}/missing/catalog.sqlite")


def test_a_transaction_of_another_process_is_waited_for_then_named(path, catalog, monkeypatch):
    monkeypatch.setattr(files, "BUSY_S", 0.2)
    feed(catalog, [opened("u")])
    catalog.close()
    other = apsw.Connection(path)
    other.execute("BEGIN IMMEDIATE")
    assert ids(catalog.sessions()) == ["u"]
    with pytest.raises(StorageError, match="busy") as caught:
        feed(catalog, [opened("v")], pack=1)
    assert caught.value.details["busy"]
    other.execute("COMMIT")
    feed(catalog, [opened("v")], pack=1)


# -- forks -----------------------------------------------------------------------------------------------------------


def test_a_child_opens_its_own(path, catalog):
    feed(catalog, [opened("u"), step("u", 0)])
    descriptors = set(os.listdir("/proc/self/fd"))
    assert any(path in os.path.realpath(f"/proc/self/fd/{fd}") for fd in descriptors)

    def child():
        assert not any(path in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        assert catalog.session("u").n_steps == 1
        feed(catalog, [opened("from the child")], stream="child")

    in_child(child)
    feed(catalog, [opened("v")], pack=1)
    assert sorted(ids(catalog.sessions())) == ["from the child", "u", "v"]
    assert catalog.check() == []


def test_a_fork_inside_a_transaction(path):
    # the child runs to the normal end of the interpreter: nothing may close the inherited connection
    code = f"""
        import os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from recorded import feed, opened, step
        from spool.catalog import Catalog
        catalog = Catalog.open({path!r})
        feed(catalog, [opened("u"), step("u", 0)])
        with catalog.rebuilding():
            feed(catalog, [opened("v"), *(step("v", n) for n in range(500))])
            pid = os.fork()
            if pid == 0:
                # its own index, in memory: SQLite would have it trust the parent's locks
                assert catalog.in_memory and catalog.offsets() == {{}}
                feed(catalog, [opened("w")])
                assert [row.session_id for row in catalog.sessions()] == ["w"]
            else:
                assert os.waitpid(pid, 0)[1] == 0
        if pid:
            assert [row.n_steps for row in catalog.sessions()] == [500]
            assert catalog.check() == []
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
    catalog = Catalog.open(path)
    assert ids(catalog.sessions()) == ["v"]
    assert catalog.check() == []


def test_a_fork_beside_a_foreign_transaction(path, catalog):
    feed(catalog, [opened("u")])
    other = apsw.Connection(path)
    other.execute("BEGIN IMMEDIATE")
    other.execute("DELETE FROM facts")

    def child():
        assert ids(catalog.sessions()) == ["u"]

    in_child(child)
    other.execute("COMMIT")
    feed(catalog, [opened("v")], pack=1)
    assert catalog.check() == []


def test_forks_while_other_threads_feed(path, catalog):
    stop = threading.Event()

    def write():
        pack = 0
        while not stop.is_set():
            feed(catalog, [opened(f"u{pack}"), *(step(f"u{pack}", n) for n in range(5))], pack=pack)
            pack += 1

    thread = threading.Thread(target=write)
    thread.start()

    def child():
        assert all(row.n_steps == 5 for row in catalog.sessions("session_id like 'u%'"))
        feed(catalog, [opened(f"c{os.getpid()}")], stream=f"c{os.getpid()}")
        assert not catalog.in_memory

    try:
        for _ in range(8):
            in_child(child)
    finally:
        stop.set()
        thread.join()
    assert len([row for row in catalog.sessions() if row.session_id[0] == "c"]) == 8
    assert catalog.check() == []


def test_no_database_is_made_in_the_midst_of_a_fork(path):
    """The fork would not wait for it: a child that was forked while SQLite opens a file hangs in its next opening."""
    made = threading.Event()
    thread = threading.Thread(target=lambda: (Catalog.open(path).close(), made.set()))
    database._before()
    try:
        thread.start()
        assert not made.wait(0.3)
    finally:
        database._in_parent()
    assert made.wait(30)
    thread.join()


def test_an_index_in_memory_is_copied_by_a_fork(path):
    catalog = Catalog.open(path, readonly=True)
    feed(catalog, [opened("u")])

    def child():
        assert ids(catalog.sessions()) == ["u"]
        feed(catalog, [opened("v")], pack=1)

    in_child(child)
    assert ids(catalog.sessions()) == ["u"]


# -- room ------------------------------------------------------------------------------------------------------------


def test_space_is_shared_and_given_back(path, catalog):
    a, b = Space(catalog, 100), Space(Catalog.open(path), 100)
    assert a.reserve("a", 60)
    assert not b.reserve("b", 41)
    assert b.reserve("b", 40)
    assert not a.reserve("a", 1)
    a.settle("a", 50)
    assert catalog.usage() == {"a": 10, "b": 40}
    assert b.reserve("b", 50)
    a.settle("a", 10)
    b.settle("b", 500)
    assert catalog.usage() == {}
    catalog.account({"dead": 70, "gone": 0}, {"live": 5})
    catalog.account({}, {"live": 9, "dead": 1})
    assert catalog.usage() == {"dead": 70, "live": 5}
    assert Space(catalog, None).reserve("c", 10**15)
    Space(catalog, None).settle("dead", 10**15)
    assert catalog.usage() == {"dead": 70, "live": 5}


def test_a_rebuild_keeps_the_account_of_room(catalog):
    Space(catalog, 100).reserve("a", 60)
    with catalog.rebuilding():
        pass
    assert catalog.usage() == {"a": 60}


def _reserve(path, barrier, granted):
    space = Space(Catalog.open(path), 1000)
    barrier.wait()
    granted.put(sum(space.reserve(str(os.getpid()), 7) for _ in range(60)))


def test_processes_together_stay_under_the_limit(path):
    barrier, granted = FORK.Barrier(4), FORK.Queue()
    processes = [FORK.Process(target=_reserve, args=(path, barrier, granted)) for _ in range(4)]
    for process in processes:
        process.start()
    total = sum(granted.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert total == 1000 // 7
    assert sum(Catalog.open(path).usage().values()) == total * 7


def test_a_rebuild_is_seen_whole_or_not_at_all(path, catalog):
    feed(catalog, [opened("old")])
    other = Catalog.open(path)
    with catalog.rebuilding():
        feed(catalog, [opened("new")])
        assert ids(catalog.sessions()) == ["new"]
        assert ids(other.sessions()) == ["old"]
    assert ids(other.sessions()) == ["new"]
    with pytest.raises(ZeroDivisionError), catalog.rebuilding():
        feed(catalog, [opened("newer")])
        1 / 0  # noqa: B018
    assert ids(other.sessions()) == ["new"]
    assert catalog.offsets().keys() == {("s", 0)}


# -- packs that go ---------------------------------------------------------------------------------------------------

ROWS = {"token_ids": ArraySize(10, 4)}


def sizes(stream):
    """Ten rows of token ids a pack, in the streams that are known."""
    return ROWS if stream in ("s0", "s1", "s") else None


_FAR = st.builds(
    lambda s, i, t, stream, row: step(s, i, t, extents={"token_ids": (Extent(stream, row, 3, 0, 7),)}),
    _NAMES,
    st.integers(0, 3),
    _TIMES,
    st.sampled_from(["s0", "s1", "nowhere"]),
    st.integers(0, 25),
)
_PACKS = st.lists(st.lists(_EVENTS | _FAR, min_size=1, max_size=7), min_size=2, max_size=5)


def _seal(catalog, n, events):
    return catalog.ingest_pack(f"s{n // 2}", n % 2, [encode_event(event) for event in events], sizes=sizes)


def _fed(packs, chosen):
    catalog = Catalog.open("/nowhere/catalog.sqlite", readonly=True)
    for n in chosen:
        assert _seal(catalog, n, packs[n])
    return catalog


def _assert_same(got, expected):
    assert got.dump() == expected.dump()
    assert got.totals() == expected.totals()
    assert list(got.segments()) == list(expected.segments())
    for name in ("u", "v"):
        assert got.session(name) == expected.session(name)
        assert got.session_events(name) == expected.session_events(name)
        assert got.released(name) == expected.released(name)
        assert got.facts(name) == expected.facts(name)
        assert got.attachments(name) == expected.attachments(name)


@settings(max_examples=200)
@given(packs=_PACKS, data=st.data())
def test_what_is_forgotten_was_never_there(packs, data):
    verbs = [(verb, n) for n in range(len(packs)) for verb in ("feed", "forget")]
    order = data.draw(st.permutations(verbs))
    kept = data.draw(st.sets(st.sampled_from(range(len(packs)))))
    catalog, gone = Catalog.open("/nowhere/catalog.sqlite", readonly=True), set()
    for verb, n in order:
        if verb == "feed":
            assert _seal(catalog, n, packs[n]) == (n not in gone)
        elif n not in kept:
            assert catalog.forget(f"s{n // 2}", n % 2, at=5.0, reason="released")
            assert not catalog.forget(f"s{n // 2}", n % 2)
            gone.add(n)
    expected = _fed(packs, sorted(kept))
    _assert_same(catalog, expected)
    there = {(f"s{n // 2}", n % 2) for n in gone}
    assert catalog.packs.of(["u", "v"]) == expected.packs.of(["u", "v"]) - there
    for n in gone:
        assert not _seal(catalog, n, packs[n])
        row = catalog.packs.get(f"s{n // 2}", n % 2)
        assert (row.state, row.gone_at, row.reason) == ("gone", 5.0, "released")
    _assert_same(catalog, expected)
    assert catalog.check() == []


@settings(max_examples=60)
@given(packs=_PACKS)
def test_bulk_is_the_same_as_one_by_one(packs):
    catalog = Catalog.open("/nowhere/catalog.sqlite", readonly=True)
    with catalog.bulk():
        for n in reversed(range(len(packs))):
            assert _seal(catalog, n, packs[n])
            assert not _seal(catalog, n, packs[n])
        catalog.forget("s0", 0)
    _assert_same(catalog, _fed(packs, range(1, len(packs))))
    assert catalog.check() == []
    names = {name for (name,) in catalog._run("SELECT name FROM sqlite_schema WHERE type = 'index'")}
    assert names >= {"sessions_group", "sessions_rollout", "sessions_open", "events_of", "uses_of", "uses_via"}


def test_a_failing_bulk_leaves_nothing(path, catalog):
    with pytest.raises(ZeroDivisionError), catalog.bulk():
        _seal(catalog, 0, [opened("u")])
        catalog.packs.saw(["manifests/1"])
        1 / 0  # noqa: B018
    assert catalog.session("u") is None
    assert catalog.packs.seen() == set()
    assert "sessions_group" in str(catalog._run("SELECT name FROM sqlite_schema"))
    assert _seal(catalog, 0, [opened("u")])


def test_a_session_whose_opening_is_gone_is_not_listed(catalog):
    _seal(catalog, 0, [opened("u"), step("u", 0)])
    _seal(catalog, 1, [step("u", 1), final("u")])
    assert len(list(catalog.segments())) == 1
    catalog.forget("s0", 0)
    assert catalog.session("u") is None
    assert list(catalog.sessions()) == []
    assert list(catalog.segments()) == []
    assert catalog.packs.sessions()["u"].state == "unknown"


def test_an_iteration_is_not_led_astray_by_what_goes(catalog):
    for n in range(600):
        catalog.ingest_pack("s", n, [encode_event(event) for event in (opened(f"s{n:03}"), final(f"s{n:03}"))])
    segments, sessions = catalog.segments(), catalog.sessions()
    next(segments), next(sessions)
    for n in range(400, 600):
        catalog.forget("s", n)
        catalog.ingest_pack("t", n, [encode_event(event) for event in (opened(f"t{n}"), final(f"t{n}"))])
    assert {ref.session_id[0] for ref in segments} == {row.session_id[0] for row in sessions} == {"s"}


def test_the_packs_that_a_session_uses(catalog):
    far = {"token_ids": (Extent("s", 15, 5, 0, 7), Extent("s1", 38, 2, 5, 7), Extent("nowhere", 0, 3, 7, 7))}
    catalog.ingest_pack("s", 0, [encode_event(e) for e in (opened("u"), step("u", 0, extents=far))], sizes=sizes)
    catalog.ingest_pack("t", 0, [encode_event(Released("u", 3.0, ("x",)))], sizes=sizes)
    assert catalog.packs.of(["u", "nobody"]) == {("s", 0), ("s", 1), ("s1", 3), ("t", 0)}
    assert catalog.packs.of([]) == set()
    uses = {(use.row.stream, use.row.pack): use for use in catalog.packs.uses()[0]}
    assert uses.keys() == {("s", 0), ("t", 0)}  # the others are not known yet
    assert (uses["s", 0].data, uses["s", 0].facts) == (("u",), ())
    assert (uses["t", 0].data, uses["t", 0].facts) == ((), ("u",))
    catalog.forget("s", 1)
    assert catalog.packs.of(["u"]) == {("s", 0), ("s1", 3), ("t", 0)}


def test_a_pack_only_goes_forward(path, catalog):
    packs = catalog.packs
    feed(catalog, [ToolsStored("k", b"[]"), opened("u", 3.0)])
    assert [(row.state, row.opened_at, row.n_events, row.known) for row in packs.rows()] == [("open", 3.0, 2, False)]
    packs.mark("s", 0, "spilled", hot_bytes=100, stored_bytes=70, sealed_at=9.0)
    packs.mark("s", 0, "sealed", hot_bytes=90)
    row = Catalog.open(path).packs.get("s", 0)
    assert (row.state, row.hot_bytes, row.stored_bytes, row.sealed_at) == ("spilled", 90, 70, 9.0)
    assert catalog.ingest("s", 0, start=216, end=-1, items=[], sealed=True)
    assert packs.get("s", 0).state == "spilled"
    packs.mark("t", 4, "evicted")
    assert [(row.stream, row.pack) for row in packs.rows("evicted")] == [("t", 4)]
    catalog.forget("s", 0)
    packs.mark("s", 0, "evicted")
    assert packs.states("s") == {0: "gone"}
    assert catalog.offsets()["s", 0].sealed
    assert packs.get("s", 1) is None


def test_requests_and_objects(path, catalog):
    packs, other = catalog.packs, Catalog.open(path).packs
    packs.request_seal("s", 3)
    other.request_seal("s", 2)
    other.request_seal("t", 0)
    assert packs.seal_requests() == {"s": 3, "t": 0}
    packs.serve("s", 2)
    assert packs.seal_requests() == {"s": 3, "t": 0}
    packs.serve("s", 3)
    packs.saw(["b", "a", "b"])
    other.saw(["c"])
    packs.unsee(["b"])
    with catalog.rebuilding():
        assert packs.seen() == set()
        packs.saw(["a"])
    assert (other.seen(), other.seal_requests()) == ({"a"}, {"t": 0})


def test_how_far_sessions_are_from_their_end(catalog):
    two = (segment("u", 0), segment("u", 1))
    feed(catalog, [opened("u"), final("u", segments=two), opened("v"), opened("w"), SessionDiscarded("w", 2.0)])
    feed(
        catalog,
        [Released("u", 3.0, (two[0].key,)), Released("u", 3.0, (two[1].key,), "a"), Released("x", 3.0, ())],
        pack=1,
    )
    ends = catalog.packs.sessions()
    assert [(name, end.state, end.n_held, end.tags) for name, end in sorted(ends.items())] == [
        ("u", "final", 1, ("a",)),
        ("v", "open", 0, ()),
        ("w", "discarded", 0, ()),
        ("x", "unknown", 0, ()),
    ]
    feed(catalog, [Checkpointed("a", 4.0)], pack=2)
    assert catalog.packs.sessions()["u"].n_held == 0
    assert [use.tags for use in catalog.packs.uses()[0]] == [(), (), ("a",)]
    catalog.forget("s", 2)
    assert catalog.packs.sessions()["u"].n_held == 1


def test_an_index_that_processes_of_another_version_use_is_left_to_them(tmp_path):
    """Each would move the other's aside, again and again."""
    root = f"{tmp_path}/s"
    other = (
        "import sys, spool; from spool.catalog import files; files.VERSION += 1\n"
        f"sp = spool.open({root!r}); s = sp.session('a'); s.append(prompt_token_ids=[1], response_token_ids=[2])\n"
        "print(len(list(sp.sessions())), flush=True); sys.stdin.read(); print(len(list(sp.sessions())))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "1\n"
        with (
            pytest.raises(StorageError, match=r"of another version .* another process uses it"),
            spool.open(root) as sp,
        ):
            list(sp.sessions())
        with spool.open(root, readonly=True) as sp:
            assert [row.session_id for row in sp.sessions()] == ["a"]
        assert process.communicate("")[0] == "1\n" and not list(Path(root).glob("*damaged*"))
    with spool.open(root) as sp:
        assert [row.session_id for row in sp.sessions()] == ["a"]
    assert list(Path(root).glob("*damaged*"))
