"""The file of a catalog: how it is opened, found damaged or of another version, told apart, and moved aside."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import time
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

import apsw

from spool import locks
from spool.catalog.schema import APPLICATION_ID, TABLES, VERSION, begin_generation, check
from spool.errors import NO_ROOM, IntegrityError, StorageError

BUSY_S = 60.0
"""How long an operation waits for another process's transaction; all last milliseconds but for a rebuild."""

OVERTAKEN_S = 1.0
_OVERTAKEN = frozenset({apsw.SQLITE_IOERR_DELETE_NOENT, apsw.SQLITE_IOERR_SHORT_READ, apsw.SQLITE_IOERR_FSTAT})
"""For so long, and for what errors, another process may be making the same database just now."""

USED_S = 3.0
"""For so long other processes may have an index of another version open that only look at it."""

BLANK_S = 5.0
"""So long a file stays empty at most whose tables a process makes; then it was cut under those that use it."""

CHECKED_BYTES = 4 << 20
"""Files up to this size are checked whole on opening; larger ones when `Catalog.check` is asked to."""

_LOOKS, _LOOK_S = 20, 0.002
"""How often it is looked whether WAL and shared memory are both there, and how long is between two looks."""

SETTLED_NS = 20_000_000
"""A file changed less than this ago may change again without its time showing it."""

WAL_VERSION = 2
"""What bytes 18 and 19 of a database in WAL mode are."""

Identity = tuple[int, int]

MEMORY = ":memory:"
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux
_SHARED = 0x40000002, 510
_BESIDE, _LOCK = ("-shm", "-wal"), ".lock"


class DamagedError(IntegrityError):
    """The catalog file is not a sound database of this version: move it aside and feed a new one.

    Attributes:
        file: device and inode of that file; None where there is no file.
    """

    def __init__(self, message: str, *, file: Identity | None) -> None:
        super().__init__(message)
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(type(self), file=self.file), (str(self),))


class OtherVersionError(DamagedError):
    """The catalog file is an index of another version."""


def identity(path: str) -> Identity | None:
    """Return device and inode of the file at ``path``, or None where there is none.

    Raises:
        StorageError: it cannot be looked at.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot look at {path}: {error.strerror}; check the disk", path=path) from error
    return found.st_dev, found.st_ino


def has_moved(connection: apsw.Connection) -> bool:
    """Return whether the file of a connection was deleted, moved or replaced: another one may be at its path."""
    answer = ctypes.c_int(0)
    connection.file_control("main", apsw.SQLITE_FCNTL_HAS_MOVED, ctypes.addressof(answer))
    return bool(answer.value)


def connect(path: str) -> apsw.Connection:
    """Open a database, made with its tables where the file is missing or empty.

    Args:
        path: the file, or ``:memory:``.

    Raises:
        StorageError: it is of another version, and another process uses it.
        DamagedError: the file is something else, of another version, or torn.
        apsw.Error: it cannot be opened.
    """
    began = time.monotonic()
    while True:
        if path != MEMORY:
            _begin(path)
        file = identity(path)
        if os.path.isdir(path):
            raise DamagedError(f"{path} is a folder, not a catalog", file=file)
        connection = apsw.Connection(path)
        try:
            _prepare(connection, path, file)
            # one that was replaced meanwhile may have met the WAL of the other
            if path == MEMORY or not has_moved(connection):
                return connection
            connection.close()
            if time.monotonic() - began > BUSY_S:
                raise StorageError(f"{path} is deleted and made anew again and again; try again later", path=path)
        except (apsw.BusyError, apsw.IOError) as error:
            full = connection.system_errno in NO_ROOM
            connection.close()
            if full:
                raise apsw.FullError(str(error)) from error
            _wait_after(error, time.monotonic() - began, path, file)
        except (apsw.NotADBError, apsw.CorruptError, apsw.SQLError, apsw.ReadOnlyError) as error:
            connection.close()
            if isinstance(error, apsw.ReadOnlyError) and not _is_of_later_version(path):
                raise
            raise DamagedError(f"{path} is damaged: {error}", file=file) from error
        except OtherVersionError:
            connection.close()
            _check_unused(path, file)
            raise
        except BaseException:
            connection.close()
            raise


def _wait_after(error: apsw.Error, waited_s: float, path: str, file: Identity | None) -> None:
    """Wait before a database is opened again, or raise that this is of no use any more.

    The switch to WAL and the recovery after a crash do not always wait for the process that is at it.
    """
    patience_s = OVERTAKEN_S if getattr(error, "extendedresult", 0) in _OVERTAKEN else 0.0
    if isinstance(error, apsw.BusyError):
        patience_s = BUSY_S
        if waited_s > BLANK_S and _is_cut(path):
            raise DamagedError(f"{path} is empty, and processes use what it was", file=file) from error
    if waited_s > patience_s:
        raise error
    time.sleep(0.01)


def connect_readonly(path: str) -> apsw.Connection:
    """Open a database as it lies there, to read only: no transaction waits for it, and it makes no file.

    Where a process has the file open, its WAL and shared memory are used as all readers do. Where none has, there is no
    WAL, and not even locks are taken: what is read counts only if the `mark` is the same afterwards.

    Raises:
        DamagedError: there is none, or it is something else, of another version, or torn.
        apsw.Error: it cannot be opened.
    """
    file, found = identity(path), _whole_mark(path)
    if found is None:
        raise DamagedError(f"{path} cannot be read where it is", file=file)
    options = "mode=ro" if found.has_wal else "mode=ro&immutable=1"
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(f"file:{quote(path)}?{options}", flags=flags)
    try:
        connection.set_busy_timeout(int(BUSY_S * 1000))
        _check_version(connection, path, file)
        wrong = check(connection, whole=False) if os.path.getsize(path) <= CHECKED_BYTES else []
        if wrong:
            raise DamagedError(f"{path} is damaged: {'; '.join(wrong[:3])}", file=file)
        if has_moved(connection):
            raise DamagedError(f"{path} was replaced while it was opened", file=file)
    except BaseException:
        connection.close()
        raise
    return connection


class Mark(NamedTuple):
    """What is seen of a database file from outside: which file it is, when it was written, whether it has a WAL."""

    identity: Identity
    n_bytes: int
    changed_ns: int
    has_wal: bool


def mark(path: str) -> Mark | None:
    """Return the mark of a database file; None where there is none. A WAL is there while a process has it open."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return Mark((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns, os.path.exists(path + _BESIDE[1]))


def _whole_mark(path: str) -> Mark | None:
    """Return the mark of a database file with both or none of WAL and shared memory; None where it stays otherwise.

    A process that opens or closes it makes and removes one after the other.
    """
    for _ in range(_LOOKS):
        found = mark(path)
        if found is None or found.has_wal == os.path.exists(path + _BESIDE[0]):
            return found
        time.sleep(_LOOK_S)
    return None


def settled_mark(path: str) -> Mark | None:
    """Return the mark of a database file once its time is not the present: a later change would not show in it.

    A time far ahead is that of another clock, which a change now would not give again.
    """
    while (found := mark(path)) is not None and not found.has_wal:
        if abs(time.time_ns() - found.changed_ns) >= SETTLED_NS:
            break
        time.sleep(SETTLED_NS / 1e9)
    return found


def _is_of_later_version(path: str) -> bool:
    """Whether the header of a file asks for a later SQLite to write or read it, which none of ours does."""
    try:
        with open(path, "rb") as file:
            return max(file.read(20)[18:], default=0) > WAL_VERSION
    except OSError:
        return False


def _begin(path: str) -> None:
    """Make an empty file where there is none, away from the WAL and shared memory of one that was deleted.

    Processes that had that open still use them: a database that met them would cut them under their feet.
    """
    if os.path.exists(path):
        return
    try:
        fd = locks.wait_for(path + _LOCK, make=True)
    except OSError:
        return  # SQLite says what is wrong with the folder
    try:
        if not os.path.exists(path):
            for suffix in _BESIDE:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path + suffix)
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    finally:
        locks.release(fd)


def _is_cut(path: str) -> bool:
    try:
        return not os.path.getsize(path)
    except OSError:
        return False


def _prepare(connection: apsw.Connection, path: str, file: Identity | None) -> None:
    connection.set_busy_timeout(int(BUSY_S * 1000))
    connection.pragma("synchronous", "normal")
    if _is_blank(connection):
        connection.set_busy_timeout(int(BLANK_S * 1000))
        connection.pragma("journal_mode", "wal")
        connection.execute("BEGIN IMMEDIATE")
        # looked at again: another process may have made the tables by now
        if _is_blank(connection):
            connection.execute(TABLES)
            begin_generation(connection)
            connection.pragma("application_id", APPLICATION_ID)
            connection.pragma("user_version", VERSION)
        connection.execute("COMMIT")
        connection.set_busy_timeout(int(BUSY_S * 1000))
    _check_version(connection, path, file)


def _check_unused(path: str, file: Identity | None) -> None:
    """Leave an index to the processes of another version that use it: each would move the other's aside for ever.

    Raises:
        StorageError: there are such.
    """
    deadline = time.monotonic() + USED_S
    while identity(path) == file and _is_used(path):
        if time.monotonic() > deadline:  # those that look at it, as this one did, are gone by then
            raise StorageError(
                f"{path} is an index of another version than {VERSION}, which is this Spool's, and another process "
                "uses it: end the processes of the other Spool first (a spiller ends by itself then), or go on with "
                "that one",
                path=path,
            )
        time.sleep(0.02)


def _is_used(path: str) -> bool:
    """Whether another process has a database open: in WAL mode each holds a lock on the bytes that SQLite shares."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # moved aside by now, or to be looked at by who opens it
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, *_SHARED, 0)
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def _check_version(connection: apsw.Connection, path: str, file: Identity | None) -> None:
    found = connection.pragma("application_id"), connection.pragma("user_version")
    if found != (APPLICATION_ID, VERSION):
        kind = OtherVersionError if found[0] == APPLICATION_ID and found[1] else DamagedError
        raise kind(f"{path} is not a catalog of version {VERSION}: application id and version are {found}", file=file)


def _is_blank(connection: apsw.Connection) -> bool:
    return not connection.pragma("user_version") and not connection.execute("SELECT count(*) FROM sqlite_schema").get


def move_aside(path: str, damaged: Identity) -> str | None:
    """Rename the database at ``path`` to ``<path>.damaged-<n>``, with its WAL, if it still is the damaged one.

    Two processes may find the same damage: a lock on the damaged file itself lets one of them move it.

    Args:
        path: the database file.
        damaged: device and inode of the file that was found damaged; by now another may be there.

    Returns:
        The new path; None where another process moved the file first.
    """
    try:
        fd = locks.wait_for(path)
    except FileNotFoundError:
        return None
    try:
        if identity(path) != damaged:
            return None
        n = 0
        while os.path.exists(f"{path}.damaged-{n}"):
            n += 1
        target = f"{path}.damaged-{n}"
        # shared memory and WAL first: a database that is made at ``path`` must never meet those of the old one
        for suffix in (*_BESIDE, ""):
            if os.path.exists(path + suffix):
                os.rename(path + suffix, target + suffix)
        return target
    finally:
        locks.release(fd)
