"""Memory of a micro-batch that several processes map: a memfd, which has no name and goes when its last holder does."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from spool.errors import CapacityError
from spool.sizes import format_size

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

CLOSE_S = 10.0
_UNLIMITED = 1 << 60
"""Control groups of version 1 say a number like this where there is no limit."""


class Room(NamedTuple):
    """Memory that may still be taken.

    Attributes:
        n_bytes: how much.
        place: who says so.
    """

    n_bytes: int
    place: str


class Memfds:
    """Micro-batches in memfds: the `spool.train.delivery.transport.Memory` of processes on one machine."""

    def room(self, need_bytes: int) -> Room:  # noqa: ARG002 - what the kernel says is sure
        """Return what is free."""
        return room()

    @contextmanager
    def made(self, n_bytes: int, fill: Callable[[Any], None]) -> Iterator[int]:
        """Yield a memfd, filled and sealed."""
        fd = create(n_bytes)
        try:
            into = writing(fd, n_bytes)
            fill(into)
            _close(into)
            seal(fd)
            yield fd
        finally:
            os.close(fd)


def create(n_bytes: int) -> int:
    """Return a memfd of ``n_bytes``, all of them there: writing to it later does not fail.

    Raises:
        CapacityError: the machine has not so much; says how much there is.
    """
    if n_bytes > (found := room()).n_bytes:
        raise too_little(n_bytes, found)  # to try would have the kernel kill for want of memory
    fd = os.memfd_create("spool-micro-batch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, n_bytes)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise too_little(n_bytes, room()) from error
        raise CapacityError(
            f"a micro-batch of {format_size(n_bytes)} cannot be made: {error.strerror}; it counts as a file "
            "(ulimit -f): raise that, or plan smaller micro-batches (max_tokens=)",
            need=n_bytes,
        ) from error  # fmt: skip
    return fd


def writing(fd: int, n_bytes: int) -> mmap.mmap:
    """Return a mapping of a memfd to fill it; it has to be closed before `seal`, with all that was made of it gone."""
    return _map(fd, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def seal(fd: int) -> None:
    """Let nobody change a memfd any more, nor its size: who maps it can neither see changes nor be cut off."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def reading(fd: int, n_bytes: int) -> mmap.mmap:
    """Return a private mapping of a memfd: pages are shared with all that map it, until this process writes to one."""
    return _map(fd, n_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _map(fd: int, n_bytes: int, **how: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, n_bytes, **how)
    except OSError as error:
        limits = f"this process ({error.strerror}; its limits, ulimit -v and -n)"
        raise too_little(n_bytes, Room(_addresses(), limits)) from error


def _close(into: mmap.mmap) -> None:
    """Close a mapping that was filled: threads that read into it hold their views a moment longer than the read."""
    deadline = time.monotonic() + CLOSE_S
    while True:
        try:
            return into.close()
        except BufferError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.0005)


def private(n_bytes: int) -> mmap.mmap:
    """Return memory of this process alone.

    Raises:
        CapacityError: there is not so much; says how much there is.
    """
    if n_bytes > (found := room()).n_bytes:
        raise too_little(n_bytes, found)
    return _map(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def room() -> Room:
    """Return how much memory this process may still take: the least of what the machine and its groups have free."""
    return min([_of_machine(), *_of_groups()])


def ran_out(error: BaseException, who: str = "the process that reads for this feed") -> CapacityError | None:
    """Return the error for one that says that ``who``, this process, ran out of memory; None for others."""
    thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    if not (thread or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM):
        return None
    found = min(room(), Room(_addresses(), "its address space (ulimit -v)"))
    return CapacityError(
        f"{who} ran out of memory: {error}; {found.place} has "
        f"{format_size(found.n_bytes)} free: raise its limits (ulimit -v, -u), plan smaller micro-batches "
        "(max_tokens=), or name fewer fields=",
        free=found.n_bytes, place=found.place,
    )  # fmt: skip


def _addresses() -> int:
    """Return the bytes that this process may still map."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _UNLIMITED
    return max(limit - int(_read("/proc/self/statm").split()[0]) * mmap.PAGESIZE, 0)


def too_little(n_bytes: int, found: Room, *, why: str = "") -> CapacityError:
    """Return the error for memory that is not there."""
    return CapacityError(
        f"{why or 'a micro-batch'} needs {format_size(n_bytes)} of memory, and {found.place} has "
        f"{format_size(found.n_bytes)} free: plan smaller micro-batches (max_tokens=), name fewer fields=, or lower "
        "depth=",
        need=n_bytes, free=found.n_bytes, place=found.place,
    )  # fmt: skip


def _of_machine() -> Room:
    with open("/proc/meminfo", encoding="ascii") as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return Room(kib << 10, "this machine")


def _of_groups() -> Iterator[Room]:
    """Yield what each control group around this process has free; page cache that can go counts as free."""
    with suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "":
                yield from _of_group("/sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _of_group("/sys/fs/cgroup/memory", path, *names)


def _of_group(root: str, path: str, limit: str, usage: str, idle: str) -> Iterator[Room]:
    """Yield for a group and those around it; one that a container does not see is passed over."""
    while True:
        folder = root + path.rstrip("/")
        with suppress(OSError, ValueError, KeyError):
            most = int(_read(f"{folder}/{limit}"))
            stat = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
            if most < _UNLIMITED:
                taken = int(_read(f"{folder}/{usage}")) - int(stat[idle])
                yield Room(max(most - taken, 0), f"control group {path or '/'}")
        if not path.strip("/"):
            return
        path = os.path.dirname(path)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()
