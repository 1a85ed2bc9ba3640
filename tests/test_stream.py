"""A stream from the outside: appends, packs, failures, concurrent readers, forks."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from writing import (
    SCHEMA,
    SMALL,
    Free,
    check,
    check_stored,
    data,
    event_of,
    files,
    folder,
    put,
    rows_of,
    stream,
    together,
)

from spool import locks
from spool.errors import CapacityError, ConfigError, InputError, LockedError, SessionStateError, StorageError
from spool.formats import records
from spool.formats.frames import decode_event, encode_event, scan
from spool.formats.shard import parse_group
from spool.model.events import Checkpointed, SessionOpened
from spool.model.fields import LOSS_MASK, FieldSpec, Schema
from spool.stores.hot import HotStore
from spool.stores.local import read_file
from spool.write.folder import lock_folder
from spool.write.log import read_log
from spool.write.space import Grants
from spool.write.stream import Rows


def events(root, writer, pack=0):
    return [decode_event(p) for p in read_log(f"{folder(root, writer.name)}/records/{pack}.log").payloads]


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_new_stream_is_locked_described_and_whole(tmp_path):
    writer = stream(tmp_path)
    assert len(writer.name) == len("20261130T054312-9f3a1c5e")
    assert os.listdir(tmp_path / "streams") == [writer.name], "no temporary folder is left"
    schema, sizes = parse_group((tmp_path / "streams" / writer.name / "zarr.json").read_bytes())
    assert (schema, sizes) == (SCHEMA, writer.layout)
    with pytest.raises(LockedError, match="exactly one"):
        lock_folder(folder(tmp_path, writer.name))
    writer.close()
    locks.release(lock_folder(folder(tmp_path, writer.name)))


def test_a_stream_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="durability"):
        stream(tmp_path, durability="maybe")
    real = os.fsync

    def full(fd):
        if "token_ids" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "full")
        return real(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError):
        stream(tmp_path)
    assert os.listdir(tmp_path / "streams") == []
    monkeypatch.undo()
    stream(tmp_path).close()
    assert len(os.listdir(tmp_path / "streams")) == 1


def test_a_stream_of_facts_has_only_a_log(tmp_path):
    writer = stream(tmp_path, Schema())
    for n in range(5):
        writer.commit(encode_event(Checkpointed(f"tag{n}", 1.0)))
    assert writer.append({}, lambda runs: encode_event(Checkpointed("last", 2.0))) == {}
    assert [event.tag for event in events(tmp_path, writer)] == ["tag0", "tag1", "tag2", "tag3", "tag4", "last"]
    assert writer.position.n_events == 6
    writer.close()
    assert files(tmp_path, writer.name) == ["lock", "records/0.arrow", "zarr.json"]


# -- appends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_rows_of_every_size_read_back_before_and_after_sealing(tmp_path, direct):
    writer, kept = stream(tmp_path, direct=direct), []
    for seed, n in enumerate([0, 1, 0, 2, 7, 255, 256, 4096, 3, 1, 12_345, 40_000, 1, 4095]):
        arrays = data(SCHEMA, seed, n, logprobs=n // 3)
        kept.append((put(writer, arrays, index=seed), arrays))
        check(tmp_path, writer, *kept[-1])
    for runs, arrays in kept:
        check(tmp_path, writer, runs, arrays)
    assert [event.index for event in events(tmp_path, writer)] == list(range(len(kept)))
    writer.flush()
    for runs, arrays in kept:
        check(tmp_path, writer, runs, arrays)
    writer.close()
    for runs, arrays in kept:
        check(tmp_path, writer, runs, arrays)


def test_arrays_that_are_left_out_get_no_rows(tmp_path):
    writer = stream(tmp_path)
    arrays = {"token_ids": np.arange(5, dtype="<i4")}
    runs = put(writer, arrays)
    assert list(runs) == ["token_ids"] and runs["token_ids"][0].n == 5
    check(tmp_path, writer, runs, arrays)
    writer.close()
    assert "routed_experts/c" not in "\n".join(files(tmp_path, writer.name))
    with pytest.raises(InputError, match="no array 'nothing'"):
        stream(tmp_path).append({"nothing": Rows(1, lambda dst, first: None)}, lambda runs: None)


def test_a_step_larger_than_the_ring_streams_through_it(tmp_path):
    writer = stream(tmp_path)
    arrays = data(SCHEMA, 1, 130_000)  # 41.6 MB of experts
    runs = put(writer, arrays)
    assert len(runs["routed_experts"]) == 1
    check(tmp_path, writer, runs, arrays)
    writer.close()
    check(tmp_path, writer, runs, arrays)


def test_a_step_larger_than_a_pack_is_split_over_packs(tmp_path):
    writer = stream(tmp_path, SMALL, max_shard_bytes=1 << 18)
    rows = writer.layout.shard_rows["wide"]
    first = data(SMALL, 0, 10)
    first_runs = put(writer, first)
    arrays = data(SMALL, 1, 3 * rows + 5, token_ids=rows + 1)
    runs = put(writer, arrays)
    assert [run.n for run in runs["wide"]] == [rows, rows, rows, 5]
    assert [run.row // rows for run in runs["wide"]] == [1, 2, 3, 4], "it starts a pack of its own"
    assert [run.n for run in runs["token_ids"]] == [rows, 1]
    check(tmp_path, writer, first_runs, first)
    check(tmp_path, writer, runs, arrays)
    after = data(SMALL, 2, rows - 5)
    after_runs = put(writer, after)
    assert after_runs["wide"][0].row == 4 * rows + 5
    writer.close()
    for found, expected in ((first_runs, first), (runs, arrays), (after_runs, after)):
        check(tmp_path, writer, found, expected)
    assert [name for name in files(tmp_path, writer.name) if "tail" in name or ".log" in name] == []


def test_packs_roll_together_and_skip_to_the_next_shard(tmp_path):
    writer = stream(tmp_path, SMALL, max_shard_bytes=1 << 18)
    rows = writer.layout.shard_rows["wide"]
    kept = []
    for seed in range(9):
        arrays = data(SMALL, seed, rows // 3 + 1, token_ids=2)
        kept.append((put(writer, arrays), arrays))
    starts = [(runs["wide"][0].row // rows, runs["token_ids"][0].row // rows) for runs, _ in kept]
    assert starts == [(n // 2, n // 2) for n in range(9)]
    writer.close()
    for runs, arrays in kept:
        check(tmp_path, writer, runs, arrays)


def test_ragged_values_have_room_of_their_own(tmp_path):
    schema = Schema.of(FieldSpec(name="kept", dtype="int32", align="token", ragged=True), *SMALL.fields)
    writer = stream(tmp_path, schema, max_shard_bytes=1 << 18)
    values = writer.layout.shard_rows["kept.values"]
    assert values > writer.layout.shard_rows["wide"]
    kept = []
    for seed in range(3):
        arrays = data(schema, seed, 4, **{"kept.values": values // 2 + 1})
        kept.append((put(writer, arrays), arrays))
    assert [runs["kept.values"][0].row // values for runs, _ in kept] == [0, 1, 2]
    assert [runs["wide"][0].row // writer.layout.shard_rows["wide"] for runs, _ in kept] == [0, 1, 2]
    writer.close()
    for runs, arrays in kept:
        check(tmp_path, writer, runs, arrays)


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float64", "int16", "uint32"])
def test_fill_sees_the_stored_dtype_and_shape(tmp_path, dtype):
    schema = Schema.of(FieldSpec(name="x", dtype=dtype, align="token", shape=(3, 7)))
    writer, arrays = stream(tmp_path, schema), data(schema, 3, 100_001)
    seen = set()

    def fill(dst, first):
        seen.add((dst.dtype, dst.shape[1:]))
        dst[...] = arrays["x"][first : first + len(dst)]

    for _ in range(3):
        runs = writer.append({"x": Rows(100_001, fill)}, lambda runs: encode_event(event_of(writer.name, runs)))
    assert seen == {(arrays["x"].dtype, (3, 7))}
    check(tmp_path, writer, runs, arrays)
    writer.close()


def test_rows_held_by_a_transaction_are_committed_later_in_another_pack(tmp_path):
    writer = stream(tmp_path, SMALL, max_shard_bytes=1 << 18)
    rows = writer.layout.shard_rows["wide"]
    first, second, other = data(SMALL, 0, 100), data(SMALL, 1, rows - 50), data(SMALL, 2, 20)
    held, got = [], []

    def hold(runs):
        held.append(event_of(writer.name, runs, "t", len(held)))

    got.append(writer.append(rows_of(first), hold))
    assert writer.position.n_events == 0
    put(writer, other)
    got.append(writer.append(rows_of(second), hold))
    assert writer.position == (1, 16, 0)
    writer.commit(together(*held))
    for runs, arrays in zip(got, (first, second), strict=True):
        check(tmp_path, writer, runs, arrays)
    assert [event.session_id for event in events(tmp_path, writer, 1)[0].events] == ["t", "t"]
    writer.close()
    for runs, arrays in zip(got, (first, second), strict=True):
        check(tmp_path, writer, runs, arrays)


def test_what_fill_or_event_raises_leaves_nothing(tmp_path):
    writer = stream(tmp_path)
    before = data(SCHEMA, 0, 1000)
    runs = put(writer, before)
    position, disk = writer.position, files(tmp_path, writer.name)

    def bad_fill(dst, first):
        dst[...] = 0
        if first > 60_000:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        writer.append(rows_of(data(SCHEMA, 1, 500)), lambda runs: 1 // 0)
    with pytest.raises(InputError, match="1 to"):
        writer.append(rows_of(data(SCHEMA, 1, 500)), lambda runs: b"")
    assert (writer.position, files(tmp_path, writer.name)) == (position, disk)
    with pytest.raises(ZeroDivisionError):  # pieces of it are in the shard file already
        writer.append(
            {"token_ids": rows_of(before)["token_ids"], "routed_experts": Rows(120_000, bad_fill)}, lambda r: b"x"
        )
    assert writer.position == position
    after = data(SCHEMA, 2, 5000)
    after_runs = put(writer, after)
    check(tmp_path, writer, runs, before)
    check(tmp_path, writer, after_runs, after)
    gap = after_runs["routed_experts"][0].row - runs["routed_experts"][0].n
    assert gap * 320 < 4096 + 320, "at most the rest of a block is lost"
    writer.close()
    check(tmp_path, writer, runs, before)
    check(tmp_path, writer, after_runs, after)


def test_a_split_step_that_fails_leaves_nothing_in_any_pack(tmp_path):
    writer = stream(tmp_path, SMALL, max_shard_bytes=1 << 18)
    rows = writer.layout.shard_rows["wide"]
    before = data(SMALL, 0, 10)
    runs = put(writer, before)

    def fail(runs):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        writer.append(rows_of(data(SMALL, 1, 3 * rows + 1)), fail)
    after = data(SMALL, 2, 11)
    after_runs = put(writer, after)
    writer.close()
    check(tmp_path, writer, runs, before)
    check(tmp_path, writer, after_runs, after)
    records = [name for name in files(tmp_path, writer.name) if name.startswith("records")]
    assert records == ["records/0.arrow", f"records/{after_runs['wide'][0].row // rows}.arrow"]


# -- many threads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_many_threads_and_a_reader_that_follows(tmp_path, durability):
    """Committed rows can be re-read at any time while appends, flushes, rolls and seals go on."""
    writer = stream(tmp_path, max_shard_bytes=8 << 20, durability=durability)
    committed, stop, failures = [], threading.Event(), []

    def append(thread):
        try:
            for i in range(12):
                n = (1, 256, 4000, 9000)[(i + thread) % 4]
                arrays = data(SCHEMA, 1000 * thread + i, n, logprobs=n // 2)
                committed.append((put(writer, arrays, f"s{thread}", i), arrays))
        except BaseException as error:
            failures.append(error)

    store = HotStore(str(tmp_path))

    def through_store(runs, arrays):
        for spec in SCHEMA.arrays:
            for run in runs[spec.name]:
                pack, first = divmod(run.row, writer.layout.shard_rows[spec.name])
                key = f"streams/{writer.name}/{spec.name}/c/{pack}" + "/0" * len(spec.shape)
                with store.borrow(key, first * spec.row_bytes, run.n * spec.row_bytes) as view:
                    assert bytes(view) == arrays[spec.name].tobytes()

    def read(seed):
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                if committed:
                    step = committed[rng.integers(len(committed))]
                    through_store(*step) if seed else check(tmp_path, writer, *step)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(n,)) for n in range(2)]
    threads = [threading.Thread(target=append, args=(n,)) for n in range(16)]
    for thread in readers + threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.flush()
    stop.set()
    for thread in readers:
        thread.join()
    assert failures == []
    assert len(committed) == 16 * 12
    taken = {}
    for runs, arrays in committed:
        check(tmp_path, writer, runs, arrays)
        for array, found in runs.items():
            taken.setdefault(array, []).extend((run.row, run.row + run.n) for run in found)
    for spans in taken.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "two steps share rows"
    writer.close()


def test_threads_share_writes(tmp_path, monkeypatch):
    writer, n_calls, real = stream(tmp_path), [0], os.pwrite
    put(writer, data(SCHEMA, 0, 10))

    def slow(*args):
        n_calls[0] += 1
        time.sleep(0.01)  # longer than threads take to come, also on a busy machine
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    threads = [
        threading.Thread(target=lambda n=n: [put(writer, data(SCHEMA, n, 10), index=i) for i in range(5)])
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert len(events(tmp_path, writer)) == 81
    assert n_calls[0] < 80 * 4 / 2, f"{n_calls[0]} writes for 80 steps of 3 arrays and a log"
    writer.close()


# -- no room -----------------------------------------------------------------------------------------------------------


def test_room_is_asked_for_in_grants_and_given_back(tmp_path):
    space = Free()
    writer = stream(tmp_path, space=space)
    for seed in range(20):
        put(writer, data(SCHEMA, seed, 4096))
    assert set(space.grants) == {16 << 20}
    writer.flush()
    on_disk = sum(os.path.getsize(f"{folder(tmp_path, writer.name)}/{name}") for name in files(tmp_path, writer.name))
    assert 0 <= space.reserved - on_disk < 32 << 20
    writer.close()
    on_disk = sum(
        os.stat(f"{folder(tmp_path, writer.name)}/{name}").st_blocks * 512
        for name in files(tmp_path, writer.name)
        if not name.endswith("zarr.json") and name != "lock"
    )
    assert space.reserved == on_disk


def test_a_refused_grant_names_the_numbers_and_leaves_the_stream_usable(tmp_path):
    space = Free(32 << 20)
    writer = stream(tmp_path, space=space)
    small = data(SCHEMA, 0, 100)
    runs = put(writer, small)
    with pytest.raises(CapacityError, match="hot_bytes") as caught:
        put(writer, data(SCHEMA, 1, 100_000))
    assert caught.value.details["need"] == 100_000 * 328 and caught.value.details["stream"] == writer.name
    again = put(writer, small)
    check(tmp_path, writer, runs, small)
    check(tmp_path, writer, again, small)
    space.limit = 1 << 40
    large = data(SCHEMA, 1, 100_000)
    check(tmp_path, writer, put(writer, large), large)
    writer.close()


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 16 MiB."""
    path = tmp_path / "tiny"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_refuses_cleanly_and_takes_the_next_append_when_there_is_room(tiny_disk):
    writer, kept = stream(tiny_disk), []
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(4 << 20))
    refused = 0
    for seed in range(40):
        arrays = data(SCHEMA, seed, 4096, logprobs=1000)
        try:
            kept.append((put(writer, arrays, index=seed), arrays))
        except CapacityError as error:
            refused += 1
            assert error.details["errno"] == "ENOSPC"
        for runs, expected in kept:
            check(tiny_disk, writer, runs, expected)
    assert refused and kept
    free = os.statvfs(tiny_disk)
    assert free.f_bavail * free.f_frsize > 0, "a refused step gives its space back"
    for seed in range(3):
        with pytest.raises(CapacityError):
            put(writer, data(SCHEMA, seed, 60_000))
    ballast.unlink()
    arrays = data(SCHEMA, 100, 4096)
    kept.append((put(writer, arrays, index=100), arrays))
    assert len(events(tiny_disk, writer)) == len(kept)
    writer.close()
    for runs, expected in kept:
        check(tiny_disk, writer, runs, expected)


def test_threads_on_a_full_disk_lose_nothing_acknowledged(tiny_disk):
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(6 << 20))
    writer, kept, refused, failures = stream(tiny_disk), [], [], []

    def append(thread):
        try:
            for i in range(30):
                arrays = data(SCHEMA, 100 * thread + i, (300, 2000)[i % 2])
                try:
                    kept.append((put(writer, arrays, str(thread), i), arrays))
                except CapacityError as error:
                    refused.append(error)
                if kept:
                    check(tiny_disk, writer, *kept[(7 * i) % len(kept)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=append, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and kept and refused
    for runs, expected in kept:
        check(tiny_disk, writer, runs, expected)
    assert len(events(tiny_disk, writer)) == len(kept)
    ballast.unlink()
    writer.close()
    for runs, expected in kept:
        check(tiny_disk, writer, runs, expected)


LIMITED = """
import os, resource, signal, sys
sys.path.insert(0, {tests!r})
from writing import *
from spool.errors import CapacityError
root = sys.argv[1]
writer = stream(root, direct=sys.argv[2] == "direct")
first = data(SCHEMA, 0, 5000)
first_runs = put(writer, first)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, resource.RLIM_INFINITY))
refused, kept = 0, [(first_runs, first)]
for seed in range(1, 6):
    arrays = data(SCHEMA, seed, 4000)
    try:
        kept.append((put(writer, arrays, index=seed), arrays))
    except CapacityError as error:
        assert error.details["errno"] == "EFBIG", error.details
        refused += 1
assert refused, "the limit was not reached"
for runs, arrays in kept:
    check(root, writer, runs, arrays)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
arrays = data(SCHEMA, 99, 9000)
kept.append((put(writer, arrays, index=99), arrays))
writer.close()
for runs, arrays in kept:
    check(root, writer, runs, arrays)
print("held", len(kept), refused)
"""


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_file_size_limit_refuses_cleanly(tmp_path, mode):
    code = LIMITED.format(tests=os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), mode], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("held")


class Faults:
    """Makes the n-th call of an ``os`` function on a file of a kind fail, once."""

    def __init__(self, monkeypatch, name, kind, error, *, partial=None):
        self.real, self.kind, self.error, self.partial, self.left = getattr(os, name), kind, error, partial, 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, fd, *args):
        if self.left and self.kind in os.readlink(f"/proc/self/fd/{fd}"):
            self.left -= 1
            if self.partial and self.left:
                return self.real(fd, memoryview(args[0])[: self.partial], *args[1:])
            if not self.left:
                raise OSError(self.error, os.strerror(self.error))
        return self.real(fd, *args)


@pytest.mark.parametrize("kind", ["/routed_experts/c/", "/token_ids/tail-", "/logprobs/tail-", "/records/0.log"])
@pytest.mark.parametrize("error", [28, 5])
def test_any_failing_write_undoes_the_step(tmp_path, monkeypatch, kind, error):
    writer = stream(tmp_path)
    kept = [(put(writer, data(SCHEMA, 0, n)), data(SCHEMA, 0, n)) for n in (10, 3000)]
    position = writer.position
    fault = Faults(monkeypatch, "pwrite", kind, error)
    for n in (5000, 1, 5000, 120_000):
        if n == 1 and "/c/" in kind:
            continue
        fault.left = 1
        arrays = data(SCHEMA, n, n)
        with pytest.raises(CapacityError if error == 28 else StorageError):
            put(writer, arrays)
        assert writer.position == position
        for runs, expected in kept:
            check(tmp_path, writer, runs, expected)
    for n in (1, 5000, 3):
        arrays = data(SCHEMA, n, n)
        kept.append((put(writer, arrays), arrays))
    monkeypatch.undo()
    for runs, expected in kept:
        check(tmp_path, writer, runs, expected)
    writer.close()
    for runs, expected in kept:
        check(tmp_path, writer, runs, expected)


def test_a_write_of_frames_that_breaks_off_is_cut_back_to_the_last_whole_one(tmp_path, monkeypatch):
    writer = stream(tmp_path, Schema())
    writer.commit(encode_event(Checkpointed("a", 1.0)))
    end = writer.position.offset
    fault = Faults(monkeypatch, "pwrite", "/records/0.log", 28, partial=7)
    fault.left = 2
    with pytest.raises(CapacityError):
        writer.commit(encode_event(Checkpointed("b" * 100, 1.0)))
    path = f"{folder(tmp_path, writer.name)}/records/0.log"
    assert os.path.getsize(path) == end == writer.position.offset
    writer.commit(encode_event(Checkpointed("c", 1.0)))
    assert [event.tag for event in events(tmp_path, writer)] == ["a", "c"]
    writer.close()


def test_of_a_group_the_frames_that_were_written_stay(tmp_path, monkeypatch):
    writer, real, gate, results = stream(tmp_path, Schema()), os.pwrite, threading.Event(), {}
    writer.commit(encode_event(Checkpointed("first", 1.0)))
    state = {"calls": 0}

    def pwrite(fd, buffer, offset):
        state["calls"] += 1
        if state["calls"] == 1:
            gate.wait()
            return real(fd, buffer, offset)
        if state["calls"] == 2:  # the group: one frame and a half
            return real(fd, memoryview(buffer)[: len(buffer) * 3 // 4], offset)
        if state["calls"] == 3:
            raise OSError(28, "full")
        return real(fd, buffer, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)

    def commit(tag):
        try:
            writer.commit(encode_event(Checkpointed(tag, 1.0)))
            results[tag] = "ok"
        except CapacityError:
            results[tag] = "refused"

    threads = [threading.Thread(target=commit, args=(tag,)) for tag in ("one", "two", "six")]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    gate.set()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert sorted(results.values()) == ["ok", "ok", "refused"]
    assert {event.tag for event in events(tmp_path, writer)} == {"first", *(t for t, r in results.items() if r == "ok")}
    writer.close()


@pytest.mark.parametrize("kind", ["/routed_experts/tail-", "/token_ids/tail-", "/records/0.log"])
def test_a_failed_sync_seals_the_pack_at_its_last_synced_event(tmp_path, monkeypatch, kind):
    writer = stream(tmp_path, durability="disk")
    first = data(SCHEMA, 0, 1000)
    runs = put(writer, first, index=0)
    fault = Faults(monkeypatch, "fdatasync", kind, 5)
    fault.left = 1
    with pytest.raises(StorageError):
        put(writer, data(SCHEMA, 1, 1000), index=1)
    assert writer.position.pack == 1
    after = data(SCHEMA, 2, 5000)
    after_runs = put(writer, after, index=2)
    assert after_runs["token_ids"][0].row == writer.layout.shard_rows["token_ids"]
    writer.close()
    check(tmp_path, writer, runs, first)
    check(tmp_path, writer, after_runs, after)


def test_a_failed_sync_of_a_flush_keeps_the_tail_that_was_synced(tmp_path, monkeypatch):
    writer = stream(tmp_path, durability="disk")
    first = data(SCHEMA, 0, 1000)
    runs = put(writer, first)
    tail = f"{folder(tmp_path, writer.name)}/routed_experts/tail-0-0"
    before = read_file(tail)
    seen = []

    class Look(Faults):
        def __call__(self, fd, *args):
            if "/routed_experts/c/" in os.readlink(f"/proc/self/fd/{fd}"):
                seen.append(read_file(tail))
            return super().__call__(fd, *args)

    fault = Look(monkeypatch, "fdatasync", "/routed_experts/c/", 5)
    fault.left = 1
    with pytest.raises(StorageError):
        put(writer, data(SCHEMA, 1, 8000))
    assert seen == [before], "the old tail outlives the sync of what replaces it"
    writer.close()
    check(tmp_path, writer, runs, first)


@pytest.mark.parametrize(("durability", "seed"), [("process", 1), ("process", 2), ("disk", 3)])
def test_threads_on_a_disk_that_fails_at_random(tmp_path, monkeypatch, durability, seed):
    """Calls of all kinds fail at random under eight threads; what was acknowledged is there, and nothing else."""
    space = Free()
    writer = stream(tmp_path, max_shard_bytes=4 << 20, durability=durability, space=space)
    chance, on, kept, failures, n_refused = random.Random(seed), [True], [], [], [0]

    def faulty(real, share):
        def call(*args, **kwargs):
            if on[0] and threading.current_thread().name.startswith("worker") and chance.random() < share:
                if real is os_pwrite and chance.random() < 0.5:
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2 // 4096 * 4096], *args[2:])
                raise OSError(chance.choice([28, 5]), "at random")
            return real(*args, **kwargs)

        return call

    os_pwrite = os.pwrite
    for name, share in {"pwrite": 0.03, "pwritev": 0.1, "fdatasync": 0.01, "open": 0.02, "ftruncate": 0.01}.items():
        monkeypatch.setattr(os, name, faulty(getattr(os, name), share))

    def work(thread):
        try:
            for i in range(25):
                n = (1, 256, 1300, 5000, 15_000)[(i + thread) % 5]
                arrays = data(SCHEMA, 100 * thread + i, n, logprobs=n // 3)
                try:
                    kept.append((put(writer, arrays, str(thread), i), arrays, (str(thread), i)))
                except (CapacityError, StorageError):
                    n_refused[0] += 1
        except BaseException as error:
            failures.append(error)

    def read():
        try:
            while on[0]:
                for runs, arrays, _ in kept[-20:]:
                    check(tmp_path, writer, runs, arrays)
                time.sleep(0.001)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,), name=f"worker{n}") for n in range(8)]
    reader = threading.Thread(target=read)
    for thread in [*workers, reader]:
        thread.start()
    for thread in workers:
        thread.join()
    on[0] = False
    reader.join()
    assert failures == []
    assert n_refused[0] > 3 and len(kept) > 20
    for runs, arrays, _ in kept:
        check(tmp_path, writer, runs, arrays)
    writer.close()
    for runs, arrays, _ in kept:
        check(tmp_path, writer, runs, arrays)
    base = f"{folder(tmp_path, writer.name)}/records"
    found = [decode_event(p) for name in os.listdir(base) for p in records.decode(read_file(f"{base}/{name}"))]
    assert sorted((e.session_id, e.index) for e in found) == sorted(key for _, _, key in kept)
    assert not [name for name in files(tmp_path, writer.name) if "tail" in name or name.endswith((".log", ".tmp"))]


# -- age, hooks, the end -----------------------------------------------------------------------------------------------


def test_an_old_pack_rolls_with_the_next_append_or_by_a_timer(tmp_path):
    writer = stream(tmp_path, SMALL, pack_age_s=0.05)
    first = put(writer, data(SMALL, 0, 5))
    time.sleep(0.06)
    second = put(writer, data(SMALL, 1, 5))
    rows = writer.layout.shard_rows["wide"]
    assert (first["wide"][0].row, second["wide"][0].row) == (0, rows)
    time.sleep(0.06)
    writer.roll_if_aged()
    writer.roll_if_aged()
    assert writer.position.pack == 2
    writer.close()
    assert [n for n in files(tmp_path, writer.name) if "records" in n] == ["records/0.arrow", "records/1.arrow"]


def test_a_long_log_rolls_too(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.write.stream.MAX_LOG_BYTES", 1000)
    writer = stream(tmp_path, Schema())
    for n in range(10):
        writer.commit(encode_event(Checkpointed(f"{n}" * 300, 1.0)))
    assert writer.position.pack == 2
    writer.close()
    assert [n for n in files(tmp_path, writer.name) if "records" in n] == [f"records/{n}.arrow" for n in range(3)]


def test_flush_of_an_empty_pack_does_nothing(tmp_path):
    writer = stream(tmp_path, SMALL)
    writer.flush()
    put(writer, data(SMALL, 0, 5))
    writer.flush()
    writer.flush()
    assert writer.position.pack == 1
    writer.close()
    writer.close()
    assert [n for n in files(tmp_path, writer.name) if "records" in n] == ["records/0.arrow"]
    for call in (lambda: put(writer, data(SMALL, 0, 5)), lambda: writer.commit(b"x"), writer.flush):
        with pytest.raises(SessionStateError, match="closed"):
            call()


def test_the_hook_hears_of_every_group_and_may_fail(tmp_path, caplog):
    heard = []

    def hook(pack, end):
        heard.append((pack, end))
        if len(heard) == 2:
            raise ZeroDivisionError

    writer = stream(tmp_path, Schema(), on_commit=hook)
    ends = []
    for tag in "abc":
        writer.commit(encode_event(Checkpointed(tag, 1.0)))
        ends.append((0, writer.position.offset))
    assert heard == ends
    assert "hook" in caplog.text
    writer.close()


def test_a_forked_child_never_writes_into_its_parents_stream(tmp_path):
    writer = stream(tmp_path)
    first = data(SCHEMA, 0, 3000)
    runs = put(writer, first)
    before = {name: os.path.getsize(f"{folder(tmp_path, writer.name)}/{name}") for name in files(tmp_path, writer.name)}
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "nothing"
        try:
            try:
                put(writer, first)
            except SessionStateError as error:
                said = f"{error}"
            writer.close()
            own = stream(tmp_path, SMALL)
            put(own, data(SMALL, 1, 10))
            own.close()
            try:
                locks.release(lock_folder(folder(tmp_path, writer.name)))
                said += " but unlocked"
            except LockedError:
                pass
        finally:
            os.write(write_end, said.encode())
            os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(read_end, 1000).decode()
    assert "another process" in said and "unlocked" not in said
    assert before == {n: os.path.getsize(f"{folder(tmp_path, writer.name)}/{n}") for n in files(tmp_path, writer.name)}
    check(tmp_path, writer, put(writer, first), first)
    check(tmp_path, writer, runs, first)
    assert len(os.listdir(tmp_path / "streams")) == 2
    writer.close()


def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    code = textwrap.dedent(f"""
        import os, sys, time
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from writing import *
        writer = stream(sys.argv[1], SMALL)
        put(writer, data(SMALL, 0, 10))
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write_end, b"runs")
            sys.stdin.read()
            os._exit(0)
        os.read(read_end, 4)
        print(writer.name, flush=True)
        os.kill(os.getpid(), 9)
    """)
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    name = child.stdout.readline().decode().strip()
    child.wait()
    locks.release(lock_folder(folder(tmp_path, name)))
    child.stdin.close()
    child.stdout.close()


def test_an_interpreter_that_ends_seals_its_streams(tmp_path):
    code = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from writing import *
        writer = stream(sys.argv[1], SMALL)
        put(writer, data(SMALL, 0, 10))
        writer.commit(encode_event(event_of(writer.name, {{}})))
        print(writer.name)
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "records/0.arrow" in files(tmp_path, done.stdout.strip())


def test_memory_stays_bounded(tmp_path):
    code = textwrap.dedent(f"""
        import os, resource, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from writing import *
        from spool.formats import records
        def rss():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        writer = stream(sys.argv[1])
        put(writer, data(SCHEMA, 0, 10))
        writer.flush()
        arrays = data(SCHEMA, 0, 20_000)
        before, most = rss(), 0
        for _ in range(30):
            put(writer, arrays)
            most = max(most, rss())
        writer.close()
        print(most - before)
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 << 20


def test_a_wide_row_and_many_arrays_fit(tmp_path):
    wide = Schema.of(FieldSpec(name="w", dtype="uint8", align="step", shape=(5_000_001,)), LOSS_MASK)
    writer, kept = stream(tmp_path, wide), []
    for seed in range(4):
        arrays = data(wide, seed, 1, loss_mask=seed)
        kept.append((put(writer, arrays), arrays))
    writer.close()
    many = Schema.of(*(FieldSpec(name=f"f{i}", dtype="float32", align="token", shape=(i + 1,)) for i in range(40)))
    other = stream(tmp_path, many)
    arrays = data(many, 9, 3000)
    runs = put(other, arrays)
    check(tmp_path, other, runs, arrays)
    other.close()
    check(tmp_path, other, runs, arrays)
    for runs, arrays in kept:
        check_stored(tmp_path, writer.name, wide, writer.layout, runs, arrays)


def test_opening_events_come_before_steps(tmp_path):
    writer = stream(tmp_path, SMALL)
    writer.commit(encode_event(SessionOpened("s", 1.0)))
    put(writer, data(SMALL, 0, 5))
    assert [type(event).__name__ for event in events(tmp_path, writer)] == ["SessionOpened", "StepCommitted"]
    writer.close()


def test_an_event_that_fails_to_sync_is_never_seen_by_who_follows_the_log(tmp_path, monkeypatch):
    """Whoever reads the log at the moment of the sync finds no frame; after the failure neither does recovery."""
    writer = stream(tmp_path, durability="disk")
    put(writer, data(SCHEMA, 0, 10), index=0)
    log, real, seen, failing = f"{folder(tmp_path, writer.name)}/records/0.log", os.fdatasync, [], [True]

    def fdatasync(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == log:
            seen.append([decode_event(found.payload).index for found in scan(read_file(log))])
            if failing[0]:
                failing[0] = False
                raise OSError(5, "I/O error")
        return real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(StorageError):
        put(writer, data(SCHEMA, 1, 10), index=1)
    put(writer, data(SCHEMA, 2, 10), index=1)
    monkeypatch.undo()
    assert seen == [[0]], "before it is durable an event is none"
    writer.close()
    base = f"{folder(tmp_path, writer.name)}/records"
    found = [decode_event(p) for n in range(2) for p in records.decode(read_file(f"{base}/{n}.arrow"))]
    assert [event.index for event in found] == [0, 1]
    assert found[0].extents["token_ids"][0].row == 0 < found[1].extents["token_ids"][0].row


def test_a_refusal_says_how_much_is_taken_and_what_is_on_disk_is_charged_in_any_case(tmp_path):
    space = Free(20 << 20)
    writer = stream(tmp_path, space=space)
    with pytest.raises(CapacityError, match="16 MiB of 20 MiB are taken") as caught:
        put(writer, data(SCHEMA, 1, 100_000))
    assert (caught.value.details["limit"], caught.value.details["taken"]) == (20 << 20, space.reserved)
    grants = Grants(space, "s")
    space.limit = space.reserved
    grants.settle(0, 1000)
    assert space.reserved == space.limit + 1000
    writer.close()


def test_who_waits_for_a_thread_that_is_interrupted_does_not_hear_of_it(tmp_path, monkeypatch):
    writer, real, started, gate, results = stream(tmp_path), os.pwrite, threading.Event(), threading.Event(), []
    first = threading.current_thread()
    put(writer, data(SCHEMA, 0, 5), index=0)

    def pwrite(fd, *args):
        if threading.current_thread() is first and not started.is_set():
            started.set()
            gate.wait(5)
            raise KeyboardInterrupt
        return real(fd, *args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    arrays = data(SCHEMA, 7, 30)

    def other():
        started.wait(5)
        threading.Timer(0.05, gate.set).start()
        results.append(put(writer, arrays, index=7))

    waiting = threading.Thread(target=other)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        put(writer, data(SCHEMA, 1, 30), index=1)
    waiting.join(10)
    check(tmp_path, writer, results[0], arrays)
    assert [event.index for event in events(tmp_path, writer)][-1] == 7
    writer.close()
