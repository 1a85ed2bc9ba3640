"""Logs on disk -> catalog: sealed, torn, damaged, growing, many writers; and whole events back."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from recorded import (
    Annotated,
    Folder,
    StepDiscarded,
    ToolsStored,
    Transaction,
    final,
    opened,
    step,
)

from spool.catalog import Catalog, DamagedError, LogState, Place, Space
from spool.errors import IntegrityError, ReleasedError, StorageError
from spool.formats import records
from spool.formats.frames import LOG_HEADER, encode_event, frame
from spool.logs import FeedTimer, LogFeeder, feeder
from spool.model.fields import TOKEN_IDS, ArraySize, Schema
from spool.model.refs import Extent
from spool.write.stream import create_stream

FORK = multiprocessing.get_context("fork")


class Root:
    """A hot root with a catalog and a feeder."""

    def __init__(self, path):
        self.path = str(path)
        self.database = f"{path}/catalog.sqlite"
        self.catalog = Catalog.open(self.database)
        self.feeder = LogFeeder(self.path, self.catalog)

    def another(self):
        return Root(self.path)

    def steps(self):
        self.feeder.catch_up()
        return {row.session_id: row.n_steps for row in self.catalog.sessions()}


@pytest.fixture
def root(tmp_path):
    os.mkdir(tmp_path / "streams")
    return Root(tmp_path)


@pytest.fixture
def folder(root):
    return Folder(root.path)


@pytest.fixture
def old_folders(monkeypatch):
    """Trust folder times at once, as if every change were long ago."""
    monkeypatch.setattr(feeder, "RACY_NS", -1)


def session(name, n_steps=3, *, messages=b'["hello"]'):
    return [opened(name), *(step(name, n, messages=messages) for n in range(n_steps))]


# -- feeding ---------------------------------------------------------------------------------------------------------


def test_new_frames_are_taken_in_as_they_come(root, folder):
    assert root.steps() == {}
    folder.append(*session("u"))
    assert root.steps() == {"u": 3}
    folder.append(step("u", 3), *session("v", 1))
    assert root.steps() == {"u": 4, "v": 1}
    folder.append(step("v", 1), pack=1)
    other = Folder(root.path, "other")
    other.append(Annotated("v", 9.0, {"reward": 1.0}))
    assert root.steps() == {"u": 4, "v": 2}
    assert root.catalog.facts("v") == {"reward": 1.0}
    assert root.catalog.offsets()[folder.name, 0] == LogState(os.path.getsize(folder.log()), 7, False)
    assert root.another().steps() == {"u": 4, "v": 2}


def test_only_the_named_streams_are_looked_at(root, folder):
    other = Folder(root.path, "other")
    folder.append(*session("u"))
    other.append(*session("v"))
    root.feeder.catch_up(["other"])
    assert [row.session_id for row in root.catalog.sessions()] == ["v"]
    assert root.feeder.catch_up(["no such stream"]) == []


def test_what_is_no_stream_is_passed_over(root, folder):
    Folder(root.path, ".new-20260101T000000-00000001").append(*session("half made"))
    open(f"{root.path}/streams/a file", "wb").close()
    os.mkdir(f"{root.path}/streams/empty")
    folder.append(*session("u"))
    for name in ("x.log", ".0.tmp", "1.log.tmp", "-1.log"):
        with open(f"{folder.path}/records/{name}", "wb") as file:
            file.write(b"not a log")
    assert root.steps() == {"u": 3}
    assert root.feeder.catch_up() == []


def test_an_empty_root(tmp_path):
    root = Root(tmp_path)
    assert root.feeder.catch_up() == []
    assert root.feeder.rebuild() == []


@pytest.mark.parametrize("window", [1, 100, 4096])
def test_frames_of_any_size_whatever_the_window(root, folder, monkeypatch, window):
    monkeypatch.setattr(feeder, "WINDOW_BYTES", window)
    folder.append(*session("u", 30), *session("v", 2, messages=b"m" * 100_000), final("u"))
    assert root.steps() == {"u": 30, "v": 2}
    assert root.feeder.catch_up() == []
    located = root.catalog.session_events("v")[2]
    assert root.feeder.read_event(located).messages == b"m" * 100_000


def test_a_torn_frame_is_waited_for(root, folder):
    folder.append(*session("u"))
    whole = frame(encode_event(step("u", 3)))
    lock = os.open(f"{folder.path}/lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for cut in (1, 7, 8, 9, len(whole) - 1):
        size = os.path.getsize(folder.log())
        folder.append_bytes(whole[:cut])
        assert root.steps() == {"u": 3}
        assert root.feeder.catch_up() == []
        os.truncate(folder.log(), size)
    folder.append_bytes(whole)
    assert root.steps() == {"u": 4}
    os.close(lock)


def test_a_log_without_its_header_is_waited_for(root, folder):
    for cut in (0, 5, 15):
        with open(folder.log(), "wb") as file:
            file.write(LOG_HEADER[:cut])
        assert root.steps() == {}
        assert root.feeder.catch_up() == []
    os.unlink(folder.log())
    folder.append(opened("u"))
    assert root.steps() == {"u": 0}


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_nothing_new_costs_two_stats_a_live_stream_and_one_a_finished_one(root, folder, old_folders, monkeypatch):
    folder.append(*session("u"))
    fresh = Folder(root.path, "fresh")
    fresh.append()
    for n in range(5):
        sealed = Folder(root.path, f"sealed-{n}")
        sealed.append(*session(f"v{n}"))
        sealed.seal(*session(f"v{n}"))
    root.feeder.catch_up()
    calls = []
    for name in ("stat", "listdir", "open"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda *args, name=name, real=real, **more: (calls.append((name, args[0])), real(*args, **more))[1],
        )
    root.feeder.catch_up()
    looked = [path for name, path in calls if name == "stat" and "/streams/" in str(path)]
    live = [path for stream in (folder, fresh) for path in (f"{stream.path}/records", stream.log())]
    finished = [f"{root.path}/streams/sealed-{n}/records" for n in range(5)]
    assert sorted(looked) == sorted([*live, *finished])
    assert {name for name, _ in calls} == {"stat"}
    calls.clear()
    root.feeder.catch_up([folder.name])
    assert len([path for _, path in calls if "/streams/" in str(path)]) == 2


def test_a_change_in_the_same_tick_as_the_listing_is_seen(root, folder, monkeypatch):
    # the clock of folder times is coarse: a log made right after a listing may leave the time as it was
    folder.append(*session("u"))
    root.feeder.catch_up()
    before = os.stat(f"{folder.path}/records")
    folder.append(*session("v"), pack=1)
    os.utime(f"{folder.path}/records", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert root.steps() == {"u": 3, "v": 3}


# -- sealing ---------------------------------------------------------------------------------------------------------


def test_a_pack_sealed_between_two_looks(root, folder, old_folders):
    events = [*session("u"), final("u"), *session("v")]
    folder.append(*events[:3])
    root.feeder.catch_up()
    folder.append(*events[3:])
    folder.seal(*events)
    assert root.steps() == {"u": 3, "v": 3}
    assert root.catalog.offsets() == {(folder.name, 0): LogState(-1, len(events), True)}
    assert root.another().feeder.catch_up() == []
    fresh = Catalog.open(root.database, readonly=True)
    LogFeeder(root.path, fresh).catch_up()
    assert fresh.dump() == root.catalog.dump()


def test_a_pack_known_whole_is_only_marked(root, folder, old_folders):
    events = session("u")
    folder.append(*events)
    root.feeder.catch_up()
    folder.seal(*events)
    root.feeder.catch_up()
    assert root.catalog.offsets()[folder.name, 0] == LogState(-1, 4, True)
    # with both files there, the log is read
    folder.append(*events, pack=1)
    with open(folder.log(1), "rb") as file:
        log = file.read()
    folder.seal(*events, pack=1)
    with open(folder.log(1), "wb") as file:
        file.write(log)
    root.another().feeder.catch_up()
    assert root.catalog.offsets()[folder.name, 1] == LogState(len(log), 4, False)


def test_sealed_packs_are_fed_in_batches(root, folder, monkeypatch):
    monkeypatch.setattr(feeder, "BATCH_EVENTS", 7)
    events = [*session("u", 40), *session("v", 1)]
    folder.seal(*events)
    taken = []
    real = root.catalog.ingest
    monkeypatch.setattr(
        root.catalog, "ingest", lambda *args, **more: (taken.append(len(more["items"])), real(*args, **more))[1]
    )
    assert root.steps() == {"u": 40, "v": 1}
    assert max(taken) == 7
    assert sum(taken) == len(events)


def test_sealed_while_it_is_read(root, folder, monkeypatch):
    events = session("u", 20)
    folder.append(*events)
    monkeypatch.setattr(feeder, "WINDOW_BYTES", 1)
    real, done = root.catalog.ingest, []

    def seal_first(*args, **more):
        done.append(more["start"])
        if len(done) == 4:
            folder.seal(*events)
            other = root.another()
            other.feeder.catch_up()
        return real(*args, **more)

    monkeypatch.setattr(root.catalog, "ingest", seal_first)
    assert root.steps() == {"u": 20}
    assert root.catalog.offsets() == {(folder.name, 0): LogState(-1, 21, True)}


def test_unlinked_between_listing_and_reading(root, folder, monkeypatch):
    events = session("u")
    folder.append(*events)
    real = root.catalog.offsets

    def seal_after_listing(streams=None):
        if os.path.exists(folder.log()):
            folder.seal(*events)
        return real(streams)

    monkeypatch.setattr(root.catalog, "offsets", seal_after_listing)
    assert root.steps() == {"u": 3}


def test_a_deleted_stream_is_forgotten_quietly(root, folder):
    folder.append(*session("u"))
    folder.append_bytes(b"\x05")
    assert len(root.feeder.catch_up()) == 1
    os.rename(folder.path, f"{root.path}/gone")
    assert root.feeder.catch_up([folder.name]) == []
    assert root.steps() == {"u": 3}


# -- whole events back -----------------------------------------------------------------------------------------------


def test_events_come_back_whole_from_log_and_records(root, folder):
    events = [
        opened("u"),
        step("u", 0, messages=b"a" * 200_000),
        Transaction((ToolsStored("k", b"[1]"), step("u", 1, messages=b"[2]"))),
    ]
    folder.append(*events)
    root.feeder.catch_up()
    located = root.catalog.session_events("u")
    tools = root.catalog.tools_at("k")
    whole = [events[0], events[1], events[2].events[1], events[2].events[0]]
    for _ in range(2):
        assert root.feeder.read_events([*located, tools]) == whole
        assert [root.feeder.read_event(place) for place in [*located, tools]] == whole
        # places of before the sealing still hold after it
        folder.seal(*events)
        root.feeder.catch_up()
    assert root.feeder.read_events([]) == []
    reread = LogFeeder(root.path, Catalog.open(root.database, readonly=True))
    reread.catch_up()
    assert reread.read_events([tools, *located]) == [whole[3], *whole[:3]]


def test_events_that_are_not_there_any_more(root, folder):
    [at, *_] = folder.append(*session("u", 1))
    place = Place(stream=folder.name, pack=0, seq=0, offset=at)
    assert root.feeder.read_event(place) == opened("u")
    with open(folder.log(), "r+b") as file:
        file.seek(at + 10)
        file.write(b"\xff")
    with pytest.raises(IntegrityError, match="no whole event at byte 16"):
        root.feeder.read_event(place)
    folder.seal(*session("u", 1))
    beyond = Place(stream=folder.name, pack=0, seq=7, offset=at)
    for wanted in ([beyond], [place, beyond]):
        with pytest.raises(IntegrityError):
            root.feeder.read_events(wanted)
    open(folder.arrow(), "wb").close()
    with pytest.raises(IntegrityError, match="empty"):
        root.feeder.read_event(place)
    os.unlink(folder.arrow())
    with pytest.raises(IntegrityError, match="neither there nor marked as released"):
        root.feeder.read_event(place)


# -- damage ----------------------------------------------------------------------------------------------------------


def test_damage_in_the_middle_is_reported_unless_its_writer_lives(root, folder):
    offsets = folder.append(*session("u", 5))
    with open(folder.log(), "r+b") as file:
        file.seek(offsets[3] + 12)
        file.write(b"\xff\xff")
    lock = os.open(f"{folder.path}/lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert root.steps() == {"u": 2}
    assert root.feeder.catch_up() == []
    os.close(lock)
    for _ in range(2):
        [problem] = root.feeder.catch_up()
        assert (problem.stream, problem.pack, problem.kind) == (folder.name, 0, "damaged")
        assert f"bytes {offsets[3]} to {offsets[4]}" in problem.message
    # what recovery saves is taken in, and the problem is over
    kept = session("u", 5)
    folder.seal(*kept[:3], *kept[4:])
    assert root.feeder.catch_up() == []
    assert root.steps() == {"u": 4}


def test_the_torn_end_of_a_dead_writer_is_reported(root, folder):
    folder.append(*session("u"))
    folder.append_bytes(frame(encode_event(step("u", 3)))[:-1])
    [problem] = root.feeder.catch_up()
    assert problem.kind == "torn"
    assert root.steps() == {"u": 3}


@pytest.mark.parametrize("inside", [0, 9])
def test_a_log_cut_behind_what_is_known_is_reported(root, folder, inside):
    offsets = folder.append(*session("u", 5))
    root.feeder.catch_up()
    os.truncate(folder.log(), offsets[3] + inside)
    [problem] = root.another().feeder.catch_up()
    assert problem.kind == "short"
    assert root.steps() == {"u": 5}
    assert [problem.kind for problem in root.feeder.rebuild()] == ["short"]
    assert root.steps() == {"u": 2}


def test_records_with_fewer_events_than_known_are_reported(root, folder):
    folder.append(*session("u", 5))
    root.feeder.catch_up()
    folder.seal(*session("u", 3))
    [problem] = root.feeder.catch_up()
    assert (problem.kind, "4 events, 6 were read" in problem.message) == ("short", True)


@pytest.mark.parametrize("content", [b"", b"ARROW1 but no more", b"\0" * 5000])
def test_damaged_records_are_reported_and_the_rest_goes_on(root, folder, content):
    with open(folder.arrow(), "wb") as file:
        file.write(content)
    folder.append(*session("u"), pack=1)
    [problem] = root.feeder.catch_up()
    assert (problem.pack, problem.kind) == (0, "damaged")
    assert root.steps() == {"u": 3}


def test_a_log_of_something_else_is_reported(root, folder):
    with open(folder.log(), "wb") as file:
        file.write(b"x" * 100)
    [problem] = root.feeder.catch_up()
    assert problem.kind == "damaged"


def test_an_event_of_a_newer_version_stops_its_pack_only(root, folder):
    folder.append(*session("u"))
    folder.append_bytes(frame(b"\x92\xa5later\x01"))
    folder.append(step("u", 3))
    folder.append(*session("v"), pack=1)
    for _ in range(2):
        [problem] = root.feeder.catch_up()
        assert (problem.pack, problem.kind, "newer Spool" in problem.message) == (0, "damaged", True)
    assert root.steps() == {"u": 3, "v": 3}


@pytest.mark.parametrize("seen_by", ["a query", "the feed", "a rebuild"])
def test_a_catalog_damaged_under_way_is_made_again(root, folder, seen_by):
    folder.append(*(event for n in range(200) for event in session(f"u{n}", 2)))
    root.feeder.catch_up()
    before = root.catalog.dump()
    root.catalog.close()
    with open(root.database, "r+b") as file:
        for page in range(1, os.path.getsize(root.database) // 4096):
            file.seek(page * 4096)
            file.write(b"\xa5" * 64)
    if seen_by == "a query":
        with pytest.raises(DamagedError):
            list(root.catalog.sessions())
    else:
        folder.append(*session("v", 1))
    (root.feeder.rebuild if seen_by == "a rebuild" else root.feeder.catch_up)()
    assert root.catalog.moved_aside == f"{root.database}.damaged-0"
    assert root.catalog.damage is None
    after = root.catalog.dump()["sessions"]
    assert [row for row in after if row[0] != "v"] == before["sessions"]
    assert len(after) == (200 if seen_by == "a query" else 201)
    assert root.catalog.check() == []


def test_a_deleted_catalog_is_made_again(root, folder):
    folder.append(*session("u"))
    other = Folder(root.path, "other")
    other.seal(*session("v"))
    assert root.steps() == {"u": 3, "v": 3}
    before = root.catalog.dump()
    os.unlink(root.database)
    assert root.steps() == {"u": 3, "v": 3}
    assert root.catalog.dump() == before
    assert os.path.exists(root.database)


# -- rebuilding ------------------------------------------------------------------------------------------------------


def mixed(root):
    """Streams in every state; returns nothing torn or damaged."""
    for n in range(3):
        folder = Folder(root.path, f"stream-{n}")
        first = [*session(f"u{n}", 4), StepDiscarded(f"u{n}", 3, 5.0), final(f"u{n}")]
        folder.append(*first)
        root.feeder.catch_up()
        folder.seal(*first)
        folder.append(Annotated(f"u{(n + 1) % 3}", 20.0 + n, {"reward": float(n)}), *session(f"v{n}", 2), pack=1)


def test_a_rebuilt_catalog_equals_the_old(root):
    mixed(root)
    root.feeder.catch_up()
    before = root.catalog.dump()
    Space(root.catalog, 100).reserve("stream-0", 50)
    assert root.feeder.rebuild() == []
    assert root.catalog.dump() == before
    assert root.catalog.usage() == {"stream-0": 50}
    assert root.catalog.check() == []
    assert root.another().feeder.catch_up() == []
    assert root.catalog.dump() == before


def test_a_rebuild_that_fails_leaves_the_old_index(root, monkeypatch):
    mixed(root)
    root.feeder.catch_up()
    before = root.catalog.dump()
    real, calls = root.catalog.ingest, []

    def fail(*args, **more):
        calls.append(args)
        if len(calls) == 3:
            raise StorageError("the disk is gone")
        return real(*args, **more)

    monkeypatch.setattr(root.catalog, "ingest", fail)
    with pytest.raises(StorageError, match="the disk is gone"):
        root.feeder.rebuild()
    monkeypatch.undo()
    assert root.catalog.dump() == before
    root.feeder.catch_up()
    assert root.catalog.dump() == before


def _rebuild_again_and_again(path, stop):
    root = Root(path)
    while not stop.wait(0.05):
        root.feeder.rebuild()


def test_rebuilding_while_others_feed_and_read(root):
    mixed(root)
    root.feeder.catch_up()
    stop = FORK.Event()
    process = FORK.Process(target=_rebuild_again_and_again, args=(root.path, stop))
    process.start()
    folder = Folder(root.path, "growing")
    try:
        for n in range(40):
            folder.append(*session(f"w{n}", 1))
            assert len(root.steps()) == 6 + n + 1
    finally:
        stop.set()
        process.join(30)
    assert process.exitcode == 0
    root.feeder.catch_up()
    before = root.catalog.dump()
    root.feeder.rebuild()
    assert root.catalog.dump() == before


# -- many processes --------------------------------------------------------------------------------------------------

TOKENS = Schema.of(TOKEN_IDS)


def _rows(n):
    from spool.write.stream import Rows

    return {"token_ids": Rows(n, lambda dst, first: dst.fill(first))}


def _write(path, number, n_sessions, die):
    root = Root(path)
    writer = create_stream(root.path, TOKENS, space=Space(root.catalog, None), on_commit=None)
    timer = FeedTimer(root.feeder, lambda: [writer.name])
    for n in range(n_sessions):
        name = f"{number}-{n}"
        writer.commit(encode_event(opened(name)))
        for index in range(5):
            writer.append(_rows(15), lambda _, index=index, name=name: encode_event(step(name, index)))
            timer.notify(0, 0)
        if n % 10 == 9:
            writer.flush()
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    timer.close()
    writer.close()


def test_writers_in_many_processes_and_one_killed(root):
    processes = [FORK.Process(target=_write, args=(root.path, n, 25, n == 0)) for n in range(3)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        assert all(n <= 5 for n in root.steps().values())
        time.sleep(0.01)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0]
    expected = {f"{number}-{n}": 5 for number in range(3) for n in range(25)}
    assert root.steps() == expected
    assert root.feeder.catch_up() == []
    before = root.catalog.dump()
    root.feeder.rebuild()
    assert root.catalog.dump() == before
    fresh = Catalog.open(root.database, readonly=True)
    LogFeeder(root.path, fresh).catch_up()
    assert fresh.dump() == before


def test_threads_catch_up_together(root, folder):
    failures = []

    def run():
        try:
            for _ in range(20):
                root.feeder.catch_up()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for n in range(30):
        folder.append(*session(f"u{n}", 1))
    for thread in threads:
        thread.join()
    assert failures == []
    root.feeder.catch_up()  # what was appended after the last look of all threads
    assert len(root.steps()) == 30


def test_a_forked_child_feeds_on_its_own(root, folder):
    folder.append(*session("u"))
    root.feeder.catch_up()
    # held by a thread that the child does not have
    with root.feeder._lock:
        pid = os.fork()
        if pid == 0:
            folder.append(*session("child"), pack=1)
            os._exit(0 if root.steps() == {"u": 3, "child": 3} else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert root.steps() == {"u": 3, "child": 3}


# -- room ------------------------------------------------------------------------------------------------------------


def test_room_is_measured_where_no_one_accounts_for_it(root, folder):
    folder.append(*session("u"), ToolsStored("k", b"x" * 100_000))
    live = Folder(root.path, "live")
    live.append(*session("v"))
    lock = os.open(f"{live.path}/lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    space = Space(root.catalog, 1 << 40)
    space.reserve(folder.name, 16 << 20)
    space.reserve("deleted", 16 << 20)
    root.feeder.account()
    usage = root.catalog.usage()
    assert 100_000 <= usage[folder.name] < 300_000
    assert 0 < usage["live"] < 100_000
    assert usage.keys() == {folder.name, "live"}
    space.reserve("live", 16 << 20)
    root.feeder.account()
    assert root.catalog.usage()["live"] == usage["live"] + (16 << 20)
    os.close(lock)
    root.feeder.account()
    assert root.catalog.usage() == usage


# -- the timer -------------------------------------------------------------------------------------------------------


class Counting:
    """Stands for a feeder; remembers its calls."""

    def __init__(self):
        self.calls = []
        self.error = None

    def catch_up(self, streams=None):
        self.calls.append((time.monotonic(), streams))
        if self.error is not None:
            raise self.error
        return []


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_commit_is_fed_soon_and_many_at_once():
    counting = Counting()
    timer = FeedTimer(counting, lambda: ["mine"])
    started = time.monotonic()
    for _ in range(1000):
        timer.notify(3, 4000)
    wait_for(lambda: counting.calls)
    at, streams = counting.calls[0]
    assert streams == ["mine"]
    assert at - started >= 0.02
    timer.notify()
    wait_for(lambda: len(counting.calls) >= 2)
    timer.close()
    assert len(counting.calls) <= 5


def test_the_timer_sleeps_while_nothing_is_committed():
    counting = Counting()
    timer = FeedTimer(counting)
    before = threading.active_count()
    time.sleep(0.1)
    assert threading.active_count() == before
    timer.notify()
    wait_for(lambda: counting.calls)
    wakes = []
    real = timer._wake.wait
    timer._wake.wait = lambda *args: (wakes.append(args), real(*args))[1]
    time.sleep(0.3)
    assert len(counting.calls) == 1
    assert wakes == []
    timer.close()


def test_closing_feeds_what_was_committed_and_ends_the_thread(root, folder):
    others = set(threading.enumerate())
    timer = FeedTimer(root.feeder, lambda: [folder.name])
    folder.append(*session("u"))
    timer.notify()
    timer.close()
    assert root.catalog.session("u").n_steps == 3
    assert set(threading.enumerate()) <= others
    timer.notify()
    timer.close()
    assert set(threading.enumerate()) <= others
    FeedTimer(root.feeder).close()


def test_a_failing_feed_is_tried_again(monkeypatch):
    from spool.logs import timer as module

    monkeypatch.setattr(module, "RETRY_S", 0.02)
    counting = Counting()
    counting.error = StorageError("busy")
    timer = FeedTimer(counting)
    timer.notify()
    wait_for(lambda: len(counting.calls) >= 3)
    counting.error = None
    n = len(counting.calls)
    wait_for(lambda: len(counting.calls) > n)
    timer.close()


def test_a_child_gets_a_thread_of_its_own(root, folder):
    timer = FeedTimer(root.feeder, lambda: [folder.name])
    folder.append(*session("u"))
    timer.notify()
    wait_for(lambda: root.catalog.session("u"))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            folder.append(*session("child"))
            timer.notify()
            wait_for(lambda: root.catalog.session("child"))
            timer.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    folder.append(*session("parent"))
    timer.notify()
    wait_for(lambda: root.catalog.session("parent"))
    timer.close()


def test_the_timer_does_not_keep_the_interpreter_alive(root, folder):
    code = f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from spool.catalog import Catalog
        from spool.logs import FeedTimer, LogFeeder
        timer = FeedTimer(LogFeeder({root.path!r}, Catalog.open({root.database!r})))
        timer.notify()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)


def test_a_real_writer_drives_the_timer(root):
    names = []
    timer = FeedTimer(root.feeder, lambda: names)
    writer = create_stream(root.path, TOKENS, space=Space(root.catalog, 1 << 30), on_commit=timer.notify)
    names.append(writer.name)
    writer.commit(encode_event(opened("u")))
    writer.append(_rows(15), lambda _: encode_event(step("u", 0, stream=writer.name)))
    wait_for(lambda: root.catalog.session("u") and root.catalog.session("u").n_steps == 1)
    located = root.catalog.session_events("u")
    assert root.feeder.read_event(located[1]).messages == b'[{"role":"user"}]'
    writer.flush()
    writer.commit(encode_event(final("u")))
    timer.close()
    writer.close()
    root.feeder.catch_up()
    assert root.catalog.session("u").state == "final"
    assert root.feeder.read_events(located)[1] == step("u", 0, stream=writer.name)
    assert all(state.sealed for state in root.catalog.offsets().values())
    assert 0 < root.catalog.usage()[writer.name] < 16 << 20


# -- packs in the tiers ----------------------------------------------------------------------------------------------


class ColdRoot:
    """A cold root with the packs that were spilled to it."""

    def __init__(self):
        self.packs, self.asked, self.error = {}, [], None

    def spill(self, folder, events, pack=0):
        self.packs[folder.name, pack] = [encode_event(event) for event in events]
        with open(f"{folder.path}/records/{pack}.cold", "w") as file:
            json.dump({"hot_bytes": 70, "stored_bytes": 50, "sealed_at": 3.5, "rows": {}, "stream": folder.name}, file)

    def _pack(self, stream, pack):
        self.asked.append((stream, pack))
        if self.error is not None:
            raise self.error
        return self.packs[stream, pack]

    def events(self, stream, pack):
        return self._pack(stream, pack)

    def records(self, stream, pack):
        return bytes(records.encode(self._pack(stream, pack)))

    def sizes(self, stream):
        return {"token_ids": ArraySize(10, 4)} if stream == "far" else None


def gone(folder, pack=0, text='{"at": 1000000000, "reason": "released"}'):
    with open(f"{folder.path}/records/{pack}.gone", "w") as file:
        file.write(text)
    for path in (folder.log(pack), folder.arrow(pack), f"{folder.path}/records/{pack}.cold"):
        if os.path.exists(path):
            os.unlink(path)


def states(root):
    return {(row.pack, row.state) for row in root.catalog.packs.rows()}


def test_a_pack_is_followed_through_the_tiers(root, folder):
    cold, events = ColdRoot(), session("u")
    folder.append(*events)
    root.steps()
    assert states(root) == {(0, "open")}
    folder.seal(*events)
    root.steps()
    row = root.catalog.packs.get(folder.name, 0)
    assert (row.state, row.sealed_at) == ("sealed", os.stat(folder.arrow()).st_mtime)
    assert row.hot_bytes == os.stat(folder.arrow()).st_blocks * 512 > 0
    cold.spill(folder, events)
    root.steps()
    row = root.catalog.packs.get(folder.name, 0)
    assert (row.state, row.hot_bytes, row.stored_bytes, row.sealed_at) == ("spilled", 70, 50, 3.5)
    os.unlink(folder.arrow())
    assert root.steps() == {"u": 3}
    assert states(root) == {(0, "evicted")}
    assert root.feeder.problems() == []
    gone(folder)
    assert root.steps() == {}
    assert states(root) == {(0, "gone")}
    assert root.another().steps() == {}


def test_a_rebuilt_index_takes_evicted_packs_from_the_cold_root(root, folder):
    cold, events = ColdRoot(), session("u")
    folder.seal(*events)
    cold.spill(folder, events)
    folder.append(*session("v", 1), pack=1)
    assert root.steps() == {"u": 3, "v": 1}
    before = root.catalog.dump()
    os.unlink(folder.arrow())
    [problem] = root.feeder.rebuild()
    assert (problem.kind, problem.pack) == ("evicted", 0)
    assert "cold root" in problem.message
    assert root.steps() == {"v": 1}
    feeder_with_cold = LogFeeder(root.path, root.catalog, cold)
    assert feeder_with_cold.catch_up() == []
    assert root.catalog.dump() == before
    assert feeder_with_cold.rebuild() == []
    assert root.catalog.dump() == before


def test_a_cold_root_that_fails_is_a_problem_and_asked_again(root, folder):
    cold, events = ColdRoot(), session("u")
    cold.spill(folder, events)
    cold.error = StorageError("the store is down")
    feeder_with_cold = LogFeeder(root.path, root.catalog, cold)
    [problem] = feeder_with_cold.catch_up()
    assert "the store is down" in problem.message
    cold.error = None
    assert feeder_with_cold.catch_up() == [problem]
    assert len(cold.asked) == 1
    feeder_with_cold._known[folder.name].retry_at = 0.0
    assert feeder_with_cold.catch_up() == []
    assert [row.n_steps for row in root.catalog.sessions()] == [3]


def test_whole_events_of_packs_that_left(root, folder):
    cold, events = ColdRoot(), session("u")
    folder.seal(*events)
    cold.spill(folder, events)
    root.steps()
    places = root.catalog.session_events("u")
    whole = root.feeder.read_events(places)
    os.unlink(folder.arrow())
    with pytest.raises(StorageError, match="spill="):
        root.feeder.read_events(places)
    feeder_with_cold = LogFeeder(root.path, root.catalog, cold)
    assert feeder_with_cold.read_events(places) == whole == events
    gone(folder)
    for one in (root.feeder, feeder_with_cold):
        with pytest.raises(ReleasedError, match="was released and deleted on 2001-09-09"):
            one.read_events(places)
    root.steps()
    os.unlink(f"{folder.path}/records/0.gone")
    with pytest.raises(ReleasedError, match="2001-09-09"):  # the catalog remembers
        root.feeder.read_events(places)


@pytest.mark.parametrize("text", ["", "no json", '{"at": null}', "[]"])
def test_a_marker_that_says_nothing_is_a_marker(root, folder, text):
    folder.seal(*session("u"))
    root.steps()
    [place, *_] = root.catalog.session_events("u")
    gone(folder, text=text)
    assert root.steps() == {}
    with pytest.raises(ReleasedError, match="deleted"):
        root.feeder.read_event(place)
    with open(f"{folder.path}/records/1.cold", "w") as file:
        file.write(text)
    root.feeder.catch_up()
    assert states(root) == {(0, "gone"), (1, "evicted")}


def test_a_gone_pack_whose_files_are_still_there_is_not_fed(root, folder):
    folder.seal(*session("u"))
    folder.append(*session("v"), pack=1)
    for pack in (0, 1):
        with open(f"{folder.path}/records/{pack}.gone", "w") as file:
            file.write("{}")
    assert root.steps() == {}
    assert root.feeder.rebuild() == []
    assert root.steps() == {}


def test_rows_in_other_packs_and_streams_are_found(root):
    writer = create_stream(root.path, Schema.of(TOKEN_IDS), space=Space(root.catalog, None))
    n_rows = writer.layout.shard_rows["token_ids"]
    folder = Folder(root.path, writer.name)
    other = Folder(root.path, "other")
    runs = (Extent(writer.name, 2 * n_rows + 1, 1, 0, 7), Extent("far", 35, 1, 1, 7), Extent("nowhere", 5, 1, 2, 7))
    other.append(opened("u"), step("u", 0, extents={"token_ids": runs}))
    LogFeeder(root.path, root.catalog, ColdRoot()).catch_up()
    assert root.catalog.packs.of(["u"]) == {("other", 0), (folder.name, 2), ("far", 3)}
    writer.close()
