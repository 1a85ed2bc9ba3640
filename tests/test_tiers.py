"""Hot and cold root together: publish, read from anywhere, evict, release, collect."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shell import run
from tiers import assert_same, record, remove_root, wait_for

import spool
from spool.spiller.elect import is_running
from spool.spiller.evict import evict
from spool.spiller.keeper import Keeper
from spool.spiller.status import read_status


@pytest.fixture
def open_pair(tmp_path, cold):
    """Open a hot root that spills to `cold`; closed after the test."""
    opened = []

    def open_(name="hot", **options):
        query = "&".join(f"{key}={value}" for key, value in {"spill": cold, **options}.items())
        opened.append(spool.open(f"file://{tmp_path}/{name}?{query}"))
        return opened[-1]

    yield open_
    for sp in reversed(opened):
        sp.close()


def test_what_was_published_reads_the_same_from_everywhere(open_pair, cold, tmp_path):
    sp = open_pair()
    segments = [ref for number in range(4) for ref in record(sp, f"u{number}", group_id="g", seed=number)]
    sp.annotate("u1", reward=0.5)
    wanted = sp.read(segments)
    sp.publish(segments, timeout_s=60)

    with spool.open(cold) as there:
        assert_same(there.read(segments), wanted)
        assert [row.session_id for row in there.sessions("reward > 0.4")] == ["u1"]
        assert [ref.id for ref in there.segments()] == [ref.id for ref in segments]
        assert list(there.status().packs) == ["cold"] and there.status().spill is there.info()["spill"] is None
        assert there.messages(segments[0]) == sp.messages(segments[0])
        part = there.read(segments[2], fields=["routed_experts"], tokens=slice(30, 90), layers=slice(2, 4))
        assert (part["routed_experts"] == wanted[2]["routed_experts"][30:90, 2:4]).all()

    code = (
        "import pickle,sys,spool\n"
        "refs,location=pickle.load(sys.stdin.buffer)\n"
        "sys.stdout.buffer.write(pickle.dumps([dict(s) for s in spool.open(location,readonly=True).read(refs)]))"
    )
    for location in (cold, str(tmp_path / "hot")):
        done = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps((segments, location)), capture_output=True, check=True
        )
        assert_same(pickle.loads(done.stdout), wanted)

    sp.close()
    wait_for(lambda: not is_running(str(tmp_path / "hot")), what="the spiller's end")
    remove_root(tmp_path / "hot")
    with spool.open(cold) as there:
        assert_same(there.read(segments), wanted)


def test_evicted_packs_are_read_from_the_cold_root_unnoticed(open_pair, cold, tmp_path):
    sp = open_pair()
    segments = record(sp, "a")
    wanted = sp.read(segments)
    messages = sp.messages(segments[0])
    sp.publish(segments, timeout_s=60)
    (row,) = sp._catalog.packs.rows("spilled")
    evict(str(tmp_path / "hot"), sp._catalog, row.stream, row.pack)
    assert not any(name.endswith("0/0/0") for name in os.listdir(tmp_path / "hot" / "streams" / row.stream))
    live = record(sp, "b")
    assert_same(sp.read(segments), wanted)
    assert len(sp.read([*segments, *live])) == 2
    assert sp.messages(segments[0]) == messages
    before = sp._catalog.dump()
    sp.rebuild()
    assert sp._catalog.dump() == before
    assert_same(sp.read(segments), wanted)


def test_released_packs_go_and_say_so(open_pair, cold):
    sp = open_pair(grace_s=0.001)
    gone, kept = record(sp, "a"), record(sp, "b")
    sp.publish([*gone, *kept], timeout_s=60)
    sp.flush()
    late = record(sp, "c")
    sp.publish(late, timeout_s=60)
    sp.release([*gone, *kept])
    sp.flush()
    plan = {(item.pack, item.go) for item in sp.gc(dry_run=True)}
    assert (0, True) in plan
    assert sp.read(gone[0])
    sp.gc()
    sp.gc()
    with pytest.raises(spool.ReleasedError, match="deleted"):
        sp.read(gone[0])
    assert sp.read(late)
    with spool.open(cold) as there:
        with pytest.raises(spool.ReleasedError, match="deleted"):
            there.read(gone[0])
        assert [row.session_id for row in there.sessions()] == ["c"]
        assert there.read(late)


def test_a_trainer_without_a_hot_root_annotates_and_releases(open_pair, cold):
    sp = open_pair(retention="keep")  # what is released stays to be looked at
    segments = record(sp, "a")
    sp.publish(segments, timeout_s=60)
    with spool.open(cold) as trainer:
        trainer.annotate("a", reward=2.0)
        trainer.release(segments, tag="ckpt-1")
        trainer.checkpointed("ckpt-1")
        assert trainer.find_session("a").reward == 2.0
        with pytest.raises(spool.SessionStateError, match="hot root"):
            trainer.session("new").append(prompt_token_ids=[1], response_token_ids=[2])
    with spool.open(cold, readonly=True) as other:
        assert other.find_session("a").reward == 2.0
        with pytest.raises(spool.SessionStateError):
            other.annotate("a", reward=1.0)
    wait_for(lambda: [row.reward for row in sp.sessions()] == [2.0], what="the trainer's fact")


def test_an_id_that_another_node_recorded_is_not_begun_anew(open_pair):
    at_a, at_b = open_pair("a"), open_pair("b")
    steps = record(at_a, "same", final=False)
    at_a.publish(steps, timeout_s=60)
    with pytest.raises(spool.LockedError, match="another node"):
        at_b.session("same").append(prompt_token_ids=[7], response_token_ids=[8])
    at_a.session("same").finalize(outcome="completed")
    assert [step.id for step in at_a.steps("same")] == [step.id for step in steps]


def has_ended(pid):
    """Whether a process is gone, or only waits for its parent to notice."""
    path = Path(f"/proc/{pid}/cmdline")
    return not path.exists() or not path.read_bytes()


def test_whether_an_id_is_recorded_is_not_guessed(tmp_path):
    cold, hot = tmp_path / "cold", tmp_path / "hot"
    uri = f"file://{hot}?spill=file://{cold}"
    with spool.open(uri) as sp:
        sp.publish(record(sp, "a", final=False), timeout_s=60)
        for row in list(sp._catalog.packs.rows("spilled")):
            evict(str(hot), sp._catalog, row.stream, row.pack)
    pid = read_status(str(hot)).pid
    wait_for(lambda: has_ended(pid), what="the spiller's end")  # as long it has the index open
    for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
        (hot / name).unlink(missing_ok=True)
    cold.rename(tmp_path / "away")
    with spool.open(uri) as sp, pytest.raises(spool.StorageError, match="cannot be told"):
        sp.session("a").append(prompt_token_ids=[1], response_token_ids=[2])
    shutil.rmtree(cold, ignore_errors=True)
    (tmp_path / "away").rename(cold)
    with spool.open(uri) as sp:
        assert len(sp.session("a").steps) == 3


def test_without_a_cold_root_released_packs_make_room_by_themselves(tmp_path):
    with spool.open(f"file://{tmp_path}/hot?hot_bytes=32MiB&append_timeout_s=60") as sp:
        for number in range(24):
            s = sp.session(f"s{number}")
            s.append(prompt_token_ids=range(500_000), response_token_ids=[1])
            sp.release(s.finalize(outcome="completed"))
        assert sum(sp._catalog.usage().values()) <= 32 << 20


@pytest.mark.parametrize("swapped", [False, True], ids=["emptied", "swapped"])
def test_nothing_is_entrusted_to_a_cold_root_that_is_not_the_one_that_was_joined(tmp_path, swapped, monkeypatch):
    cold, hot = tmp_path / "cold", tmp_path / "hot"
    with spool.open(f"file://{hot}?spill=file://{cold}") as sp:
        sp.publish(record(sp, "a"), timeout_s=60)
    wait_for(lambda: not is_running(str(hot)), what="the spiller's end")
    cold.rename(tmp_path / "away")
    if swapped:
        with spool.open(f"file://{tmp_path}/other?spill=file://{cold}") as other:
            other.publish(record(other, "o"), timeout_s=60)
    monkeypatch.setattr(Keeper, "keep_running", lambda *_, **__: None)
    with spool.open(f"file://{hot}?spill=file://{cold}") as sp:
        record(sp, "b")
        sp.flush()
        kind, said = (spool.ConfigError, "in its place") if swapped else (spool.StorageError, "emptied")
        with pytest.raises(kind, match=said):
            sp.spill()
        assert not list(cold.glob(f"streams/{sp._feeder.stream_names()[-1]}"))


def test_a_copy_of_a_hot_root_replaces_nothing(tmp_path):
    cold, hot, copy = tmp_path / "cold", tmp_path / "hot", tmp_path / "copy"
    with spool.open(f"file://{hot}?spill=file://{cold}&spill_when=pressure") as sp:
        record(sp, "a")
        sp._catalog.close()
        shutil.copytree(hot, copy, ignore=shutil.ignore_patterns("spiller*", "catalog*"))
        segments = record(sp, "b")
        sp.publish(segments, timeout_s=60)
        wanted = sp.read(segments)
    with spool.open(f"file://{copy}") as sp:
        sp.recover()
        assert [row.state for row in sp.spill()] == ["sealed"]
    with spool.open(f"file://{cold}") as there:
        assert_same(there.read(segments), wanted)


def test_a_cold_root_by_its_path_spills_nowhere(tmp_path, by_hand):
    with spool.open(f"{tmp_path}/hot?spill=file://{tmp_path}/cold") as sp:
        record(sp, "a")
        sp.flush()
        sp.spill()
    for place in (f"{tmp_path}/cold", f"file://{tmp_path}/cold"):
        with pytest.raises(spool.ConfigError, match="is a cold root and spills nowhere"):
            spool.open(f"{place}?spill=file://{tmp_path}/other")
    with spool.open(f"{tmp_path}/cold") as sp:
        assert [row.session_id for row in sp.sessions()] == ["a"]


def test_a_lost_identity_of_the_cold_root_is_written_again(tmp_path, by_hand):
    """At a hot root whose streams are in it; a root that is only not mounted is left alone."""
    hot, lost = f"{tmp_path}/hot", tmp_path / "cold/spool.json"
    with spool.open(f"{hot}?spill=file://{tmp_path}/cold") as sp:
        refs = record(sp, "a")
        sp.flush()
        sp.spill()
        wanted = sp.read(refs)
    before = lost.read_bytes()
    lost.unlink()
    assert "would be written again" in run("recover", hot, "--dry-run").err and not lost.exists()
    assert "spool.json of the cold root file://" in run("recover", hot).err
    assert json.loads(lost.read_bytes())["id"] == json.loads(before)["id"]
    (tmp_path / "cold").rename(tmp_path / "mounted")
    (tmp_path / "cold").mkdir()
    assert "cold root" not in run("recover", hot, code=None).err
    assert not list((tmp_path / "cold").iterdir())
    (tmp_path / "cold").rmdir()
    (tmp_path / "mounted").rename(tmp_path / "cold")
    remove_root(hot)
    with spool.open(f"file://{tmp_path}/cold") as sp:
        assert_same(sp.read(refs), wanted)
