"""Short forms of the tools that measure the trainer's side, and the browser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import spool
from tools.bench import delivery, look
from tools.bench.writes import SHAPE, append, make_step

REPOSITORY = Path(__file__).parents[1]


def test_delivery_gives_eight_ranks_their_rows_and_reads_them_once(tmp_path):
    with spool.open(str(tmp_path / "spool")) as sp:
        refs = []
        for number in range(8):
            session = sp.session(f"s{number}", experts=SHAPE)
            append(sp, make_step(255, number), session)
            refs += session.finalize(outcome="completed")
        sp.flush()
    job = delivery.Job(f"file://{tmp_path}/spool", refs, n_steps=2, compute_s=0.0)
    found = delivery._on_ranks(delivery._delivered_ahead, job)
    assert [len(waits) for waits, _ in found] == [2] * 8
    read, memory = delivery._bytes([stats for _, stats in found], sum(map(delivery._stored_bytes, refs)))
    assert 1 <= read.ratio <= 1.1  # small pieces; the bench itself allows 1.02
    assert memory.name == "delivery_rank_memory"


def test_a_batch_through_a_spool_leaves_the_manager_and_the_object_store_alone(tmp_path):
    path = tmp_path / "memory.json"
    command = [sys.executable, "-m", "tools.plot_memory", "--sessions", "16", "--tokens", "4096", "--json", str(path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert path.exists(), done.stderr
    found = json.loads(path.read_text())
    objects, ours = found["peaks"]["Ray objects"], found["peaks"]["a spool"]
    assert objects["object store"] > found["payload_bytes"] > 40e6
    assert ours["object store"] < found["payload_bytes"] / 20
    assert ours["manager"] < objects["manager"] / 2


def test_the_browser_is_there_at_once(tmp_path):
    start, memory = look.browsing(str(tmp_path), n_sessions=2000, runs=1)
    assert 0.05 < start.ratio < 20  # in a test beside others; the bench itself allows a second
    assert 20 << 20 < memory.ratio * (256 << 20) < 256 << 20
