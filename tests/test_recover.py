"""Recovery: real processes that are really killed, and files that were damaged."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import zarr
from writing import (
    SCHEMA,
    SMALL,
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

import spool
from spool.errors import IntegrityError
from spool.formats import records
from spool.formats.frames import decode_event, encode_event, frame, scan
from spool.formats.shard import parse_group
from spool.model.events import Checkpointed
from spool.model.fields import Schema
from spool.stores.hot import HotStore
from spool.stores.local import read_file, write_atomic
from spool.write.log import CommitLog
from spool.write.recover import recover
from spool.write.stream import Run

WORK = """
import sys, threading
sys.path.insert(0, {tests!r})
from writing import *
root, seed, sizes, durability = sys.argv[1], int(sys.argv[2]), [int(n) for n in sys.argv[3].split(",")], sys.argv[4]
writer = stream(root, max_shard_bytes=8 << 20, durability=durability)
out = threading.Lock()
print(writer.name, flush=True)
def work(thread):
    for i in range(100_000):
        key = seed * 1000 + 100 * thread + i % 50
        n = sizes[(i + thread) % len(sizes)]
        runs = put(writer, data(SCHEMA, key, n, logprobs=n // 2), str(thread), i)
        line = " ".join([str(key), str(n), *(f"{{a}}:{{r.row}}:{{r.n}}:{{r.crc}}" for a, f in runs.items() for r in f)])
        with out:
            print(line, flush=True)
for thread in range(3):
    threading.Thread(target=work, args=(thread,)).start()
"""


def copy_of_dead(root, writer, to):
    """A copy of the spool as a killed writer would leave it now."""
    shutil.copytree(root, to)
    return str(to)


def parse(line):
    key, n, *found = line.split()
    runs = {name: [] for name in ("routed_experts", "token_ids", "logprobs")}
    for text in found:
        array, *numbers = text.split(":")
        runs[array].append(Run(*map(int, numbers)))
    return int(key), int(n), runs


def run_and_kill(root, seed, sizes, after_s, durability="process"):
    """Start a writer, kill it, and return its stream and the lines of what it had acknowledged."""
    child = subprocess.Popen(
        [sys.executable, "-c", WORK.format(tests=os.path.dirname(__file__)), str(root), str(seed), sizes, durability],
        stdout=subprocess.PIPE,
    )
    name = child.stdout.readline().decode().strip()
    timer = threading.Timer(after_s, child.send_signal, [signal.SIGKILL])
    timer.start()
    lines = [line.decode() for line in child.stdout.readlines()]
    child.wait()
    child.stdout.close()
    timer.join()
    assert child.returncode == -signal.SIGKILL
    return name, [line for line in lines if line.endswith("\n")]


@pytest.mark.parametrize(
    ("sizes", "durability"), [("256,1,300,0,255", "process"), ("4000,9000,1,300", "process"), ("40000,2,3000", "disk")]
)
def test_whatever_was_acknowledged_before_a_kill_reads_back(tmp_path, sizes, durability):
    chance = random.Random(sizes)
    layout = stream(tmp_path / "other", max_shard_bytes=8 << 20).layout
    for seed in range(3):
        name, lines = run_and_kill(tmp_path, seed, sizes, chance.uniform(0.02, 0.5), durability)
        steps = [parse(line) for line in lines]

        def check_all(steps=steps, name=name):
            for key, n, runs in steps:
                check_stored(tmp_path, name, SCHEMA, layout, runs, data(SCHEMA, key, n, logprobs=n // 2))

        if seed % 2:
            check_all()  # readable before recovery too
        planned = recover(str(tmp_path), dry_run=True)
        assert "records/" not in "".join(files(tmp_path, name)) or planned
        reports = recover(str(tmp_path))
        assert [report.packs for report in reports] == [report.packs for report in planned]
        assert all(r.error is None and not r.shortfalls and not r.damaged_bytes for r in reports)
        check_all()
        assert recover(str(tmp_path)) == []
        left = files(tmp_path, name)
        assert not [n for n in left if "tail" in n or n.endswith((".log", ".tmp"))]
        found = [
            decode_event(payload)
            for file in left
            if file.endswith(".arrow")
            for payload in records.decode(read_file(f"{folder(tmp_path, name)}/{file}"))
        ]
        assert len(found) >= len(steps)
        referred = {(array, e.row) for event in found for array, run in event.extents.items() for e in run}
        assert {(array, run.row) for _, _, runs in steps for array, each in runs.items() for run in each} <= referred
        for array in ("token_ids", "routed_experts"):
            z = zarr.open_array(f"{folder(tmp_path, name)}/{array}", mode="r")
            for key, n, runs in steps[-3:]:
                at = 0
                for run in runs[array]:
                    assert (
                        z[run.row : run.row + run.n] == data(SCHEMA, key, n, logprobs=n // 2)[array][at : at + run.n]
                    ).all()
                    at += run.n


def test_a_live_stream_is_left_alone(tmp_path):
    writer = stream(tmp_path)
    arrays = data(SCHEMA, 0, 10)
    runs = put(writer, arrays)
    before = files(tmp_path, writer.name)
    assert recover(str(tmp_path)) == []
    assert files(tmp_path, writer.name) == before
    check(tmp_path, writer, runs, arrays)
    writer.close()
    assert recover(str(tmp_path)) == []
    assert recover(str(tmp_path / "nowhere")) == []


def test_a_dry_run_reports_and_changes_nothing(tmp_path):
    writer = stream(tmp_path / "live")
    for seed in range(3):
        put(writer, data(SCHEMA, seed, 2000))
    root = copy_of_dead(tmp_path / "live", writer, tmp_path / "dead")
    with open(f"{folder(root, writer.name)}/records/0.log", "ab") as file:
        file.write(b"\x50\0\0\0torn")
    before = {n: read_file(f"{folder(root, writer.name)}/{n}") for n in files(root, writer.name)}
    (planned,) = recover(root, dry_run=True)
    assert (planned.packs, planned.n_events, planned.torn_bytes) == ((0,), 3, 8)
    assert before == {n: read_file(f"{folder(root, writer.name)}/{n}") for n in files(root, writer.name)}
    assert recover(root) == [planned]
    assert recover(root) == []
    writer.close()


@pytest.mark.parametrize("where", ["boundary", "inside", "header", "empty"])
def test_a_log_cut_anywhere_keeps_its_whole_events(tmp_path, where):
    writer, kept, ends = stream(tmp_path / "live"), [], []
    for seed in range(10):
        arrays = data(SCHEMA, seed, 500)
        kept.append((put(writer, arrays, index=seed), arrays))
        ends.append(writer.position.offset)
    root = copy_of_dead(tmp_path / "live", writer, tmp_path / "dead")
    size = {"boundary": ends[4], "inside": ends[5] - 3, "header": 7, "empty": 0}[where]
    os.truncate(f"{folder(root, writer.name)}/records/0.log", size)
    n = 5 if where in ("boundary", "inside") else 0
    (report,) = recover(root)
    assert report.n_events == n
    assert report.torn_bytes == (ends[5] - 3 - ends[4] if where == "inside" else 0)
    for runs, arrays in kept[:n]:
        check_stored(root, writer.name, SCHEMA, writer.layout, runs, arrays)
    array = zarr.open_array(f"{folder(root, writer.name)}/token_ids", mode="r")
    assert array.shape == (500 * n,)
    writer.close()


def test_damage_inside_a_log_costs_one_event_and_is_reported(tmp_path):
    writer, kept, ends = stream(tmp_path / "live"), [], []
    for seed in range(10):
        arrays = data(SCHEMA, seed, 500)
        kept.append((put(writer, arrays, index=seed), arrays))
        ends.append(writer.position.offset)
    root = copy_of_dead(tmp_path / "live", writer, tmp_path / "dead")
    with open(f"{folder(root, writer.name)}/records/0.log", "r+b") as file:
        file.seek(ends[3] + 20)
        file.write(b"\0\xff\0")
    (report,) = recover(root)
    assert (report.n_events, report.damaged_bytes, report.torn_bytes) == (9, ends[4] - ends[3], 0)
    for runs, arrays in kept:
        check_stored(root, writer.name, SCHEMA, writer.layout, runs, arrays)
    writer.close()


def test_rows_that_are_missing_are_reported_and_read_as_an_integrity_error(tmp_path):
    writer = stream(tmp_path / "live")
    first, second = data(SCHEMA, 0, 1000), data(SCHEMA, 1, 1000)
    kept, lost = put(writer, first, index=0), put(writer, second, index=1)
    root = copy_of_dead(tmp_path / "live", writer, tmp_path / "dead")
    os.truncate(f"{folder(root, writer.name)}/token_ids/tail-0-0", 6001)
    (planned,) = recover(root, dry_run=True)
    (report,) = recover(root)
    assert planned == report
    (short,) = report.shortfalls
    assert (short.array, short.pack, short.expected_bytes, short.got_bytes) == ("token_ids", 0, 8000, 6001)
    assert report.n_events == 2, "the event stays"
    check_stored(root, writer.name, SCHEMA, writer.layout, kept, first)
    for array in ("routed_experts", "logprobs"):
        check_stored(root, writer.name, SCHEMA, writer.layout, {array: lost[array]}, {array: second[array]})
    store = HotStore(root)
    with pytest.raises(IntegrityError), store.borrow(f"streams/{writer.name}/token_ids/c/0", 6000, 8) as view:
        print(bytes(view))
    with store.borrow(f"streams/{writer.name}/token_ids/c/0", 4000, 2000) as view:
        assert bytes(view) == second["token_ids"].tobytes()[:2000]
    assert zarr.open_array(f"{folder(root, writer.name)}/token_ids", mode="r").shape == (0,)
    writer.close()


def test_rows_committed_in_a_later_log_count(tmp_path):
    """A transaction's rows lie in pack 0, its commit in pack 1; neither pack is sealed."""
    writer = stream(tmp_path / "live", SMALL, max_shard_bytes=1 << 18)
    rows = writer.layout.shard_rows["wide"]
    first, second, held = data(SMALL, 0, rows - 10), data(SMALL, 1, 60), []
    a = writer.append(rows_of(first), lambda runs: held.append(event_of(writer.name, runs, "t", 0)))
    writer.commit(encode_event(Checkpointed("x", 1.0)))
    copies = f"{tmp_path}/before"
    shutil.copytree(tmp_path / "live", copies)
    b = writer.append(rows_of(second), lambda runs: held.append(event_of(writer.name, runs, "t", 1)))
    writer.commit(together(*held))
    writer.close()
    root = f"{tmp_path}/dead"
    shutil.copytree(tmp_path / "live", root)
    base = folder(root, writer.name)
    # pack 0 as it was before it was sealed, and pack 1's log as it was before that
    shutil.rmtree(base)
    shutil.copytree(folder(copies, writer.name), base)
    late = stream(tmp_path / "late", Schema())
    late.commit(together(*held))
    shutil.copy(f"{folder(tmp_path / 'late', late.name)}/records/0.log", f"{base}/records/1.log")
    for name in ("wide", "token_ids"):
        spec = next(spec for spec in SMALL.arrays if spec.name == name)
        with open(f"{base}/{name}/tail-1-0", "wb") as tail:
            tail.write(second[name].tobytes())
        assert spec.row_bytes
    (report,) = recover(root)
    assert (report.packs, report.shortfalls) == ((0, 1), ())
    for runs, arrays in ((a, first), (b, second)):
        check_stored(root, writer.name, SMALL, writer.layout, runs, arrays)
    assert zarr.open_array(f"{base}/wide", mode="r").attrs["spool:rows"] == [[0, rows - 10], [rows, 60]]
    late.close()


def test_rows_that_only_evicted_records_name_are_not_forgotten(tmp_path):
    """Torn documents are made anew of the records that are there; others may name rows of a pack that is."""
    writer = stream(tmp_path / "live", SMALL, max_shard_bytes=1 << 18)
    arrays, held = data(SMALL, 0, 500), []
    runs = writer.append(rows_of(arrays), lambda runs: held.append(event_of(writer.name, runs, "t", 0)))
    writer.flush()
    writer.commit(together(*held))
    writer.close()
    root = str(tmp_path / "live")
    base = folder(root, writer.name)
    os.rename(f"{base}/records/1.arrow", f"{base}/records/1.cold")
    for name in ("wide", "token_ids"):
        write_atomic(f"{base}/{name}/zarr.json", b"{")
    (report,) = recover(root)
    assert set(report.rebuilt) == {"wide/zarr.json", "token_ids/zarr.json"}
    check_stored(root, writer.name, SMALL, writer.layout, runs, arrays)
    for name in ("wide", "token_ids"):
        ((start, count),) = zarr.open_array(f"{base}/{name}", mode="r").attrs["spool:rows"]
        assert start == 0 and 500 <= count < 500 + writer.layout.chunk_rows[name]


def test_rows_that_nobody_refers_to_are_cut_off(tmp_path):
    writer = stream(tmp_path / "live")
    arrays = data(SCHEMA, 0, 1000)
    runs = put(writer, arrays)
    base = folder(tmp_path / "live", writer.name)
    log = read_file(f"{base}/records/0.log")
    put(writer, data(SCHEMA, 1, 30_000))
    root = copy_of_dead(tmp_path / "live", writer, tmp_path / "dead")
    with open(f"{folder(root, writer.name)}/records/0.log", "wb") as file:
        file.write(log)
    recover(root)
    check_stored(root, writer.name, SCHEMA, writer.layout, runs, arrays)
    array = zarr.open_array(f"{folder(root, writer.name)}/routed_experts", mode="r")
    assert array.shape[0] == 1000 and (array[:] == arrays["routed_experts"]).all()
    assert os.path.getsize(f"{folder(root, writer.name)}/routed_experts/c/0/0/0") < 1 << 20
    writer.close()


@pytest.mark.parametrize("cut", [0, 5])
def test_torn_metadata_is_rebuilt(tmp_path, cut):
    writer = stream(tmp_path, SMALL, max_shard_bytes=1 << 18)
    rows = writer.layout.shard_rows["wide"]
    kept = []
    for seed in range(3):
        arrays = data(SMALL, seed, rows // 2 + 1, token_ids=5)
        kept.append((put(writer, arrays), arrays))
    writer.close()
    base = folder(tmp_path, writer.name)
    before = {name: read_file(f"{base}/{name}") for name in files(tmp_path, writer.name)}
    for name in ("zarr.json", "wide/zarr.json", "token_ids/zarr.json"):
        os.truncate(f"{base}/{name}", cut)
    (planned,) = recover(str(tmp_path), dry_run=True)
    assert recover(str(tmp_path)) == [planned]
    assert planned.rebuilt == ("zarr.json", "token_ids/zarr.json", "wide/zarr.json")
    assert before == {name: read_file(f"{base}/{name}") for name in files(tmp_path, writer.name)}
    assert parse_group(before["zarr.json"])[0] == SMALL


def test_a_stream_that_cannot_be_understood_is_reported_and_left(tmp_path):
    good, bad = stream(tmp_path / "live", SMALL), stream(tmp_path / "live", SMALL)
    arrays = data(SMALL, 0, 10)
    runs = put(good, arrays)
    put(bad, arrays)
    root = copy_of_dead(tmp_path / "live", good, tmp_path / "dead")
    for name in ("zarr.json", "lock"):
        os.truncate(f"{folder(root, bad.name)}/{name}", 3)
    reports = {report.stream: report for report in recover(root)}
    assert "zarr.json" in reports[bad.name].error and reports[good.name].error is None
    assert "records/0.log" in files(root, bad.name)
    check_stored(root, good.name, SMALL, good.layout, runs, arrays)
    good.close()
    bad.close()


def test_half_made_streams_are_removed_unless_they_are_being_made(tmp_path):
    for name in (".new-20261130T000000-00000001", ".new-20261130T000000-00000002"):
        os.makedirs(tmp_path / "streams" / name / "records")
        (tmp_path / "streams" / name / "lock").touch()
    os.makedirs(tmp_path / "streams" / "somebody-elses")
    fd = os.open(tmp_path / "streams" / ".new-20261130T000000-00000002" / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    (planned,) = recover(str(tmp_path), dry_run=True)
    assert len(os.listdir(tmp_path / "streams")) == 3
    assert recover(str(tmp_path)) == [planned]
    assert planned.removed
    assert sorted(os.listdir(tmp_path / "streams")) == [".new-20261130T000000-00000002", "somebody-elses"]
    os.close(fd)


def test_streams_are_made_while_recovery_sweeps(tmp_path):
    stop, failures = threading.Event(), []

    def sweep():
        while not stop.is_set():
            recover(str(tmp_path))

    def make():
        try:
            for _ in range(5):
                writer = stream(tmp_path, SMALL)
                put(writer, data(SMALL, 0, 3))
                writer.close()
        except BaseException as error:
            failures.append(error)

    sweeper, makers = threading.Thread(target=sweep), [threading.Thread(target=make) for _ in range(2)]
    for thread in (sweeper, *makers):
        thread.start()
    for thread in makers:
        thread.join()
    stop.set()
    sweeper.join()
    assert failures == []
    assert len(os.listdir(tmp_path / "streams")) == 10


def test_temporary_files_of_a_killed_writer_are_swept(tmp_path):
    writer = stream(tmp_path / "live", SMALL)
    put(writer, data(SMALL, 0, 10))
    root = copy_of_dead(tmp_path / "live", writer, tmp_path / "dead")
    for name in (".zarr.json.ab.tmp", "wide/.zarr.json.cd.tmp", "records/.0.arrow.ef.tmp"):
        open(f"{folder(root, writer.name)}/{name}", "w").close()
    recover(root)
    assert not [name for name in files(root, writer.name) if ".tmp" in name]
    writer.close()


def test_two_recoveries_at_once_do_it_once(tmp_path):
    writer = stream(tmp_path / "live")
    arrays = data(SCHEMA, 0, 3000)
    runs = put(writer, arrays)
    root = copy_of_dead(tmp_path / "live", writer, tmp_path / "dead")
    reports = []
    threads = [threading.Thread(target=lambda: reports.extend(recover(root))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0)
    assert [report.packs for report in reports] == [(0,)]
    check_stored(root, writer.name, SCHEMA, writer.layout, runs, arrays)
    writer.close()


def test_a_stream_without_a_lock_is_reported_and_left_to_its_writer(tmp_path):
    writer = stream(tmp_path, SMALL)
    arrays = data(SMALL, 0, 10)
    runs = put(writer, arrays)
    os.unlink(f"{folder(tmp_path, writer.name)}/lock")
    for dry_run in (True, False):
        (report,) = recover(str(tmp_path), dry_run=dry_run)
        assert "lock is missing" in report.error and report.packs == ()
    later = put(writer, arrays)
    for found in (runs, later):
        check(tmp_path, writer, found, arrays)
    writer.close()
    check(tmp_path, writer, later, arrays)


def test_events_that_a_killed_writer_had_made_durable_but_not_yet_shown_are_recovered(tmp_path):
    os.makedirs(tmp_path / "x" / "records")
    writer = stream(tmp_path / "live", Schema())
    writer.commit(encode_event(Checkpointed("first", 1.0)))
    root = copy_of_dead(tmp_path / "live", writer, tmp_path / "dead")
    log = CommitLog(str(tmp_path / "x"), 0, sync=True)
    log.append([frame(encode_event(Checkpointed("first", 1.0)))])
    log.prepare([frame(encode_event(Checkpointed(tag, 1.0))) for tag in ("second", "third")])
    log.close()
    assert len(list(scan(read_file(log.path)))) == 1
    shutil.copy(log.path, f"{folder(root, writer.name)}/records/0.log")
    (report,) = recover(root)
    assert (report.n_events, report.torn_bytes, report.damaged_bytes) == (3, 0, 0)
    writer.close()


def test_a_log_that_came_back_shorter_does_not_replace_the_records_made_of_it(tmp_path):
    writer = stream(tmp_path, Schema())
    for tag in "abc":
        writer.commit(encode_event(Checkpointed(tag, 1.0)))
    base = f"{folder(tmp_path, writer.name)}/records"
    log = read_file(f"{base}/0.log")
    writer.close()
    with open(f"{base}/0.log", "wb") as file:
        file.write(log[: len(log) // 2])
    (report,) = recover(str(tmp_path))
    assert report.n_events == 3 and report.torn_bytes == 0
    assert [decode_event(payload).tag for payload in records.decode(read_file(f"{base}/0.arrow"))] == ["a", "b", "c"]


@pytest.mark.parametrize("deep", [False, True])
def test_verify_names_a_shortened_log_once(tmp_path, deep):
    with spool.open(f"{tmp_path}/spool") as sp:
        for n in range(3):
            sp.session("s").append(prompt_token_ids=[n], response_token_ids=[1], logprobs=[-1.0])
        assert len(sp.steps("s")) == 3
        shutil.copytree(f"{tmp_path}/spool", f"{tmp_path}/dead")
    (log,) = (tmp_path / "dead" / "streams").glob("*/records/0.log")
    with open(log, "r+b") as file:
        file.truncate(os.path.getsize(log) - 150)
    with spool.open(f"{tmp_path}/dead") as sp:
        found = [finding for finding in sp.verify(deep=deep).findings if finding.field == "records"]
        assert len(found) == 1, found
