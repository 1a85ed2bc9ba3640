"""Files of a local file system: atomic replacement, direct I/O, aligned memory, the names of tails.

Writers and readers share the two rules kept here: how a shard's tail is found (`tail_site`, `tail_name`), and that
direct I/O moves whole blocks of `BLOCK` bytes and falls back to buffered where the file system refuses it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import resource
import secrets
from collections.abc import Callable

from spool.errors import NO_ROOM, CapacityError, ConfigError, NotFoundError, SpoolError, StorageError

log = logging.getLogger("spool.stores")

BLOCK = 4096
"""Direct I/O: offsets, lengths and addresses are multiples of this; also the unit in which a shard grows."""

_SHARD = re.compile(r"(streams/[^/]+/[^/]+)/c/(\d+)(?:/0)*")
_TAIL = re.compile(r"tail-(\d+)-(\d+)")
_HUGE_BYTES = 2 << 20
_NOT_LOCAL = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "orangefs",
     "pvfs2", "ocfs2", "gfs2", "virtiofs", "vboxsf", "davfs", "fuse", "fuseblk"}
)  # fmt: skip
_noticed: set[str] = set()


def notice_buffered(root: str) -> None:
    """Log, once for each hot root, that its file system refuses direct I/O."""
    if root not in _noticed:
        _noticed.add(root)
        log.warning("%s: the file system refuses direct I/O; files there go through the page cache", root)


def tail_site(key: str) -> tuple[str, int] | None:
    """Return the folder of the tails of the shard at ``key`` and its pack, or None where ``key`` is a plain file."""
    match = _SHARD.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def tail_name(pack: int, size: int) -> str:
    """Return the name of the file that holds the bytes of shard ``pack`` from ``size``, the shard file's size, on."""
    return f"tail-{pack}-{size}"


def spare_prefix(pack: int) -> str:
    """Return how the names of files begin that are kept to become tails of shard ``pack``; no reader opens them."""
    return f"spare-{pack}-"


def parse_tail(name: str) -> tuple[int, int] | None:
    """Return ``(pack, size)`` of a tail's file name, or None where it is not one."""
    match = _TAIL.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def make_dirs(root: str, path: str, *, dir_fd: int | None = None) -> None:
    """Make a folder and those that lead to it from ``root``. That is not made: it may have been moved or removed.

    Args:
        root: where to begin.
        path: the folder.
        dir_fd: of the folder that the paths are relative to; they are as they stand where None.

    Raises:
        OSError: one cannot be made.
    """
    made = root
    for part in os.path.relpath(path, root).split(os.sep):
        made = f"{made}/{part}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(made, dir_fd=dir_fd)


def aligned_buffer(n_bytes: int) -> memoryview:
    """Return ``n_bytes`` of zeroed, writable, page-aligned memory of its own; it is unmapped with its last view."""
    # private, so that a forked child gets a copy and never writes into a buffer its parent hands to the kernel
    memory = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if n_bytes >= _HUGE_BYTES:  # direct I/O pins pages one by one: let there be few
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:n_bytes]


def map_os_error(error: OSError, *, what: str, path: str) -> SpoolError:
    """Return the Spool error for ``error``: no room, not found, or the storage failed.

    Args:
        error: what the system call raised.
        what: the operation, as in ``"cannot {what} {path}"``.
        path: the file.
    """
    text = f"cannot {what} {path}: {error.strerror or error}"
    details = {"path": path, "errno": errno.errorcode.get(error.errno or 0, str(error.errno))}
    if error.errno in NO_ROOM:
        return CapacityError(f"{text}; free space there, or use a larger disk", **details)
    if error.errno == errno.ENOENT:
        return NotFoundError(f"{text}; check the location of the spool", **details)
    return StorageError(f"{text}; check the disk, its permissions and the kernel log, then try again", **details)


def pwrite_all(fd: int, data: bytes | bytearray | memoryview, offset: int, *, direct: bool = False) -> int:
    """Write all of ``data`` at ``offset``, however many calls that takes; return their number.

    Args:
        fd: an open file; with ``direct``, opened for direct I/O (then address, offset and length are whole blocks).
        data: bytes, or a C-contiguous view of them; an empty one makes no call.
        offset: where they go.
        direct: after a short write go on from a whole block.

    Raises:
        OSError: as the system call did, or ENOSPC where it wrote nothing.
    """
    view = memoryview(data).cast("B")
    done = n_calls = 0
    while done < len(view):
        n = _pwrite(fd, view[done:], offset + done, direct=direct)
        n_calls += 1
        if direct and done + n < len(view):
            n -= n % BLOCK
        if n == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += n
    return n_calls


def _pwrite(fd: int, data: memoryview, offset: int, *, direct: bool) -> int:
    try:
        return os.pwrite(fd, data, offset)
    except OSError as error:
        # cut off at a limit that is no whole block, a direct write is an invalid one
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if direct and error.errno == errno.EINVAL and 0 <= limit < offset + len(data):
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG)) from error
        raise


def sync_dir(path: str) -> None:
    """Make the names in folder ``path`` durable.

    Raises:
        SpoolError: it cannot be opened or synced.
    """
    sync_file(path, flags=os.O_DIRECTORY)


def sync_file(path: str, *, flags: int = 0) -> None:
    """Make what a file holds durable, whoever wrote it.

    Raises:
        SpoolError: it cannot be opened or synced.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise map_os_error(error, what="sync", path=path) from error


def create_atomic(path: str, data: bytes) -> bool:
    """Put ``data`` at ``path`` as `write_atomic` does, unless there is a file; return whether it was put.

    Raises:
        SpoolError: it could not.
    """
    draft = f"{os.path.dirname(path)}/.{os.path.basename(path)}.{secrets.token_hex(8)}.tmp"
    write_atomic(draft, data)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise map_os_error(error, what="write", path=path) from error
    finally:
        os.unlink(draft)
    sync_dir(os.path.dirname(path))
    return True


def write_atomic(
    path: str,
    data: bytes | bytearray | memoryview,
    *,
    sync: bool = True,
    prove: Callable[[str], None] | None = None,
) -> None:
    """Put ``data`` at ``path``: a reader sees the file as it was or the whole new one, and so does a restart.

    The order is: write a temporary file beside it, sync it, rename it, sync the folder.

    Args:
        path: the file; its folder exists.
        data: what it shall hold.
        sync: False leaves the two syncs out: still atomic for readers, not across a power cut.
        prove: called with the path of the temporary file before it is renamed; may refuse it by raising.

    Raises:
        SpoolError: it could not; ``path`` is untouched unless only the last sync failed.
    """
    folder, name = os.path.split(path)
    temp = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                pwrite_all(fd, data, 0)
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            if prove is not None:
                prove(temp)
            os.rename(temp, path)
        except BaseException:
            os.unlink(temp)
            raise
    except OSError as error:
        raise map_os_error(error, what="write", path=path) from error
    if sync:
        sync_dir(folder or ".")


def read_file(path: str) -> bytes:
    """Return the whole file.

    Raises:
        NotFoundError: there is none.
        StorageError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise map_os_error(error, what="read", path=path) from error


def set_direct(fd: int, *, on: bool) -> bool:
    """Switch direct I/O of an open file on or off; return whether it is on.

    Switching it on is refused by file systems without direct I/O; then the file stays buffered.

    Raises:
        OSError: anything else.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        if not on or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return on


def open_direct(path: str, flags: int, *, root: str, mode: int = 0o644, dir_fd: int | None = None) -> tuple[int, bool]:
    """Open a file for direct I/O, or buffered where its file system refuses that.

    Direct I/O is switched on after the open: an open that is refused for it may have created the file.

    Args:
        path: the file.
        flags: of ``os.open``, without ``O_DIRECT``; ``O_CLOEXEC`` is added.
        root: the hot root it belongs to; the fallback is logged once for each.
        mode: permissions of a new file.
        dir_fd: of the folder that the path is relative to.

    Returns:
        The descriptor, which the caller closes, and whether it is direct.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        direct = set_direct(fd, on=True)
    except BaseException:
        os.close(fd)
        raise
    if not direct:
        notice_buffered(root)
    return fd, direct


def check_hot_root(path: str, *, mountinfo: str = "/proc/self/mountinfo") -> None:
    """Refuse a folder on a network or FUSE file system as hot root: locks and atomic sizes do not hold there.

    Args:
        path: the folder; it need not exist yet.
        mountinfo: the kernel's table of mounts.

    Raises:
        ConfigError: it is on such a file system.
        StorageError: the table cannot be read.
    """
    kind = _file_system(os.path.realpath(path), read_file(mountinfo).decode(errors="surrogateescape"))
    if kind in _NOT_LOCAL or kind.startswith("fuse."):
        raise ConfigError(
            f"{path} is on {kind}: the hot tier needs a local disk (its locks and file sizes are not reliable there); "
            "name a folder on local NVMe, and use the shared one as the cold tier (?spill=file://...)",
            path=path,
            file_system=kind,
        )


def _file_system(path: str, table: str) -> str:
    """Return the type of the file system that holds ``path``: the last mount with the longest matching point."""
    best, kind = -1, "unknown"
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), right.split(" ")[0]
    return kind
