"""Locks between processes: a forked child never holds one, and whoever only looks does not hide a free one."""

from __future__ import annotations

import fcntl
import os
import signal
import time

import pytest
from writing import folder, stream

from spool import locks
from spool.catalog import files
from spool.errors import StorageError
from spool.logs import streams
from spool.write import recover as recovery
from spool.write import stream as writing


class Child:
    """A forked process, as soon as its own code runs; it sleeps until it is told to end."""

    def __init__(self):
        runs, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(30)
            os.write(said, b".")
            time.sleep(60)
            os._exit(0)
        os.read(runs, 1)
        os.close(runs)
        os.close(said)

    def end(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_lock_is_taken_once_and_let_go_of(tmp_path):
    path = str(tmp_path / "lock")
    assert not locks.is_taken(path)
    fd = locks.take(path, os.O_RDWR | os.O_CREAT)
    assert locks.is_taken(path)
    assert locks.take(path) is None
    locks.release(fd)
    locks.release(fd)
    assert not locks.is_taken(path)
    fd = locks.wait_for(path)
    assert locks.is_taken(path)
    locks.release(fd)


def test_a_child_holds_no_lock_and_closes_nothing_else(tmp_path):
    path = str(tmp_path / "lock")
    fd = locks.take(path, os.O_RDWR | os.O_CREAT)
    child = Child()
    locks.release(fd)
    try:
        assert not locks.is_taken(path)
    finally:
        child.end()
    fd = locks.take(path)
    pid = os.fork()
    if pid == 0:
        other = os.open(os.devnull, os.O_RDONLY)
        locks.release(fd)  # closed already; the number may be another file's by now
        os._exit(0 if os.fstat(other) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert locks.is_taken(path), "a child does not unlock what its parent holds"
    locks.release(fd)


def test_a_fork_while_a_stream_is_being_made_does_not_keep_it_alive(tmp_path, monkeypatch):
    children = []
    made = writing.make_folder

    def make_folder(*arguments):
        found = made(*arguments)
        children.append(Child())
        return found

    monkeypatch.setattr(writing, "make_folder", make_folder)
    writer = stream(tmp_path)
    try:
        assert streams.is_live(str(tmp_path), writer.name)
        writer.close()
        assert not streams.is_live(str(tmp_path), writer.name)
    finally:
        children[0].end()


def test_a_fork_during_recovery_does_not_keep_a_stream_alive(tmp_path, monkeypatch):
    writer = stream(tmp_path)
    writer.close()
    children = []
    recover_stream = recovery._recover_stream

    def recover_one(root, name, *, dry_run):
        children.append(Child())
        return recover_stream(root, name, dry_run=dry_run)

    monkeypatch.setattr(recovery, "_recover_stream", recover_one)
    recovery.recover(str(tmp_path))
    try:
        assert not streams.is_live(str(tmp_path), writer.name)
    finally:
        children[0].end()


def test_a_look_at_a_dead_stream_does_not_hide_it_from_recovery(tmp_path, monkeypatch):
    writer = stream(tmp_path)
    writer.close()
    lock = os.open(f"{folder(tmp_path, writer.name)}/lock", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)  # as `is_live` does for a moment
    found = []
    monkeypatch.setattr(recovery, "_recover_stream", lambda root, name, **_: found.append(name))
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            fcntl.flock(lock, fcntl.LOCK_UN)

    monkeypatch.setattr(locks.time, "sleep", pause)
    recovery.recover(str(tmp_path))
    os.close(lock)
    assert len(pauses) == 2
    assert found == [writer.name]


def test_a_folder_of_streams_that_cannot_be_listed_is_an_error_of_the_storage(tmp_path):
    (tmp_path / "streams").touch()
    with pytest.raises(StorageError, match="cannot list"):
        streams.stream_names(str(tmp_path))


def test_a_catalog_that_cannot_be_looked_at_is_an_error_of_the_storage(tmp_path):
    (tmp_path / "file").touch()
    assert files.identity(str(tmp_path / "none")) is None
    with pytest.raises(StorageError, match="cannot look at"):
        files.identity(str(tmp_path / "file" / "catalog.sqlite"))
