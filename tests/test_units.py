"""Multimodal units in a hot root: any array comes back as it was, stored once, whole or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from imaging import run_python, same, unit_files
from safetensors import safe_open
from safetensors.numpy import load_file

import spool
from spool.formats.units import DTYPES, decode, encode
from spool.logs import Room
from spool.model.units import is_unit_key, parse_unit_path, unit_path
from spool.points import listen
from spool.stores.units import ACCOUNT, HotUnits, disk_bytes

MIB = 1 << 20
forks = multiprocessing.get_context("fork")


def root_of(sp):
    return str(sp.config.root)


# -- the array ---------------------------------------------------------------------------------------------------------

ANY = np.random.default_rng(0)
ARRAYS = {
    "image": ANY.integers(0, 256, (3, 17, 19), dtype=np.uint8),
    "frames": ANY.standard_normal((4, 3, 8, 8)).astype(np.float32),
    "0-d": np.float64(2.5),
    "0-d array": np.array(7, np.int16),
    "empty": np.zeros((0, 3), np.float32),
    "empty inside": np.zeros((2, 0, 5), np.int64),
    "no axis left": np.zeros(0, bool),
    "strided": np.arange(60, dtype=np.int32).reshape(6, 10)[::2, 1::3],
    "transposed": np.arange(24, dtype=np.uint16).reshape(4, 6).T,
    "reversed": np.arange(9, dtype=np.float16)[::-1],
    "broadcast": np.broadcast_to(np.float32(1.5), (3, 4)),
    "big-endian": np.arange(12, dtype=">i4").reshape(3, 4),
    "big-endian, strided": np.arange(12, dtype=">f8")[::-2],
    "nan and -0.0": np.array([np.nan, -0.0, np.inf, 0.0], np.float32),
    "bfloat16": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "read-only": np.frombuffer(b"abcd", np.uint8),
    **{name: np.arange(4).astype(getattr(ml_dtypes, name)) for name in DTYPES if name.startswith("float8")},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_as_it_was(shared_sp, name):
    array = ARRAYS[name]
    key = shared_sp.put_unit(array)
    (first, second) = shared_sp.read_units([key, key])
    assert same(first, array)
    assert first.flags.writeable
    assert first.flags.c_contiguous
    assert isinstance(key, str)
    assert is_unit_key(key)
    if first.size:
        first.reshape(-1).view(np.uint8)[:] ^= 255
        assert same(second, array)
        assert same(shared_sp.read_unit(key), array)


@given(hnp.arrays(
    st.sampled_from([name for name in DTYPES if hasattr(np, name)]).map(np.dtype)
    | hnp.integer_dtypes(endianness="?") | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4),
))  # fmt: skip
def test_any_array_is_decoded_as_it_was_encoded(array):
    unit = encode(array)
    data = bytearray(unit.head + bytes(unit.body))
    assert len(data) == unit.size
    assert len(unit.head) % 8 == 0
    assert same(decode(data, unit.key, where="here"), array)
    assert encode(np.asfortranarray(array) if array.ndim else array).key == unit.key
    assert encode(array.astype(array.dtype.newbyteorder())).key == unit.key


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "bfloat16", "float16", "uint8"])
def test_a_tensor_has_the_key_of_its_values(shared_sp, name):
    tensor = torch.arange(12).reshape(3, 4).to(getattr(torch, name))
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    key = shared_sp.put_unit(tensor)
    assert key == shared_sp.put_unit(np.arange(12).reshape(3, 4).astype(dtype))
    assert shared_sp.put_unit(tensor.t()) == shared_sp.put_unit(tensor.t().contiguous()) != key
    assert shared_sp.put_unit(torch.nn.Parameter(torch.ones(2))) == shared_sp.put_unit(np.ones(2, np.float32))


def test_what_differs_has_another_key():
    keys = [encode(array).key for array in (
        np.zeros(4, np.uint8), np.zeros(4, np.int8), np.zeros(4, bool), np.zeros(1, "i4"), np.zeros((2, 2), np.uint8),
        np.zeros((4, 1), np.uint8), np.zeros((1, 4), np.uint8), np.zeros(5, np.uint8), np.zeros(0), np.zeros((0, 1)),
        np.zeros((), np.float32), np.array(-0.0, np.float32), np.zeros(4, ml_dtypes.float8_e4m3fnuz),
    )]  # fmt: skip
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "wrong",
    [b"bytes", bytearray(3), memoryview(b"abc"), "text", [1, 2], (1, 2), 3, 2.5, True, None, {}, object(),
     np.array(["a"]), np.array([object()]), np.zeros(2, "datetime64[s]"), np.zeros(2, complex), np.zeros(2, "V4"),
     np.zeros(2, [("a", "i4")]), np.zeros(2, np.longdouble), np.ma.masked_array([1, 2], [0, 1])],
    ids=lambda value: type(value).__name__ + str(getattr(value, "dtype", "")),
)  # fmt: skip
def test_what_is_no_array_is_refused(shared_sp, wrong):
    before = unit_files(root_of(shared_sp))
    with pytest.raises(spool.PayloadError):
        shared_sp.put_unit(wrong)
    assert unit_files(root_of(shared_sp)) == before


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["image", "frames", "0-d", "empty", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"])
def test_the_file_is_read_without_spool(shared_sp, name):
    array = np.asarray(ARRAYS[name])
    path = HotUnits(root_of(shared_sp)).path(shared_sp.put_unit(array))
    with safe_open(path, "pt") as file:
        tensor, metadata = file.get_tensor("unit"), file.metadata()
    assert tuple(tensor.shape) == array.shape
    raw = tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
    assert raw.numpy().tobytes() == np.ascontiguousarray(array).tobytes()
    if metadata is not None:
        assert metadata == {"dtype": array.dtype.name}
        assert tensor.dtype == torch.uint8
    elif not array.dtype.name.startswith("float8"):
        assert np.array_equal(load_file(path)["unit"].astype(array.dtype), array)
    with open(path, "rb") as file:
        data = file.read()
    assert path.endswith("unit-" + hashlib.sha256(data).hexdigest())
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["unit"]["shape"] == list(array.shape)


def test_keys_do_not_change():
    """A key is for ever: units that were stored before are found by the keys of today."""
    header = b'{"unit":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]}}'.ljust(64)
    file = (64).to_bytes(8, "little") + header + bytes(range(6))
    key = encode(np.arange(6, dtype=np.uint8).reshape(2, 3)).key
    assert key == f"unit-{hashlib.sha256(file).hexdigest()}"
    assert key == "unit-f8d7e024ef2986c0a154dcf03db87efac00e5ea446b90923acf5573e5b6128c7"
    bits = b'{"unit":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"__metadata__":{"dtype":"float8_e4m3fnuz"}}'
    file = (104).to_bytes(8, "little") + bits.ljust(104) + b"\x40"
    assert encode(np.ones(1, ml_dtypes.float8_e4m3fnuz)).key == f"unit-{hashlib.sha256(file).hexdigest()}"


def test_paths_and_keys_belong_together():
    key = encode(np.zeros(3)).key
    assert parse_unit_path(unit_path(key)) == key
    for path in (key, f"units/{key}", f"units/00/{key}", f"x{unit_path(key)}", f"{unit_path(key)}.tmp", "units/gone/1"):
        assert parse_unit_path(path) is None
    assert not any(map(is_unit_key, ("sha256:abc", key.upper(), key + "0", key[:-1], key[5:], f"{key}\n", "")))


# -- storing once ------------------------------------------------------------------------------------------------------


def test_a_unit_is_stored_once_and_its_age_begins_anew(sp):
    array = ARRAYS["image"]
    key = sp.put_unit(array)
    path = HotUnits(root_of(sp)).path(key)
    inode = os.stat(path).st_ino
    os.utime(path, (1, 1))
    assert sp.put_unit(array.copy()) == key
    assert os.stat(path).st_ino == inode
    assert os.stat(path).st_nlink == 1
    assert time.time() - os.stat(path).st_mtime < 60
    assert list(unit_files(root_of(sp))) == [key]


def test_an_append_that_names_a_unit_makes_it_young(sp):
    keys = [sp.put_unit(np.full(4, value)) for value in range(2)]
    paths = [HotUnits(root_of(sp)).path(key) for key in keys]
    for path in paths:
        os.utime(path, (1, 1))
    s = sp.session("s")
    s.append(prompt_token_ids=[1, 2], response_token_ids=[3], units=[(keys[0], 0, 4), ("my own", 1, 2)])
    assert os.stat(paths[0]).st_mtime > 1
    assert os.stat(paths[1]).st_mtime == 1
    ref = s.append(prompt_token_ids=[1, 2, 3, 9], response_token_ids=[4], units=[(keys[0], 0, 4), ("my own", 1, 2)])
    assert [unit.key for unit in ref.units] == [keys[0], "my own"]
    (segment,) = s.finalize()
    assert same(sp.read_units([unit.key for unit in segment.units][:1])[0], np.full(4, 0))
    assert sp._catalog.units.named() == {} or list(sp._catalog.units.named()) == [keys[0]]
    assert sp.verify(deep=True).findings == ()
    assert sp._catalog.units.named() == {keys[0]: ["s"]}


def test_keys_of_ones_own_stay_legal_and_have_nothing_stored(sp):
    sp.session("s").append(prompt_token_ids=[1, 2], response_token_ids=[3], units=[("sha256:" + "a" * 64, 0, 4)])
    assert sp.verify(deep=True).findings == ()
    with pytest.raises(spool.NotFoundError, match="no key of put_unit"):
        sp.read_unit("sha256:" + "a" * 64)


def test_a_missing_unit_is_named(sp):
    key = encode(np.zeros(9)).key
    with pytest.raises(spool.NotFoundError, match=f"{key} is in no tier.*never put") as told:
        sp.read_units([key])
    assert not isinstance(told.value, spool.ReleasedError)
    for wrong in ("unit", b"x", 3, None, [1]):
        with pytest.raises(spool.InputError):
            sp.read_units(wrong)
    with pytest.raises(spool.InputError):
        sp.read_unit(3)
    assert sp.read_units([]) == []


def test_many_are_read_in_the_order_asked_for(sp):
    arrays = [ANY.integers(0, 256, (5, size), dtype=np.uint8) for size in range(40)]
    keys = [sp.put_unit(array) for array in arrays]
    order = [*reversed(range(40)), 3, 3, 7]
    for got, number in zip(sp.read_units([keys[i] for i in order]), order, strict=True):
        assert same(got, arrays[number])


def test_async_twins(sp):
    async def work():
        keys = await asyncio.gather(*(sp.put_unit_async(np.full((100, 100), n % 5)) for n in range(20)))
        return keys, await sp.read_units_async(keys)

    keys, arrays = asyncio.run(work())
    assert len(set(keys)) == 5
    assert all(same(array, np.full((100, 100), n % 5)) for n, array in enumerate(arrays))


def put_all(uri, seed, go, out):
    with spool.open(uri) as sp:
        go.wait(30)
        arrays = [np.random.default_rng(n).integers(0, 256, 300_000, dtype=np.uint8) for n in range(12)]
        order = np.random.default_rng(seed).permutation(12)
        out.put({int(n): sp.put_unit(arrays[n]) for n in order})


@pytest.mark.parametrize("options", ["hot_bytes=64MiB", "durability=disk&hot_bytes=64MiB"])
def test_eight_processes_put_the_same(spool_uri, options):
    uri = f"{spool_uri}?{options}"
    spool.open(uri).close()
    context = multiprocessing.get_context("spawn")
    go, out = context.Event(), context.Queue()
    workers = [context.Process(target=put_all, args=(uri, seed, go, out)) for seed in range(8)]
    for worker in workers:
        worker.start()
    go.set()
    found = [out.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(keys == found[0] for keys in found)
    with spool.open(uri) as sp:
        assert set(unit_files(root_of(sp))) == set(found[0].values())
        assert sp._catalog.usage()[ACCOUNT] == HotUnits(root_of(sp)).measure() == 12 * disk_bytes(300_000 + 72)
        assert sp.verify(deep=True).findings == ()


def test_threads_of_one_process_put_and_read_the_same(sp):
    arrays, failures = [np.full((64, 64), n, np.float32) for n in range(6)], []

    def work(seed):
        try:
            for n in np.random.default_rng(seed).integers(0, 6, 40):
                assert same(sp.read_unit(sp.put_unit(arrays[n])), arrays[n])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(unit_files(root_of(sp))) == 6


def test_a_forked_child_puts_and_reads(sp):
    before = sp.put_unit(ARRAYS["frames"])
    sp.read_units([before] * 3)

    def child():
        assert same(sp.read_units([before, before])[1], ARRAYS["frames"])
        sp.put_unit(ARRAYS["image"])
        os._exit(0)

    process = forks.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert same(sp.read_unit(encode(ARRAYS["image"]).key), ARRAYS["image"])


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, MIB - 73, MIB, MIB + 1, 4 * MIB, 8 * MIB - 72, 9 * MIB + 5])
@pytest.mark.parametrize("options", ["", "direct=false", "durability=disk"])
def test_files_of_any_size_are_whole(open_spool, size, options):
    sp = open_spool(options=options)
    array = np.resize(ANY.integers(0, 256, 4099, dtype=np.uint8), size)
    key = sp.put_unit(array)
    assert same(sp.read_unit(key), array)
    assert os.stat(HotUnits(root_of(sp)).path(key)).st_size == encode(array).size


def test_a_large_unit_leaves_nothing_in_the_page_cache(sp):
    array = ANY.integers(0, 256, 32 * MIB, dtype=np.uint8)
    path = HotUnits(root_of(sp)).path(sp.put_unit(array))
    sp.read_unit(encode(array).key)
    assert cached_bytes(path) <= array.nbytes // 20


def cached_bytes(path):
    done = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", path], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_who_may_only_read_puts_nothing(spool_uri, sp):
    key = sp.put_unit(ARRAYS["image"])
    with spool.open(spool_uri, readonly=True) as reader:
        assert same(reader.read_unit(key), ARRAYS["image"])
        with pytest.raises(spool.SessionStateError, match="read only"):
            reader.put_unit(ARRAYS["image"])
    with pytest.raises(spool.SessionStateError, match="closed"):
        reader.read_unit(key)
    code = "import sys, spool\nprint(spool.open(sys.argv[1]).read_unit(sys.argv[2]).sum())"
    assert int(run_python(code, spool_uri, key)) == ARRAYS["image"].sum()


# -- whole or not at all -----------------------------------------------------------------------------------------------

DIE = """
import os, signal, sys
import numpy as np, spool
from spool.points import kill_at
sp = spool.open(sys.argv[1])
kill_at(sys.argv[2])
sp.put_unit(np.arange(100_000))
"""


@pytest.mark.parametrize(("point", "there"), [("put.written", False), ("put.named", True)])
def test_a_put_that_is_killed_leaves_all_or_nothing(spool_uri, sp, point, there):
    with pytest.raises(subprocess.CalledProcessError) as died:
        run_python(DIE, spool_uri, point)
    assert died.value.returncode == -signal.SIGKILL
    units, array = HotUnits(root_of(sp)), np.arange(100_000)
    key = encode(array).key
    assert (units.info(key) is not None) == there
    assert any(name.startswith(".") for name in unit_files(root_of(sp)))
    assert units.sweep(older_than_s=3600) == 0
    assert units.sweep(older_than_s=0) == 1
    assert list(unit_files(root_of(sp))) == [key] * there
    assert sp.put_unit(array) == key
    assert same(sp.read_unit(key), array)


def test_a_put_that_fails_leaves_nothing_and_gives_its_room_back(open_spool, monkeypatch):
    sp = open_spool(options="hot_bytes=64MiB")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(5, "input/output error")))
    with pytest.raises(spool.StorageError, match="input/output"):
        sp.put_unit(np.arange(10_000))
    assert unit_files(root_of(sp)) == {}
    assert sp._catalog.usage().get(ACCOUNT) is None


def test_damage_is_found_when_read_and_by_verify(sp):
    array = ANY.integers(0, 256, 5000, dtype=np.uint8)
    key = sp.put_unit(array)
    sp.session("s").append(prompt_token_ids=[1], response_token_ids=[2], units=[(key, 0, 3)])
    path = HotUnits(root_of(sp)).path(key)
    with open(path, "r+b") as file:
        file.seek(2000)
        file.write(b"\0\1\2\3")
    with pytest.raises(spool.IntegrityError, match=path) as told:
        sp.read_units([key])
    assert told.value.details["file"] == path
    assert sp.verify().findings == ()
    (finding,) = sp.verify(deep=True).findings
    assert (finding.kind, finding.field, finding.file, finding.steps) == ("integrity", "units", path, ("s",))
    assert sp.put_unit(array) == key  # what is damaged is stored anew
    assert same(sp.read_unit(key), array)
    os.truncate(path, 100)
    assert sp.put_unit(array) == key
    assert same(sp.read_unit(key), array)
    os.unlink(path)
    (finding,) = sp.verify().findings
    assert "in no tier" in finding.text
    assert finding.steps == ("s",)
    sp.put_unit(array)
    assert sp.verify(deep=True).findings == ()


def test_a_file_that_somebody_else_made_is_no_unit(sp):
    """Its key is right and it is no safetensors file of this version."""
    for data in (b"", b"1234567", b"\xff" * 100, (2).to_bytes(8, "little") + b"{}", (9).to_bytes(8, "little") + b"{}"):
        key = "unit-" + hashlib.sha256(data).hexdigest()
        HotUnits(root_of(sp)).store(key, [data], sync=False)
        with pytest.raises(spool.IntegrityError, match="upgrade"):
            sp.read_unit(key)


# -- room --------------------------------------------------------------------------------------------------------------


def test_units_count_towards_hot_bytes(open_spool):
    sp = open_spool(options="hot_bytes=40MiB&append_timeout_s=0.2")
    keys = [sp.put_unit(np.full(8 * MIB, n, np.uint8)) for n in range(4)]
    assert sp.put_unit(np.full(8 * MIB, 0, np.uint8)) == keys[0]
    with pytest.raises(spool.CapacityError, match="no room for a unit") as told:
        sp.put_unit(np.full(9 * MIB, 9, np.uint8))
    assert told.value.details["limit"] == 40 * MIB
    with pytest.raises(spool.CapacityError):
        sp.session("s").append(prompt_token_ids=np.arange(3 * MIB), response_token_ids=[1])
    assert sorted(unit_files(root_of(sp))) == sorted(keys)
    assert sp._catalog.usage()[ACCOUNT] == HotUnits(root_of(sp)).measure()
    sp._feeder.account()
    assert sp._catalog.usage()[ACCOUNT] == HotUnits(root_of(sp)).measure() == 4 * disk_bytes(8 * MIB + 80)
    with pytest.raises(spool.CapacityError):
        sp.put_unit(np.zeros(100 * MIB, np.uint8))  # more than all there is: it does not wait


def test_an_async_put_waits_for_room_and_holds_no_thread(open_spool, monkeypatch):
    sp = open_spool(options="threads=1&append_timeout_s=20")
    free, real = threading.Event(), Room.reserve
    monkeypatch.setattr(Room, "reserve", lambda room, *asked: free.is_set() and real(room, *asked))

    async def work():
        puts = [asyncio.create_task(sp.put_unit_async(np.full(9, n))) for n in range(3)]
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(sp._on_thread(lambda: 7), 5) == 7
        assert not any(put.done() for put in puts)
        free.set()
        return await asyncio.gather(*puts)

    assert len(set(asyncio.run(work()))) == 3


def test_points_of_a_put_are_reached_in_order(sp):
    seen = []
    listen(seen.append)
    try:
        sp.put_unit(np.arange(5))
        sp.put_unit(np.arange(5))
    finally:
        listen(None)
    assert seen == ["put.written", "put.named"]
