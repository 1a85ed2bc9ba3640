"""The commit log of one pack, as a file."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from spool.formats.frames import LOG_HEADER, find_frame, scan
from spool.stores.local import pwrite_all, sync_dir

_HEAD = struct.Struct("<II")
_INVERTED = 0xFFFFFFFF


def log_path(stream_path: str, pack: int) -> str:
    """Return where the commit log of ``pack`` lies until it is sealed."""
    return f"{stream_path}/records/{pack}.log"


class CommitLog:
    """An open commit log; only the leader of a group writes to it.

    A frame is committed with the write that makes it whole, and may be seen at once. Where it must be durable before
    that, it is written and synced with its checksum inverted first: then no reader takes it for a frame, and `read_log`
    does, once nobody writes any more.

    Attributes:
        end: bytes that hold the header and whole frames.
        n_events: frames.
    """

    def __init__(self, stream_path: str, pack: int, *, sync: bool) -> None:
        """Create the file with its header.

        Raises:
            OSError: it cannot be created; then it is not there.
        """
        path = log_path(stream_path, pack)
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            pwrite_all(self._fd, LOG_HEADER, 0)
            if sync:
                os.fsync(self._fd)
                sync_dir(os.path.dirname(path))
        except BaseException:
            self.close()
            os.unlink(path)
            raise
        self.path = path
        self.end = len(LOG_HEADER)
        self.n_events = 0
        self._sync = sync
        self._writing: Sequence[bytes] = ()

    def prepare(self, frames: Sequence[bytes]) -> None:
        """Write ``frames`` where `append` will, as what is none yet.

        Raises:
            OSError: they are not all written; `cut` what is there.
        """
        pwrite_all(self._open_fd(), b"".join(map(_inverted, frames)), self.end)

    def sync(self) -> None:
        """Make what was prepared durable.

        Raises:
            OSError: it may not be.
        """
        os.fdatasync(self._open_fd())

    def append(self, frames: Sequence[bytes]) -> BaseException | None:
        """Write ``frames`` with one call; return why they are not all written.

        Those that are whole in the file count, whatever broke in: a reader may have seen them. What a signal handler
        raised meanwhile is returned like an error of the system. A part of a frame is cut off, or overwritten.
        """
        fd, done = self._open_fd(), 0
        error: BaseException | None = None
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        self._writing = frames
        try:
            while done < len(data):
                done += os.pwrite(fd, memoryview(data)[done:] if done else data, self.end + done)
        except BaseException as caught:  # noqa: BLE001 - returned
            error = caught
            self.recount()
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self.end)
        else:
            self._count(len(frames))
        return error

    def recount(self) -> None:
        """Count the frames of an `append` that was broken off and that are whole in the file."""
        if self._writing:
            frames, there = self._writing, b""
            with contextlib.suppress(OSError):
                there = os.pread(self._open_fd(), sum(map(len, frames)), self.end)
            self._count(_whole_frames(frames, there))

    def _count(self, n_whole: int) -> None:
        end = self.end + sum(map(len, self._writing[:n_whole]))
        self.n_events, self.end, self._writing = self.n_events + n_whole, end, ()

    def cut(self) -> None:
        """Cut off what is behind the last whole frame, for good: what comes next may be in another file.

        Raises:
            OSError: it may still be there.
        """
        fd = self._open_fd()
        os.ftruncate(fd, self.end)
        if self._sync:
            os.fsync(fd)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open_fd(self) -> int:
        assert self._fd is not None, "the log is closed"
        return self._fd


def _inverted(frame: bytes) -> bytes:
    length, crc = _HEAD.unpack_from(frame)
    return _HEAD.pack(length, crc ^ _INVERTED) + frame[_HEAD.size :]


def _whole_frames(frames: Sequence[bytes], there: bytes) -> int:
    """Return how many of ``frames`` the bytes ``there`` begin with."""
    offset = 0
    for number, frame in enumerate(frames):
        if there[offset : offset + len(frame)] != frame:
            return number
        offset += len(frame)
    return len(frames)


class LogContents(NamedTuple):
    """What a commit log holds.

    Attributes:
        payloads: of its whole frames, in order, also of those that were prepared and not yet appended.
        torn_bytes: behind the last one: what a killed writer had not finished.
        damaged_bytes: between whole frames: events that were there once.
    """

    payloads: list[bytes]
    torn_bytes: int
    damaged_bytes: int


def read_log(path: str) -> LogContents:
    """Return everything that can be read of a commit log.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size <= len(LOG_HEADER):
            return LogContents([], 0, 0)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return _parse(buffer)


def _parse(buffer: mmap.mmap) -> LogContents:
    payloads: list[bytes] = []
    offset, damaged = len(LOG_HEADER), 0
    if buffer[:offset] != LOG_HEADER:
        damaged, offset = offset, 0
    while True:
        frames = scan(buffer, offset)
        payloads.extend(frame.payload for frame in frames)
        if frames.stop == "end":
            return LogContents(payloads, 0, damaged)
        prepared = _prepared(buffer, frames.end)
        if prepared is not None:
            payloads.append(prepared)
            offset = frames.end + _HEAD.size + len(prepared)
            continue
        found = find_frame(buffer, frames.end)
        if found is None:
            return LogContents(payloads, len(buffer) - frames.end, damaged)
        damaged, offset = damaged + found - frames.end, found


def _prepared(buffer: mmap.mmap, offset: int) -> bytes | None:
    """Return the payload of the frame at ``offset`` if it was prepared and not yet, or no longer, appended."""
    if len(buffer) - offset <= _HEAD.size:
        return None
    length, crc = _HEAD.unpack_from(buffer, offset)
    start = offset + _HEAD.size
    payload = buffer[start : start + length]
    return payload if length == len(payload) > 0 and crc32c(payload) ^ _INVERTED == crc else None
