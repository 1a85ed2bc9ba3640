"""The connections of one process to the catalog: one that reads and one that writes, each behind its lock.

Before a fork both are closed, since SQLite keeps a list of its locks for the whole process, and a child that inherits
it would trust locks it does not hold. A fork inside a transaction leaves the child an index in memory, and the
inherited connection is never touched again, not even to close it.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its lock is taken in a fork after these links', if it is known before
import ctypes
import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import apsw

from spool.catalog import files
from spool.catalog.files import DamagedError
from spool.catalog.schema import GENERATION
from spool.errors import NO_ROOM, CapacityError, StorageError, moved_away

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
Execute: TypeAlias = "Callable[..., list[tuple[Any, ...]]]"
"""Runs a statement with its values and returns its rows."""

Generation: TypeAlias = object
"""See `spool.catalog.schema.GENERATION`; to be compared."""

FEEDINGS = 10
"""So often a question is asked of one new index after the other."""

FORK_WAIT_S = 30.0
"""How long a fork waits for a transaction of another thread."""

_OTHER_WAL = frozenset({apsw.SQLITE_IOERR_SHORT_READ, apsw.SQLITE_IOERR_SHMMAP, apsw.SQLITE_IOERR_SHMSIZE})
"""What SQLite says where WAL or shared memory were cut, or taken away, under a process that uses them."""


class Link:
    """A connection, opened on first use, and its lock; ``mark`` is of the file, where that is opened to read only."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connection: apsw.Connection | None = None
        self.identity: files.Identity | None = None
        self.mark: files.Mark | None = None
        self.owner = 0
        self.held = False

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Database:
    """A catalog file, or an index in memory (``path`` None).

    Safe from many threads and after a fork. A file that was deleted or replaced is noticed at the next operation.

    Attributes:
        path: the file; None in memory.
        damage: what an operation found wrong with the file, until it is moved aside.
        fed: the generation that was fed; None before the first time.
        feed: feeds it again; None where nobody does.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.damage: DamagedError | None = None
        self.fed: Generation | None = None
        self.feed: Callable[[], object] | None = None
        self._links(Link(), Link() if path is not None else None)
        self._begin()
        with _forks:  # what a fork did not see when it began would be open in the midst of it
            _live.add(self)

    def _links(self, writer: Link, reader: Link | None) -> None:
        # one database in memory is one connection
        self._writer, self._reader = writer, reader or writer

    def _begin(self) -> None:
        self._gate = threading.Lock()  # held during a fork: no link is lent then
        self._apart: set[Link] = set()

    @property
    def is_borrowed(self) -> bool:
        """It is a file that this process does not write to; see `BorrowedDatabase`."""
        return False

    def generation(self) -> Generation:
        """Return what is another one once the content may be: in a new file, after a rebuild, in a child's memory.

        Raises:
            DamagedError, StorageError, CapacityError: as `ask`.
        """
        return self.ask(_generation)

    def version(self) -> tuple[object, ...]:
        """Return a value that changes whenever something was written, by whichever process."""
        return self.ask(lambda asked: (_generation(asked), asked.data_version(), asked.total_changes()))

    def ask(self, question: Callable[[apsw.Connection], T], *, apart: bool = False) -> T:
        """Return what a question finds that only reads.

        Args:
            question: called with a connection; may be called again where the file changed under it.
            apart: it takes long: a file is read by a connection of its own, so that others go on meanwhile.

        Raises:
            DamagedError, StorageError, CapacityError: of what is done with it.
        """
        with self._reading_apart() if apart else self.reading() as connection:
            return question(connection)

    def ask_fed(self, question: Callable[[apsw.Connection], T], *, apart: bool = False) -> tuple[T, Generation]:
        """Return what a question finds in the index that was fed, and of which generation that is.

        Another process may move that aside, delete it or make it anew at any time. Where another one, or a damaged one,
        was asked, it is fed and asked again.

        Args:
            question: as `ask`.
            apart: as `ask`.

        Raises:
            StorageError: it is made anew again and again.
            DamagedError, StorageError, CapacityError: as `ask`, and of feeding it.
        """
        for _ in range(FEEDINGS):
            fed = self.fed  # before the question: another thread may feed this index while it is asked
            try:
                found, asked = self.ask(lambda connection: (question(connection), _generation(connection)), apart=apart)
            except DamagedError:
                if self.feed is None:
                    raise
            else:  # a connection does not go back: what it was of afterwards it was of before
                if self.feed is None or fed in (None, asked):
                    return found, asked
            self.feed()
        raise StorageError(f"{self.path or 'the catalog in memory'} is made anew again and again; try again later")

    def at_one_moment(self, question: Callable[[Execute], T]) -> T:
        """Return what a question finds whose statements all see the same moment; it may take long, see `ask_fed`."""
        return self.ask_fed(lambda connection: _at_one_moment(connection, question), apart=True)[0]

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """Lend a connection to read with; inside this thread's own `writing` it sees what that wrote.

        Raises:
            DamagedError, StorageError, CapacityError: of what is done with it.
        """
        link = self._writer if self._writer.owner == threading.get_ident() else self._reader
        with link.lock, self._translated(link):
            yield self._connection(link)

    @contextmanager
    def writing(self) -> Iterator[apsw.Connection]:
        """Lend a connection inside a transaction, committed at the end and rolled back by an exception; it nests.

        Raises:
            DamagedError, StorageError, CapacityError: of what is done with it.
        """
        link = self._writer
        with link.lock, self._translated(link):
            if link.owner:
                yield self._connection(link)
                return
            connection = self._connection(link)
            if connection.in_transaction:  # a signal handler raised where the one before could not end it
                connection.execute("ROLLBACK")
            connection.execute("BEGIN IMMEDIATE")
            link.owner = threading.get_ident()
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                link.owner = 0
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextmanager
    def _reading_apart(self) -> Iterator[apsw.Connection]:
        if self.path is not None:
            with self._lent() as link, self._translated(link):
                own = self._connection(link)
                if self.path is not None:  # else it is read from a copy from now on
                    yield own
                    return
        with self.reading() as connection:
            yield connection

    @contextmanager
    def _lent(self) -> Iterator[Link]:
        """Lend a link of its own, which a fork waits for as it does for the others."""
        link = Link()
        with self._gate:
            link.lock.acquire()
            self._apart.add(link)
        try:
            yield link
        finally:
            link.close()
            self._apart.discard(link)
            link.lock.release()

    def move_aside(self, damage: DamagedError) -> str | None:
        """Put a damaged file out of the way, so that the next operation makes a new one; return where it is."""
        self.close()
        self.damage = None
        if self.path is None or damage.file is None:
            return None
        return files.move_aside(self.path, damage.file)

    def close(self) -> None:
        """Close the connections; the next operation opens them again."""
        for link in (self._writer, self._reader):
            with link.lock:
                link.close()

    def _connection(self, link: Link) -> apsw.Connection:
        opened = link.connection if self.path is not None and not link.owner else None
        # 2 us, and the only way to learn that the file was deleted or moved aside by another process
        if opened is not None and files.has_moved(opened):
            link.close()
        if link.connection is None:
            link.connection = files.connect(self.path or files.MEMORY)
            link.identity = files.identity(self.path) if self.path is not None else None
        return link.connection

    @contextmanager
    def _translated(self, link: Link) -> Iterator[None]:
        name = self.path or "the catalog in memory"
        try:
            yield
        except DamagedError as error:
            self.damage = error
            raise
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError) as error:
            if isinstance(error, apsw.SQLError) and "no such table" not in str(error):
                raise
            self.damage = DamagedError(f"{name} is damaged: {error}; it is made again", file=link.identity)
            raise self.damage from error
        except apsw.FullError as error:
            raise _no_room(name, error) from error
        except (apsw.BusyError, apsw.LockedError, apsw.ProtocolError) as error:
            raise StorageError(
                f"{name} was busy with another process's transaction for {files.BUSY_S:g} s ({error}); try again",
                path=name,
                busy=True,
            ) from error
        except (apsw.IOError, apsw.CantOpenError, apsw.ReadOnlyError, apsw.PermissionsError) as error:
            if link.connection is not None and link.connection.system_errno in NO_ROOM:
                raise _no_room(name, error) from error
            if getattr(error, "extendedresult", 0) in _OTHER_WAL:
                self.damage = DamagedError(f"{name} has lost its WAL ({error}); it is made again", file=link.identity)
                raise self.damage from error
            if not os.path.isdir(os.path.dirname(name)):
                raise moved_away(os.path.dirname(name)) from error
            raise StorageError(f"cannot use {name}: {error}; check the disk and its permissions", path=name) from error

    # -- forks -------------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Wait for transactions of other threads and close what can be closed."""
        self._gate.acquire()
        for link in {self._writer, self._reader, *self._apart}:
            link.held = link.lock.acquire(timeout=FORK_WAIT_S)
            if link.held and not link.owner and self.path is not None:
                link.close()

    def after_fork_in_parent(self) -> None:
        """Let other threads go on."""
        for link in {self._writer, self._reader, *self._apart}:
            if link.held:
                link.lock.release()
        self._gate.release()

    def after_fork_in_child(self) -> None:
        """Start with own connections, or with memory where the parent was inside a transaction."""
        for link in self._apart:  # those that the fork did not wait for
            _leak(link.connection)
        self._begin()
        inherited = [link for link in (self._writer, self._reader) if link.connection is not None]
        if self.path is None and self._writer.held and not self._writer.owner:
            # a database in memory is plain memory: the child has a whole copy
            connection = self._writer.connection
            if connection is None or not connection.filename:
                self._writer.lock = threading.RLock()
                return
        for link in inherited:
            _leak(link.connection)
        if inherited:
            self.path = None
        self._links(Link(), Link() if self.path is not None else None)


def executing(connection: apsw.Connection) -> Execute:
    """Return what runs statements on a connection."""
    return lambda sql, values=(): connection.execute(sql, tuple(values)).fetchall()


def _generation(connection: apsw.Connection) -> Generation:
    return connection.execute(GENERATION).get


def _at_one_moment(connection: apsw.Connection, question: Callable[[Execute], T]) -> T:
    own = not connection.in_transaction
    if own:
        connection.execute("BEGIN")
    try:
        return question(executing(connection))
    finally:
        if own:
            connection.execute("COMMIT")


def _no_room(name: str, error: apsw.Error) -> CapacityError:
    return CapacityError(f"no room to write {name}: {error}; free space on its disk", path=name)


def _leak(kept: object) -> None:
    # closing an inherited connection, also at interpreter exit, would touch the parent's locks and shared memory
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_live: weakref.WeakSet[Database] = weakref.WeakSet()
_forking: list[Database] = []
_forks = threading.RLock()
"""Held by the one thread that forks: what it waits for it lets go of, and no database is made meanwhile."""


def _before() -> None:
    _forks.acquire()
    _forking[:] = list(_live)
    for database in _forking:
        database.before_fork()


def _in_parent() -> None:
    for database in _forking:
        database.after_fork_in_parent()
    _forking.clear()
    _forks.release()


def _in_child() -> None:
    for database in _forking:
        database.after_fork_in_child()
    _forking.clear()
    _forks.release()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
