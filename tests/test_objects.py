"""The bytes of a cold root: one suite over a shared folder, a real S3 server, and fsspec stores."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from objects_workers import die_in_rename, die_in_upload, digest, inherit, pooled, read_and_leave

from spool.errors import CapacityError, ConfigError, IntegrityError, StorageError
from spool.stores import local, remote, s3, shared
from spool.stores.objects import PIECE_BYTES, open_objects
from spool.testing.objects import ObjectsConformance


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    """A put finds the root's folder there, or its file system is not mounted."""
    (tmp_path / "root").mkdir()


class TestSharedFolder(ObjectsConformance):
    @pytest.fixture
    def open_store(self, tmp_path):
        (tmp_path / "a b" / "root").mkdir(parents=True)
        return lambda: open_objects(f"file://{tmp_path}/a%20b/root/")


class TestSharedFolderVerified(ObjectsConformance):
    @pytest.fixture
    def open_store(self, tmp_path):
        return lambda: open_objects(f"file://{tmp_path}/root", verify="always", concurrency=1)


class TestS3(ObjectsConformance):
    @pytest.fixture
    def open_store(self, s3_root):
        return lambda: open_objects(s3_root)


class TestMemory(ObjectsConformance):
    @pytest.fixture
    def open_store(self):
        root = f"memory://{secrets.token_hex(4)}/root"
        return lambda: open_objects(root, verify="always")


class TestFileSystemOfFsspec(ObjectsConformance):
    """A file system of fsspec where a plain write is not atomic."""

    @pytest.fixture
    def open_store(self, tmp_path):
        return lambda: open_objects(f"local://{tmp_path}/root")


# ------------------------------------------------------------------------------------------------ processes


@pytest.fixture(params=["file", "s3"])
def root(request, tmp_path, s3_root):
    return f"file://{tmp_path}/root" if request.param == "file" else s3_root


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_every_kind_read_with_clients_of_their_own(method, s3_root, tmp_path):
    stores = {url: open_objects(url) for url in (s3_root, f"file://{tmp_path}/root")}
    for store in stores.values():
        store.put("k", bytes(range(256)) * 400)
    wanted = [("k", i, 90_000 + i) for i in range(20)]
    expected = [digest(store, wanted) for store in stores.values()]
    # a forked child inherits the open stores, as a data loader's worker does; the others open theirs
    inherited = stores if method == "fork" else {}
    with multiprocessing.get_context(method).Pool(2, inherit, (inherited, dict(os.environ))) as pool:
        found = pool.map(pooled, [(url, wanted) for url in stores] * 3, chunksize=1)
    assert found == expected * 3
    assert [digest(store, wanted) for store in stores.values()] == expected
    for store in stores.values():
        store.close()


def test_a_forked_child_that_leaves_does_no_harm_to_its_parents_connections(s3_root, caplog):
    store = open_objects(s3_root)
    store.put("k", b"x" * 100_000)
    wanted = [("k", 0, 100_000)] * 16
    store.get_ranges(wanted)
    for close in (True, False):
        pid = os.fork()
        if pid == 0:
            read_and_leave(store, wanted, close=close)
        assert os.waitpid(pid, 0)[1] == 0
        began = time.monotonic()
        assert store.get_ranges(wanted) == [b"x" * 100_000] * 16
        assert time.monotonic() - began < 10
    store.close()
    assert caplog.records == []


@pytest.mark.parametrize("how", ["use", "forget"])
def test_a_forked_child_that_ends_like_any_program_does_no_harm_either(how, s3_root):
    program = Path(__file__).with_name("objects_fork.py")
    done = subprocess.run(
        [sys.executable, program, s3_root, how], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_child_forked_while_others_read_is_not_stuck(s3_root):
    store = open_objects(s3_root)
    store.put("k", b"x" * 100_000)
    done = threading.Event()

    def read():
        while not done.is_set():
            store.get_ranges([("k", 0, 100_000)] * 8)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                read_and_leave(store, [("k", 0, 9)] * 4, close=True)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()
        store.close()


def test_importing_spool_and_help_load_no_client():
    code = (
        "import sys, spool\nfrom spool.cli import main\nsys.argv = ['spool', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "import spool.stores.objects\n"
        "assert not {'fsspec', 's3fs', 'botocore', 'aiohttp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_process_that_forgets_to_close_ends_quietly(s3_root):
    code = (
        "import sys; from spool.stores.objects import open_objects; s = open_objects(sys.argv[1]); s.put('k', b'x')\n"
        "print(s.get_ranges([('k', 0, 1)] * 3))"
    )
    done = subprocess.run([sys.executable, "-c", code, s3_root], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[b'x', b'x', b'x']\n"
    assert done.stderr == ""


# ---------------------------------------------------------------------------------- a put that does not end


def test_a_killed_put_leaves_no_object_and_is_swept(tmp_path):
    url = f"file://{tmp_path}/root"
    store = open_objects(url)
    store.put("a/kept", b"x")
    process = multiprocessing.get_context("spawn").Process(target=die_in_rename, args=(url, "a/b"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    left = [path for path in Path(tmp_path).rglob("*") if path.is_file()]
    assert len(left) == 2
    assert [info.key for info in store.list("")] == ["a/kept"]
    assert store.info("a/b") is None
    assert store.abort_stale_uploads(3600) == 0
    assert store.abort_stale_uploads(0) == 1
    assert [path.name for path in Path(tmp_path).rglob("*") if path.is_file()] == ["kept"]


def test_a_killed_multipart_upload_leaves_no_object_and_is_swept(s3_root, hostile):
    store = open_objects(s3_root)
    hostile.fault("delay", "PUT", part="partNumber=2", n=30)
    process = multiprocessing.get_context("spawn").Process(target=die_in_upload, args=(s3_root, "a/b"))
    process.start()
    deadline = time.monotonic() + 60
    while not hostile.count("PUT", "partNumber=2") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert store.list("") == []
    assert store.info("a/b") is None
    assert store.abort_stale_uploads(3600) == 0
    assert store.abort_stale_uploads(0) == 1
    assert store.abort_stale_uploads(0) == 0
    hostile.heal()
    store.put("a/b", b"x" * (PIECE_BYTES + 1))
    assert store.info("a/b").size == PIECE_BYTES + 1
    store.close()


def test_a_folder_that_refuses_the_write_keeps_what_was_there(tmp_path, monkeypatch):
    store = open_objects(f"file://{tmp_path}/root")
    store.put("a/k", b"old")

    def full(*_args, **_how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local, "pwrite_all", full)
    with pytest.raises(CapacityError, match="a/k"):
        store.put("a/k", b"new and longer")
    monkeypatch.undo()
    assert store.get("a/k") == b"old"
    assert [path.name for path in Path(tmp_path).rglob("*") if path.is_file()] == ["k"]


def test_a_folder_that_stores_other_bytes_is_found_out(tmp_path, monkeypatch):
    writes = local.write_atomic
    monkeypatch.setattr(shared, "write_atomic", lambda path, data, **how: writes(path, bytes(len(data)), **how))
    checked, unchecked = (open_objects(f"file://{tmp_path}/root", verify=verify) for verify in ("always", "size"))
    with pytest.raises(IntegrityError, match="a/k"):
        checked.put("a/k", b"data")
    assert checked.info("a/k") is None
    unchecked.put("a/k", b"data")
    monkeypatch.setattr(shared, "write_atomic", lambda path, data, **how: writes(path, bytes(data)[1:], **how))
    with pytest.raises(IntegrityError, match="a/k"):
        unchecked.put("a/k", b"data")
    assert unchecked.get("a/k") == bytes(4)  # as it was
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(StorageError, match="is its file system mounted"):
        unchecked.put("a/k", b"data")
    assert not (tmp_path / "root").exists()


def test_a_put_into_a_folder_comes_in_the_safe_order(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)

        def traced(*args, real=real, name=name):
            calls.append((name, os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else args[1]))
            return real(*args)

        monkeypatch.setattr(os, name, traced)
    open_objects(f"file://{tmp_path}/root").put("a/k", b"data")
    folder = f"{tmp_path}/root/a"
    assert calls[0] == ("fsync", f"{tmp_path}/root")
    assert [name for name, _ in calls[1:]] == ["fsync", "rename", "fsync"]
    assert calls[1][1].startswith(f"{folder}/.k.")
    assert calls[2:] == [("rename", f"{folder}/k"), ("fsync", folder)]


def test_links_and_odd_files_are_no_objects(tmp_path):
    store = open_objects(f"file://{tmp_path}/root")
    store.put("a/k", b"x")
    os.symlink("k", tmp_path / "root/a/link")
    os.mkfifo(tmp_path / "root/a/pipe")
    (tmp_path / "root/a/.nfs0001").write_bytes(b"x")
    assert [info.key for info in store.list("")] == ["a/k"]
    store.delete(["a/k"])
    assert (tmp_path / "root/a").is_dir()


# ------------------------------------------------------------------------------------------- more than one page


def test_listings_deletes_and_sweeps_of_many_pages(s3_root, monkeypatch):
    call = s3.S3Wire._call

    def small_pages(self, timeout_s, method, **arguments):
        arguments |= {"list_objects_v2": {"MaxKeys": 3}, "list_multipart_uploads": {"MaxUploads": 1}}.get(method, {})
        calls.append(method)
        return call(self, timeout_s, method, **arguments)

    calls = []
    monkeypatch.setattr(s3.S3Wire, "_call", small_pages)
    monkeypatch.setattr(remote, "_MOST_KEYS", 4)
    store = open_objects(s3_root)
    keys = [f"p/{i:02}" for i in range(10)]
    for key in keys:
        store.put(key, b"x")
    assert [info.key for info in store.list("p/")] == keys
    assert calls.count("list_objects_v2") == 4
    store.delete(keys)
    assert calls.count("delete_objects") == 3
    assert store.list("") == []
    for i in range(3):
        store._wire.begin(f"p/{i}", 10)
    assert store.abort_stale_uploads(0) == 3
    assert store.abort_stale_uploads(0) == 0
    store.close()


def test_a_delete_that_is_refused_for_one_key_says_so(s3_root, monkeypatch):
    store = open_objects(s3_root)
    answer = {"Errors": [{"Key": "x", "Code": "AccessDenied", "Message": "no"}]}
    monkeypatch.setattr(s3.S3Wire, "_call", lambda *_, **__: answer)
    with pytest.raises(StorageError, match=r"AccessDenied.*credentials"):
        store.delete(["k"])
    answer["Errors"][0]["Code"] = "NoSuchKey"
    store.delete(["k"])


# ---------------------------------------------------------------------------------------------- URLs and keys


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAEXAMPLE:sEcrEt@bucket/x",
        "s3://AKIAEXAMPLE:sEc/rEt/t@bucket/x",
        "s3://AKIAEXAMPLE@bucket",
        "s3://AKIAEXAMPLE:sEcrEt",
        "https://AKIAEXAMPLE:sEcrEt@host:9000/x",
        "sftp://AKIAEXAMPLE:sEcrEt@host/x",
        "simplecache::s3://AKIAEXAMPLE:sEcrEt@bucket/x",
        "file://AKIAEXAMPLE:sEcrEt@host/x",
        "s3://bucket/x?key=AKIAEXAMPLE&secret=sEcrEt",
        "abfs://bucket/x#sEcrEt=AKIAEXAMPLE",
    ],
)
def test_a_url_with_credentials_is_refused_without_showing_them(url):
    with pytest.raises(ConfigError) as caught:
        open_objects(url)
    shown = f"{caught.value!r} {caught.value.details}"
    assert not any(secret in shown for secret in ("sEc", "rEt", "AKIA"))


@pytest.mark.parametrize(
    "url", ["bucket/x", "/tmp/x", "file://host/x", "file:///", "file://", "s3://", "s3:///x", "nothing://x/y", "://x"]
)
def test_a_url_that_names_nothing_is_refused(url):
    with pytest.raises(ConfigError):
        open_objects(url)


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"deadline_s": 0}, {"verify": "maybe"}])
def test_options_are_checked(options, tmp_path):
    with pytest.raises(ConfigError):
        open_objects(f"file://{tmp_path}", **options)


def test_a_user_or_a_port_is_no_credential():
    for url in ("sftp://user@host/x", "hdfs://host:8020/x@2"):
        try:
            open_objects(url)
        except ConfigError as error:
            assert "installed" in str(error)


# ------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", None])
def test_endpoint_and_keys_come_from_the_standard_variables_and_files(variable, s3_server, s3_root, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    if variable:
        env |= s3_server.environment()
        env[variable] = env.pop("AWS_ENDPOINT_URL")
    else:
        (tmp_path / "config").write_text(f"[profile p]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint}\n")
        (tmp_path / "credentials").write_text(
            f"[p]\naws_access_key_id = {s3_server.key}\naws_secret_access_key = {s3_server.secret}\n"
        )
        env |= {"AWS_CONFIG_FILE": f"{tmp_path}/config", "AWS_SHARED_CREDENTIALS_FILE": f"{tmp_path}/credentials"}
        env |= {"AWS_PROFILE": "p", "AWS_EC2_METADATA_DISABLED": "true"}
    code = "import sys; from spool.stores.objects import open_objects; open_objects(sys.argv[1]).put('k', b'x')"
    subprocess.run([sys.executable, "-c", code, s3_root], check=True, env=env, capture_output=True)
    assert open_objects(s3_root).get("k") == b"x"


def test_no_credentials_say_so_at_once(s3_root, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/none")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/none")
    store = open_objects(s3_root)
    with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID"):
        store.put("k", b"x")
    store.close()


def test_requests_are_observed(root):
    seen = []
    store = open_objects(root, observer=lambda *request: seen.append(request))
    store.put("a/k", b"12345")
    looked = [] if root.startswith("file:") else [("head", "a/k", 0)]
    assert [one[:3] for one in seen] == [("put", "a/k", 5), *looked]
    seen.clear()
    store.get_ranges([("a/k", 1, 3), ("a/k", 2, 2)])
    store.list("a/")
    store.delete(["a/k"])
    assert [one[:3] for one in seen] == [("get", "a/k", 2), ("list", "a/", 0), ("delete", "a/k", 0)]
    assert all(0 <= seconds < 60 for *_, seconds in seen)
    store.close()


def test_writers_of_one_object_at_once_do_not_take_the_folder_for_away(tmp_path):
    """As nodes that bring the same unit: each finds the other's file, and the same bytes in it."""
    shared.SharedFolder(str(tmp_path)).create("spool.json", b"{}")
    gate = threading.Barrier(3)

    def put(_):
        folder = shared.SharedFolder(str(tmp_path))
        assert folder.get("spool.json") == b"{}"
        for number in range(60):
            gate.wait(60)
            folder.put(f"units/ab/{number}", b"x" * 100_000)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(put, range(3))) == [None] * 3
