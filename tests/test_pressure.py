"""Room in the hot tier: never more than ``hot_bytes``, writers wait for it, and it comes back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from pressing import SHAPE, STEP_BYTES, Peak, digest, disk_bytes, step
from tiers import wait_for

import spool
from spool.errors import CapacityError
from spool.logs.room import Disk, want, wanted
from spool.spiller.plan import Pressure, packs_to_spill, pressure
from spool.spiller.status import read_status

MIB = 1 << 20
SLACK = 1 * MIB
"""Beside rows and logs: array documents, markers, and records while the log that they come from is there."""


def add(sp, session_id, seed=0, **more):
    session = sp.session(session_id, experts=SHAPE)
    session.append(**step(seed), **more)
    return session.finalize()


def expected(seed):
    given = step(seed)
    return given["routed_experts"].astype("i4")


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taken", "limit", "wants", "free", "high"),
    [
        (0, 1024, 0, 9000, False),
        (860, 1024, 0, 9000, False),
        (880, 1024, 0, 9000, True),  # above 85 %
        (48, 64, 0, 9000, False),  # one more grant of 16 fits
        (49, 64, 0, 9000, True),
        (80, 95, 0, 9000, True),  # 84 %, and no other grant fits
        (800, 1024, 16, 9000, False),  # somebody waits, but it fits
        (800, 1024, 300, 9000, True),
        (None, None, 0, 9000, False),
        (None, None, 0, 100, True),  # the disk is what is short
        (10, 1024, 0, 100, True),
        (None, None, 600, 1000, True),
    ],
)
def test_when_room_is_made(taken, limit, wants, free, high):
    found = pressure(
        taken=(taken or 0) * MIB,
        limit=None if limit is None else limit * MIB,
        wanted=wants * MIB,
        disk_total=10_000 * MIB,
        disk_free=free * MIB,
    )
    assert found.is_high == high
    assert found.low < found.used or not high
    if high and limit is not None and taken > 10:
        assert found.low <= found.limit - max(wants, 16) * MIB, "what is wanted fits afterwards"


def test_a_want_of_room_is_said_on_a_full_disk_and_forgotten(tmp_path, monkeypatch):
    assert wanted(str(tmp_path)) == 0
    want(str(tmp_path), 40 * MIB)
    want(str(tmp_path), 50 * MIB)
    assert wanted(str(tmp_path)) == 50 * MIB
    assert disk_bytes(tmp_path) == 0
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 60)
    assert wanted(str(tmp_path)) == 0


# -- the whole system --------------------------------------------------------------------------------------------------


def test_writers_of_many_processes_stay_below_the_limit_and_lose_nothing(tmp_path):
    limit, n_writers, n_steps = 96 * MIB, 3, 40
    hot, cold = tmp_path / "hot", f"file://{tmp_path}/cold"
    uri = f"file://{hot}?spill={cold}&hot_bytes=96MiB&append_timeout_s=300"
    spool.open(uri).close()
    command = [sys.executable, str(Path(__file__).parent / "pressing.py"), uri]
    with Peak(str(hot)) as peak:
        writers = [
            subprocess.Popen([*command, str(n), str(n_steps)], stdout=subprocess.PIPE, text=True)
            for n in range(n_writers)
        ]
        told = [json.loads(writer.communicate(timeout=500)[0]) for writer in writers]
    assert all(writer.returncode == 0 for writer in writers)
    assert n_writers * n_steps * STEP_BYTES > 1.5 * limit, "it did not fit at once"
    assert 0.3 * limit < peak.most <= limit + SLACK
    with spool.open(uri) as sp:
        assert len([ref for one in told for ref in one["sessions"]]) == n_writers * n_steps
        for number in range(n_writers):
            for index in range(n_steps):
                (ref,) = sp.final_segments(f"w{number}-{index}")
                sample = sp.read(ref, fields=["routed_experts"])
                assert np.array_equal(sample["routed_experts"], expected(number * 1000 + index))


def test_one_stream_does_not_wait_for_its_own_open_pack(tmp_path):
    uri = f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold&hot_bytes=64MiB&append_timeout_s=120"
    with spool.open(uri) as sp:
        for index in range(60):  # a pack may grow to 40 MiB, and with grants the limit comes before that
            add(sp, f"s{index}", index)
        status = wait_for(lambda: (found := read_status(f"{tmp_path}/hot")) and found.n_evicted and found, what="room")
        assert status.error is None
        for index in (0, 31, 59):
            (ref,) = sp.final_segments(f"s{index}")
            assert np.array_equal(sp.read(ref)["routed_experts"], expected(index))


def test_room_that_idle_streams_hold_is_given_back(tmp_path):
    uri = f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold&hot_bytes=64MiB&append_timeout_s=120"
    others = [spool.open(uri) for _ in range(4)]
    try:
        for number, other in enumerate(others[:3]):  # each has a grant of 16 MiB, and its own open pack
            other.session(f"idle{number}", experts=SHAPE).append(**step(number))
        for index in range(20):
            add(others[3], f"s{index}", index)
        with others[0] as sp:
            assert sum(row.session_id.startswith("s") for row in sp.sessions()) == 20
    finally:
        for other in others:
            other.close()


def test_released_first_then_the_oldest_is_evicted_and_read_on(tmp_path):
    hot = str(tmp_path / "hot")
    uri = f"file://{hot}?spill=file://{tmp_path}/cold&hot_bytes=128MiB&append_timeout_s=120&retention=keep"
    with spool.open(uri) as sp:
        refs = []
        for index in range(4):
            refs.append([ref for part in range(12) for ref in add(sp, f"s{index}-{part}", 100 * index + part)])
            sp.publish(refs[-1], timeout_s=120)
        sp.release(refs[1])
        for index in range(40):
            add(sp, f"more{index}", 1000 + index)
        wait_for(lambda: read_status(hot).n_evicted >= 1, what="eviction")
        states = {row.pack: row.state for row in sp._catalog.packs.rows() if row.hot_bytes}
        assert states[1] == "evicted"
        if states[3] != "evicted":
            assert "evicted" not in {states[2], states[3]} or states[0] == "evicted"
        for index in range(4):
            sample = sp.read(refs[index][3])
            assert np.array_equal(sample["routed_experts"], expected(100 * index + 3))


def test_a_refusal_names_the_numbers_and_goes_on_when_room_returns(tmp_path):
    (tmp_path / "cold").mkdir()
    uri = f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold&hot_bytes=48MiB&append_timeout_s=1"
    with spool.open(uri) as sp:
        sp.session("first", experts=SHAPE).append(**step(0))
        streams = tmp_path / "cold" / "streams"
        wait_for((tmp_path / "cold" / "spool.json").exists)
        if streams.exists():
            streams.rename(tmp_path / "elsewhere")
        streams.write_text("a file where a folder should be: nothing can be spilled")
        kept, refused = [], None
        for index in range(60):
            try:
                kept += add(sp, f"s{index}", index)
            except CapacityError as error:
                refused = error
                break
        assert refused is not None
        assert refused.details["limit"] == 48 * MIB and refused.details["need"] >= 1 * MIB
        for word in ("48 MiB", "hot_bytes", "spool status", "released"):
            assert word in str(refused)
        status = wait_for(lambda: (found := read_status(f"{tmp_path}/hot")) and found.error and found, what="trouble")
        assert "streams" in status.error
        streams.unlink()
        if (tmp_path / "elsewhere").exists():
            (tmp_path / "elsewhere").rename(streams)
        wait_for(lambda: _fits(sp), timeout_s=90, what="room")
        for number, ref in enumerate(kept):
            assert np.array_equal(sp.read(ref)["routed_experts"], expected(number))


def _fits(sp):
    try:
        return add(sp, f"late{time.monotonic_ns()}", 7)
    except CapacityError:
        return None


def test_waiting_for_room_holds_no_thread(tmp_path):
    (tmp_path / "cold").mkdir()
    uri = f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold&hot_bytes=48MiB&append_timeout_s=120&threads=2"
    streams = tmp_path / "cold" / "streams"

    async def work(sp):
        given, n_before = step(1), threading.active_count()

        async def one(index):
            session = sp.session(f"s{index}", experts=SHAPE)
            await session.append_async(**{**given, "prompt_token_ids": given["prompt_token_ids"] + index})

        tasks = [asyncio.ensure_future(one(index)) for index in range(60)]
        while sum(task.done() for task in tasks) < 20:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        n_waiting = sum(not task.done() for task in tasks)
        assert n_waiting > 10 and threading.active_count() - n_before < 8
        streams.unlink()  # now it can be spilled
        await asyncio.gather(*tasks)

    with spool.open(uri) as sp:
        shutil_streams(streams)
        asyncio.run(work(sp))
        assert sum(1 for _ in sp.sessions()) == 60


def shutil_streams(streams):
    if streams.exists():
        streams.rmdir()
    streams.write_text("in the way")


def test_without_a_cold_root_released_packs_make_room(tmp_path):
    with spool.open(f"file://{tmp_path}/hot?hot_bytes=48MiB&append_timeout_s=60") as sp:
        first = None
        for index in range(60):
            refs = add(sp, f"s{index}", index)
            sp.release(refs)
            first = first or refs
        with pytest.raises(spool.ReleasedError):
            sp.read(first)
    with spool.open(f"file://{tmp_path}/kept?hot_bytes=48MiB&append_timeout_s=2") as sp, pytest.raises(CapacityError):
        for index in range(60):
            add(sp, f"s{index}", index)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 96 MiB."""
    path = tmp_path / "tiny"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_a_full_tier(tiny_disk, tmp_path):
    uri = f"file://{tiny_disk}/hot?spill=file://{tmp_path}/cold&append_timeout_s=120"
    with spool.open(uri) as sp:
        for index in range(90):  # 115 MiB
            add(sp, f"s{index}", index)
        assert Disk.of(str(tiny_disk)).free > 0
        for index in (0, 45, 89):
            (ref,) = sp.final_segments(f"s{index}")
            assert np.array_equal(sp.read(ref)["routed_experts"], expected(index))


def test_under_pressure_only_nothing_goes_up_before_it_is_needed(tmp_path):
    uri = f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold&spill_when=pressure&hot_bytes=128MiB"
    with spool.open(uri) as sp:
        early = add(sp, "early", 1)
        sp.flush()
        late = add(sp, "late", 2)
        sp.flush()
        wait_for(lambda: read_status(f"{tmp_path}/hot"), what="a spiller")
        time.sleep(1.5)
        assert {row.state for row in sp._catalog.packs.rows()} == {"sealed"}
        sp.publish(late, timeout_s=60)
        assert sp._catalog.packs.get(late[0].extents["token_ids"][0].stream, 1).state == "spilled"
        for index in range(120):
            add(sp, f"s{index}", 10 + index)
        assert np.array_equal(sp.read(early[0])["routed_experts"], expected(1))
        wait_for(lambda: read_status(f"{tmp_path}/hot").n_spilled > 2, what="what pressure brings over")


def test_which_packs_go_up(tmp_path):
    class Row:
        def __init__(self, stream, pack, sealed_at, hot_bytes=10):
            self.stream, self.pack, self.sealed_at, self.hot_bytes = stream, pack, sealed_at, hot_bytes

    rows = [Row("b", 1, 2.0), Row("b", 0, 1.0), Row("a", 0, 3.0)]
    plan = {"when": "sealed", "requested": {}, "pressed": False}
    assert packs_to_spill(rows, **plan) == {"b": [0, 1], "a": [0]}
    assert packs_to_spill(rows, **{**plan, "when": "pressure"}) == {}
    assert packs_to_spill(rows, **{**plan, "when": "pressure", "pressed": True}) == {"b": [0, 1], "a": [0]}
    assert packs_to_spill(rows, **{**plan, "requested": {"a": 0}}) == {"a": [0]}
    assert packs_to_spill(rows, **plan, round_bytes=15) == {"b": [0], "a": [0]}
    assert packs_to_spill(rows, **plan, round_bytes=1) == {"b": [0]}
    assert Pressure(5, 4, 3, 9).is_high


def test_digests_tell_samples_apart():
    assert digest({"a": np.arange(3)}) != digest({"a": np.arange(3) + 1})


def test_who_fills_the_tier_may_release_what_is_in_it(tmp_path, by_hand):
    """There is no room for another pack of the data; what is said needs little, and gives it back."""
    uri = f"file://{tmp_path}/hot?hot_bytes=64MiB&append_timeout_s=0.5&retention=released"
    with spool.open(uri) as sp:
        refs, n = [], 0
        with pytest.raises(CapacityError):
            for n in range(100):
                refs += add(sp, f"s{n}", n)
                sp.flush()
        assert n > 5
        sp.release(refs)
        sp.flush()
        assert any(decision.go for decision in sp.gc())
        assert add(sp, "after", 1)
