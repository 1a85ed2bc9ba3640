"""Open files of a hot root: a bounded cache of descriptors, and what their buffered reads leave in the page cache."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from spool.stores.local import BLOCK, notice_buffered, open_direct

WINDOW_BYTES = 256 << 10
"""The page cache is accounted in windows of this size: one that is read again and again counts once."""

SWEEP_S = 1.0
"""Between two looks for files that were deleted: their bytes stay on the disk for as long as one is open."""

_PAUSES_S = (0.0, 0.002, 0.01, 0.05, 0.2)

T = TypeVar("T")


class OpenFile:
    """A file opened for reading; its descriptors close with the last reference to it.

    Attributes:
        path: where it was found.
        fd: the descriptor for buffered reads.
    """

    __slots__ = ("_direct", "_refused", "fd", "path")

    def __init__(self, path: str) -> None:
        self._direct = -1
        self._refused = False
        self.path = path
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # without read-ahead a read leaves no more in the page cache than it asked for
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def direct_fd(self, root: str) -> int | None:
        """Return a descriptor of the same file for direct reads, or None where they are refused."""
        if self._direct < 0 and not self._refused:
            # through /proc it is this very file, even where another one has its name by now
            self._direct, direct = open_direct(f"/proc/self/fd/{self.fd}", os.O_RDONLY, root=root)
            self._refused = not direct
        return None if self._refused else self._direct

    def refuse_direct(self, root: str) -> None:
        """Remember that direct reads fail here although opening the file for them did not."""
        self._refused = True
        notice_buffered(root)

    def is_deleted(self) -> bool:
        """Whether nothing but this descriptor keeps the file."""
        return os.fstat(self.fd).st_nlink == 0

    def drop_pages(self, offset: int = 0, length: int = 0) -> None:
        """Let the kernel forget the pages of a range; length 0 means to the end."""
        first = offset - offset % BLOCK
        n_bytes = -(-(offset + length - first) // BLOCK) * BLOCK if length else 0
        os.posix_fadvise(self.fd, first, n_bytes, os.POSIX_FADV_DONTNEED)

    def __del__(self) -> None:
        for fd in (self.fd, self._direct):
            if fd >= 0:
                os.close(fd)


class Descriptors:
    """A bounded, thread-safe, least-recently-used cache of open files.

    Args:
        root: the hot root, for the notice where direct reads are refused.
        max_open_files: descriptors kept, at most half of what the process may have; a file takes up to two. Files in
            use outlive their place here.
        page_cache_bytes: what buffered reads may leave behind before what was read longest ago is dropped.
    """

    def __init__(self, root: str, *, max_open_files: int, page_cache_bytes: int) -> None:
        self._root = root
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most != resource.RLIM_INFINITY:
            max_open_files = min(max_open_files, most // 2)
        self._max_files = max(1, max_open_files // 2)
        self._max_windows = page_cache_bytes // WINDOW_BYTES
        self.reset()

    def reset(self) -> None:
        """Forget everything, locks included: what a forked child does before it reads."""
        self._lock = threading.Lock()
        self._files: dict[str, OpenFile] = {}
        self._windows: dict[tuple[str, int], None] = {}
        self._is_watched = False

    def clear(self) -> None:
        """Let go of all files and the pages that were read of them."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.drop_pages()

    def open(self, path: str) -> OpenFile | None:
        """Return the open file at ``path``, or None where there is none.

        Raises:
            OSError: it cannot be opened.
        """
        with self._lock:
            file = self._files.pop(path, None)
            if file is not None:
                self._files[path] = file
                return file
        try:
            file = self._open(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with self._lock:
            file = self._files.setdefault(path, file)
            self._watch()
            surplus = [self._files.pop(next(iter(self._files))) for _ in range(len(self._files) - self._max_files)]
        for old in surplus:
            old.drop_pages()
        return file

    def _watch(self) -> None:
        """Have deleted files noticed while any are open, whether anybody reads or not; under the lock."""
        if not self._is_watched:
            watch = threading.Thread(target=_sweep_again, args=(weakref.ref(self),), name="spool-sweep", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and what is open with it
                watch.start()
                self._is_watched = True

    def sweep(self) -> bool:
        """Let go of files that were deleted meanwhile; return whether any are left, else nobody looks any more."""
        with self._lock:
            files = list(self._files.values())
        for file in files:
            if file.is_deleted():
                self.forget(file)
        with self._lock:
            self._is_watched = bool(self._files)
            return self._is_watched

    def let_go(self, path: str) -> None:
        """Let go of the file that is kept for ``path``, and of the pages that were read of it."""
        with self._lock:
            file = self._files.pop(path, None)
        if file is not None:
            file.drop_pages()

    def _open(self, path: str) -> OpenFile:
        return self.with_descriptors(lambda: OpenFile(path))

    def with_descriptors(self, call: Callable[[], T]) -> T:
        """Call what opens files; where the process has no descriptors left, give up the kept ones and call again.

        Raises:
            OSError: of the call; also where others hold all descriptors.
        """
        for pause_s in _PAUSES_S:
            try:
                return call()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
            self.clear()
            time.sleep(pause_s)
        return call()

    def forget(self, file: OpenFile) -> None:
        """Let go of ``file`` if it is still what is kept for its path."""
        with self._lock:
            if self._files.get(file.path) is file:
                del self._files[file.path]

    def direct_fd(self, file: OpenFile) -> int | None:
        """Return the descriptor of ``file`` for direct reads, or None where there is none to be had."""
        with self._lock:
            try:
                return file.direct_fd(self._root)
            except OSError:
                # no more descriptors, or no /proc: a buffered read works all the same
                return None

    def was_read(self, file: OpenFile, offset: int, length: int) -> None:
        """Note a buffered read; drop the windows that were read longest ago beyond the limit."""
        surplus: list[tuple[OpenFile | None, int]] = []
        with self._lock:
            # the pages of a file that lost its place were dropped then, so nothing would drop these later
            known = self._files.get(file.path) is file
            for window in range(offset // WINDOW_BYTES, (offset + length - 1) // WINDOW_BYTES + 1):
                if known:
                    self._windows.pop((file.path, window), None)
                    self._windows[file.path, window] = None
                else:
                    surplus.append((file, window))
            while len(self._windows) > self._max_windows:
                path, window = next(iter(self._windows))
                del self._windows[path, window]
                surplus.append((self._files.get(path), window))
        for old, window in surplus:
            if old is not None:
                old.drop_pages(window * WINDOW_BYTES, WINDOW_BYTES)


def _sweep_again(of: weakref.ref[Descriptors]) -> None:
    """Sweep now and then until nothing is open, or nobody has the cache any more."""
    while True:
        time.sleep(SWEEP_S)
        cache = of()
        if cache is None or not cache.sweep():
            return
        del cache
