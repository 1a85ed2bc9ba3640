"""Publishing: from wherever, grouped, and cheap."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from pressing import step
from tiers import SHAPE, assert_same, record, wait_for

import spool
from spool.errors import NotFoundError, StorageError
from spool.logs.streams import is_live
from spool.spiller import elect
from spool.spiller.status import read_status
from spool.stores.objects import open_objects

RECORD = """
import os, pickle, sys
sys.path.insert(0, {tests!r})
import spool
from tiers import record
sp = spool.open({uri!r})
refs = record(sp, {session!r})
sys.stdout.buffer.write(pickle.dumps(refs))
sys.stdout.buffer.flush()
{end}
"""


def other_process(uri, session, *, end="sp.close()"):
    """Record a session in another process; return the process and the references."""
    import pickle

    code = RECORD.format(tests=os.path.dirname(__file__), uri=uri, session=session, end=end)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return process, pickle.load(process.stdout)


@pytest.fixture
def uri(tmp_path):
    return f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold"


@pytest.fixture
def sp(uri):
    with spool.open(uri) as opened:
        yield opened


def test_many_sessions_of_many_processes_cost_few_objects(tmp_path, s3_root):
    uri, n_writers, n_each = f"file://{tmp_path}/hot?spill={s3_root}", 4, 48
    spool.open(uri).close()
    root = os.path.dirname(os.path.dirname(__file__))
    command = [sys.executable, "-m", "tools.bench.publisher", uri, str(n_each)]
    writers = [
        subprocess.Popen([*command, str(n)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(n_writers)
    ]
    told = [json.loads(writer.communicate("go\n", timeout=300)[0].splitlines()[-1]) for writer in writers]
    objects = open_objects(s3_root)
    with spool.open(s3_root) as there:
        assert sum(1 for _ in there.sessions()) == n_writers * n_each
    assert len(objects.list("")) <= 1 + n_writers * 40, "a few rolls a stream, of a handful of objects each"
    assert all(one["threads"] < 30 for one in told)


def test_from_another_process_on_the_node(sp, uri, tmp_path):
    process, refs = other_process(uri, "theirs", end="sys.stdin.read()")
    sp.publish(refs, timeout_s=60)
    with spool.open(f"file://{tmp_path}/cold") as there:
        assert_same(there.read(refs), sp.read(refs))
    assert process.poll() is None, "its owner lives on and has rolled for us"
    process.communicate()


def test_of_a_writer_that_died(sp, uri, tmp_path):
    process, refs = other_process(uri, "dead", end="os.kill(os.getpid(), 9)")
    process.wait()
    stream = refs[0].extents["token_ids"][0].stream
    assert not is_live(str(tmp_path / "hot"), stream)
    sp.publish(refs, timeout_s=60)
    with spool.open(f"file://{tmp_path}/cold") as there:
        assert_same(there.read(refs), sp.read(refs))
    wait_for(lambda: not sp._catalog.packs.seal_requests(), what="no request that piles up")


def test_from_another_node_and_from_a_cold_handle_it_waits_for_the_manifest(sp, tmp_path):
    with (
        spool.open(f"file://{tmp_path}/node2?spill=file://{tmp_path}/cold") as node,
        spool.open(f"file://{tmp_path}/cold") as cold,
    ):
        refs = record(sp, "a")
        for other in (node, cold):
            with pytest.raises(NotFoundError, match=r"'a' was not published in 0\.5 s"):
                other.publish(refs, timeout_s=0.5)
        done = []
        waiting = [
            threading.Thread(target=lambda o=o: done.append(o.publish(refs, timeout_s=60))) for o in (node, cold)
        ]
        for thread in waiting:
            thread.start()
        time.sleep(0.5)
        assert not done
        sp.publish(refs, timeout_s=60)
        for thread in waiting:
            thread.join(60)
        assert len(done) == 2
        assert_same(node.read(refs), sp.read(refs))


def test_a_publish_that_is_late_says_what_is_missing_and_why(sp, tmp_path):
    (tmp_path / "cold").mkdir(exist_ok=True)
    (tmp_path / "cold" / "streams").write_text("in the way")
    refs = record(sp, "a")
    stream = refs[0].extents["token_ids"][0].stream
    with pytest.raises(StorageError) as caught:
        sp.publish(refs, timeout_s=15)
    assert caught.value.details["missing"] == [(stream, 0)]
    for word in (f"pack 0 of stream {stream}", "15 s", "publish again", "streams"):
        assert word in str(caught.value)
    (tmp_path / "cold" / "streams").unlink()
    sp.publish(refs, timeout_s=60)


def test_what_is_there_is_published_at_once_without_a_look_at_the_cold_root(tmp_path, hostile, s3_root):
    with spool.open(f"file://{tmp_path}/hot?spill={s3_root}") as sp:
        refs = record(sp, "a")
        sp.publish(refs, timeout_s=60)
        wait_for(lambda: read_status(f"{tmp_path}/hot").n_spilled)
        started = time.monotonic()
        for _ in range(20):
            sp.publish(refs, timeout_s=5)
        assert time.monotonic() - started < 5
        refs = record(sp, "b")
        hostile.heal()
        sp.publish(refs, timeout_s=60)
        lists = [path for method, path in hostile.requests if method == "GET" and "list-type" in path]
        assert len(lists) <= 6, "only the spiller looks around, every five seconds"
        assert not sp._catalog.packs.seal_requests()


def test_publishes_that_wait_hold_no_thread_and_share_their_looks(tmp_path):
    uri = f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold&threads=2&publish_interval_s=1"
    with spool.open(uri) as sp:
        looks = []
        real = sp._catalog.packs.get
        sp._catalog.packs.get = lambda *pack: looks.append(pack) or real(*pack)

        async def one(index):
            session = sp.session(f"s{index}", experts=SHAPE)
            await session.append_async(prompt_token_ids=[1, index], response_token_ids=[3, 4])
            await sp.publish_async(await session.finalize_async(), timeout_s=120)

        async def work():
            most, tasks = 0, [asyncio.ensure_future(one(index)) for index in range(200)]
            while not all(task.done() for task in tasks):
                most = max(most, threading.active_count())
                await asyncio.sleep(0.02)
            await asyncio.gather(*tasks)
            return most

        n_before, started = threading.active_count(), time.monotonic()
        most = asyncio.run(work())
        seconds = time.monotonic() - started
        assert most <= n_before + 8
        assert len(looks) < 200 * 6 + 40 * seconds, "a look costs one question to the index, however many wait"
        packs = [row.pack for row in sp._catalog.packs.rows()]
        assert len(packs) <= seconds + 3, "at most one roll an interval"


def test_cancelled_publishes_are_forgotten(sp, tmp_path):
    (tmp_path / "cold" / "streams").write_text("in the way")
    refs = record(sp, "a")

    async def work():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sp.publish_async(refs), 1)

    asyncio.run(work())
    assert not sp._tiers._publisher._waiting
    (tmp_path / "cold" / "streams").unlink()
    sp.publish(refs, timeout_s=60)


def test_a_forked_child_publishes_on_its_own(sp):
    refs = record(sp, "a")
    pid = os.fork()
    if pid == 0:
        try:
            sp.publish(refs, timeout_s=60)
            os._exit(0)
        except BaseException:
            os._exit(1)
    sp.publish(refs, timeout_s=60)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_large_backlog_does_not_hold_up_what_is_published(tmp_path):
    uri = f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold&spill_when=pressure"
    with spool.open(uri) as sp:
        for number in range(6):
            sp.session(f"big{number}", experts=spool.MoEShape(40, 256, 8)).append(**step(number))
            sp.flush()
        refs = record(sp, "small")
        sp.publish(refs, timeout_s=60)
        states = [row.state for row in sp._catalog.packs.rows()]
        assert states.count("spilled") < len(states)
    wait_for(lambda: not elect.is_running(str(tmp_path / "hot")), timeout_s=60, what="the end of the spiller")
