"""Deleting by retention, in processes and nodes: what goes, what stays, what readers are told, and that it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from nodes import TESTS, location
from tiers import SHAPE, assert_same, record, remove_root, wait_for

import spool
from spool import locks
from spool.catalog import Catalog, tiers
from spool.formats.frames import decode_event
from spool.formats.records import decode
from spool.logs.cold import ColdFeeder
from spool.logs.keys import gone_key, is_rollup
from spool.model.fields import layout
from spool.retention import Policy
from spool.root import open_cold
from spool.spiller import elect
from spool.spiller.collect import Collector
from spool.spiller.evict import evict
from spool.spiller.rollup import OBJECTS_ROLLED, roll_up
from spool.stores.objects import open_objects
from spool.write import stream as stream_module


@pytest.fixture
def cold(cold, tmp_path):
    """The URL of a cold root where nothing is yet."""
    (tmp_path / "cold").mkdir()
    return cold


@pytest.fixture
def released(cold, tmp_path):
    """The URI of a hot root whose released packs may go at once."""
    return location(tmp_path / "hot", cold, retention="released", grace_s=0.001, publish_interval_s=0.1)


def in_packs(sp, *names):
    """Record sessions, each in a pack of its own, and publish them; return their segments by name."""
    refs = {}
    for name in names:
        refs[name] = record(sp, name)
        sp.flush()
    sp.publish([ref for many in refs.values() for ref in many], timeout_s=120)
    return refs


def files(root):
    """Return the files of a hot root that recording made."""
    found = [path for path in Path(root).rglob("*") if path.is_file()]
    return {str(path.relative_to(root)) for path in found if "catalog.sqlite" not in path.name}


def spill(uri):
    """Run a spiller until nothing needs it; the one that a handle had started ends first."""
    root = str(spool.config.parse_uri(uri).root)
    wait_for(lambda: not elect.is_running(root), timeout_s=120, what="the end of the spiller")
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, "-m", "spool", "spill", uri, "--until-idle"]
    subprocess.run(command, check=True, timeout=120, env=environment)


def collect(sp, **policy):
    """Delete by a policy of one's own; return what happened to each pack."""
    own = sp._tiers.collector()
    own._policy = Policy(released=True, **policy)
    sp._feeds.catch_up(fresh=True)
    plan = own.plan()
    own.run(plan)
    return plan


def read_elsewhere(where, refs):
    """Return the name of the error that a read raises in another process; ``None`` where it succeeds."""
    code = (
        "import sys, msgspec, spool\nfrom spool.model.refs import SegmentRef\n"
        "refs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[SegmentRef])\n"
        "try:\n    spool.open(sys.argv[1], readonly=True).read(refs)\n    print(None)\n"
        "except spool.SpoolError as error:\n    lost = isinstance(error, spool.IntegrityError)\n"
        "    print('Integrity' if lost else type(error).__name__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([sys.executable, "-c", code, where], input=msgspec.json.encode(refs), capture_output=True,
                          check=True, timeout=120, env=environment)  # fmt: skip
    return done.stdout.decode().strip()


def collector(catalog, feeder, grace_s=0.0):
    """Return what collects all of a cold root."""
    policy = Policy(released=True)
    return Collector(None, catalog, feeder, policy, grace_s=grace_s, withdraw=lambda _: None, refresh=feeder.catch_up)


def test_a_finished_root_comes_to_rest(released, cold, tmp_path):
    """All is released; spillers run again and again: nothing grows, and each of them ends."""
    with spool.open(released) as sp:
        first = record(sp, "whole")
        s = sp.session("spread")
        for step in range(4):
            s.append(prompt_token_ids=[step] * 8, response_token_ids=[1, 2], tools=[{"name": "t"}])
            sp.flush()
        refs = [*first, *s.finalize()]
        record(sp, "open", final=False)
        sp.publish(refs, timeout_s=120)
        sp.annotate("whole", reward=1.0)
        sp.release(refs, tag="last")
        sp.checkpointed("last")
        sp.discard("open")
    objects = open_objects(cold)
    seen = []
    for _ in range(5):
        spill(released)
        seen.append((files(tmp_path / "hot"), {found.key for found in objects.list("")}))
    assert seen[-1] == seen[-2] == seen[-3]
    hot, there = seen[-1]
    assert not [name for name in hot if "/c/" in name]
    assert not [key for key in there if "/c/" in key]
    with spool.open(released) as sp:
        before = sp._catalog.dump()
        sp.rebuild()
        sp.sessions()
        assert sp._catalog.dump() == before
        assert list(sp.sessions()) == []
    # what is left are late facts, whose data might still arrive; after a day they go too
    with spool.open(f"{cold}?grace_s=0.001") as operator:
        collect(operator, unknown_keep_s=0.0)
        collect(operator, unknown_keep_s=0.0)
        assert objects.list("facts/") == []
        assert objects.list("manifests/") == []
        assert operator._catalog.packs.uses()[0] == []
        assert all(not rows for rows in operator._catalog.dump().values())


def test_who_reads_what_is_gone_is_told_so_everywhere(released, cold, tmp_path):
    with spool.open(released) as sp, spool.open(location(tmp_path / "other", cold)) as other:
        refs = in_packs(sp, "gone", "lost", "kept")
        wanted = sp.read(refs["kept"])
        sp.release(refs["gone"])
        plan = {item.sessions or item.why: item.go for item in sp.gc(dry_run=True)}
        assert plan[("lost",)] is plan[("kept",)] is False
        assert True in plan.values()
        sp.gc()
        sp.gc()
        objects = sp._feeds.cold.objects
        lost = sp._catalog.packs.of(["lost"])
        for row in list(sp._catalog.packs.rows("spilled")):
            evict(sp.config.root, sp._catalog, row.stream, row.pack)
        for stream, pack in lost:
            objects.delete(
                [found.key for found in objects.list(f"streams/{stream}/") if f"/c/{pack}/" in f"{found.key}/"]
            )
        with spool.open(cold) as there:
            for handle in (sp, other, there):
                with pytest.raises(spool.ReleasedError, match=f"^{refs['gone'][0].id}: rows .* over"):
                    handle.read(refs["gone"])
                with pytest.raises(spool.ReleasedError):
                    handle.read([*refs["kept"], *refs["gone"]])
                with pytest.raises(spool.IntegrityError) as caught:
                    handle.read(refs["lost"])
                assert not isinstance(caught.value, spool.ReleasedError)
                assert_same(handle.read(refs["kept"]), wanted)
        for where in (str(tmp_path / "hot"), cold):
            assert read_elsewhere(where, refs["gone"]) == "ReleasedError"
            assert read_elsewhere(where, refs["lost"]) == "Integrity"
            assert read_elsewhere(where, refs["kept"]) == "None"


def test_one_live_session_keeps_its_pack_and_one_failed_one_does_not_for_ever(released):
    with spool.open(released) as sp:
        refs = record(sp, "done")
        live = sp.session("live", experts=SHAPE)
        live.append(prompt_token_ids=[1], response_token_ids=[2])
        failed = sp.session("failed", experts=SHAPE)
        failed.append(prompt_token_ids=[1], response_token_ids=[2])
        failed.finalize(outcome="failed")
        sp.publish(refs, timeout_s=120)
        sp.release(refs)
        (held,) = [item for item in sp.gc(dry_run=True) if "live" in item.sessions]
        assert set(held.sessions) == {"live", "failed"}
        assert not held.go
        sp.discard("live")
        (held,) = [item for item in sp.gc(dry_run=True) if item.sessions]
        assert held.sessions == ("failed",)
        plan = collect(sp, failed_keep_s=0.0)
        assert any(item.go for item in plan)
        with pytest.raises(spool.ReleasedError):
            sp.read(refs)


def test_an_open_session_of_a_dead_writer_ends_and_goes(cold, tmp_path):
    uri = location(tmp_path / "hot", cold, retention="released", grace_s=0.001, session_idle_s=0.2)
    child = os.fork()
    if not child:
        try:
            sp = spool.open(uri)
            record(sp, "left", final=False)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    time.sleep(0.3)
    spill(uri)
    with spool.open(uri) as sp:
        row = sp.find_session("left")
        assert (row.state, row.outcome) == ("final", "timeout")
        refs = list(sp.segments())
        sp.publish(refs, timeout_s=120)
        sp.release(refs)
        sp.gc()
        with pytest.raises(spool.ReleasedError):
            sp.read(refs)


def test_age_takes_packs_from_every_kind_of_handle(cold, tmp_path):
    with spool.open(location(tmp_path / "hot", cold)) as sp:
        refs = in_packs(sp, "one")["one"]
    time.sleep(0.01)
    with spool.open(location(tmp_path / "hot", cold, retention="age=0.001s", grace_s=0.001)) as sp:
        assert any(item.go and "sealed" in item.why for item in sp.gc(dry_run=True))
        sp.gc()
        with pytest.raises(spool.ReleasedError, match="sealed"):
            sp.read(refs)
    with spool.open(cold) as there:
        assert list(there.sessions()) == []
        with pytest.raises(spool.ReleasedError):
            there.read(refs)


def test_a_reader_in_the_middle_of_a_read_finishes_within_grace(cold, tmp_path):
    uri = location(tmp_path / "hot", cold, retention="released", grace_s=3600)
    with spool.open(uri) as sp, spool.open(cold) as reader:
        refs = in_packs(sp, "one")["one"]
        wanted = sp.read(refs)
        objects = reader._feeds.cold.objects
        under_way, go_on, got = threading.Event(), threading.Event(), []
        plain = objects.get_range

        def slow(*arguments):
            under_way.set()
            assert go_on.wait(60)
            return plain(*arguments)

        objects.get_range = slow
        thread = threading.Thread(target=lambda: got.append(reader.read(refs)))
        thread.start()
        assert under_way.wait(60)
        sp.release(refs)
        assert any(item.go for item in sp.gc())
        assert not [name for name in files(tmp_path / "hot") if "/c/" in name]
        go_on.set()
        thread.join(60)
        assert_same(got[0], wanted)
        # grace is over
        sp._tiers.collector()
        own = sp._tiers.collector()
        own._grace_s = 0.0
        own.run([])
        objects.get_range = plain
        with pytest.raises(spool.ReleasedError):
            reader.read(refs)


POINTS = ["collect.tombstone", "delete.marked", "evict.shard", "delete.removed", "collect.object", "collect.objects"]


@pytest.mark.parametrize("point", POINTS)
def test_a_deletion_that_broke_off_is_completed(released, cold, tmp_path, point):
    hot = str(tmp_path / "hot")
    with spool.open(released) as sp:
        refs = in_packs(sp, "one", "two")
    wait_for(lambda: not elect.is_running(hot), timeout_s=120, what="the end of the spiller")
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    code = (
        "import sys, spool\nfrom spool.points import kill_at\nsp = spool.open(sys.argv[1])\n"
        f"kill_at({point!r})\nsp.gc(); sp.gc()"
    )
    held = elect.require_lock(hot)  # a spiller would delete the pack as well
    with spool.open(released) as sp:
        sp.release(refs["one"])
    done = subprocess.run([sys.executable, "-c", code, released], check=False, timeout=120, env=environment)
    locks.release(held)
    assert done.returncode == -signal.SIGKILL
    with spool.open(released) as sp:
        sp.gc()
        sp.gc()
        with pytest.raises(spool.ReleasedError):
            sp.read(refs["one"])
        assert sp.read(refs["two"])
        assert sp.verify(deep=True).findings == ()
        left = {found.key for found in sp._feeds.cold.objects.list("")}
        (gone,) = [key for key in left if key.startswith("gone/")]
        stream, pack = gone.removeprefix("gone/").rsplit("-", 1)
        assert not [key for key in left if f"/c/{pack}/" in f"{key}/" or key.endswith(f"records/{pack}.arrow")]
        assert not [key for key in left if key.endswith(f"-{stream}-{pack}.parquet")]
        own = files(tmp_path / "hot")
        assert not [name for name in own if stream in name and (f"/c/{pack}/" in name or name.endswith(
            (f"records/{pack}.arrow", f"records/{pack}.cold")))]  # fmt: skip
        before = sp._catalog.dump()
        sp.rebuild()
        sp.sessions()
        assert sp._catalog.dump() == before


def test_a_session_of_two_nodes_does_not_come_back_open(cold, tmp_path):
    """The ending lies in a pack that goes first; the other node's pack still knows that the session is over."""
    a, b = (
        location(tmp_path / name, cold, retention="released", grace_s=0.001, publish_interval_s=0.1) for name in "ab"
    )
    with spool.open(a) as at_a, spool.open(b) as at_b:
        s = at_a.session("moved")
        s.append(prompt_token_ids=[1, 2], response_token_ids=[3])
        token = s.suspend()
        at_a.publish(at_a.steps("moved"), timeout_s=120)
        s = at_b.resume(token)
        s.append(prompt_token_ids=[1, 2, 3, 4], response_token_ids=[5])
        refs = s.finalize()
        at_b.publish(refs, timeout_s=120)
        with spool.open(cold) as trainer:
            trainer.release(refs)
        assert any(item.go for item in at_b.gc())
        at_b.gc()
        with spool.open(cold) as there:
            assert [row.state for row in there.sessions(discarded=True) if row.session_id == "moved"] in (
                [], ["discarded"])  # fmt: skip
        assert any(item.go for item in at_a.gc())
        at_a.gc()
    objects = open_objects(cold)
    assert not [found.key for found in objects.list("streams/") if "/c/" in found.key]
    n_facts = len(objects.list("facts/"))
    for uri in (a, b, a, b):
        with spool.open(uri) as sp:
            sp.gc()
    assert len(objects.list("facts/")) == n_facts


def test_a_collector_by_hand_beside_a_living_node(released, cold, tmp_path):
    """What was buried from elsewhere leaves the node's own disk too."""
    with spool.open(released) as sp:
        refs = in_packs(sp, "one", "two")
        with spool.open(f"{cold}?retention=released&grace_s=0.001") as operator:
            operator.release(refs["one"])
            assert any(item.go for item in operator.gc())
            operator.gc()
        sp.gc()
        with pytest.raises(spool.ReleasedError):
            sp.read(refs["one"])
        assert sp.read(refs["two"])
        assert len([name for name in files(tmp_path / "hot") if name.endswith(".gone")]) >= 1
        assert sp.verify(deep=True).findings == ()
        later = in_packs(sp, "three")
        with spool.open(cold) as there:
            assert there.read(later["three"])
            assert there.verify(deep=True).findings == ()


def test_roll_ups_of_gone_packs_go(cold):
    from test_cold_feed import put_group, put_manifest

    objects, stream = open_objects(cold), "20260101T000000-00000001"
    put_group(objects)
    for pack in range(2 * OBJECTS_ROLLED):
        put_manifest(objects, pack)
    catalog = Catalog.open("", readonly=True)
    feeder = ColdFeeder(objects, catalog)
    roll_up(feeder, [stream])
    feeder.catch_up()
    own = Collector(
        None, catalog, feeder, Policy(released=True), grace_s=0.0, withdraw=lambda _: None, refresh=feeder.catch_up
    )
    for pack in range(OBJECTS_ROLLED + 1):
        objects.put(gone_key(stream, pack), b'{"at": 1.0, "reason": "released"}')
    own.run([])
    (left,) = objects.list("manifests/")
    assert is_rollup(left.key)
    feeder.catch_up()
    assert len(list(catalog.sessions())) == OBJECTS_ROLLED - 1
    for pack in range(OBJECTS_ROLLED + 1, 2 * OBJECTS_ROLLED):
        objects.put(gone_key(stream, pack), b'{"at": 1.0, "reason": "released"}')
    # a new process, which knows of no roll-up yet what is in it
    fresh = ColdFeeder(objects, catalog)
    Collector(
        None, catalog, fresh, Policy(released=True), grace_s=0.0, withdraw=lambda _: None, refresh=feeder.catch_up
    ).run([])
    assert objects.list("manifests/") == []


@pytest.mark.parametrize(("ahead_s", "goes"), [(30 * 86_400.0, True), (5.0, False), (-5.0, False), (-90.0, True)])
def test_a_tombstone_of_a_clock_that_was_ahead_is_completed(cold, ahead_s, goes):
    from test_cold_feed import put_group, put_manifest

    objects, stream = open_objects(cold), "20260101T000000-00000001"
    put_group(objects)
    put_manifest(objects, 0)
    objects.put(gone_key(stream, 0), msgspec.json.encode({"at": time.time() + ahead_s, "reason": "released"}))
    catalog = Catalog.open("", readonly=True)
    feeder = ColdFeeder(objects, catalog)
    feeder.catch_up()
    Collector(
        None, catalog, feeder, Policy(released=True), grace_s=60.0, withdraw=lambda _: None, refresh=feeder.catch_up
    ).run([])
    assert (objects.list("manifests/") == []) == goes


def test_without_a_cold_root_packs_go_and_withdrawals_are_recorded_here(tmp_path):
    with spool.open(f"file://{tmp_path}/hot?retention=released") as sp:
        s, live = sp.session("spread"), sp.session("live")
        s.append(prompt_token_ids=[1], response_token_ids=[2])
        sp.flush()
        live.append(prompt_token_ids=[1], response_token_ids=[2])
        s.append(prompt_token_ids=[5], response_token_ids=[2])
        refs = s.finalize()
        sp.flush()
        sp.release(refs)
        assert [item.pack for item in sp.gc() if item.go] == [0]
        first, second = refs
        with pytest.raises(spool.ReleasedError):
            sp.read(first)
        assert sp.read(second)
        assert [item.go for item in sp.gc() if item.go] == []
        before = sp._catalog.dump()
        sp.rebuild()
        assert sp._catalog.dump() == before
        assert [row.state for row in sp.sessions("session_id = 'spread'", discarded=True)] in ([], ["discarded"])
        assert sp.verify(deep=True).findings == ()


def test_the_spiller_rolls_up_its_own_manifests(cold, tmp_path):
    uri = location(tmp_path / "hot", cold)
    with spool.open(uri) as sp:
        made = []
        for number in range(OBJECTS_ROLLED + 1):
            s = sp.session(f"u{number}")
            s.append(prompt_token_ids=[number], response_token_ids=[2])
            made += s.finalize()
            sp.flush()
        sp.publish(made, timeout_s=240)
    spill(uri)
    objects = open_cold(spool.config.parse_uri(uri), cold)
    keys = [found.key for found in objects.list("manifests/")]
    assert len([key for key in keys if is_rollup(key)]) == 1
    assert len(keys) <= 4
    with spool.open(cold) as there:
        assert len(list(there.sessions())) == OBJECTS_ROLLED + 1
        assert len(there.read(made)) == len(made)


def test_a_spiller_whose_root_is_removed_ends(released, tmp_path):
    sp = spool.open(released)
    try:
        sp.publish(record(sp, "one"), timeout_s=120)
        started = sp._keeper._started
        assert started.poll() is None
        remove_root(tmp_path / "hot")
        assert started.wait(60) in (0, 4)  # by itself, or since there is nothing to work on
    finally:
        with contextlib.suppress(spool.SpoolError):
            sp.close()


# -- what is recorded while it is decided ----------------------------------------------------------------------------


@pytest.fixture(params=["hot", "cold"])
def quiet(request, tmp_path, by_hand):
    """The URI of a spool that nothing but the test spills or collects; where its packs are."""
    cold = f"&spill=file://{tmp_path}/cold" if request.param == "cold" else ""
    return f"file://{tmp_path}/hot?retention=released&grace_s=0.001{cold}"


def sealed(sp):
    """Seal what is open, and bring it to the cold root where there is one."""
    sp.flush()
    if sp.config.spill is not None:
        sp.spill()


def test_a_session_that_ends_while_it_is_decided_keeps_its_pack(quiet, monkeypatch):
    """The index is read as of one moment: not first that nothing of it is held, and then that it is over."""
    with spool.open(quiet) as writer, spool.open(quiet) as operator:
        refs = record(writer, "a", final=False)
        sealed(writer)
        ends, ended = tiers.session_ends, []

        def between(run):
            def told(sql, values=()):
                found = run(sql, values)
                if sql == tiers._HELD and not ended:
                    ended.extend(writer.session("a").finalize())
                    assert [row.state for row in writer.sessions()] == ["final"]
                return found

            return ends(told)

        monkeypatch.setattr(tiers, "session_ends", between)
        assert not any(decision.go for decision in operator.gc())
        monkeypatch.undo()
        assert ended and operator.read(ended) and operator.read(refs)


def test_rows_of_an_open_transaction_stay_when_all_else_in_their_pack_is_released(quiet):
    with spool.open(quiet) as sp:
        s = sp.session("a", experts=SHAPE)
        s.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4])
        sealed(sp)
        with s.transaction():
            s.append(prompt_token_ids=list(range(900)), response_token_ids=[5])
            sp.release(record(sp, "b"))
            sealed(sp)
            (held,) = [decision for decision in sp.gc() if decision.pack == 1]
            assert (held.go, held.sessions) == (False, ("a",))
        refs = s.finalize()
        sealed(sp)
        sp.gc()
        assert [len(sample["token_ids"]) for sample in sp.read(refs)] == [4, 901]
        sp.release(refs)
        sealed(sp)
        sp.gc()
        with pytest.raises(spool.ReleasedError):
            sp.read(refs)


def test_a_pack_that_one_append_filled_stays_for_it(quiet, monkeypatch):
    """Its event lies in a later pack, which may be unknown for a while: to who sees the cold root alone."""
    monkeypatch.setattr(stream_module, "layout", lambda schema, **_: layout(schema, max_shard_bytes=1 << 14))
    with spool.open(quiet) as sp:
        s = sp.session("a")
        s.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4])
        s.append(prompt_token_ids=list(range(20_000)), response_token_ids=[5])
        sp.flush()
        records = sorted(Path(sp.config.root).glob("streams/*/records/*.arrow"), key=lambda path: int(path.stem))
        packs = [{event.session_id for event in map(decode_event, decode(path.read_bytes()))} for path in records]
        assert len(packs) > 3 and all(packs), "each of them says whose its rows are"
        assert sp.read(s.finalize())


def test_a_pack_that_waits_for_its_readers_is_no_finding(quiet):
    with spool.open(quiet.replace("grace_s=0.001", "grace_s=3600")) as sp:
        sp.release(record(sp, "a"))
        record(sp, "b")
        sealed(sp)
        sp.release(sp.final_segments("b"))
        sealed(sp)
        sp.gc()
        assert [row.pack for row in sp._catalog.packs.rows("gone")] == [0]
        assert not sp.verify(deep=True).findings
