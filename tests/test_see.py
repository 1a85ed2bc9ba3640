"""Looking at a spool with two tiers from the command line, and the verbs that move its packs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from shell import SCRIPT, environment, on_terminal, run
from tiers import record, wait_for

import spool
from spool import tiers as tiers_module
from spool.cli.status_ import _spiller
from spool.status import SpillerStatus


@pytest.fixture
def hot(tmp_path):
    """The path of a hot root with two sealed packs, and no cold root yet."""
    with spool.open(f"{tmp_path}/hot") as sp:
        record(sp, "a")
        sp.flush()
        record(sp, "b")
    return f"{tmp_path}/hot"


def test_spill_brings_over_what_is_sealed_and_ends(hot, cold, tmp_path):
    location = f"{hot}?spill={cold}&spill_when=pressure"
    planned = run("spill", location, "--dry-run", "--json").json
    assert planned["dry_run"] and [(row["pack"], row["state"]) for row in planned["packs"]] == [
        (0, "sealed"),
        (1, "sealed"),
    ]
    before = run("status", location, "--json").json
    assert before["backlog"]["n_packs"] == 2
    assert (
        before["backlog"]["n_bytes"]
        == sum(row["hot_bytes"] for row in planned["packs"])
        == before["packs"]["sealed"]["hot_bytes"]
    )
    assert before["backlog"]["oldest_at"] == min(row["sealed_at"] for row in planned["packs"])
    done = run("spill", location, "--json").json
    assert [row["state"] for row in done["packs"]] == ["spilled", "spilled"]
    assert run("spill", hot, "--json").json["packs"] == []
    after = run("status", hot, "--json").json
    assert after["backlog"] == {"n_packs": 0, "n_bytes": 0, "oldest_at": None}
    assert after["packs"]["spilled"]["cold_bytes"] == sum(row["stored_bytes"] for row in done["packs"])
    assert (after["spill"], after["spiller"]["running"], after["spiller"]["n_spilled"]) == (cold, False, 0)
    there = run("status", cold, "--json").json
    assert (there["hot"], there["spiller"], there["root"]) == (None, None, cold)
    assert there["packs"]["cold"] == {**after["packs"]["spilled"], "hot_bytes": 0}


def test_a_spill_without_a_cold_root_is_refused(hot):
    assert "no cold root" in run("spill", hot, code=2).err
    assert "no cold root" in run("publish", hot, "a", code=2).err


def test_a_second_spiller_is_refused_and_the_first_is_seen(hot, tmp_path):
    location = f"{hot}?spill=file://{tmp_path}/cold"
    worker = subprocess.Popen([SCRIPT, "spill", location, "--follow"], env=environment())
    try:
        looked = lambda: run("status", location, "--json").json["spiller"]  # noqa: E731
        wait_for(lambda: looked()["n_spilled"] == 2, what="the spill", timeout_s=60)
        status = run("status", location, "--json").json
        assert (status["spiller"]["running"], status["spiller"]["pid"]) == (True, worker.pid)
        assert status["spiller"]["bytes_per_s"] > 0
        assert "works already" not in run("spill", location, "--dry-run").err
        assert "a spiller works" in run("spill", location, code=4).err
        worker.send_signal(signal.SIGINT)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
    assert run("status", location, "--json").json["spiller"]["running"] is False


def test_a_damaged_pack_stays_and_is_said(hot, tmp_path):
    (stream,) = os.listdir(f"{hot}/streams")
    os.truncate(f"{hot}/streams/{stream}/token_ids/c/0", 4)
    location = f"{hot}?spill=file://{tmp_path}/cold"
    done = run("spill", location, "--json", code=5).json
    assert [row["state"] for row in done["packs"]] == ["sealed", "spilled"]
    status = run("status", location, "--json").json
    assert status["backlog"]["n_packs"] == 1 and len(status["spiller"]["damaged"]) == 1
    assert "damaged" in run("status", location).text


def test_release_checkpointed_and_gc(hot, cold):
    location = f"{hot}?spill={cold}&grace_s=0.001"
    run("spill", location)
    plan = run("gc", location, "--dry-run", "--json").json
    assert [(row["go"], row["sessions"]) for row in plan if row["pack"] < 2][:2] == [(False, ["a"]), (False, ["b"])]
    assert run("release", location, "a", "--tag", "t", "--dry-run", "--json").json["segments"] == ["a@lineage/0"]
    assert run("checkpointed", location, "t", "--dry-run", "--json").json["n_segments"] == 0
    run("release", location, "a", "--tag", "t")
    assert not any(row["go"] for row in run("gc", location, "--dry-run", "--json").json)
    assert run("checkpointed", location, "t", "--json").json == {"tag": "t", "n_segments": 1, "dry_run": False}
    shown = run("gc", location, "--dry-run").rows
    assert [row["go"] for row in shown].count("true") == 1
    going = next(row for row in shown if row["go"] == "true")
    assert going["pack"] == "0" and "over" in going["why"]
    assert any(row["held_by"] == '["b"]' for row in shown)
    assert "GOES" in on_terminal("gc", location, "--dry-run", columns=200)
    run("gc", location)
    assert "no session" in run("cat", location, "a", code=3).err
    assert run("status", location, "--json").json["packs"]["gone"]["n_packs"] == 1
    assert "segments are released, not steps" in run("release", location, "b:0", code=2).err
    run("checkpointed", location, code=2)


def test_a_trainer_releases_from_the_cold_root(hot, cold):
    run("spill", f"{hot}?spill={cold}")
    run("release", cold, "a")
    assert [row["session_id"] for row in run("ls", hot, "--where", "n_steps > 0", "--json").json] == ["a", "b"]
    for location in (cold, hot):
        rows = run("ls", location, "--segments", "--where", "released = true", "--json").json
        assert [row["id"] for row in rows] == ["a@lineage/0"]


def test_publish_waits_for_the_spiller_that_it_starts(hot, cold):
    location = f"{hot}?spill={cold}"
    missing = run("publish", location, "a", "--dry-run", "--json").json
    assert [row["pack"] for row in missing["waited_for"]] == [0]
    done = run("publish", location, "a", "--timeout", "50", "--json").json
    assert done["refs"] == ["a@lineage/0"]
    assert run("publish", location, "a", "--dry-run", "--json").json["waited_for"] == []
    assert len(run("cat", cold, "a", "--json").json) == 1
    assert run("publish", cold, "a", "--json").json["refs"] == ["a@lineage/0"]
    wait_for(lambda: not run("status", location, "--json").json["spiller"]["running"], what="its end", timeout_s=60)


def test_du_says_what_each_tier_takes(hot, cold, tmp_path):
    plain = run("du", hot, "--json").json["total"]
    assert (plain["cold_bytes"], plain["cold_ratio"]) == (None, None)
    run("spill", f"{hot}?spill={cold}")
    total = run("du", hot, "--json").json["total"]
    both = {row["field"]: row for row in run("du", hot, "--json").json["fields"]}
    there = {row["field"]: row for row in run("du", cold, "--json").json["fields"]}
    assert both.keys() == there.keys()
    for name, row in there.items():
        assert row["file_bytes"] is None
        for column in ("rows", "stored_bytes", "sent_bytes", "cold_rows", "cold_sent_bytes", "cold_bytes"):
            assert row[column] == both[name][column], (name, column)
        assert row["cold_rows"] == row["rows"]
    experts = there["routed_experts"]
    assert experts["cold_ratio"] == round(experts["rows"] * 6 * 4 * 4 / experts["cold_bytes"], 2)
    assert total["file_bytes"] == plain["file_bytes"] or total["file_bytes"] > 0
    with spool.open(cold, readonly=True) as sp:
        status = sp.status()
        assert sum(row["cold_bytes"] for row in sp.usage()) >= status.packs["cold"].cold_bytes
    with spool.open(hot) as sp:
        record(sp, "c")
    fields = {row["field"]: row for row in run("du", hot, "--json").json["fields"]}
    assert fields["token_ids"]["cold_rows"] < fields["token_ids"]["rows"]
    assert "COLD" in on_terminal("du", hot, columns=200)


def test_du_of_a_hot_root_goes_without_a_cold_root_that_is_away(hot, tmp_path):
    run("spill", f"{hot}?spill=file://{tmp_path}/cold")
    os.rename(tmp_path / "cold", tmp_path / "away")
    done = run("du", hot, "--json")
    assert done.json["total"]["file_bytes"] > 0


def test_verbs_that_read_work_on_a_cold_root(hot, cold):
    run("spill", f"{hot}?spill={cold}")
    run("cat", cold, "a")
    assert [row["session_id"] for row in run("ls", cold, "--json").json] == ["a", "b"]
    shown, there = (run("show", root, "a:1", "--messages", "--json").json[0] for root in (hot, cold))
    tiers = [{name: (field.pop("hot_bytes"), field.pop("cold_bytes")) for name, field in one["coverage"].items()}
             for one in (shown, there)]  # fmt: skip
    assert shown == there
    assert [one.pop("loss_mask") for one in tiers] == [(0, 0)] * 2, "it follows from what was generated"
    assert all(hot_bytes and not cold_bytes for hot_bytes, cold_bytes in tiers[0].values())
    assert all(cold_bytes and not hot_bytes for hot_bytes, cold_bytes in tiers[1].values())
    facts, known = run("info", cold, "--json").json, run("info", hot, "--json").json
    for name in ("id", "n_streams", "n_sessions", "n_steps", "n_tokens", "n_segments", "n_final"):
        assert facts[name] == known[name], name
    assert cold in run("locate", cold, "a:0").text


def test_status_of_a_root_with_a_limit_says_where_eviction_begins(tmp_path):
    with spool.open(f"{tmp_path}/hot?hot_bytes=64MiB&spill=file://{tmp_path}/cold&spill_when=pressure") as sp:
        record(sp, "a")
        found = sp.status()
        hot = found.hot
        # a grant of 16 MiB has to fit between: below 107 MiB the grants decide, not the shares
        assert (hot.limit_bytes, hot.high_bytes, hot.low_bytes) == (64 << 20, 48 << 20, 32 << 20)
        assert found.hot.reserved_bytes >= found.hot.used_bytes > 0
        assert (found.n_live, found.packs["open"].n_packs) == (1, 1)
        assert found.packs["open"].hot_bytes > 0
        sp._catalog.packs.request_seal("s", 3)
        assert sp.status().seal_requests == {"s": 3}
        sp._catalog.packs.serve("s", 3)
    shown = run("status", f"{tmp_path}/hot?hot_bytes=64MiB").text
    assert "evicts_above_bytes\t50331648" in shown and "state\tn_packs" in shown


def test_fact_files_are_told_apart_from_packs(hot, cold, by_hand):
    with spool.open(f"{hot}?spill={cold}") as sp:
        sp.spill()
    with spool.open(cold) as trainer:
        for number in range(3):
            trainer.annotate("a", reward=float(number))
    for place in (hot, cold):
        found = run("status", place, "--json").json
        assert found["facts"]["n_packs"] == 3 and found["facts"]["cold_bytes"] > 0
        assert sum(total["n_packs"] for total in found["packs"].values()) == 2
        info = run("info", place, "--json").json
        assert (info["n_streams"], info["n_packs"]) == (1, 2)
        listed = run("gc", place, "--dry-run")
        assert "facts-" not in listed.text and "3 fact files stay" in listed.err and "of 2 packs" in listed.err
    assert run("checkpointed", hot, "no-such-tag", "--dry-run").err.count("is the tag") == 1


def test_a_spiller_that_gives_no_sign_of_life_is_said():
    for age_s, word in ((5, "works"), (60, "is silent")):
        told = {name: value for name, value, _ in _spiller(SpillerStatus(True, 7, at=time.time() - age_s))}
        assert told["spiller"] == f"{word}, pid 7"


def test_gc_sweeps_uploads_that_no_spiller_came_back_for(tmp_path, s3_root, monkeypatch):
    with spool.open(f"{tmp_path}/hot?spill={s3_root}") as sp:
        record(sp, "a")
        wire = sp._feeds.cold.objects._wire
        wire.begin("streams/x/token_ids/c/0", 10)
        sp.gc()
        assert len(wire.uploads(time.time() + 60, 10)) == 1  # it may still be at work
        monkeypatch.setattr(tiers_module, "STALE_UPLOAD_S", -60.0)
        sp.gc()
        assert wire.uploads(time.time() + 60, 10) == []


def test_gc_says_why_on_a_narrow_terminal(hot):
    shown = on_terminal("gc", hot, "--dry-run", columns=80)
    assert "WHY" in shown and "1 of its sessions are not over" in shown


def test_the_bare_command_says_once_how_it_is_used():
    assert run(code=2).err.count("Usage:") == 1


@pytest.mark.parametrize("form", ["parquet", "spool"])
def test_an_export_that_finds_nothing_says_so_and_writes_nothing(hot, tmp_path, form):
    for what in (("--where", "session_id = 'nobody'"), ("--where", "reward > 1e9", "--view", "timeline")):
        found = run("export", hot, *what, "--format", form, "-o", tmp_path / "out", code=3)
        assert f"there are no segments with {what[1]} in " in found.err and found.out == b""
    with spool.open(tmp_path / "empty"):
        pass
    found = run("export", tmp_path / "empty", "--all", "-o", tmp_path / "out", "--json", code=3)
    assert "there are no segments in " in found.err and found.out == b""
    assert not (tmp_path / "out").exists()


def test_export_on_the_command_line(hot, tmp_path):
    import pyarrow.parquet as pq

    planned = run("export", hot, "a", "-o", tmp_path / "out", "--dry-run", "--json").json
    assert not (tmp_path / "out").exists() and planned["n_segments"] == 1
    done = run("export", hot, "a", "-o", tmp_path / "out", "--json").json
    assert done == {**planned, "file_bytes": done["file_bytes"]}
    assert json.loads(pq.read_table(tmp_path / "out")["facts"][0].as_py()) == {}
    assert "overwrites nothing" in run("export", hot, "a", "-o", tmp_path / "out", code=2).err
    run("export", hot, "--where", "session_id = 'b'", "-o", tmp_path / "copy", "--format", "spool")
    assert [row["session_id"] for row in run("ls", tmp_path / "copy", "--json").json] == ["b"]
    assert run("verify", tmp_path / "copy", "--deep").text == ""
    for args in ((), ("a", "--all"), ("--all", "--where", "n_steps > 0")):
        assert "what to export" in run("export", hot, *args, "-o", tmp_path / "x", code=2).err
    run("export", hot, "nothing", "-o", tmp_path / "x", code=3)
    assert not (tmp_path / "x").exists()
