"""The commit log of one pack, as a file."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

from spool.formats.frames import LOG_HEADER, find_frame, scan
from spool.stores.local import pwrite_all, sync_dir


def log_path(stream_path: str, pack: int) -> str:
    """Return where the commit log of ``pack`` lies until it is sealed."""
    return f"{stream_path}/records/{pack}.log"


class CommitLog:
    """An open commit log; only the leader of a group writes to it.

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
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
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

    def append(self, frames: Sequence[bytes]) -> tuple[int, OSError | None]:
        """Write ``frames`` with one call; return how many are whole in the file, and why not all.

        The file ends behind the last whole frame even where the write broke off inside one.
        """
        fd = self._open_fd()
        done, error = 0, None
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        try:
            while done < len(data):
                done += os.pwrite(fd, memoryview(data)[done:] if done else data, self.end + done)
        except OSError as caught:
            error = caught
        n_whole = len(frames)
        if error is not None:
            n_whole = _whole_frames(frames, done)
            done = sum(map(len, frames[:n_whole]))
            with contextlib.suppress(OSError):  # the next write goes to the same offset in any case
                os.ftruncate(fd, self.end + done)
        self.end += done
        self.n_events += n_whole
        return n_whole, error

    def sync(self) -> None:
        """Make the frames durable.

        Raises:
            OSError: they may not be.
        """
        os.fdatasync(self._open_fd())

    def cut(self, end: int, n_events: int) -> None:
        """Drop the frames behind ``end``, so that ``n_events`` are left.

        Raises:
            OSError: they are still in the file; what is appended next overwrites them.
        """
        self.end, self.n_events = end, n_events
        os.ftruncate(self._open_fd(), end)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open_fd(self) -> int:
        assert self._fd is not None, "the log is closed"
        return self._fd


def _whole_frames(frames: Sequence[bytes], n_bytes: int) -> int:
    for number, frame in enumerate(frames):
        n_bytes -= len(frame)
        if n_bytes < 0:
            return number
    return len(frames)


class LogContents(NamedTuple):
    """What a commit log holds.

    Attributes:
        payloads: of its whole frames, in order.
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
        found = find_frame(buffer, frames.end)
        if found is None:
            return LogContents(payloads, len(buffer) - frames.end, damaged)
        damaged, offset = damaged + found - frames.end, found
