"""Processes that race, fork, die and leave cut files."""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import workers
from kit import add, counting, routing, session
from numpy.testing import assert_array_equal
from tiers import record

import spool
from spool.logs.cold import ColdFeeder

spawn = multiprocessing.get_context("spawn")
fork = multiprocessing.get_context("fork")


# ---------------------------------------------------------------------------- case 11: eight processes at once


def check_eight_processes(uri):
    barrier = spawn.Barrier(8)
    processes = [spawn.Process(target=workers.append_many, args=(uri, worker, 25, barrier)) for worker in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 8
    with spool.open(uri) as sp:
        check_their_steps(sp)


def check_their_steps(sp):
    names = [row.session_id for row in sp.sessions() if row.session_id != "before"]
    refs = [ref for name in names for ref in sp.steps(name)]
    assert (len(names), len(refs)) == (40, 200)
    for ref, sample in zip(refs, sp.read(refs, fields=["token_ids", "routed_experts"]), strict=True):
        worker = int(ref.session_id.split("-")[0])
        tokens = [worker + 1, int(ref.step_id) + 1, *counting(60, 100 * worker)]
        assert sample["token_ids"].tolist() == tokens
        assert_array_equal(sample["routed_experts"], routing(tokens))
    owners = {}
    for ref in refs:
        for extent in ref.extents["token_ids"]:
            assert owners.setdefault(extent.stream, ref.session_id.split("-")[0]) == ref.session_id.split("-")[0]
    assert len(owners) == 8


def test_case_11_eight_processes_append_to_one_spool_at_once(open_spool, spool_uri):
    add(session(open_spool(), "before"), [1, 2], [3])
    check_eight_processes(spool_uri)


def test_case_11_eight_processes_create_the_spool_at_once(spool_uri):
    check_eight_processes(spool_uri)


# --------------------------------------------------------------------- case 23: forks with everything open at once


def test_case_23_a_fork_inside_an_open_transaction(open_spool, spool_uri, tmp_path):
    sp = open_spool()
    s = session(sp)
    before = add(s, [1, 2], [3])
    with s.transaction():
        add(s, [1, 2, 3, 4], [5])
        child = fork.Process(target=_read_and_append_in_child, args=(sp, spool_uri, before, str(tmp_path / "seen")))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        add(s, [1, 2, 3, 4, 5, 6], [7])
    assert (tmp_path / "seen").read_text() == "[1, 2, 3]"
    assert [ref.n_tokens for ref in sp.steps("s")] == [3, 5, 7]
    (ref,) = sp.steps("child")
    assert sp.read(ref)["token_ids"].tolist() == [8, 9]
    assert_array_equal(sp.read(s.steps[-1])["routed_experts"], routing([1, 2, 3, 4, 5, 6, 7]))
    sp.close()
    again = open_spool()
    assert [ref.n_tokens for ref in again.steps("s")] == [3, 5, 7]
    assert again.verify(deep=True).findings == ()


def _read_and_append_in_child(sp, uri, ref, out):
    Path(out).write_text(str(sp.read(ref, fields=["token_ids"])["token_ids"].tolist()))
    with spool.open(uri) as own:
        assert own.read(ref)["token_ids"].tolist() == [1, 2, 3]
        add(session(own, "child"), [8], [9])


def test_case_23_the_parents_handle_works_in_a_child_that_appends_by_it(sp):
    s = session(sp)
    add(s, [1, 2], [3])
    child = fork.Process(target=_append_by_inherited_handle, args=(sp,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    add(s, [1, 2, 3], [4])
    assert [ref.n_tokens for ref in sp.steps("s")] == [3, 4]
    (ref,) = sp.steps("by child")
    assert sp.read(ref)["token_ids"].tolist() == [5, 6]
    assert {e.stream for e in ref.extents["token_ids"]}.isdisjoint(e.stream for e in s.steps[0].extents["token_ids"])


def _append_by_inherited_handle(sp):
    add(session(sp, "by child"), [5], [6])
    sp.close()


# ------------------------------------------------------------------------------- case 24: killed writers, cut files


def killed_after_five(uri):
    """Return the references that a writer acknowledged before it was killed."""
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=workers.write_ten, args=(uri, theirs))
    process.start()
    refs = []
    for number in range(5):
        assert ours.poll(60)
        refs.append(spool.ref_from_json(ours.recv()))
        ours.send("die" if number == 4 else "go on")
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    return refs


def test_case_24_what_a_killed_writer_acknowledged_is_there(open_spool, spool_uri):
    refs = killed_after_five(spool_uri)
    sp = open_spool()
    assert [ref.extents for ref in sp.steps("s")] == [ref.extents for ref in refs]
    for number, sample in enumerate(sp.read(refs, verify="always")):
        tokens = [number + 1, *counting(300), 7, 8]
        assert sample["token_ids"].tolist() == tokens
        assert_array_equal(sample["routed_experts"], routing(tokens))
    assert add(session(sp), [99], [98]).index == 5
    assert sp.verify(deep=True).findings == ()


@pytest.mark.parametrize("cut", [1, 7, 300])
def test_case_24_a_cut_log_is_reported_and_never_silently_shorter(open_spool, spool_uri, cut):
    refs = killed_after_five(spool_uri)
    root = spool_uri.removeprefix("file://")
    open_spool().close()
    (log,) = glob.glob(f"{glob.escape(root)}/streams/*/records/0.log")
    os.truncate(log, os.path.getsize(log) - cut)
    assert not passes_verify(spool_uri)
    with spool.open(spool_uri) as sp:
        for ref, sample in zip(refs[:4], sp.read(refs[:4]), strict=True):
            assert sample["token_ids"].tolist()[1:] == [*counting(300), 7, 8]
            assert ref.n_tokens == len(sample["token_ids"])


@pytest.mark.parametrize("field", ["token_ids", "routed_experts"])
def test_case_24_payload_that_is_cut_is_an_integrity_error(open_spool, spool_uri, field):
    refs = killed_after_five(spool_uri)
    root = spool_uri.removeprefix("file://")
    for tail in glob.glob(f"{glob.escape(root)}/streams/*/{field}/**", recursive=True):
        if os.path.isfile(tail) and not tail.endswith("zarr.json"):
            os.truncate(tail, max(os.path.getsize(tail) - 5, 0))
    sp = open_spool()
    with pytest.raises(spool.IntegrityError, match=field):
        sp.read(refs[-1])
    assert sp.read(refs[0])["token_ids"].tolist() == [1, *counting(300), 7, 8]
    assert not passes_verify(spool_uri)


@pytest.mark.parametrize("field", ["token_ids", "routed_experts", "logprobs"])
def test_case_24_a_flipped_bit_is_an_integrity_error(open_spool, spool_uri, field):
    sp = open_spool()
    ref = add(session(sp), counting(50), [1, 2])
    sp.flush()
    sp.close()
    root = spool_uri.removeprefix("file://")
    (shard,) = (
        p for p in glob.glob(f"{glob.escape(root)}/streams/*/{field}/c/**", recursive=True) if os.path.isfile(p)
    )
    with open(shard, "r+b") as file:
        file.seek(1)
        byte = file.read(1)
        file.seek(1)
        file.write(bytes([byte[0] ^ 1]))
    again = open_spool()
    with pytest.raises(spool.IntegrityError):
        again.read(ref)
    assert not passes_verify(spool_uri, deep=True)


def passes_verify(uri, deep=False):
    """Return whether ``sp.verify`` finds nothing wrong."""
    with spool.open(uri) as sp:
        return not sp.verify(deep=deep).findings


def test_a_spool_opens_in_a_plain_interpreter_without_the_test_environment(spool_uri):
    code = (
        "import sys, spool\n"
        f"sp = spool.open({spool_uri!r})\n"
        "s = sp.session(session_id='s')\n"
        "ref = s.append(prompt_token_ids=[1, 2], response_token_ids=[3])\n"
        "assert sp.read(ref)['token_ids'].tolist() == [1, 2, 3]\n"
        "assert not {'torch', 'ray', 'click', 'textual', 's3fs', 'botocore'} & set(sys.modules)\n"
        "sp.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_that_exits_without_closing_loses_nothing(open_spool, spool_uri):
    code = (
        "import spool\n"
        f"s = spool.open({spool_uri!r}).session(session_id='s')\n"
        "s.append(prompt_token_ids=[1, 2], response_token_ids=[3])\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 30
    assert [ref.n_tokens for ref in open_spool().steps("s")] == [3]


def test_a_fork_waits_for_who_decides_what_may_go(tmp_path):
    """That is asked on a connection of its own; a child that inherits it in the middle would wait for ever."""
    with spool.open(f"{tmp_path}/s?retention=released") as sp:
        for number in range(20):
            record(sp, f"s{number}", n_steps=1)
        sp.flush()
        over = threading.Event()

        def decide():
            while not over.is_set():
                sp.gc(dry_run=True)

        threads = [threading.Thread(target=decide) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(80):
                pid = os.fork()
                if not pid:
                    with contextlib.suppress(BaseException):
                        os._exit(0 if len(list(sp.sessions())) == 20 else 1)
                    os._exit(2)
                assert wait_for_child(pid) == 0
        finally:
            over.set()
            for thread in threads:
                thread.join()


def wait_for_child(pid, timeout_s=60.0):
    """Return the exit code of a child; one that hangs is killed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_beside_a_look_at_the_cold_root_waits_for_no_time_to_be_up(sp, tmp_path, monkeypatch):
    """Threads that fetch are begun under the lock of an index in memory: a fork must not hold what that waits for."""
    cold = f"file://{tmp_path}/cold"
    with spool.open(f"file://{tmp_path}/hot?spill={cold}&spill_when=pressure") as hot:
        s = session(hot, "a")
        add(s, [1], [2])
        hot.publish(s.finalize(), timeout_s=60)
    inside, fetched = threading.Event(), ColdFeeder._fetched

    def slow(self, new):
        inside.set()
        time.sleep(0.5)
        yield from fetched(self, new)

    monkeypatch.setattr(ColdFeeder, "_fetched", slow)
    with spool.open(cold) as there:
        looked = []
        looking = threading.Thread(target=lambda: looked.extend(there.sessions()))
        looking.start()
        inside.wait(30)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert time.monotonic() - began < 20
        os.waitpid(child, 0)
        looking.join()
        assert [row.session_id for row in looked] == ["a"]
