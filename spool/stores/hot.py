"""The hot tier's bytes by key, readable while they are being written.

An object is a file, or a shard: what the shard file holds, and behind that its tail. Appending puts whole blocks into
the shard file and the rest into ``tail-<pack>-<size of the shard file>`` in the array's folder; a flush writes the
next tail, then the shard file, then unlinks the old tail. So a reader takes the size of the shard file, reads what
lies below from that same file and the rest from the tail of that size, and where either is not as expected begins
again. A writer may have died between those steps: any tail that begins at or before what is wanted and reaches its
end is as good.

A shard that is not sealed has a size of whole blocks and is read directly from 64 KiB on, past the page cache (which
its writer goes past too); a sealed one ends in its index, at an odd size, and is read directly from 4 MiB on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import weakref
from typing import TYPE_CHECKING

from spool.errors import AbsentError, IntegrityError
from spool.stores.bounce import BouncePool
from spool.stores.descriptors import Descriptors, OpenFile
from spool.stores.local import BLOCK, map_os_error, parse_tail, tail_name, tail_site
from spool.stores.vectors import flat, preadv_all, read_direct, split, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DIRECT_BYTES = 64 << 10
"""Shortest direct read of a shard that is not sealed, and shortest through a pooled buffer."""
DIRECT_SEALED_BYTES = 4 << 20
"""Shortest direct read of a sealed shard."""
PATIENCE_S = 1.0
"""How long a reader follows a shard that is being written before it calls bytes missing."""

_IDLE_BYTES = 64 << 20
_stores: weakref.WeakSet[HotStore] = weakref.WeakSet()


class Borrowed:
    """Bytes of the store on loan: ``with store.borrow(...) as view``.

    The view is read-only and ends with the block. Arrays and slices made of it stay good for as long as they live; to
    let go of them early is to have the memory used again.
    """

    __slots__ = ("_block", "_pool", "_view")

    def __init__(self, view: memoryview, block: memoryview | None, pool: BouncePool) -> None:
        self._view, self._block, self._pool = view, block, pool

    def __enter__(self) -> memoryview:
        return self._view

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BufferError):
            self._view.release()
        if self._block is not None:
            self._pool.give(self._block)
            self._block = None


class HotStore:
    """Bytes at keys under a hot root. Thread-safe; a forked child opens its own files.

    Args:
        root: the hot root.
        page_cache_bytes: what buffered reads may leave in the page cache.
        max_open_files: descriptors kept open between reads.
    """

    def __init__(self, root: str, *, page_cache_bytes: int = 64 << 20, max_open_files: int = 256) -> None:
        self.root = root
        self._files = Descriptors(root, max_open_files=max_open_files, page_cache_bytes=page_cache_bytes)
        self._pool = BouncePool(_IDLE_BYTES)
        _stores.add(self)

    def path(self, key: str) -> str:
        """Return the path of the file (of a shard, without its tail) at ``key``."""
        return f"{self.root}/{key}"

    def close(self) -> None:
        """Let go of files and buffers; a later read opens them again."""
        self._files.clear()
        self._pool.clear()

    def let_go(self, key: str) -> None:
        """Let go of the file at ``key``: it will not be read again soon, or is to be deleted."""
        self._files.let_go(self.path(key))

    def forked(self) -> None:
        """Drop what was open before a fork; in the child, this is called before any of its code runs."""
        self._files.reset()
        self._pool.reset()

    def size(self, key: str) -> int:
        """Return the bytes at ``key``: of a shard, what can be read, tail included.

        Raises:
            IntegrityError: there is nothing.
            StorageError: the file system failed.
        """
        path, site = self.path(key), tail_site(key)
        try:
            for _ in _rounds():
                file, size = self._open(path)
                tails = self._tails(site) if site else []
                if self._open(path)[1] != size:
                    continue
                if file is None and not tails:
                    break
                ends = [start + n for start, tail in tails if start <= size and (n := _length(tail)) is not None]
                if ends or not tails:
                    return max([size, *ends])
        except OSError as error:
            raise map_os_error(error, what="read", path=path) from error
        raise _short(path, key, 0, 1, 0, absent=True)

    def read(self, key: str) -> bytes:
        """Return all bytes at ``key``.

        Raises:
            IntegrityError: there is nothing.
            StorageError: the file system failed.
        """
        path = self.path(key)
        if tail_site(key) is not None:
            data = bytearray(self.size(key))
            self.read_into(key, 0, [memoryview(data)])
            return bytes(data)
        try:
            # size and bytes of one descriptor: a file that is replaced as a whole may have another size by now
            file, size = self._open(path)
            data = bytearray(size)
            got = self._from_file(file, size, 0, size, [memoryview(data)], None) if file and size else 0
        except OSError as error:
            raise map_os_error(error, what="read", path=path) from error
        if file is None or got < size:
            raise _short(path, key, 0, max(size, 1), got, absent=file is None)
        return bytes(data)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, with the bytes from ``offset`` on.

        Args:
            key: a file, or a shard with or without tail.
            offset: of the first byte.
            buffers: writable and C-contiguous, any number; empty ones are skipped.

        Raises:
            IntegrityError: the bytes are not all there; some buffers may have been written.
            StorageError: the file system failed.
        """
        parts = [flat(buffer) for buffer in buffers if buffer.nbytes]
        self._fill(key, offset, sum(map(len, parts)), parts)

    def borrow(self, key: str, offset: int, length: int) -> Borrowed:
        """Return bytes ``[offset, offset + length)`` in memory of the store.

        Returns:
            A context manager that gives a read-only view, valid inside its block.

        Raises:
            IntegrityError: the bytes are not all there.
            StorageError: the file system failed.
        """
        if length < DIRECT_BYTES:
            view, block = memoryview(bytearray(length)), None
        else:
            skew = offset % BLOCK
            block = self._pool.take(whole_blocks(skew + length))
            view = block[skew : skew + length]
        self._fill(key, offset, length, [view], block)
        return Borrowed(view.toreadonly(), block, self._pool)

    def _fill(
        self, key: str, offset: int, length: int, buffers: list[memoryview], block: memoryview | None = None
    ) -> None:
        """Read ``length`` bytes into ``buffers``; ``block``, if given, is the aligned memory that they lie in."""
        if length == 0:
            return
        path, site, got, last_size, file = self.path(key), None, 0, -1, None
        try:
            for _ in _rounds():
                file, size = self._open(path)
                below = min(max(size - offset, 0), length)
                got = self._from_file(file, size, offset, below, buffers, block) if file and below else 0
                if got == length:
                    return
                site = site or tail_site(key)
                if site is None:
                    break
                if got == below and self._from_tails(site, size, offset + got, split(buffers, got)[1]):
                    if self._open(path)[1] == size:
                        return
                    continue  # the shard has grown past the tail, whose file may be another tail by now
                # no tail, and no growth since the last look: nobody is writing this, so waiting will not help
                if size == last_size and not self._tails(site):
                    break
                last_size = size
        except OSError as error:
            raise map_os_error(error, what="read", path=path) from error
        raise _short(path, key, offset, length, got, absent=file is None)

    def _open(self, path: str) -> tuple[OpenFile | None, int]:
        """Return the file at ``path`` and its size; None and 0 where there is none."""
        file = self._files.open(path)
        while file is not None:
            facts = os.fstat(file.fd)
            if facts.st_nlink:
                return file, facts.st_size
            self._files.forget(file)
            file = self._files.open(path)
        return None, 0

    def _from_file(
        self, file: OpenFile, size: int, offset: int, length: int, buffers: list[memoryview], block: memoryview | None
    ) -> int:
        """Read the first ``length`` bytes of ``buffers`` from a file of ``size``; return how many came."""
        sealed = size % BLOCK != 0
        if length >= (DIRECT_SEALED_BYTES if sealed else DIRECT_BYTES):
            fd = self._files.direct_fd(file)
            try:
                if fd is not None and block is not None:
                    return read_direct(fd, block, offset, length)
                if fd is not None:
                    return self._scatter_direct(fd, offset, split(buffers, length)[0])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                file.refuse_direct(self.root)
        got = preadv_all(file.fd, split(buffers, length)[0], offset)
        self._files.was_read(file, offset, length)
        return got

    def _scatter_direct(self, fd: int, offset: int, buffers: list[memoryview]) -> int:
        """Fill buffers of any alignment by direct reads, a piece at a time; return the bytes that came."""
        total, done = sum(map(len, buffers)), 0
        block = self._pool.take(min(total, DIRECT_SEALED_BYTES) + BLOCK)
        while done < total:
            skew = (offset + done) % BLOCK
            n = min(total - done, len(block) - skew)
            got = read_direct(fd, block, offset + done, n)
            head, buffers = split(buffers, got)
            for part in head:
                part[:] = block[skew : skew + len(part)]
                skew += len(part)
            done += got
            if got < n:
                break
        self._pool.give(block)
        return done

    def _tails(self, site: tuple[str, int]) -> list[tuple[int, str]]:
        """Return ``(first byte, path)`` of the tails of a shard, the last first."""
        folder, pack = f"{self.root}/{site[0]}", site[1]
        try:
            names = self._files.with_descriptors(lambda: os.listdir(folder))
        except FileNotFoundError:
            return []
        parsed = ((parse_tail(name), name) for name in names)
        return sorted(
            ((tail[1], f"{folder}/{name}") for tail, name in parsed if tail and tail[0] == pack), reverse=True
        )

    def _from_tails(self, site: tuple[str, int], size: int, at: int, buffers: list[memoryview]) -> bool:
        """Fill ``buffers`` with the bytes from ``at`` on out of one tail; return whether one had them all."""
        if self._read_tail(f"{self.root}/{site[0]}/{tail_name(site[1], size)}", at - size, buffers):
            return True
        return any(start <= at and self._read_tail(path, at - start, buffers) for start, path in self._tails(site))

    def _read_tail(self, path: str, offset: int, buffers: list[memoryview]) -> bool:
        return self._files.with_descriptors(lambda: _read_tail(path, offset, buffers))


def _read_tail(path: str, offset: int, buffers: list[memoryview]) -> bool:
    """Fill ``buffers`` from one tail; return whether it is there and has all of that."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return preadv_all(fd, buffers, offset) == sum(map(len, buffers))
    finally:
        os.close(fd)


def _length(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _rounds() -> Iterator[None]:
    """Yield at once and then again, after growing pauses, for `PATIENCE_S`."""
    deadline, pause = time.monotonic() + PATIENCE_S, 0.0
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = min(pause + 0.0005, 0.02)


def _short(path: str, key: str, offset: int, expected: int, got: int, *, absent: bool) -> IntegrityError:
    return (AbsentError if absent else IntegrityError)(
        f"{path}: bytes [{offset}, {offset + expected}) were recorded and only {got} of them are there; the file "
        "or its tail was removed or cut: read from the cold tier, or run `spool verify` to see what else is gone",
        key=key,
        offset=offset,
        expected=expected,
        got=got,
    )


def _after_fork() -> None:
    for store in _stores:
        store.forked()


os.register_at_fork(after_in_child=_after_fork)
