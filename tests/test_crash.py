"""Crash safety from append to collection: killed at every named point, stopped machines, torn files, two spillers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import assert_same, record, wait_for

import spool
from spool.logs.packs import marker_path
from spool.points import POINTS, listen, reach
from spool.spiller import elect
from spool.spiller.evict import evict
from spool.spiller.status import read_status
from spool.stores.objects import open_objects
from spool.stores.remote import PIECE_BYTES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools import crash  # noqa: E402

LONG_S = 200
forks = multiprocessing.get_context("fork")


@pytest.fixture
def cold(tmp_path):
    return f"file://{tmp_path}/cold"


@pytest.fixture
def uri(tmp_path, cold):
    return f"file://{tmp_path}/hot?spill={cold}&grace_s=0.001"


def spill(uri, *, env=None, code=0):
    """Run a spiller until nothing needs it; return what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "spool", "spill", uri],
        env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stderr


def in_fork(call, *arguments):
    """Run ``call`` in a forked child; return its exit code."""
    child = forks.Process(target=call, args=arguments)
    child.start()
    child.join(LONG_S)
    return child.exitcode


def recorded(uri, names=("a", "b", "c")):
    """Record and seal a pack for each session; return all segments and what they read as."""
    segments = []
    with spool.open(uri) as sp:
        for name in names:
            segments += record(sp, name)
            sp.flush()
        return segments, sp.read(segments)


# -- named points ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_a_kill_at_each_point_and_at_random_loses_and_leaves_nothing(tmp_path):
    harness = crash.Harness(str(tmp_path), "", seed=5)
    points = [*POINTS, "at random", "at random"]
    with open(tmp_path / "report", "w") as report:
        harness.run(points, 10_000, report=report)
    assert {point for point in POINTS if not harness.kills[point]} == set()
    assert harness.kills["at random"] >= 10
    assert len(harness.claims.steps) > 20


def test_a_harness_that_finds_nothing_would_find_something(tmp_path, uri, cold, by_hand):
    segments, _ = recorded(uri)
    spill(uri)
    claims = crash.Claims()
    crash.check_zarr(open_objects(cold))
    shard = next((tmp_path / "cold" / "streams").glob("*/token_ids/c/1/0"), None) or next(
        (tmp_path / "cold" / "streams").glob("*/token_ids/c/1")
    )
    assert shard.exists()
    os.unlink(shard)
    with pytest.raises(AssertionError, match="zeros"):
        crash.check_zarr(open_objects(cold))
    with pytest.raises(AssertionError, match="None of"):
        crash.check_objects(open_objects(cold))
    with open(tmp_path / "hot" / ".x.tmp", "w"), pytest.raises(AssertionError, match="left over"):
        crash.check_hot_files(str(tmp_path / "hot"))
    with spool.open(uri) as sp:
        steps = sp.steps("a")
        sp.release(segments)
        sp.gc()
        with pytest.raises(AssertionError, match="nobody did that"):
            crash.check_claim(sp, steps[0], 0, claims, loose=False)
        crash.check_claim(sp, steps[0], 0, claims, loose=True)


def test_every_point_is_one_of_the_list():
    source = "".join(path.read_text() for path in (ROOT / "spool").rglob("*.py"))
    assert {point for point in POINTS if source.count(f'reach("{point}")') != 1} == set()
    assert source.count('reach("') == len(POINTS)
    seen = []
    listen(seen.append)
    try:
        reach(POINTS[0])
    finally:
        listen(None)
    reach(POINTS[1])
    assert seen == [POINTS[0]]


def test_the_command_line_dies_where_it_is_told(uri, by_hand):
    segments, wanted = recorded(uri)
    spill(uri, env={"SPOOL_KILL_AT": "spill.shard:3"}, code=-signal.SIGKILL)
    assert "there is no point" in spill(uri, env={"SPOOL_KILL_AT": "spill.nothing"}, code=2)
    assert "SPOOL_KILL_AT" in spill(uri, env={"SPOOL_KILL_AT": "spill.shard:0"}, code=2)
    spill(uri)
    with spool.open(uri) as sp:
        assert [row.state for row in sp._catalog.packs.rows()][:3] == ["spilled"] * 3
        assert_same(sp.read(segments), wanted)


# -- forks, stopped machines, half-made things -----------------------------------------------------------------------


def test_a_forked_child_has_its_own_and_harms_nothing(uri, cold, by_hand):
    with spool.open(uri) as sp:
        before = record(sp, "before")
        wanted = sp.read(before)
        live = sp.session("live")
        live.append(prompt_token_ids=[1, 2], response_token_ids=[3])

        def child():
            assert_same(sp.read(before), wanted)
            record(sp, "child")
            sp.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        with sp._catalog._database.writing():  # the parent is inside a transaction
            quiet = forks.Process(target=lambda: (sp.read(before), os._exit(0)))
            quiet.start()
            quiet.join(LONG_S)
            assert quiet.exitcode == 0
        assert in_fork(child) == -signal.SIGKILL
        live.append(prompt_token_ids=[1, 2, 3, 4], response_token_ids=[5])
        assert [row.session_id for row in sp.sessions()] == ["before", "live", "child"]
        assert sp._catalog.check() == []
        sp.flush()
    spill(uri)
    with spool.open(cold) as there:
        assert {row.session_id for row in there.sessions()} == {"before", "live", "child"}
        assert_same(there.read(before), wanted)


def test_a_stopped_machine_leaves_locks_that_nobody_holds(tmp_path, uri, cold, by_hand):
    with spool.open(uri) as sp:
        sealed = record(sp, "sealed")
        sp.flush()
        spill_once(sp)
        unsealed = record(sp, "unsealed")
        wanted = sp.read([*sealed, *unsealed])
        (tmp_path / "hot" / "spiller.json").write_bytes(b'{"pid": 1, "at": 0.0}')
        shutil.copytree(tmp_path / "hot", tmp_path / "after")  # as the disk of a machine that lost power
        moved = f"file://{tmp_path}/after?grace_s=0.001"
        assert not elect.is_running(str(tmp_path / "after"))
        spill(moved)
        with spool.open(moved) as other:
            assert other.recover() == []
            assert_same(other.read([*sealed, *unsealed]), wanted)
            dump = other._catalog.dump()
            other.rebuild()
            assert other._catalog.dump() == dump
        crash.check_hot_files(str(tmp_path / "after"))
        with spool.open(cold) as there:
            assert_same(there.read([*sealed, *unsealed]), wanted)


def spill_once(sp):
    """Bring over what is sealed, in this process."""
    spiller = sp._tiers.spiller()
    spiller._feeder.catch_up()
    while spiller._spill():
        pass
    spiller.close()


def test_half_made_and_temporary_things_are_swept(tmp_path, uri, by_hand):
    recorded(uri)
    spill(uri)
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    stream = next(path.name for path in (hot / "streams").iterdir())
    half = hot / "streams" / ".new-20260101T000000-00000000"
    half.mkdir()
    (half / "zarr.json").write_bytes(b"{}")
    records = hot / "streams" / stream / "records"
    old = [hot / ".spiller.json.0123.tmp", hot / ".spool-0123.json", records / ".0.cold.1.tmp"]
    old.append(cold / "manifests" / ".m.parquet.1.tmp")
    young = cold / "manifests" / ".m.parquet.2.tmp"  # of another node, at work
    for path in [*old, young]:
        path.write_bytes(b"half")
    for path in old:
        os.utime(path, (1, 1))
    spill(uri)
    assert [path for path in [half, *old] if path.exists()] == []
    assert young.exists()


# -- torn files ------------------------------------------------------------------------------------------------------


def test_torn_markers_are_written_anew(tmp_path, uri, by_hand):
    segments, wanted = recorded(uri)
    spill(uri)
    root = str(tmp_path / "hot")
    with spool.open(uri) as sp:
        rows = list(sp._catalog.packs.rows("spilled"))
        evict(root, sp._catalog, rows[0].stream, rows[0].pack)
        dump = sp._catalog.dump()
    paths = [Path(marker_path(root, row.stream, row.pack, "cold")) for row in rows]
    whole = [path.read_bytes() for path in paths]
    for path in paths:
        path.write_bytes(b"")
    manifests = sorted((tmp_path / "cold" / "manifests").iterdir())
    os.unlink(manifests[2])  # the third is brought over again
    with spool.open(uri) as sp:
        assert_same(sp.read(segments), wanted)
    spill(uri)
    assert [json.loads(path.read_bytes()) for path in paths] == [json.loads(data) for data in whole]
    assert manifests[2].exists()
    os.unlink(tmp_path / "hot" / "catalog.sqlite")
    with spool.open(uri) as sp:
        assert_same(sp.read(segments), wanted)
        assert len(list(sp.sessions())) == 3
        assert sp._catalog.dump() == dump


def test_a_torn_mark_of_a_deletion_still_says_released(tmp_path, uri, cold, by_hand):
    segments, _ = recorded(uri)
    spill(uri)
    root = str(tmp_path / "hot")
    with spool.open(uri) as sp:
        sp.release(segments)
        sp.flush()
        sp.gc()
    for path in (tmp_path / "hot" / "streams").glob("*/records/*.gone"):
        path.write_bytes(b"")
    for path in (tmp_path / "cold" / "gone").iterdir():
        path.write_bytes(b"")
    for place in (uri, cold):
        with spool.open(place) as sp, pytest.raises(spool.ReleasedError):
            sp.read(segments)
    spill(uri)
    crash.check_hot_files(root)
    with spool.open(uri) as sp:
        sp.gc()
    crash.check_objects(open_objects(cold))


def test_a_torn_manifest_hides_its_pack_until_it_is_written_anew(tmp_path, uri, cold, by_hand):
    segments, wanted = recorded(uri)
    spill(uri)
    first, second, third = sorted((tmp_path / "cold" / "manifests").iterdir())[:3]
    whole = first.read_bytes()
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-9])
    with spool.open(cold) as there:
        assert [row.session_id for row in there.sessions()] == ["c"]
        assert len(there._feeds.cold.damaged()) == 2
        assert_same(there.read(segments), wanted)
        spill(uri)
        assert first.read_bytes() == whole
        assert [row.session_id for row in there.sessions()] == ["a", "b", "c"]
        assert there._feeds.cold.damaged() == []
    assert third.exists()


def test_a_torn_document_of_a_hot_array_is_written_anew(tmp_path, uri, cold, by_hand):
    with spool.open(uri) as sp:
        wanted = sp.read(record(sp, "a"))
        sp.flush()
        refs = record(sp, "b")
    (document,) = (tmp_path / "hot" / "streams").glob("*/token_ids/zarr.json")
    whole = json.loads(document.read_bytes())
    document.write_bytes(b"")
    spill(uri)
    assert json.loads(document.read_bytes()) == whole
    with spool.open(cold) as there:
        assert_same(there.read(list(there.segments("session_id = 'a'"))), wanted)
        assert there.read(refs)


# -- deletions that broke off ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["collect.tombstone", "delete.marked", "evict.shard", "delete.removed"])
def test_a_deletion_that_broke_off_is_completed_by_the_next_spiller(tmp_path, uri, cold, by_hand, point):
    segments, _ = recorded(uri)
    with spool.open(f"{uri}&retention=keep") as sp:
        sp.release(segments)
    spill(f"{uri}&retention=keep")
    spill(uri, env={"SPOOL_KILL_AT": point}, code=-signal.SIGKILL)
    spill(uri)
    time.sleep(0.01)
    with spool.open(uri) as sp:
        sp.gc()
        assert sum(row.state == "gone" for row in sp._catalog.packs.rows()) == 3  # the release stays a day
    crash.check_hot_files(str(tmp_path / "hot"))
    crash.check_objects(open_objects(cold))
    for place in (uri, cold):
        with spool.open(place) as sp, pytest.raises(spool.ReleasedError):
            sp.read(segments)


def test_rows_of_deleted_packs_do_not_come_back_with_the_next_pack(uri, cold, by_hand):
    with spool.open(uri) as sp:
        gone = record(sp, "gone")
        sp.flush()
        spiller = sp._tiers.spiller()
        spiller._feeder.catch_up()
        assert spiller._spill()
        sp.release(gone)
        sp.flush()
        sp.gc()
        time.sleep(0.01)
        sp.gc()
        record(sp, "kept")
        sp.flush()
        spiller._feeder.catch_up()
        assert spiller._spill()
        spiller.close()
    crash.check_zarr(open_objects(cold))


def test_a_pack_with_a_manifest_and_no_marker_is_marked_again(tmp_path, uri, by_hand):
    recorded(uri)
    spill(uri, env={"SPOOL_KILL_AT": "spill.manifest"}, code=-signal.SIGKILL)
    with spool.open(uri) as sp:
        assert len(list(sp.sessions())) == 3  # the cold root's manifests are taken in before the hot root knows
        assert not list(sp._catalog.packs.rows("spilled"))
    spill(uri)
    with spool.open(uri) as sp:
        for row in list(sp._catalog.packs.rows("spilled")):
            evict(str(tmp_path / "hot"), sp._catalog, row.stream, row.pack)
        assert len(list(sp._catalog.packs.rows("evicted"))) >= 3


def test_room_is_given_back_once_for_a_pack_that_left(tmp_path, uri, by_hand):
    recorded(f"{uri}&hot_bytes=1GiB")
    spill(f"{uri}&hot_bytes=1GiB")
    root = str(tmp_path / "hot")
    with spool.open(f"{uri}&hot_bytes=1GiB") as sp:
        crash.check_account(root, sp)
        before = sum(sp._catalog.usage().values())
        row = next(sp._catalog.packs.rows("spilled"))
        for _ in range(3):
            evict(root, sp._catalog, row.stream, row.pack)
        assert sum(sp._catalog.usage().values()) == before - row.hot_bytes
        crash.check_account(root, sp)


# -- one spiller -----------------------------------------------------------------------------------------------------


def test_of_ten_spillers_that_are_started_at_once_one_works(uri):
    with spool.open(uri) as sp:
        record(sp, "a")
        sp.flush()
        root = str(sp.config.root)
        wait_for(lambda: elect.is_running(root), timeout_s=LONG_S)
        first = wait_for(lambda: read_status(root), timeout_s=LONG_S).pid
        others = [
            subprocess.Popen(
                [sys.executable, "-m", "spool", "spill", uri, "--follow"], stderr=subprocess.PIPE, text=True
            )
            for _ in range(9)
        ]
        for other in others:
            _, said = other.communicate(timeout=LONG_S)
            assert other.returncode == 4 and "one is enough" in said, said
        assert elect.is_running(root) and read_status(root).pid == first


def test_of_ten_processes_that_find_no_spiller_one_starts_one(tmp_path, uri):
    spool.open(uri).close()
    root, gate = str(tmp_path / "hot"), forks.Barrier(10)
    started = forks.Queue()

    def start():
        gate.wait()
        process = elect.start(root, uri)
        if process is not None:
            started.put(process.pid)
            process.wait(LONG_S)

    children = [forks.Process(target=start) for _ in range(10)]
    for child in children:
        child.start()
    for child in children:
        child.join(LONG_S)
        assert child.exitcode == 0
    assert started.get(timeout=10) and started.empty()
    wait_for(lambda: not elect.is_running(root), timeout_s=LONG_S)


def test_a_killed_spiller_is_replaced_and_the_last_one_ends(tmp_path, uri):
    root = str(tmp_path / "hot")
    with spool.open(uri) as sp:
        pids = set()
        for number in range(3):
            segments = record(sp, f"s{number}")
            sp.publish(segments, timeout_s=LONG_S)
            pid = wait_for(lambda: (s := read_status(root)) and s.pid not in pids and s.pid, timeout_s=LONG_S)
            pids.add(pid)
            os.kill(pid, signal.SIGKILL)
        sp.publish(record(sp, "last"), timeout_s=LONG_S)
        assert len(pids) == 3
    wait_for(lambda: not elect.is_running(root), timeout_s=LONG_S, what="the end of the spiller")


# -- uploads ---------------------------------------------------------------------------------------------------------


def test_a_killed_upload_of_many_parts_leaves_nothing_under_the_key(s3_root):
    store = open_objects(s3_root)

    def die():
        from spool.stores import s3

        own = open_objects(s3_root)
        name = next(name for name, value in vars(s3).items() if isinstance(value, type) and hasattr(value, "complete"))
        getattr(s3, name).complete = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        own.put("m", random.Random(1).randbytes(3 * PIECE_BYTES))

    assert in_fork(die) == -signal.SIGKILL
    assert store.info("m") is None and store.list("") == []
    assert store.abort_stale_uploads(3600) == 0
    assert store.abort_stale_uploads(0) == 1
    assert store.abort_stale_uploads(0) == 0
    store.put("m", b"whole")
    assert store.get("m") == b"whole"
    store.close()
