"""Sealing: what is on disk afterwards, for every reader, and wherever it broke off before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import zarr
from writing import SCHEMA, SMALL, check, check_stored, data, files, folder, put, stream

from spool.errors import CapacityError, IntegrityError, StorageError
from spool.formats import records
from spool.formats.frames import decode_event
from spool.model.fields import FieldSpec, Schema
from spool.stores.hot import HotStore
from spool.write import seal
from spool.write.log import read_log
from spool.write.recover import recover
from spool.write.stream import Run


def open_array(root, name, array):
    return zarr.open_array(f"{folder(root, name)}/{array}", mode="r")


@pytest.mark.parametrize("counts", [[1], [4096], [4097, 1], [100, 3000, 9000, 5]])
def test_zarr_reads_what_was_written(tmp_path, counts):
    writer = stream(tmp_path)
    written = []
    for seed, n in enumerate(counts):
        arrays = data(SCHEMA, seed, n, logprobs=n // 2)
        put(writer, arrays, index=seed)
        written.append(arrays)
    writer.close()
    group = zarr.open_group(folder(tmp_path, writer.name), mode="r")
    for spec in SCHEMA.arrays:
        expected = np.concatenate([arrays[spec.name] for arrays in written])
        array = open_array(tmp_path, writer.name, spec.name)
        assert array.shape == expected.shape
        assert np.asarray(array[:]).tobytes() == expected.tobytes()
        assert spec.name in group


def test_rows_that_were_skipped_read_as_fill_value_and_are_named(tmp_path):
    writer = stream(tmp_path, SMALL, max_shard_bytes=1 << 18)
    rows = writer.layout.shard_rows["wide"]
    packs = []
    for seed, n in enumerate((5, rows, rows // 2 + 1)):
        packs.append(data(SMALL, seed, n, token_ids=0 if seed == 1 else 3))
        put(writer, packs[-1])
        writer.flush()
    writer.close()
    wide, tokens = (open_array(tmp_path, writer.name, name) for name in ("wide", "token_ids"))
    assert wide.shape[0] == 2 * rows + rows // 2 + 1 and tokens.shape[0] == 2 * rows + 3
    assert wide.attrs["spool:rows"] == [[0, 5], [rows, rows], [2 * rows, rows // 2 + 1]]
    assert tokens.attrs["spool:rows"] == [[0, 3], [2 * rows, 3]]
    got = wide[:]
    for seed, arrays in enumerate(packs):
        assert (got[seed * rows : seed * rows + len(arrays["wide"])] == arrays["wide"]).all()
    assert not got[5:rows].any()
    assert not tokens[3 : 2 * rows].any()
    assert (tokens[2 * rows :] == packs[2]["token_ids"]).all()


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float16", "uint64", "int8"])
def test_every_dtype_opens_in_zarr(tmp_path, dtype):
    schema = Schema.of(FieldSpec(name="x", dtype=dtype, align="token", shape=(3,)))
    writer, arrays = stream(tmp_path, schema), data(schema, 1, 1001)
    put(writer, arrays)
    writer.close()
    array = open_array(tmp_path, writer.name, "x")
    assert np.asarray(array[:]).tobytes() == arrays["x"].tobytes()
    if dtype == "bfloat16":
        assert array.attrs["spool:dtype"] == "bfloat16" and array.dtype == np.uint16


def test_the_records_are_the_log(tmp_path):
    writer = stream(tmp_path)
    for seed in range(5):
        put(writer, data(SCHEMA, seed, 10), f"s{seed}", seed)
    base = folder(tmp_path, writer.name)
    payloads = read_log(f"{base}/records/0.log").payloads
    writer.close()
    with open(f"{base}/records/0.arrow", "rb") as file:
        raw = file.read()
    assert records.decode(raw) == payloads
    table = pa.ipc.open_file(pa.py_buffer(raw)).read_all()
    assert table["session_id"].to_pylist() == ["s0", "s1", "s2", "s3", "s4"]
    assert decode_event(records.one(raw, 3)).index == 3


def test_the_hot_store_reads_through_every_state(tmp_path):
    writer, store, kept = stream(tmp_path), HotStore(str(tmp_path)), []
    for seed, n in enumerate((1000, 9000, 100)):
        arrays = data(SCHEMA, seed, n)
        kept.append((put(writer, arrays), arrays))

    def check_all():
        for runs, arrays in kept:
            for spec in SCHEMA.arrays:
                run = runs[spec.name][0]
                key = f"streams/{writer.name}/{spec.name}/c/0" + "/0" * len(spec.shape)
                with store.borrow(key, run.row * spec.row_bytes, run.n * spec.row_bytes) as view:
                    assert bytes(view) == arrays[spec.name].tobytes()

    check_all()
    writer.flush()
    check_all()
    writer.close()
    check_all()
    store.close()


def test_a_seal_that_fails_is_tried_again(tmp_path, monkeypatch):
    writer = stream(tmp_path)
    arrays = data(SCHEMA, 0, 5000)
    runs = put(writer, arrays)
    real = os.fsync

    def full(fd):
        if "/c/0" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "full")
        return real(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError):
        writer.flush()
    check(tmp_path, writer, runs, arrays)
    more = data(SCHEMA, 1, 50)
    more_runs = put(writer, more)
    assert "records/0.log" in files(tmp_path, writer.name)
    monkeypatch.undo()
    writer.flush()
    names = files(tmp_path, writer.name)
    assert "records/0.arrow" in names and "records/1.arrow" in names
    assert not any("tail" in name or name.endswith((".log", ".tmp")) for name in names)
    writer.close()
    check(tmp_path, writer, runs, arrays)
    check(tmp_path, writer, more_runs, more)


def test_a_log_that_changed_on_disk_is_not_sealed_over(tmp_path):
    writer = stream(tmp_path)
    for seed in range(3):
        put(writer, data(SCHEMA, seed, 10))
    with open(f"{folder(tmp_path, writer.name)}/records/0.log", "r+b") as file:
        file.seek(30)
        file.write(b"\xff\xff")
    with pytest.raises(IntegrityError, match="recover"):
        writer.flush()
    with pytest.raises(IntegrityError):
        writer.close()
    assert "records/0.log" in files(tmp_path, writer.name)
    (report,) = recover(str(tmp_path))
    assert report.damaged_bytes > 0 and report.n_events == 2 and report.packs == (0,)


STEPS = ["makedirs", "open", "preadv", "pwrite", "fsync", "ftruncate", "rename", "unlink", "listdir", "posix_fadvise"]


def test_a_seal_that_dies_at_any_call_is_finished_by_recovery(tmp_path, monkeypatch):
    """Every call of the operating system in a seal is the last one, once; then recovery seals, and all is there."""
    live = stream(tmp_path / "live", SMALL, max_shard_bytes=1 << 18, durability="process")
    rows = live.layout.shard_rows["wide"]
    arrays = data(SMALL, 1, rows // 2 + 3, token_ids=1001)
    runs = put(live, arrays)
    half = live.name
    shutil.copytree(tmp_path / "live", tmp_path / "seed")
    live.close()

    class Died(BaseException):
        pass

    left = [0]

    def dying(real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise Died
            return real(*args, **kwargs)

        return call

    done, n = False, 0
    while not done:
        n += 1
        root = tmp_path / f"try{n}"
        shutil.copytree(tmp_path / "seed", root)
        left[0] = n
        with monkeypatch.context() as patch:
            for name in STEPS:
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                recover(str(root))
                done = left[0] > 0
            except Died:
                left[0] = -1
        check_stored(root, half, SMALL, live.layout, runs, arrays)
        recover(str(root))
        check_stored(root, half, SMALL, live.layout, runs, arrays)
        names = files(root, half)
        assert names == files(tmp_path / "live", half), f"after dying at call {n}"
        assert recover(str(root)) == []
        wide = open_array(root, half, "wide")
        assert (wide[:] == arrays["wide"]).all()
        shutil.rmtree(root)
    assert n > 40, "too few calls were seen"


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
from writing import *
writer = stream(sys.argv[1], max_shard_bytes=4 << 20)
print(writer.name, flush=True)
for seed in range(10_000):
    arrays = data(SCHEMA, seed, 3000)
    runs = put(writer, arrays)
    print(seed, *(f"{{a}}:{{r.row}}:{{r.n}}:{{r.crc}}" for a, found in runs.items() for r in found), flush=True)
"""


def test_sigkill_while_packs_are_sealed(tmp_path):
    for attempt in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED.format(tests=os.path.dirname(__file__)), str(tmp_path)],
            stdout=subprocess.PIPE,
        )
        name, acknowledged = child.stdout.readline().decode().strip(), []
        for line in child.stdout:
            acknowledged.append(line.decode())
            if len(acknowledged) == 12 + 3 * attempt:
                child.send_signal(signal.SIGKILL)
        child.wait()
        if not acknowledged[-1].endswith("\n"):
            acknowledged.pop()
        recover(str(tmp_path))
        writer = stream(tmp_path / "layout", max_shard_bytes=4 << 20)
        for line in acknowledged:
            seed, *found = line.split()
            runs = {}
            for text in found:
                array, *numbers = text.split(":")
                runs.setdefault(array, []).append(Run(*map(int, numbers)))
            check_stored(tmp_path, name, SCHEMA, writer.layout, runs, data(SCHEMA, int(seed), 3000))
        array = open_array(tmp_path, name, "token_ids")
        assert array[:].size == array.shape[0] and sum(n for _, n in array.attrs["spool:rows"]) >= 3000 * len(
            acknowledged
        )
        writer.close()


def test_an_unreadable_zarr_json_is_an_error_not_a_loss(tmp_path):
    writer = stream(tmp_path)
    arrays = data(SCHEMA, 0, 10)
    runs = put(writer, arrays)
    path = f"{folder(tmp_path, writer.name)}/token_ids/zarr.json"
    open(path, "w").close()
    with pytest.raises(IntegrityError):
        writer.close()
    check(tmp_path, writer, runs, arrays)
    (report,) = recover(str(tmp_path))
    assert report.rebuilt == ("token_ids/zarr.json",) and report.packs == (0,)
    assert (open_array(tmp_path, writer.name, "token_ids")[:] == arrays["token_ids"]).all()


def test_a_thread_that_cannot_seal_says_so_and_leaves_it_for_later(tmp_path, monkeypatch, caplog):
    writer = stream(tmp_path, SMALL, max_shard_bytes=1 << 18)
    rows = writer.layout.shard_rows["wide"]

    def broken(*args, **kwargs):
        raise StorageError("broken")

    monkeypatch.setattr(seal, "seal_pack", broken)
    for seed in range(3):
        put(writer, data(SMALL, seed, rows))
    with pytest.raises(StorageError):
        writer.flush()
    assert "waits to be sealed" in caplog.text
    monkeypatch.undo()
    writer.close()
    assert [n for n in files(tmp_path, writer.name) if "records" in n] == [f"records/{n}.arrow" for n in range(3)]


def test_each_file_is_synced_before_its_name_and_both_before_the_log_goes(tmp_path, monkeypatch):
    writer = stream(tmp_path)
    put(writer, data(SCHEMA, 0, 5000))
    base, calls = folder(tmp_path, writer.name), []

    def watched(name, real):
        def call(first, *args, **options):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(args[0] if args else first)
            calls.append((name, os.path.relpath(path, base).replace(".tmp", "")))
            return real(first, *args, **options)

        return call

    for name in ("fsync", "rename", "unlink"):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    writer.flush()
    monkeypatch.undo()
    names = [path for call, path in calls if call == "rename" and path.endswith((".json", ".arrow"))]
    assert names[-1] == "records/0.arrow" and len(names) == 4
    order = {call: n for n, call in enumerate(calls)}
    for path in names:
        head, tail = os.path.split(path)
        synced = [n for (call, at), n in order.items() if call == "fsync" and at.startswith(f"{head}/.{tail}.")]
        assert synced and max(synced) < order["rename", path] < order["fsync", head]
        assert order["fsync", head] <= order["fsync", "records"]
    shards = [path for call, path in calls if call == "fsync" and "/c/0" in path]
    assert set(shards) >= {"routed_experts/c/0/0/0", "routed_experts/c/0/0", "routed_experts/c/0", "token_ids/c/0"}
    assert max(n for n, (call, path) in enumerate(calls) if "/c" in path) < order["rename", names[0]]
    assert order["unlink", "records/0.log"] > order["rename", "records/0.arrow"]
    assert sum(call == "fsync" for call, _ in calls) <= 18
    writer.close()
