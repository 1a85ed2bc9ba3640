"""Rings, tapes, groups and commit logs by themselves."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from writing import SCHEMA, Free, check, data, folder, put, read_bytes, rows_of, stream

from spool.errors import CapacityError
from spool.formats.frames import decode_event, frame
from spool.model.fields import ArraySpec, FieldSpec, Schema, layout
from spool.stores.hot import HotStore
from spool.stores.local import BLOCK
from spool.write import group as group_module
from spool.write.folder import Folder
from spool.write.group import Group, Ticket
from spool.write.log import CommitLog, log_path, read_log
from spool.write.mover import Mover
from spool.write.ring import BUDGET_BYTES, FLUSH_BYTES, Ring, make_rings
from spool.write.space import GRANT_BYTES, Grants
from spool.write.stream import Run
from spool.write.tape import Tape

# -- rings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "shape"), [("uint8", (59,)), ("int32", ()), ("uint16", (7, 3)), ("float64", (500,))])
def test_a_ring_holds_rows_across_its_end(dtype, shape):
    spec = ArraySpec(name="x", dtype=dtype, shape=shape)
    ring, width, calls = Ring(spec, 16 * BLOCK), spec.row_bytes, []
    source = np.frombuffer(np.random.default_rng(1).bytes(width * 5000), dtype).reshape(-1, *shape)

    def fill(dst, first):
        calls.append((first, len(dst)))
        dst[...] = source[first : first + len(dst)]

    done = 0
    while done < 3000:
        n = min(3000 - done, max(1, 10 * BLOCK // width - done % 7))
        calls.clear()
        crc = ring.fill(done * width, n, fill, done, 7)
        raw = source[done : done + n].tobytes()
        assert b"".join(ring.parts(done * width, (done + n) * width)) == raw
        assert crc == crc32c(raw, 7)
        assert [first for first, _ in calls] == [done + sum(k for _, k in calls[:i]) for i in range(len(calls))]
        assert sum(k for _, k in calls) == n
        done += n


@pytest.mark.parametrize("n_arrays", [1, 3, 8, 40])
def test_rings_share_a_budget(n_arrays):
    arrays = [ArraySpec(name=f"a{i}", dtype="uint8", shape=(320 if i == 0 else 4,)) for i in range(n_arrays)]
    rings = make_rings(arrays)
    assert sum(ring.n_bytes for ring in rings.values()) <= BUDGET_BYTES + 2 * BLOCK * n_arrays
    for ring in rings.values():
        assert ring.n_bytes % BLOCK == 0 and ring.n_bytes >= 64 << 10
        assert ring.flush_bytes <= min(FLUSH_BYTES, ring.n_bytes // 2)
    assert make_rings([]) == {}
    (wide,) = make_rings([ArraySpec(name="w", dtype="uint8", shape=(30_000_000,))]).values()
    assert wide.n_bytes >= 60_000_000


# -- tapes -------------------------------------------------------------------------------------------------------------


class Bench:
    """One tape with a small ring, and what it must hold."""

    def __init__(self, root, width, *, mover=None, direct=True, ring_bytes=64 << 10):
        self.schema = Schema.of(FieldSpec(name="x", dtype="uint8", align="token", shape=(width,)))
        (self.spec,) = self.schema.arrays
        self.folder = Folder(str(root), "s", self.schema, layout(self.schema, max_shard_bytes=4 << 20))
        os.makedirs(f"{root}/streams/s/x", exist_ok=True)
        self.root, self.width = root, width
        self.tape = Tape(self.folder, self.spec, 0, Ring(self.spec, ring_bytes), direct=direct, mover=mover)
        self.rng = np.random.default_rng(width)
        self.kept = []

    def fill(self, n):
        """Fill ``n`` rows; return where they are and what they hold."""
        rows = self.rng.integers(0, 256, (n, self.width), dtype=np.uint8)

        def fill(dst, first):
            dst[...] = rows[first : first + len(dst)]

        start, done = self.tape.filled, 0
        while done < n:
            k = n - done if self.tape.fits(n - done) else self.tape.piece(n - done)
            if not self.tape.fits(k):
                self.tape.ready = self.tape.filled
                self.tape.write(self.tape.ready)
                self.tape.settle()
            self.tape.fill(k, fill, done, 0)
            done += k
        return start, rows.tobytes()

    def publish(self):
        self.tape.ready = self.tape.whole = self.tape.filled

    def commit(self, piece):
        self.publish()
        self.tape.write(self.tape.ready)
        self.tape.settle()
        self.tape.kept = self.tape.whole
        self.kept.append(piece)

    def check(self, patience_s=1.0, last=None):
        for start, raw in self.kept[-last:] if last else self.kept:
            assert read_bytes(self.root, "s", self.spec, 0, start, start + len(raw), patience_s=patience_s) == raw


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["commit", "commit", "fail", "part", "unwritten"]), st.integers(0, 3000)), max_size=25
)


@pytest.mark.parametrize("width", [1, 59, 320])
@pytest.mark.parametrize("moves", [False, True])
@settings(max_examples=25)
@given(operations=OPERATIONS)
def test_a_tape_keeps_what_is_committed_through_any_sequence(tmp_path_factory, width, moves, operations):
    root = tmp_path_factory.mktemp("tape")
    mover = Mover() if moves else None
    bench = Bench(root, width, mover=mover)
    tape, refused = bench.tape, 0
    for what, n in operations:
        n = min(n, tape.room)
        piece = bench.fill(n)
        if what == "commit":
            bench.commit(piece)
        elif what == "fail":  # written, but its event was not
            bench.publish()
            tape.write(tape.ready)
            tape.whole = tape.kept
            tape.rewind()
            refused += 1
        else:  # the append itself failed, before or after a part of it was written
            if what == "part":
                tape.ready = tape.filled
                tape.write(tape.ready)
                tape.settle()
            tape.rewind()
            refused += 1
        assert tape.filled == tape.ready == tape.whole and tape.filled % width in (0, tape.limit % width)
        lost = tape.filled - sum(len(raw) for _, raw in bench.kept)
        assert 0 <= lost <= refused * (BLOCK + width)
        bench.check()
    tape.close()
    bench.check()
    if mover:
        mover.close()
    shutil.rmtree(root)


def test_only_whole_blocks_reach_the_shard_and_nothing_is_preallocated(tmp_path):
    bench = Bench(tmp_path, 59, ring_bytes=4 << 20)
    path, sizes = bench.folder.shard_path(bench.spec, 0), []
    for n in [10_000] * 6:
        bench.commit(bench.fill(n))
        size = os.path.getsize(path) if os.path.exists(path) else 0
        sizes.append(size)
        assert size % BLOCK == 0
        tails = os.listdir(tmp_path / "streams" / "s" / "x")
        assert [name for name in tails if name.startswith("tail")] == [f"tail-0-{size}"]
        assert os.path.getsize(tmp_path / "streams" / "s" / "x" / f"tail-0-{size}") == bench.tape.filled - size
    assert sizes[0] == 0 and sizes[1] == 2 * 590_000 // BLOCK * BLOCK
    assert os.stat(path).st_blocks * 512 <= sizes[-1] + BLOCK
    bench.check()
    bench.tape.close()


def test_whole_blocks_need_no_tail(tmp_path):
    bench = Bench(tmp_path, 256, ring_bytes=4 << 20)
    bench.commit(bench.fill(8192))
    assert bench.tape.filled == 2 << 20
    assert not [name for name in os.listdir(tmp_path / "streams" / "s" / "x") if name.startswith("tail")]
    bench.commit(bench.fill(3))
    bench.check()
    bench.tape.close()


def test_each_commit_writes_only_its_new_bytes(tmp_path, monkeypatch):
    bench, written, real = Bench(tmp_path, 64, ring_bytes=4 << 20), [], os.pwrite

    def pwrite(fd, buffer, offset):
        written.append((len(buffer), offset))
        return real(fd, buffer, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    for n in (10, 5, 0, 1):
        bench.commit(bench.fill(n))
    assert written == [(640, 0), (320, 640), (64, 960)]
    bench.tape.close()


CALLS = ("pwrite", "pwritev", "unlink", "ftruncate", "open", "mkdir")


@pytest.mark.parametrize("failing", [False, True])
def test_at_every_system_call_what_is_committed_can_be_read(tmp_path, monkeypatch, failing):
    """Whoever looks between two calls finds all committed rows at once: no state needs the writer to go on."""
    bench, n_looks = Bench(tmp_path, 59, direct=False, ring_bytes=128 << 10), [0]

    def watched(real):
        def call(*args, **kwargs):
            with monkeypatch.context() as patch:
                for name, function in reals.items():
                    patch.setattr(os, name, function)
                n_looks[0] += 1
                bench.check(patience_s=0.0)
            return real(*args, **kwargs)

        return call

    reals = {name: getattr(os, name) for name in CALLS}
    for name in CALLS:
        monkeypatch.setattr(os, name, watched(reals[name]))
    for step, n in enumerate([5, 700, 100, 400, 1500, 3, 600, 2000, 1]):
        piece = bench.fill(n)
        if failing and step % 2:
            bench.publish()
            bench.tape.write(bench.tape.ready)
            bench.tape.whole = bench.tape.kept
            bench.tape.rewind()
        else:
            bench.commit(piece)
    bench.tape.close()
    monkeypatch.undo()
    bench.check()
    assert n_looks[0] > 20


class Later:
    """A mover that moves when it is told to."""

    def __init__(self):
        self.jobs = []
        self.submit = self.jobs.append


def test_at_every_system_call_of_moves_what_is_committed_can_be_read(tmp_path, monkeypatch):
    mover, n_looks, n_moves = Later(), 0, 0
    bench = Bench(tmp_path, 320, mover=mover, direct=False, ring_bytes=4 << 20)
    reals = {name: getattr(os, name) for name in CALLS}

    def watched(real):
        def call(*args, **kwargs):
            nonlocal n_looks
            with monkeypatch.context() as patch:
                for name, function in reals.items():
                    patch.setattr(os, name, function)
                n_looks += 1
                bench.check(patience_s=0.0, last=10)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, watched(reals[name]))
    for step in range(60):
        piece = bench.fill(400)
        if step % 4 == 3:  # also fails while a move is on its way
            bench.publish()
            bench.tape.write(bench.tape.ready)
            bench.tape.whole = bench.tape.kept
            bench.tape.rewind()
        else:
            bench.commit(piece)
        if mover.jobs and step % 3 == 2:
            mover.jobs.pop()()
            n_moves += 1
    while mover.jobs:
        mover.jobs.pop()()
    bench.tape.close()
    monkeypatch.undo()
    bench.check()
    assert n_moves >= 3 and n_looks > 60


# -- moving blocks of long tails ---------------------------------------------------------------------------------------


def test_small_appends_move_to_the_shard_while_they_go_on(tmp_path):
    """The move is held up; appends meanwhile go to both tails, and a reader never waits."""
    mover, gate = Mover(), threading.Event()
    bench = Bench(tmp_path, 59, mover=mover, ring_bytes=4 << 20)
    mover.submit(gate.wait)
    shard = bench.folder.shard_path(bench.spec, 0)
    while not bench.tape.filled > 1_400_000:
        bench.commit(bench.fill(1000))
        bench.check(patience_s=0.0)
        if bench.tape.filled > 1_200_000 and not gate.is_set():
            assert os.path.getsize(shard) == 0
            names = os.listdir(tmp_path / "streams" / "s" / "x")
            assert len([name for name in names if name.startswith("tail")]) == 2
            gate.set()
            time.sleep(0.05)
            bench.check(patience_s=0.0)
    bench.commit(bench.fill(1))
    assert os.path.getsize(shard) >= (1 << 20) - BLOCK
    bench.tape.close()
    bench.check()
    mover.close()


def test_a_move_that_fails_costs_nothing_that_was_committed(tmp_path, monkeypatch):
    mover = Mover()
    bench = Bench(tmp_path, 59, mover=mover, ring_bytes=4 << 20)
    real, shard, failing = os.pwrite, bench.folder.shard_path(bench.spec, 0), [True]

    def pwrite(fd, buffer, offset):
        if failing[0] and os.readlink(f"/proc/self/fd/{fd}") == shard:
            real(fd, memoryview(buffer)[: 40 * BLOCK], offset)
            raise OSError(28, "full")
        return real(fd, buffer, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    raised = 0
    for _ in range(60):
        piece = bench.fill(1000)
        try:
            bench.commit(piece)
        except OSError as error:
            assert error.errno == 28
            raised += 1
            bench.tape.whole = bench.tape.kept
            bench.tape.rewind()
        bench.check()
    assert raised, "somebody must hear of it in the end"
    failing[0] = False
    for _ in range(20):
        bench.commit(bench.fill(1000))
    assert os.path.getsize(shard) > 1 << 20
    bench.check()
    bench.tape.close()
    mover.close()
    bench.check()


def test_fork_during_a_move_leaves_the_child_free_to_go(tmp_path):
    writer = stream(tmp_path)
    for seed in range(40):
        put(writer, data(SCHEMA, seed, 256))
        if seed % 10 == 9:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            deadline = time.monotonic() + 10
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    pytest.fail("the child hangs")
                time.sleep(0.01)
    writer.close()


# -- groups ------------------------------------------------------------------------------------------------------------


def make_group(write=lambda batch, snapshot: None):
    batches = []

    def record(batch, snapshot):
        batches.append([ticket.frame for ticket in batch])
        write(batch, snapshot)

    return Group(lambda: None, record, lambda batch, error: []), batches


def run(group, name):
    ticket = Ticket(name)
    with group.mutex:
        group.enqueue(ticket)
    group.run(ticket)
    return ticket


def test_what_is_queued_while_a_leader_writes_is_one_group():
    started, gate = threading.Event(), threading.Event()

    def write(batch, snapshot):
        started.set()
        gate.wait()

    group, batches = make_group(write)
    threads = [threading.Thread(target=run, args=(group, b"first"))]
    threads[0].start()
    started.wait()
    for n in range(15):
        threads.append(threading.Thread(target=run, args=(group, b"%d" % n)))
        threads[-1].start()
    time.sleep(0.1)
    gate.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert batches[0] == [b"first"] and len(batches) == 2 and len(batches[1]) == 15


def test_what_write_raises_fails_its_group_and_not_the_next():
    fail = [True]

    def write(batch, snapshot):
        if fail[0]:
            raise OSError(5, "broken")

    group, _ = make_group(write)
    assert run(group, b"a").error.errno == 5
    fail[0] = False
    assert run(group, b"b").error is None


def test_an_abandoned_ticket_is_written_by_the_next_and_blocks_nobody():
    group, batches = make_group()
    lost = Ticket(b"lost")
    with group.mutex:
        group.enqueue(lost)
    assert run(group, b"next").error is None
    assert batches == [[b"lost", b"next"]] and lost.done
    with group.exclusive():
        pass


def test_holding_the_turn_keeps_writers_out():
    group, batches = make_group()
    thread = threading.Thread(target=run, args=(group, b"later"))
    with group.exclusive():
        thread.start()
        time.sleep(0.05)
        assert batches == []
    thread.join(10)
    assert batches == [[b"later"]]


def test_an_interrupted_leader_leaves_the_group_working():
    def write(batch, snapshot):
        if batch[0].frame == b"bad":
            raise KeyboardInterrupt

    group, _ = make_group(write)
    with pytest.raises(KeyboardInterrupt):
        run(group, b"bad")
    assert run(group, b"good").error is None


def test_a_signal_while_waiting_is_raised_after_the_commit():
    """A thread that waits may be interrupted; its event is committed whole and the others go on."""
    started, gate = threading.Event(), threading.Event()

    def write(batch, snapshot):
        started.set()
        gate.wait()

    group, batches = make_group(write)
    other = threading.Thread(target=run, args=(group, b"other"))
    other.start()
    started.wait()

    def interrupt(signum, at):
        threading.Timer(0.05, gate.set).start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            run(group, b"mine")
    finally:
        signal.signal(signal.SIGALRM, before)
    other.join(10)
    assert batches == [[b"other"], [b"mine"]]
    assert run(group, b"next").error is None


# -- logs and grants ---------------------------------------------------------------------------------------------------


def test_a_log_writes_a_group_with_one_call(tmp_path, monkeypatch):
    os.makedirs(tmp_path / "records")
    log, calls, real = CommitLog(str(tmp_path), 0, sync=False), [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: calls.append(args) or real(*args))
    frames = [frame(b"%d" % n * (n + 1)) for n in range(5)]
    assert log.append(frames) is None
    assert len(calls) == 1 and log.n_events == 5
    monkeypatch.undo()
    log.close()
    assert read_log(log_path(str(tmp_path), 0)).payloads == [b"%d" % n * (n + 1) for n in range(5)]


@pytest.mark.parametrize("written", range(0, 60, 7))
def test_a_log_that_breaks_off_ends_with_a_whole_frame(tmp_path, monkeypatch, written):
    os.makedirs(tmp_path / "records")
    log, frames = CommitLog(str(tmp_path), 0, sync=False), [frame(b"x" * n) for n in (5, 10, 15)]
    start, real, left = log.end, os.pwrite, [written]

    def pwrite(fd, buffer, offset):
        if left[0] == 0:
            raise OSError(28, "full")
        n = real(fd, memoryview(buffer)[: left[0]], offset)
        left[0] -= n
        return n

    monkeypatch.setattr(os, "pwrite", pwrite)
    error, n_whole = log.append(frames), log.n_events
    monkeypatch.undo()
    ends = np.cumsum([0, *map(len, frames)])
    assert n_whole == np.searchsorted(ends, written, side="right") - 1
    assert (error is None) == (written >= ends[-1])
    assert log.end == start + ends[n_whole] == os.path.getsize(log.path)
    assert len(read_log(log.path).payloads) == n_whole
    log.close()


def test_a_log_that_cannot_be_made_leaves_no_file(tmp_path, monkeypatch):
    os.makedirs(tmp_path / "records")

    def full(*args):
        raise OSError(28, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        CommitLog(str(tmp_path), 0, sync=False)
    assert os.listdir(tmp_path / "records") == []


def test_grants_are_whole_and_refusals_take_nothing():
    space = Free(3 * GRANT_BYTES)
    grants = Grants(space, "s")
    grants.take(1)
    grants.take(GRANT_BYTES)
    assert space.grants == [GRANT_BYTES, GRANT_BYTES]
    with pytest.raises(CapacityError) as caught:
        grants.take(2 * GRANT_BYTES)
    assert caught.value.details["used"] == GRANT_BYTES + 1
    grants.put_back(GRANT_BYTES)
    grants.settle(1, 0)
    grants.give_back()
    assert space.reserved == 0


def test_rows_of_nothing_are_legal(tmp_path):
    writer = stream(tmp_path)
    runs = put(writer, data(SCHEMA, 0, 0))
    assert runs == {"routed_experts": (), "token_ids": (), "logprobs": ()}
    assert writer.append(rows_of(data(SCHEMA, 0, 0)), lambda runs: None) == runs
    writer.close()
    assert sorted(os.listdir(f"{folder(tmp_path, writer.name)}/records")) == ["0.arrow"]


# -- interruptions -----------------------------------------------------------------------------------------------------


class Interrupting:
    """Raises once in this thread where the n-th signal handler could: as a call begins, or a built-in one returns."""

    def __init__(self, file, n):
        self.file, self.left, self.raised = file, n, False

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _event(self, frame, event, argument):
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(self.file):
            self.left -= 1
            if self.left == 0:
                self.raised = True
                raise KeyboardInterrupt


def test_an_interruption_anywhere_in_a_group_holds_nobody_up(monkeypatch):
    """At every call and return in the module, alone and behind a leader; then others go on, and so does this thread."""
    monkeypatch.setattr(group_module, "PATIENCE_S", 0.02)
    for use in ("alone", "behind", "exclusive"):
        n, done = 0, False
        while not done:
            n += 1
            gate, group = threading.Event(), None

            def write(batch, snapshot, gate=gate):
                if batch and batch[0].frame == b"first":
                    gate.wait(5)

            group, _ = make_group(write)
            other = threading.Thread(target=run, args=(group, b"first"))
            if use == "behind":
                other.start()
                threading.Timer(0.005, gate.set).start()
            ticket = Ticket(b"mine")
            with Interrupting("write/group.py", n) as interrupting, suppress(KeyboardInterrupt):
                if use == "exclusive":
                    with group.exclusive():
                        pass
                else:
                    with group.mutex:
                        group.enqueue(ticket)
                    group.run(ticket)
            gate.set()
            done = not interrupting.raised
            late = threading.Thread(target=run, args=(group, b"late"), daemon=True)
            late.start()
            late.join(5)
            assert not late.is_alive(), f"hangs after an interruption at {n} ({use})"
            if use == "behind":
                other.join(5)
                assert not other.is_alive()
        assert n > 4


def test_an_interruption_anywhere_in_a_commit_leaves_what_is_on_disk_and_nothing_else(tmp_path):
    """What an interrupted thread reports does not matter: frames that were whole stay where they are, and count."""
    for file in ("write/log.py", "write/commit.py", "write/tape.py", "write/pack.py"):
        n, done = 0, False
        while not done:
            n += 1
            writer, kept = stream(tmp_path, space=Free()), []
            kept.append((put(writer, data(SCHEMA, 0, 50), index=0), data(SCHEMA, 0, 50)))
            log = log_path(folder(tmp_path, writer.name), 0)
            with Interrupting(file, n) as interrupting, suppress(KeyboardInterrupt):
                put(writer, data(SCHEMA, 1, 50), index=1)
            done = not interrupting.raised
            seen = read_log(log).payloads
            for index in (2, 3):
                arrays = data(SCHEMA, index, 50)
                kept.append((put(writer, arrays, index=index), arrays))
            after = read_log(log).payloads
            assert after[: len(seen)] == seen, f"frames were taken back that could be seen ({file}, {n})"
            indexes = [decode_event(payload).index for payload in after]
            assert indexes in ([0, 2, 3], [0, 1, 2, 3])
            for payload in after:
                event = decode_event(payload)
                for array, extents in event.extents.items():
                    run_ = [(extent.row, extent.n, extent.crc) for extent in extents]
                    check(tmp_path, writer, {array: [Run(*r) for r in run_]},
                          {array: data(SCHEMA, event.index, 50)[array]})  # fmt: skip
            for runs, arrays in kept:
                check(tmp_path, writer, runs, arrays)
            writer.close()
            for runs, arrays in kept:
                check(tmp_path, writer, runs, arrays)
            shutil.rmtree(tmp_path / "streams")
        assert n > 3


@pytest.mark.parametrize("how", ["whole", "part"])
def test_frames_that_are_whole_count_for_those_who_wait_whatever_the_leader_meets(tmp_path, monkeypatch, how):
    writer, real, armed = stream(tmp_path), os.pwrite, [False]
    put(writer, data(SCHEMA, 0, 5), index=0)

    def pwrite(fd, buffer, offset):
        if armed[0] and os.readlink(f"/proc/self/fd/{fd}").endswith(".log"):
            armed[0] = False
            real(fd, memoryview(buffer)[: len(buffer) if how == "whole" else len(buffer) // 2 + 9], offset)
            raise KeyboardInterrupt
        return real(fd, buffer, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    armed[0] = True
    with pytest.raises(KeyboardInterrupt):
        put(writer, data(SCHEMA, 1, 5), index=1)
    put(writer, data(SCHEMA, 2, 5), index=2)
    found = [decode_event(p).index for p in read_log(log_path(folder(tmp_path, writer.name), 0)).payloads]
    assert found == ([0, 1, 2] if how == "whole" else [0, 2])
    writer.close()


def test_bytes_that_were_seen_never_change_while_tails_are_used_again(tmp_path):
    """Readers hammer unsealed rows while small and large appends alternate, so that every tail is soon another's."""
    mover, stop, failures = Mover(), threading.Event(), []
    bench = Bench(tmp_path, 320, mover=mover, ring_bytes=4 << 20)
    store = HotStore(str(tmp_path))

    def read(seed):
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                if bench.kept:
                    start, raw = bench.kept[-1 - int(rng.integers(min(3, len(bench.kept))))]
                    if seed:
                        assert read_bytes(tmp_path, "s", bench.spec, 0, start, start + len(raw)) == raw
                    else:
                        with store.borrow("streams/s/x/c/0/0", start, len(raw)) as view:
                            assert bytes(view) == raw
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for reader in readers:
        reader.start()
    for step in range(500):
        n = (1, 40, 3300)[step % 3] if step % 30 < 3 else 60
        if bench.tape.room < n:
            break
        bench.commit(bench.fill(n))
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
    bench.tape.close()
    names = os.listdir(tmp_path / "streams" / "s" / "x")
    assert len([name for name in names if name.startswith("tail")]) <= 1 and not any("spare" in name for name in names)
    bench.check()
    mover.close()


def test_a_spare_takes_no_room(tmp_path):
    bench = Bench(tmp_path, 320, ring_bytes=4 << 20)
    for n in (1000, 4000, 10):
        bench.commit(bench.fill(n))
    spares = [path for path in (tmp_path / "streams" / "s" / "x").iterdir() if path.name.startswith("spare")]
    assert spares and all(path.stat().st_size == 0 for path in spares)
    bench.tape.close()


@pytest.mark.parametrize("call", ["rename", "ftruncate"])
def test_a_tail_that_cannot_be_put_aside_does_no_harm(tmp_path, monkeypatch, call):
    """Whatever is left in its place is gone before the pack is sealed, which looks for the rows in tails."""
    bench, real, failing = Bench(tmp_path, 320, ring_bytes=4 << 20), getattr(os, call), [True]

    def fail(*args, **kwargs):
        if failing[0] and (call == "ftruncate" or "spare" in str(args[1])):
            raise OSError(28, "full")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, fail)
    for n in (1000, 4000, 10, 4086):
        bench.commit(bench.fill(n))
        bench.check(patience_s=0.0)
    bench.tape.close()
    tails = [name for name in os.listdir(tmp_path / "streams" / "s" / "x") if name.startswith("tail")]
    assert len(tails) <= 1
    bench.check()


def test_an_interruption_anywhere_while_a_pack_is_opened_costs_only_that_append(tmp_path):
    for file in ("write/stream.py", "write/pack.py", "write/log.py"):
        n, done = 0, False
        while not done:
            n += 1
            writer, arrays = stream(tmp_path), data(SCHEMA, n, 20)
            with Interrupting(file, n) as interrupting, suppress(KeyboardInterrupt):
                put(writer, arrays)
            done = not interrupting.raised
            runs = put(writer, arrays)
            check(tmp_path, writer, runs, arrays)
            writer.close()
            check(tmp_path, writer, runs, arrays)
            shutil.rmtree(tmp_path / "streams")
        assert n > 3


def test_a_mover_whose_start_was_interrupted_still_ends(monkeypatch):
    mover, real, moved = Mover(), threading.Thread.start, threading.Event()

    def start(thread):
        real(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        mover.submit(moved.set)
    monkeypatch.undo()
    mover.submit(moved.set)
    closing = threading.Thread(target=mover.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive() and moved.is_set()
