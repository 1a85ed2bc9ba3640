"""Local files and the hot store: real files, real processes, real kills."""

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.errors import CapacityError, ConfigError, IntegrityError, NotFoundError, StorageError
from spool.stores import hot, local, vectors
from spool.stores.bounce import BouncePool
from spool.stores.hot import HotStore
from spool.stores.local import (
    BLOCK,
    aligned_buffer,
    check_hot_root,
    map_os_error,
    open_direct,
    parse_tail,
    pwrite_all,
    read_file,
    set_direct,
    sync_dir,
    tail_name,
    tail_site,
    write_atomic,
)

SHARD = "streams/s1/routed_experts/c/0/0/0"
FOLDER = "streams/s1/routed_experts"
PATTERN = np.random.default_rng(7).bytes(65521)


def pattern(start, stop):
    """Bytes [start, stop) of an endless pattern whose period is prime."""
    first = start % len(PATTERN)
    n = stop - start
    return (PATTERN * (2 + n // len(PATTERN)))[first : first + n]


def put(root, key, data):
    path = Path(root, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def read(store, key, offset, length):
    """The range by all three ways, which must agree."""
    data = bytearray(length)
    store.read_into(key, offset, [memoryview(data)])
    with store.borrow(key, offset, length) as view:
        assert view.readonly
        assert view.nbytes == length
        assert view == data
    return bytes(data)


def resident(path):
    """Bytes of the file in the page cache, without bringing any in."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-data.size // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        args = (ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.size), ctypes.c_void_p(pages.ctypes.data))
        assert libc.mincore(*args) == 0
        del data
        return int((pages & 1).sum()) * mmap.PAGESIZE


def evict(path):
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def disk(tmp_path):
    """A folder whose file system does direct I/O and has a page cache."""
    if local._file_system(os.path.realpath(tmp_path), read_file("/proc/self/mountinfo").decode()) in ("tmpfs", "ramfs"):
        pytest.fail("the temporary folder is in memory: set TMPDIR to one on a disk")
    fd, direct = open_direct(str(tmp_path / "probe"), os.O_RDWR | os.O_CREAT, root=str(tmp_path))
    os.close(fd)
    assert direct, "the file system of the temporary folder refuses direct I/O: set TMPDIR to another"
    return tmp_path


@pytest.fixture
def store(tmp_path):
    store = HotStore(str(tmp_path))
    yield store
    store.close()


class Calls:
    """Records system calls by name, each with what it was about, and passes them on."""

    def __init__(self, monkeypatch, *names):
        self.log = []
        self._stat = os.stat
        for name in names:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name, real):
        def call(*args, **kwargs):
            subject = args[0]
            if isinstance(subject, int):
                subject = "dir" if stat.S_ISDIR(self._stat(f"/proc/self/fd/{subject}").st_mode) else "file"
            self.log.append((name, subject, args))
            return real(*args, **kwargs)

        return call

    def names(self):
        return [name for name, _, _ in self.log]


# --- local files


def test_an_atomic_write_syncs_the_file_renames_and_syncs_the_folder(tmp_path, monkeypatch):
    path = str(tmp_path / "zarr.json")
    calls = Calls(monkeypatch, "pwrite", "fsync", "rename")
    write_atomic(path, b"one")
    assert [(name, what if name != "rename" else "") for name, what, _ in calls.log] == [
        ("pwrite", "file"),
        ("fsync", "file"),
        ("rename", ""),
        ("fsync", "dir"),
    ]
    source, target = calls.log[2][2]
    assert target == path
    assert os.path.dirname(source) == str(tmp_path)
    assert read_file(path) == b"one"
    calls.log.clear()
    write_atomic(path, memoryview(b"second"), sync=False)
    assert calls.names() == ["pwrite", "rename"]
    write_atomic(path, b"")
    assert read_file(path) == b""
    assert os.listdir(tmp_path) == ["zarr.json"]


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [("pwrite", errno.ENOSPC, CapacityError), ("pwrite", errno.EIO, StorageError), ("fsync", errno.EIO, StorageError),
     ("fsync", errno.EDQUOT, CapacityError), ("rename", errno.EROFS, StorageError)],
)  # fmt: skip
def test_a_failed_atomic_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call, number, error):
    path = tmp_path / "zarr.json"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(error) as caught:
            write_atomic(str(path), b"new")
    assert caught.value.details == {"path": str(path), "errno": errno.errorcode[number]}
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["zarr.json"]


def test_a_file_size_limit_is_a_lack_of_room(tmp_path):
    code = """
import resource, signal, sys
from spool.errors import CapacityError
from spool.stores.local import write_atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_atomic(sys.argv[1], bytes(200_000))
except CapacityError as error:
    print(error.details["errno"])
"""
    run = [sys.executable, "-c", code, str(tmp_path / "x")]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "EFBIG\n"
    assert os.listdir(tmp_path) == []


def test_an_atomic_write_is_whole_at_every_instant_and_after_a_kill(tmp_path):
    path = str(tmp_path / "x")
    code = """
import sys
from spool.stores.local import write_atomic
n = 0
while True:
    n += 1
    write_atomic(sys.argv[1], bytes([n % 256]) * (1 + n * 7919 % 50_000), sync=False)
"""
    write_atomic(path, b"0")
    writer = subprocess.Popen([sys.executable, "-c", code, path])
    try:
        seen, end = set(), time.monotonic() + 20
        while len(seen) < 200 and time.monotonic() < end:
            data = read_file(path)
            assert data == data[:1] * len(data)
            seen.add(len(data))
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) >= 200
    data = read_file(path)
    assert data == data[:1] * len(data)
    assert all(name == "x" or name.endswith(".tmp") for name in os.listdir(tmp_path))


def test_missing_files_and_folders_are_named(tmp_path):
    missing = str(tmp_path / "no" / "x")
    with pytest.raises(NotFoundError, match=r"cannot read .*/no/x"):
        read_file(missing)
    with pytest.raises(NotFoundError, match="cannot write"):
        write_atomic(missing, b"x")
    with pytest.raises(NotFoundError, match="cannot sync"):
        sync_dir(missing)
    with pytest.raises(StorageError, match="cannot read"):
        read_file(str(tmp_path))


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, CapacityError), (errno.EDQUOT, CapacityError), (errno.EFBIG, CapacityError),
     (errno.ENOENT, NotFoundError), (errno.EIO, StorageError), (errno.EACCES, StorageError),
     (errno.ESTALE, StorageError)],
)  # fmt: skip
def test_system_errors_become_what_the_caller_does_next(number, kind):
    error = map_os_error(OSError(number, os.strerror(number)), what="append to", path="/hot/x")
    assert type(error) is kind
    assert str(error).startswith(f"cannot append to /hot/x: {os.strerror(number)}; ")
    assert error.details == {"path": "/hot/x", "errno": errno.errorcode[number]}
    assert type(map_os_error(OSError("odd"), what="read", path="x")) is StorageError


def test_aligned_buffers_are_aligned_zeroed_and_private_to_a_process():
    for n_bytes in (0, 1, 4096, 100_001):
        buffer = aligned_buffer(n_bytes)
        assert len(buffer) == n_bytes
        assert not buffer.readonly
        assert bytes(buffer) == bytes(n_bytes)
        if n_bytes:
            assert np.frombuffer(buffer, np.uint8).ctypes.data % BLOCK == 0
    buffer = aligned_buffer(10)
    child = os.fork()
    if child == 0:
        buffer[:] = b"x" * 10
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes(buffer) == bytes(10)


def test_a_short_write_is_continued_and_from_a_whole_block_where_it_is_direct(tmp_path, monkeypatch):
    real, offsets = os.pwrite, []

    def short(fd, data, offset):
        offsets.append(offset)
        return real(fd, data[:5000], offset)

    monkeypatch.setattr(os, "pwrite", short)
    data = pattern(0, 4 * BLOCK)
    for direct, expected in ((False, [0, 5000, 10000, 15000]), (True, [0, 4096, 8192, 12288])):
        fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        assert pwrite_all(fd, data, 0, direct=direct) == 4
        assert offsets == expected
        assert os.pread(fd, len(data) + 1, 0) == data
        assert pwrite_all(fd, b"", 0) == 0
        os.close(fd)
        offsets.clear()
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="No space left"):
        pwrite_all(0, b"x", 0)


@given(pack=st.integers(0, 10**9), size=st.integers(0, 2**50), ndim=st.integers(1, 4))
def test_a_tail_is_found_from_the_key_alone(pack, size, ndim):
    assert tail_site(f"streams/s-1/top_p.values/c/{pack}" + "/0" * (ndim - 1)) == ("streams/s-1/top_p.values", pack)
    assert parse_tail(tail_name(pack, size)) == (pack, size)


def test_other_names_have_no_tail():
    for key in ("streams/s/records/3.arrow", "streams/s/x/zarr.json", "units/0c/c/1", "spool.json", "streams/s/x/c/1/2",
                "streams/s/x/c/", "c/0", "streams/s/c/0"):  # fmt: skip
        assert tail_site(key) is None
    for name in ("tail-1", "tail-1-", "tail--1-2", "tail-1-2.tmp", "xtail-1-2", "zarr.json", "c"):
        assert parse_tail(name) is None


MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /data rw - nfs4 server:/export rw,vers=4.2
31 30 259:0 / /data/nvme rw master:3 propagate_from:2 - xfs /dev/nvme0n1 rw
32 22 0:50 / /mnt/a\040b rw - fuse.sshfs host: rw
33 22 0:51 / /dev/shm rw - tmpfs tmpfs rw
34 22 0:52 / /over rw - nfs server:/x rw
35 34 259:1 / /over rw - ext4 /dev/sdb rw
36 22 0:53 / /under rw - ext4 /dev/sdc rw
37 36 0:54 / /under rw - cifs //srv/x rw
garbage
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", None), ("/data/x", "nfs4"), ("/data", "nfs4"), ("/data/nvme/run/7", None), ("/database", None),
     ("/mnt/a b/x", "fuse.sshfs"), ("/dev/shm/spool", None), ("/over/x", None), ("/under/x", "cifs")],
)  # fmt: skip
def test_shared_file_systems_are_refused_as_hot(tmp_path, path, kind):
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    if kind is None:
        check_hot_root(path, mountinfo=str(table))
        return
    with pytest.raises(ConfigError, match=f"is on {kind}: the hot tier needs a local disk") as caught:
        check_hot_root(path, mountinfo=str(table))
    assert caught.value.details == {"path": path, "file_system": kind}


def test_a_link_is_judged_by_where_it_leads(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path}/share rw - nfs x rw\n")
    (tmp_path / "share").mkdir()
    (tmp_path / "link").symlink_to("share")
    with pytest.raises(ConfigError, match="nfs"):
        check_hot_root(str(tmp_path / "link" / "spool"), mountinfo=str(table))


def test_this_machines_temporary_folder_may_be_hot(tmp_path):
    check_hot_root(str(tmp_path / "not" / "there" / "yet"))
    with pytest.raises(NotFoundError):
        check_hot_root(str(tmp_path), mountinfo=str(tmp_path / "none"))


def refuse_direct(monkeypatch):
    """Make every file system refuse direct I/O, as some do."""
    real = local.fcntl.fcntl

    def refuse(fd, command, flags=0):
        if command == local.fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, flags)

    monkeypatch.setattr(local.fcntl, "fcntl", refuse)


def test_direct_io_is_switched_on_and_off(disk):
    fd, direct = open_direct(str(disk / "x"), os.O_RDWR | os.O_CREAT | os.O_EXCL, root=str(disk))
    assert direct
    block = aligned_buffer(BLOCK)
    assert pwrite_all(fd, block, 0, direct=True) == 1
    with pytest.raises(OSError, match="Invalid argument"):
        os.pwrite(fd, b"odd", BLOCK)
    assert not set_direct(fd, on=False)
    assert os.pwrite(fd, b"odd", BLOCK) == 3
    assert set_direct(fd, on=True)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_refused_direct_io_falls_back_with_one_notice_a_root(tmp_path, monkeypatch, caplog):
    refuse_direct(monkeypatch)
    with caplog.at_level(logging.WARNING, "spool.stores"):
        for root in ("a", "b"):
            (tmp_path / root).mkdir()
            for name in ("x", "y"):
                path = tmp_path / root / name
                fd, direct = open_direct(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, root=str(tmp_path / root))
                assert not direct
                pwrite_all(fd, b"odd", 0)
                os.close(fd)
                assert path.read_bytes() == b"odd"
    notices = [record.getMessage() for record in caplog.records]
    assert len(notices) == 2
    assert f"{tmp_path}/a" in notices[0]


# --- the hot store: reading


@pytest.mark.parametrize("n", [1, 1024, 1025, 5000])
def test_any_number_of_buffers_is_filled_in_groups(tmp_path, store, monkeypatch, n):
    rng = random.Random(n)
    sizes = [rng.choice([0, 1, 3, 100, 700]) for _ in range(n - 1)] + [50]
    total = sum(sizes)
    put(tmp_path, "units/ab/x", pattern(0, total + 99) + b"!")
    assert (total + 100) % BLOCK
    buffers = [memoryview(bytearray(size)) for size in sizes]
    calls = Calls(monkeypatch, "preadv")
    store.read_into("units/ab/x", 13, buffers)
    assert b"".join(buffers) == pattern(13, 13 + total)
    filled = sum(size > 0 for size in sizes)
    assert len(calls.log) == -(-filled // 1024)
    assert all(len(args[1]) <= 1024 for _, _, args in calls.log)
    position = 13
    for buffer, size in zip(buffers, sizes, strict=True):
        assert read(store, "units/ab/x", position, size) == bytes(buffer)
        position += size


def test_empty_ranges_make_no_system_call(store, monkeypatch):
    calls = Calls(monkeypatch, "open", "fstat", "preadv", "pread", "stat", "listdir")
    store.read_into("no/such/key", 5, [])
    store.read_into("no/such/key", 5, [memoryview(b""), memoryview(np.empty((0, 3)))])
    with store.borrow("no/such/key", 5, 0) as view:
        assert bytes(view) == b""
    assert calls.log == []


def test_a_small_read_of_an_open_file_is_two_system_calls(tmp_path, store, monkeypatch):
    put(tmp_path, SHARD, pattern(0, 1 << 20) + b"index")
    read(store, SHARD, 0, 100)
    calls = Calls(monkeypatch, "open", "fstat", "preadv", "pread", "stat", "listdir", "close")
    with store.borrow(SHARD, 77, 96 << 10) as view:
        assert view == pattern(77, 77 + (96 << 10))
    assert calls.names() == ["fstat", "preadv"]
    calls.log.clear()
    store.read_into(SHARD, 500_000, [memoryview(bytearray(1000)), memoryview(bytearray(2000))])
    assert calls.names() == ["fstat", "preadv"]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_reads_through_short_calls_and_tight_limits_are_exact(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("short")
    size = data.draw(st.integers(1, 40_000))
    split_at = data.draw(st.integers(0, size // BLOCK)) * BLOCK
    if split_at:
        put(root, SHARD, pattern(0, split_at))
    put(root, f"{FOLDER}/{tail_name(0, split_at)}", pattern(split_at, size))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    cuts = sorted(data.draw(st.lists(st.integers(start, stop), max_size=20)))
    edges = [start, *cuts, stop]
    buffers = [memoryview(bytearray(b - a)) for a, b in itertools.pairwise(edges)]
    rng, real = random.Random(size), os.preadv

    def short(fd, given_buffers, offset):
        assert len(given_buffers) <= 3
        assert sum(map(len, given_buffers)) <= 9000
        cut = rng.choice([None, 1, 100, 5000])
        if cut is not None:
            given_buffers = vectors.split(list(given_buffers), cut)[0]
        return real(fd, given_buffers, offset)

    store = HotStore(str(root))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        patch.setattr(vectors, "IOV_MAX", 3)
        patch.setattr(vectors, "MAX_CALL_BYTES", 9000)
        store.read_into(SHARD, start, buffers)
    assert b"".join(buffers) == pattern(start, stop)
    assert store.size(SHARD) == size
    assert store.read(SHARD) == pattern(0, size)
    store.close()


def test_typed_and_many_dimensional_buffers_are_filled(tmp_path, store):
    put(tmp_path, "x", pattern(0, 1000))
    array, floats = np.zeros((3, 4, 5), np.uint8), np.zeros(4, np.float32)
    store.read_into("x", 8, [memoryview(array), memoryview(floats)])
    assert array.tobytes() == pattern(8, 68)
    assert floats.tobytes() == pattern(68, 84)


RANGES = [(13, 10), (0, 1), (4095, 2), (0, 64 << 10), (13, 64 << 10), (4096, 128 << 10), (13, 1 << 20),
          (1, 4 << 20), (0, 5 << 20), (4097, (5 << 20) - 4097)]  # fmt: skip


@pytest.mark.parametrize("extra", [0, 1, 20, 4095])
def test_direct_and_buffered_reads_agree(disk, store, extra):
    size = (5 << 20) + extra
    put(disk, SHARD, pattern(0, size))
    for offset, length in [*RANGES, (size - 100_000, 100_000), (size - 1, 1), (0, size)]:
        assert read(store, SHARD, offset, length) == pattern(offset, offset + length)
    pieces = [memoryview(bytearray(n)) for n in (1, 4 << 20, 4095, 1 << 19, 0, 7)]
    store.read_into(SHARD, 5, pieces)
    assert b"".join(pieces) == pattern(5, 5 + sum(map(len, pieces)))


def test_a_deleted_file_is_let_go_by_who_reads_no_more(disk):
    path = put(disk, SHARD, pattern(0, 8 << 20))
    store = HotStore(str(disk))
    read(store, SHARD, 13, 4 << 20)
    assert holds(path)
    os.unlink(path)
    assert holds(f"{path} (deleted)")
    until = time.monotonic() + 20
    while holds(f"{path} (deleted)"):
        assert time.monotonic() < until, "its bytes stay on the disk"
        time.sleep(0.1)
    put(disk, SHARD, pattern(7, 8 << 20))
    assert read(store, SHARD, 13, 100) == pattern(20, 120)


def holds(target):
    """Whether this process has a file open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return str(target) in found


def test_only_the_reads_that_should_go_past_the_page_cache(disk, store):
    unsealed, sealed = put(disk, SHARD, pattern(0, 8 << 20)), put(disk, f"{FOLDER}/c/1/0/0", pattern(0, (8 << 20) + 20))
    for path in (unsealed, sealed):
        evict(path)
        assert resident(path) == 0
    for offset, length in [(13, 64 << 10), (4096, 3 << 20), (1, 8 << 19)]:
        read(store, SHARD, offset, length)
    read(store, f"{FOLDER}/c/1/0/0", 13, 4 << 20)
    assert resident(unsealed) == resident(sealed) == 0
    read(store, SHARD, 100, 5000)
    read(store, f"{FOLDER}/c/1/0/0", 1 << 20, 1 << 20)
    assert resident(unsealed) == 2 * 4096
    assert resident(sealed) == 1 << 20


def test_small_reads_leave_a_bounded_page_cache(disk):
    paths = [put(disk, f"{FOLDER}/c/{pack}/0/0", pattern(pack, pack + (8 << 20) + 20)) for pack in range(3)]
    for path in paths:
        evict(path)
    limit, rng = 1 << 20, random.Random(0)
    store = HotStore(str(disk), page_cache_bytes=limit)
    most = 0
    for i in range(300):
        pack, offset = rng.randrange(3), rng.randrange(7 << 20)
        with store.borrow(f"{FOLDER}/c/{pack}/0/0", offset, 96 << 10) as view:
            assert view == pattern(pack + offset, pack + offset + (96 << 10))
        if i % 50 == 49:
            most = max(most, sum(map(resident, paths)))
    # each range may touch one page more on either side
    assert 0 < most <= limit + 2 * 4096 * (limit // (96 << 10) + 1)
    store.close()
    assert sum(map(resident, paths)) == 0


def test_a_page_cache_of_nothing_and_evicted_descriptors_leave_nothing(disk):
    paths = [put(disk, f"{FOLDER}/c/{pack}/0/0", pattern(0, 300_001)) for pack in range(6)]
    for path in paths:
        evict(path)
    none = HotStore(str(disk), page_cache_bytes=0)
    read(none, f"{FOLDER}/c/0/0/0", 5, 100_000)
    assert resident(paths[0]) == 0
    few = HotStore(str(disk), max_open_files=4)
    for pack in range(6):
        read(few, f"{FOLDER}/c/{pack}/0/0", 5, 100_000)
    assert [resident(path) > 0 for path in paths] == [False] * 4 + [True] * 2
    few.close()


def test_a_tmpfs_reads_the_same(store):
    shm = Path("/dev/shm")
    root = shm / f"spool-test-{os.getpid()}"
    try:
        put(root, SHARD, pattern(0, 5 << 20))
        put(root, f"{FOLDER}/{tail_name(0, 5 << 20)}", pattern(5 << 20, (5 << 20) + 777))
        memory = HotStore(str(root))
        for offset, length in [*RANGES, ((5 << 20) - 100_000, 100_777)]:
            assert read(memory, SHARD, offset, length) == pattern(offset, offset + length)
        memory.close()
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_refused_direct_reads_are_buffered_with_one_notice(tmp_path, store, monkeypatch, caplog):
    put(tmp_path, SHARD, pattern(0, 5 << 20))
    put(tmp_path, f"{FOLDER}/c/1/0/0", pattern(0, (5 << 20) + 1))
    refuse_direct(monkeypatch)
    with caplog.at_level(logging.WARNING, "spool.stores"):
        for pack in (0, 1):
            for offset, length in RANGES:
                assert read(store, f"{FOLDER}/c/{pack}/0/0", offset, length) == pattern(offset, offset + length)
    assert len(caplog.records) == 1


def test_a_direct_read_that_fails_where_opening_did_not_is_buffered(tmp_path, store, monkeypatch, caplog):
    put(tmp_path, SHARD, pattern(0, 5 << 20))
    real = os.preadv

    def picky(fd, buffers, offset):
        if local.fcntl.fcntl(fd, local.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", picky)
    with caplog.at_level(logging.WARNING, "spool.stores"):
        for offset, length in RANGES:
            assert read(store, SHARD, offset, length) == pattern(offset, offset + length)
    assert len(caplog.records) <= 1


def test_a_failing_disk_is_a_storage_error(tmp_path, store, monkeypatch):
    put(tmp_path, SHARD, pattern(0, 5 << 20))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    for length in (10, 100_000):
        with pytest.raises(StorageError, match="Input/output error"):
            store.read_into(SHARD, 0, [memoryview(bytearray(length))])
        with pytest.raises(StorageError, match="Input/output error"):
            store.borrow(SHARD, 0, length)


# --- the hot store: what is lent


def test_a_loan_ends_with_its_block(tmp_path, store):
    put(tmp_path, SHARD, pattern(0, 1 << 20))
    for length in (100, 200_000):
        with store.borrow(SHARD, 3, length) as view, pytest.raises(TypeError):
            view[0] = 1
        with pytest.raises(ValueError, match="released"):
            bytes(view)


KEEP = {
    "array": lambda view: np.frombuffer(view, np.uint8),
    "slice": lambda view: view[1000:],
    "array of a slice": lambda view: np.asarray(view[5:])[7:],
}


@pytest.mark.parametrize("way", KEEP)
def test_memory_is_used_again_but_never_under_what_was_made_of_it(tmp_path, store, way):
    put(tmp_path, SHARD, pattern(0, 4 << 20))
    with store.borrow(SHARD, 0, 200_000) as view:
        kept = KEEP[way](view)
        first = address(view)
    others = set()
    for offset in range(1, 40):
        with store.borrow(SHARD, offset * 4096, 200_000) as view:
            others.add(address(view))
    assert bytes(kept) == pattern(0, 200_000)[-len(kept) :]
    assert first not in others
    assert len(others) == 1
    del kept
    with store.borrow(SHARD, 0, 200_000) as one, store.borrow(SHARD, 0, 200_000) as two:
        assert {address(one), address(two)} == {first, *others}


def address(block):
    return np.frombuffer(block, np.uint8).ctypes.data


def test_the_pool_keeps_no_more_than_its_limit_and_lends_no_giants():
    pool = BouncePool(3 << 20)
    lent = [pool.take(1 << 20) for _ in range(5)]
    first = set(map(address, lent))
    for block in lent:
        pool.give(block)
    again = [pool.take(1 << 20) for _ in range(3)]
    assert len(set(map(address, again)) & first) == 3
    giant = pool.take(3 << 20)
    where = address(giant)
    pool.give(giant)
    assert len(small := pool.take(100)) < 1 << 20
    assert address(small) != where
    assert address(pool.take(2 << 20)) == where
    for n_bytes in (1, 4096, 200_000, (1 << 20) + 1, (64 << 20) + 8192):
        assert len(pool.take(n_bytes)) >= n_bytes


# --- the hot store: shard and tail


def test_bytes_come_from_the_shard_and_the_tail_of_its_size(tmp_path, store):
    size = 8 * BLOCK
    put(tmp_path, SHARD, pattern(0, size))
    put(tmp_path, f"{FOLDER}/tail-0-{size}", pattern(size, size + 3000))
    put(tmp_path, f"{FOLDER}/tail-1-0", b"x" * 9000)
    put(tmp_path, f"{FOLDER}/tail-10-{size}", b"y" * 9000)
    for offset, length in [(0, size + 3000), (size - 1, 2), (size, 3000), (size + 2999, 1), (13, 10), (size - 5, 5)]:
        assert read(store, SHARD, offset, length) == pattern(offset, offset + length)
    assert store.size(SHARD) == size + 3000
    assert store.read(SHARD) == pattern(0, size + 3000)
    assert store.read(f"{FOLDER}/c/1/0/0") == b"x" * 9000
    assert store.path(SHARD) == str(tmp_path / SHARD)


def test_what_a_killed_writer_left_in_the_middle_of_a_flush_is_read(tmp_path, store):
    # the next tail is there, the shard has grown by a part of its blocks only, the old tail was not unlinked
    end = 10 * BLOCK + 500
    put(tmp_path, SHARD, pattern(0, 6 * BLOCK))
    put(tmp_path, f"{FOLDER}/tail-0-{4 * BLOCK}", pattern(4 * BLOCK, end))
    put(tmp_path, f"{FOLDER}/tail-0-{10 * BLOCK}", pattern(10 * BLOCK, end))
    rng = random.Random(1)
    for _ in range(200):
        start = rng.randrange(end)
        stop = rng.randrange(start, end) + 1
        assert read(store, SHARD, start, stop - start) == pattern(start, stop)
    assert store.size(SHARD) == end


def test_a_reader_follows_a_flush(tmp_path, store, monkeypatch):
    """Each step of a flush happens exactly between the reader's look at the shard and its look at the tail."""
    end = 4 * BLOCK + 100
    old, new = f"{FOLDER}/tail-0-0", f"{FOLDER}/tail-0-{4 * BLOCK}"
    put(tmp_path, old, pattern(0, end))
    steps = [
        lambda: put(tmp_path, new, pattern(4 * BLOCK, end)),
        lambda: put(tmp_path, SHARD, pattern(0, 2 * BLOCK)),
        lambda: put(tmp_path, SHARD, pattern(0, 4 * BLOCK)),
        lambda: (tmp_path / old).unlink(),
        lambda: (put(tmp_path, SHARD, pattern(0, end) + b"pad, index"), (tmp_path / new).unlink()),
        lambda: None,
    ]
    real = os.fstat

    def look(fd):
        facts = real(fd)
        if steps:
            steps.pop(0)()
        return facts

    monkeypatch.setattr(os, "fstat", look)
    while steps:
        before = len(steps)
        data = bytearray(end - 50)
        store.read_into(SHARD, 50, [memoryview(data)])
        assert data == pattern(50, end)
        assert store.size(SHARD) >= end
        if len(steps) == before:
            steps.pop(0)()
    assert read(store, SHARD, 50, end - 50) == pattern(50, end)


def test_a_tail_that_comes_a_little_later_is_waited_for(tmp_path, store):
    put(tmp_path, SHARD, pattern(0, BLOCK))
    put(tmp_path, f"{FOLDER}/tail-0-{BLOCK}", pattern(BLOCK, BLOCK + 10))

    def grow():
        time.sleep(0.1)
        put(tmp_path, f"{FOLDER}/tail-0-{BLOCK}", pattern(BLOCK, BLOCK + 200))

    thread = threading.Thread(target=grow)
    thread.start()
    assert read(store, SHARD, 10, BLOCK + 190) == pattern(10, BLOCK + 200)
    thread.join()


def test_what_is_not_there_is_an_integrity_error_and_soon(tmp_path, store):
    put(tmp_path, f"{FOLDER}/c/1/0/0", pattern(0, BLOCK))
    put(tmp_path, "records/0.arrow", pattern(0, 100))
    start = time.monotonic()
    for key, offset, length, got in [(SHARD, 0, 10, 0), (f"{FOLDER}/c/1/0/0", 90, BLOCK, BLOCK - 90),
                                     (f"{FOLDER}/c/1/0/0", 2 * BLOCK, 5, 0), ("records/0.arrow", 90, 20, 10),
                                     ("units/ab/none", 0, 1, 0), (SHARD, 0, 100_000, 0),
                                     ("records/0.arrow/x", 0, 1, 0)]:  # fmt: skip
        for ask in (lambda: store.borrow(key, offset, length),  # noqa: B023
                    lambda: store.read_into(key, offset, [memoryview(bytearray(length))])):  # fmt: skip  # noqa: B023
            with pytest.raises(
                IntegrityError, match=rf"{key}: bytes \[{offset}, {offset + length}\).*spool verify"
            ) as e:
                ask()
            assert e.value.details == {"key": key, "offset": offset, "expected": length, "got": got}
    for key in (SHARD, "units/ab/none"):
        for ask in (store.size, store.read):
            with pytest.raises(IntegrityError):
                ask(key)
    assert time.monotonic() - start < hot.PATIENCE_S


def test_a_tail_that_stays_short_is_given_up(tmp_path, store, monkeypatch):
    monkeypatch.setattr(hot, "PATIENCE_S", 0.2)
    put(tmp_path, f"{FOLDER}/tail-0-0", pattern(0, 50))
    start = time.monotonic()
    with pytest.raises(IntegrityError):
        read(store, SHARD, 0, 51)
    assert 0.2 <= time.monotonic() - start < 2
    assert read(store, SHARD, 0, 50) == pattern(0, 50)
    assert store.size(SHARD) == 50


def write_for_ever(root, seed, slow):
    """Append to a shard as a writer does; count in a file what is committed."""
    rng, folder = random.Random(seed), f"{root}/{FOLDER}"
    os.makedirs(os.path.dirname(f"{root}/{SHARD}"))
    count = os.open(f"{root}/committed", os.O_WRONLY | os.O_CREAT)
    size = end = 0
    shard, path = None, f"{folder}/{tail_name(0, 0)}"
    tail = os.open(path, os.O_WRONLY | os.O_CREAT)
    while True:
        n = rng.choice([1, 100, 3000, 20000])
        os.pwrite(tail, pattern(end, end + n), end - size)
        end += n
        if end - size > 64 * 1024:
            cut = end - end % BLOCK
            next_path = f"{folder}/{tail_name(0, cut)}"
            next_tail = os.open(next_path, os.O_WRONLY | os.O_CREAT)
            os.pwrite(next_tail, pattern(cut, end), 0)
            if shard is None:
                shard = os.open(f"{root}/{SHARD}", os.O_WRONLY | os.O_CREAT)
            step = BLOCK if slow else cut - size
            for at in range(size, cut, step):
                os.pwrite(shard, pattern(at, min(at + step, cut)), at)
                if slow:
                    time.sleep(0.0005)
            os.close(tail)
            os.unlink(path)
            size, tail, path = cut, next_tail, next_path
        os.pwrite(count, struct.pack("<Q", end), 0)


@pytest.mark.parametrize(("slow", "seconds"), [(False, 2.0), (True, 1.0), (True, 0.503), (True, 0.211), (True, 0.347)])
def test_readers_of_a_living_and_then_killed_writer_see_all_that_was_committed(tmp_path, slow, seconds):
    writer = os.fork()
    if writer == 0:
        signal.alarm(60)
        try:
            write_for_ever(str(tmp_path), int(seconds * 1000), slow)
        finally:
            os._exit(1)
    killed = threading.Event()
    store, n_reads, failures = HotStore(str(tmp_path), page_cache_bytes=1 << 20), [0, 0], []

    def committed():
        try:
            data = (tmp_path / "committed").read_bytes()
        except FileNotFoundError:
            return 0
        return struct.unpack("<Q", data)[0] if len(data) == 8 else 0

    def check(rng, end):
        length = min(end, rng.choice([1, 50, 5000, 70_000, 300_000]))
        start = end - length if rng.random() < 0.6 else rng.randrange(end - length + 1)
        if rng.random() < 0.5:
            with store.borrow(SHARD, start, length) as view:
                assert view == pattern(start, start + length)
        else:
            parts = [memoryview(bytearray(length // 2)), memoryview(bytearray(length - length // 2))]
            store.read_into(SHARD, start, parts)
            assert b"".join(parts) == pattern(start, start + length)

    def follow(number):
        rng = random.Random(number)
        try:
            while not killed.is_set():
                end = committed()
                if end:
                    check(rng, end)
                    assert store.size(SHARD) >= end
                    n_reads[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while not committed():
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(writer, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
    killed.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert min(n_reads) > 5
    end, rng = committed(), random.Random(9)
    for _ in range(300):
        check(rng, end)
    assert store.size(SHARD) >= end
    store.close()


# --- the hot store: descriptors, threads, forks


def open_under(root):
    """Targets of this process's descriptors under ``root``."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(str(root)):
            targets.append(target)
    return targets


def test_open_files_are_bounded_and_the_last_used_stay(tmp_path, monkeypatch):
    for i in range(40):
        put(tmp_path, f"units/ab/{i}", pattern(i, i + (128 << 10)))
    store = HotStore(str(tmp_path), max_open_files=8)
    for i in range(40):
        assert read(store, f"units/ab/{i}", 0, 128 << 10) == pattern(i, i + (128 << 10))
        read(store, "units/ab/0", 5, 10)
        assert len(open_under(tmp_path)) <= 8
    calls = Calls(monkeypatch, "open")
    read(store, "units/ab/0", 5, 10)
    assert calls.log == []
    store.close()
    assert open_under(tmp_path) == []
    assert read(store, "units/ab/1", 0, 10) == pattern(1, 11)


def test_files_that_were_unlinked_or_replaced_are_let_go(tmp_path, store):
    path = put(tmp_path, "units/ab/x", b"first version")
    assert read(store, "units/ab/x", 0, 5) == b"first"
    write_atomic(path, b"second, longer version")
    assert store.read("units/ab/x") == b"second, longer version"
    assert open_under(tmp_path) == [path]
    os.unlink(path)
    with pytest.raises(IntegrityError):
        read(store, "units/ab/x", 0, 5)
    assert open_under(tmp_path) == []


def test_a_store_that_runs_out_of_descriptors_gives_its_own_back(tmp_path):
    for i in range(30):
        put(tmp_path, f"units/ab/{i}", pattern(i, i + 1000))
    code = """
import os, resource, sys
from spool.stores.hot import HotStore
store = HotStore(sys.argv[1])
for i in range(29):
    store.read_into(f"units/ab/{i}", 0, [memoryview(bytearray(1000))])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
sys.stdout.buffer.write(store.read("units/ab/29"))
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True)
    assert run.stdout == pattern(29, 1029)


def test_many_threads_share_few_descriptors(tmp_path):
    for pack in range(6):
        put(tmp_path, f"{FOLDER}/c/{pack}/0/0", pattern(pack, pack + (1 << 20) + pack))
    store, failures = HotStore(str(tmp_path), max_open_files=4, page_cache_bytes=1 << 19), []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(150):
                pack, length = rng.randrange(6), rng.choice([10, 5000, 70_000, 300_000])
                offset = rng.randrange((1 << 20) - length)
                data = read(store, f"{FOLDER}/c/{pack}/0/0", offset, length)
                assert data == pattern(pack + offset, pack + offset + length)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        store.close()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert failures == []
    store.close()
    assert open_under(tmp_path) == []


def in_child(work):
    """Run ``work`` in a forked child; return its exit status (0 where it returned)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_opens_its_own_files_even_if_a_lock_was_held(tmp_path, store):
    put(tmp_path, SHARD, pattern(0, 1 << 20))
    read(store, SHARD, 0, 200_000)
    parents = open_under(tmp_path)
    assert len(parents) == 2

    def child():
        assert open_under(tmp_path) == []
        assert read(store, SHARD, 7, 200_000) == pattern(7, 200_007)
        store.close()

    with store._files._lock, store._pool._lock:
        assert in_child(child) == 0
    assert open_under(tmp_path) == parents
    assert read(store, SHARD, 9, 200_000) == pattern(9, 200_009)


def test_a_fork_inside_a_loan_leaves_both_sides_their_bytes(tmp_path, store):
    put(tmp_path, SHARD, pattern(0, 2 << 20))
    with store.borrow(SHARD, 5, 300_000) as view:

        def child():
            assert read(store, SHARD, 400_000, 300_000) == pattern(400_000, 700_000)
            assert view == pattern(5, 300_005)

        assert in_child(child) == 0
        assert view == pattern(5, 300_005)


def test_a_file_that_is_replaced_is_read_as_it_was_or_as_it_is(tmp_path):
    versions = [b"a" * 40, b"b" * 5000, b"c" * 300]
    path, store, done, failures = tmp_path / "zarr.json", HotStore(str(tmp_path)), [False], []
    write_atomic(str(path), versions[0], sync=False)

    def replace():
        for n in range(3000):
            write_atomic(str(path), versions[n % 3], sync=False)
        done[0] = True

    thread = threading.Thread(target=replace)
    thread.start()
    n_reads = 0
    while not done[0]:
        got, n_reads = store.read("zarr.json"), n_reads + 1
        if got not in versions:
            failures.append(got)
    thread.join()
    assert failures == [] and n_reads > 100
    with pytest.raises(IntegrityError, match="gone"):
        store.read("gone.json")
