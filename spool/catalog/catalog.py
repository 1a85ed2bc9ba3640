"""The catalog: what `logs` feeds and everyone asks."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import apsw

from spool.catalog import files, forget, listing, query, schema
from spool.catalog.borrowed import BorrowedDatabase
from spool.catalog.database import Database, Execute, Generation, executing
from spool.catalog.dump import dump
from spool.catalog.files import DamagedError
from spool.catalog.fold import decode_event
from spool.catalog.history import late_events, openings, session_events
from spool.catalog.ingest import Ingest, Sessions, decode_items, prepare
from spool.catalog.news import News, newest_mark, news
from spool.catalog.packs import Packs
from spool.catalog.rows import (
    GroupLook,
    Located,
    LogItem,
    LogState,
    Place,
    Release,
    SessionLook,
    SessionRow,
    Totals,
)
from spool.catalog.schema import GONE
from spool.catalog.shape import Summary
from spool.catalog.space import give_back
from spool.catalog.summary import sample, slowest, summary
from spool.catalog.units import NamedUnits
from spool.catalog.uses import StreamSizes, Uses, no_sizes, pack_id
from spool.errors import StorageError
from spool.model.events import Annotated, Attached, StepCommitted
from spool.model.refs import SegmentRef

T = TypeVar("T")

_OPENINGS = 3


class Catalog:
    """An index of sessions, steps, segments and late facts; safe from many threads, many processes, and after a fork.

    Attributes:
        moved_aside: where a damaged file was moved, in this process; None where all was sound.
        packs: what is known of packs.
        units: which multimodal units sessions name.
    """

    def __init__(self, database: Database, moved_aside: str | None = None) -> None:
        self._database = database
        self.moved_aside = moved_aside
        self.packs = Packs(database)
        self.units = NamedUnits(database)
        self._bulk: Sessions | None = None

    @classmethod
    def open(cls, path: str, *, readonly: bool = False) -> Catalog:
        """Open the catalog at ``path``, made where there is none.

        A file that is not a sound catalog of this version is moved aside (`moved_aside`) and begun anew. In a folder
        that cannot be written to, it is as with ``readonly``. The index is as empty, or as old, as the file was until
        it is fed from the logs.

        Args:
            path: the database file; its folder exists.
            readonly: leave the file as it is: it is read where it lies, or as a copy once something is fed that others
                did not feed.

        Raises:
            StorageError: the file cannot be opened.
        """
        if readonly or not _writable(path):
            return cls(BorrowedDatabase(path) if path else Database(None))
        catalog = cls(Database(path))
        for _ in range(_OPENINGS):
            try:
                catalog._first_look(path)
                break
            except DamagedError as error:
                catalog.reset(error)
        return catalog

    def _first_look(self, path: str) -> None:
        with self._database.reading() as connection:
            wrong = schema.check(connection, whole=False) if os.path.getsize(path) <= files.CHECKED_BYTES else []
            if wrong:
                raise DamagedError(f"{path} is damaged: {'; '.join(wrong[:3])}", file=files.identity(path))

    def reset(self, damage: DamagedError) -> None:
        """Move the file that ``damage`` is about aside; what follows works on a new, empty one."""
        self.moved_aside = self._database.move_aside(damage) or self.moved_aside

    def close(self) -> None:
        """Close the connections; the next call opens them again."""
        self._database.close()

    def check(self) -> list[str]:
        """Return what a full integrity check finds wrong; nothing where the file is sound."""
        return self._database.ask(lambda connection: schema.check(connection, whole=True))

    @property
    def damage(self) -> DamagedError | None:
        """What a call of this process found wrong with the file; None once it is `reset`."""
        return self._database.damage

    @property
    def in_memory(self) -> bool:
        """The index is this process's own and gone with it."""
        return self._database.path is None

    @property
    def is_borrowed(self) -> bool:
        """The index is a file that others feed; what is fed here goes into a copy of it."""
        return self._database.is_borrowed

    @property
    def generation(self) -> Generation:
        """What is another one once the content may be (deleted, reset, rebuilt), and numbers of rows mean others."""
        return self._database.generation()

    # -- feeding -----------------------------------------------------------------------------------------------------

    def fed_by(self, feed: Callable[[], object]) -> None:
        """Have questions answered by what was fed only: where another index is there by now, ``feed`` feeds that.

        Args:
            feed: brings the index up to date, by `feeding`. What it asks itself is how far it is fed: `offsets`,
                `Packs.states`, `Packs.seen`; they are answered by the index that is there.
        """
        self._database.feed = feed

    @contextmanager
    def feeding(self) -> Iterator[bool]:
        """Bring the index up to date inside; yields whether it is another one than the last time."""
        try:
            generation = self.generation
        except DamagedError:  # what is fed is another one
            generation = None
        yield self._database.fed not in (None, generation)
        self._database.fed = generation

    def offsets(self, streams: Sequence[str] | None = None) -> dict[tuple[str, int], LogState]:
        """Return how far the log of each (stream, pack) is known, of all streams or some."""
        return query.log_states(self._run, streams)

    def ingest(
        self,
        stream: str,
        pack: int,
        *,
        start: int,
        end: int,
        items: Sequence[LogItem],
        sealed: bool = False,
        sizes: StreamSizes = no_sizes,
    ) -> bool:
        """Take in frames of one pack, all or none, in one transaction.

        Args:
            stream: the stream's name.
            pack: number of the pack.
            start: the offset known before, as `offsets` gave it; 0 for a pack never seen.
            end: the offset known afterwards; -1 where the frames come from sealed records.
            items: the frames, in order, without a hole after those that are known.
            sealed: the pack is sealed, and known whole with these.
            sizes: tells which packs the rows of the events lie in, and what they take; see
                `spool.catalog.uses.StreamSizes`.

        Returns:
            False, and nothing changed, where another process took them in first, or the pack was forgotten; ask
            `offsets` again.

        Raises:
            StorageError: another process's transaction lasts too long, or the disk fails.
            CapacityError: the disk is full.
            DamagedError: the file is damaged; see `reset`.
        """
        ready, uses = prepare(items), Uses(stream, pack, sizes)
        uses.ask(item.event for item in ready)
        with self._database.writing() as connection:
            found = connection.execute(query.LOG, (stream, pack)).fetchone()
            log, state, offset, n_events, was_sealed = found or (None, None, 0, 0, 0)
            if state == GONE or offset != start or was_sealed or (items and items[0].seq != n_events):
                return False
            if log is None:
                log = pack_id(connection, stream, pack)
            connection.execute(query.ADD_LOG, (log, stream, pack))
            batch = Ingest(connection, log, stream, pack, uses, self._bulk or Sessions())
            batch.apply(ready)
            batch.finish()
            at = next((item.event.at for item in ready if hasattr(item.event, "at")), None)
            connection.execute(query.SET_LOG, (log, end, len(items), sealed))
            connection.execute(query.SET_PACK, (log, int(sealed), at))
        return True

    def ingest_pack(self, stream: str, pack: int, payloads: Sequence[bytes], *, sizes: StreamSizes = no_sizes) -> bool:
        """Take in a whole sealed pack, or what is not known of it yet; see `bulk` for many.

        Args:
            stream: the stream's name; of a file of facts ``facts-`` and its id, which is pack 0.
            pack: number of the pack.
            payloads: its events as they are in the commit log (msgpack), in order; messages may be left out.
            sizes: as `ingest`.

        Returns:
            False, and nothing changed, where it is known whole or was forgotten.

        Raises:
            IntegrityError: a payload is no event.
            StorageError, CapacityError, DamagedError: as `ingest`.
        """
        while True:
            state = self.offsets([stream]).get((stream, pack), LogState())
            if state.sealed:
                return False
            items = decode_items(payloads, state.n_events, what=f"pack {pack} of stream {stream}")
            if self.ingest(stream, pack, start=state.offset, end=-1, items=items, sealed=True, sizes=sizes):
                return True

    @contextmanager
    def bulk(self) -> Iterator[None]:
        """Make what this thread takes in inside one transaction; an empty catalog is filled faster.

        Other processes see nothing of it until it ends, and wait to feed theirs; a failure leaves nothing of it.
        """
        with self._database.writing() as connection:
            if self._bulk is not None:
                yield
                return
            indexes = schema.drop_indexes(connection)
            self._bulk = Sessions()
            connection.pragma("cache_size", schema.BULK_CACHE)
            try:
                yield
                schema.make_indexes(connection, indexes)
            finally:
                self._bulk = None
                connection.pragma("cache_size", schema.CACHE)

    def forget(self, stream: str, pack: int, *, at: float | None = None, reason: str | None = None) -> bool:
        """Take out what a pack's events fed, as if it had never been fed; it is gone, and never taken in again.

        Args:
            stream: the stream's name.
            pack: number of the pack.
            at: when it was deleted, seconds since the epoch.
            reason: why.

        Returns:
            False where it was gone already.

        Raises:
            StorageError, CapacityError, DamagedError: as `ingest`.
        """
        with self._database.writing() as connection:
            log = pack_id(connection, stream, pack)
            if connection.execute("SELECT state FROM packs WHERE id = ?", (log,)).get == GONE:
                return False
            self._forget(connection, log)
            connection.execute(
                "UPDATE packs SET state = ?, gone_at = ?, reason = ? WHERE id = ?", (GONE, at, reason, log)
            )
        return True

    def lose(self, stream: str, pack: int) -> None:
        """Take out what a pack's events fed, as if it had never been fed; where it is found again it is taken in.

        Raises:
            StorageError, CapacityError, DamagedError: as `ingest`.
        """
        with self._database.writing() as connection:
            log = pack_id(connection, stream, pack)
            self._forget(connection, log)
            connection.execute("DELETE FROM packs WHERE id = ?", (log,))

    def _forget(self, connection: apsw.Connection, log: int) -> None:
        forget.forget(connection, log)
        give_back(connection, log)
        if self._bulk is not None:
            self._bulk = Sessions()

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """Empty what the logs feed and let this thread feed it again, all in one transaction.

        Other processes see the old index until it ends, and wait to feed theirs; a failure leaves the old one.
        """
        with self._database.writing() as connection:
            for table in schema.FED:
                connection.execute(f"DELETE FROM {table}")  # noqa: S608
            schema.begin_generation(connection)
            yield

    # -- asking ------------------------------------------------------------------------------------------------------

    def session(self, session_id: str) -> SessionRow | None:
        """Return a session, or None where no opening of it is known."""
        return self._of(session_id, lambda run, sid: next(iter(query.session_rows(run, [sid])), None), None)

    def sessions(
        self, where: str | None = None, *, order: Sequence[str] = ("opened_at",), limit: int | None = None
    ) -> Iterator[SessionRow]:
        """Iterate sessions, discarded ones included (``state = 'discarded'``).

        Args:
            where: a filter expression; see `spool.catalog.where`.
            order: column names, ``-`` in front for descending; ties go by id.
            limit: at most so many.

        Raises:
            InputError: the filter or the order does not parse; raised by the call, not while iterating.
            StorageError: the index was made anew meanwhile; raised while iterating.
        """
        sids, generation = self._chosen(lambda run: query.session_ids(run, where, order, limit))
        return self._paged(sids, query.session_rows, generation)

    def segments(self, where: str | None = None, view: str | None = None) -> Iterator[SegmentRef]:
        """Iterate segments of finalised sessions that were not discarded, by time of ending, id, view and index.

        The references carry the late facts and arrays that are known now.

        Args:
            where: a filter expression; see `spool.catalog.where`.
            view: of this view only; as sessions were finalised.

        Raises:
            InputError: the filter does not parse; raised by the call, not while iterating.
            StorageError: the index was made anew meanwhile; raised while iterating.
        """
        numbers, generation = self._chosen(lambda run: query.segment_ids(run, where, view))
        return self._paged(numbers, query.segment_refs, generation)

    def _paged(
        self, numbers: Sequence[int], fetch: Callable[[Execute, Sequence[int]], list[T]], generation: Generation
    ) -> Iterator[T]:
        """Yield what is fetched by number, a page at a time, as long as the numbers mean what they did."""
        for start in range(0, len(numbers), query.PAGE):
            page = numbers[start : start + query.PAGE]
            yield from self._fetched(page, fetch, generation, f"after {start} of {len(numbers)} were listed")

    def _fetched(
        self,
        numbers: Sequence[int],
        fetch: Callable[[Execute, Sequence[int]], list[T]],
        generation: Generation,
        since: str,
    ) -> list[T]:
        rows, now = self._chosen(lambda run: fetch(run, numbers))
        if now != generation:
            raise StorageError(
                f"the index {self._database.path or 'in memory'} was made anew {since}, and numbers of sessions and "
                "segments mean others now: list them again"
            )
        return rows

    def numbers(
        self,
        where: str | None,
        order: Sequence[str],
        *,
        after: int = 0,
        discarded: bool = True,
        limit: int | None = None,
    ) -> tuple[array[int], Generation]:
        """Return the numbers of sessions that match, in an order, and in which generation they mean those.

        See `spool.catalog.listing.numbers_query`.

        Raises:
            InputError: the filter or the order does not parse.
        """
        sql, values = listing.numbers_query(where, order, after=after, discarded=discarded, limit=limit)
        return self._database.ask_fed(
            lambda connection: array("q", (number for (number,) in connection.execute(sql, values))), apart=True
        )

    def looks(self, numbers: Sequence[int], generation: Generation) -> list[SessionLook]:
        """Return sessions by number, in the order given, as they are now; those that are gone are left out.

        Raises:
            StorageError: the index is of another generation than the one that the numbers are of.
        """
        return self._fetched(numbers, listing.session_looks, generation, "after they were listed")

    def groups(self, where: str | None, order: Sequence[str], limit: int | None = None) -> list[GroupLook]:
        """Return the groups of sessions that match, in an order; ties go by name.

        Raises:
            InputError: the filter or the order does not parse.
        """
        sql, values = listing.groups_query(where, order, limit)
        return self._database.ask_fed(
            lambda connection: [listing.group(row) for row in connection.execute(sql, values)], apart=True
        )[0]

    def newest(self) -> int:
        """Return the number of the session that arrived last; 0 where there is none."""
        return self._asked(listing.newest)

    @property
    def version(self) -> tuple[object, ...]:
        """A value that changes whenever something was taken in, by whichever process."""
        return self._database.version()

    def check_filter(self, where: str, of: Literal["sessions", "segments"]) -> None:
        """Check a filter expression and its names: each a column, or a late fact that something here has.

        `sessions` and `segments` take any other name for a late fact that nothing has.

        Raises:
            InputError: the filter does not parse, or has an unknown name; lists the known ones.
        """

        def run(sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            return self._asked(lambda run: run(sql, values))  # each, as an index that is not fed refuses a name

        query.check_filter(run, where, query.SESSION if of == "sessions" else query.SEGMENT)

    def session_events(self, session_id: str) -> list[Located]:
        """Return a session's openings, steps, withdrawals and endings in order, ``messages`` left out.

        Empty where nothing is recorded.
        """
        return self._of(session_id, session_events, [])

    def openings(self, session_id: str) -> list[Located]:
        """Return all openings of a session, also those of owners whose record does not count; empty where none."""
        return self._of(session_id, openings, [])

    def is_contested(self, session_id: str) -> bool:
        """Whether owners recorded a session that did not know of each other; see `spool.catalog.rivals`."""
        sql = "SELECT 1 FROM sessions WHERE session_id = ? AND contested"
        return bool(self._asked(lambda run: run(sql, (session_id,))))

    def steps_at(self, session_id: str, index: int) -> list[StepCommitted]:
        """Return the steps that are recorded under an index, withdrawn ones too: mostly one, or none."""
        sql = "SELECT event FROM events WHERE sid = ? AND slot = ?"
        found: list[tuple[Any, ...]] = self._of(session_id, lambda run, sid: run(sql, (sid, index)), [])
        events = [decode_event(data) for (data,) in found if index >= 0]  # other slots have other numbers
        return [event for event in events if isinstance(event, StepCommitted)]

    def newest_late(self, session_id: str) -> float:
        """Return when the newest late fact or array of a session was recorded, seconds since the epoch; 0 if none."""
        each = "SELECT at FROM {} WHERE sid = ?1"
        sql = f"SELECT max(at) FROM ({each.format('facts')} UNION ALL {each.format('attachments')})"  # noqa: S608
        return self._of(session_id, lambda run, sid: run(sql, (sid,))[0][0], None) or 0.0

    def late_events(self, session_id: str) -> list[Annotated | Attached]:
        """Return a session's annotations and late arrays, in the order in which the last wins."""
        return self._of(session_id, late_events, [])

    def facts(self, session_id: str, segment: str | None = None) -> dict[str, Any]:
        """Return the late facts of a session, or those given to one of its segments, by its key."""
        return self._of(session_id, lambda run, sid: query.facts_of(run, sid, segment or ""), {})

    def attachments(self, session_id: str) -> tuple[Attached, ...]:
        """Return the late arrays of a session's segments and steps, the last of each target and field."""
        return self._of(session_id, query.attachments_of, ())

    def with_late(self, ref: SegmentRef) -> SegmentRef:
        """Return a segment's reference with the late facts and arrays that are known now."""
        target = ref.key
        facts = {**self.facts(ref.session_id), **self.facts(ref.session_id, target)}
        attached = [late for late in self.attachments(ref.session_id) if late.target == target]
        return query.with_late(ref, facts, attached)

    def released(self, session_id: str) -> tuple[Release, ...]:
        """Return the releases of a session's segments."""
        return self._of(session_id, query.releases_of, ())

    def final_view(self, session_id: str) -> str | None:
        """Return the view that a session was finalised with; None where it was not, was discarded, or is unknown."""
        sql = "SELECT view FROM sessions WHERE session_id = ? AND discarded_at IS NULL"
        return next((view for (view,) in self._asked(lambda run: run(sql, (session_id,)))), None)

    def n_tagged(self, tag: str) -> int:
        """Return how many segments are released under a tag."""
        return self._asked(lambda run: query.n_tagged(run, tag))

    def tools_at(self, key: str) -> Place | None:
        """Return where tool schemas are stored, or None."""
        return self._asked(lambda run: query.place_of_tools(run, key))

    def idle(self, now: float) -> list[str]:
        """Return the open sessions whose last event is older than their ``idle_s``, longest first."""
        return self._asked(lambda run: query.idle_ids(run, now))

    def totals(self, *, without: str = "") -> Totals:
        """Return counts over the whole spool, leaving out streams whose names begin with ``without``."""
        return self._asked(lambda run: query.totals(run, without))

    def summary(self, where: str | None = None, current_version: str | None = None) -> Summary:
        """Return the shape of the run at one moment; see `spool.catalog.summary`."""
        return self._database.at_one_moment(lambda run: summary(run, where, current_version))

    def slowest(self, where: str | None = None, limit: int = 10) -> list[SessionRow]:
        """Return the sessions that took longest, without discarded ones."""
        return self._asked(lambda run: query.session_rows(run, slowest(run, where, limit)))

    def sample(self, n: int, where: str | None = None) -> list[SegmentRef]:
        """Return at most ``n`` segments, spread over those of all sessions that match; the same ones each time."""
        return self._asked(lambda run: query.segment_refs(run, sample(run, n, where)))

    def news(self, mark: int | None, where: str | None = None) -> tuple[list[News], int]:
        """Return what became known behind a mark, and the next mark; with None only the mark behind all."""
        if mark is None:
            return [], self._asked(newest_mark)
        return self._asked(lambda run: news(run, mark, where))

    def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return everything the logs feed in a form that is equal for equal logs, however and when they were fed.

        Left out is where frames lay in logs that may be sealed by now.
        """
        return dump(self._run)

    # -- room --------------------------------------------------------------------------------------------------------

    def reserve(self, stream: str, n_bytes: int, limit: int) -> bool:
        """Add ``n_bytes`` to what a stream takes unless all streams together would pass ``limit``."""
        with self._database.writing() as connection:
            if connection.execute("SELECT ifnull(sum(n_bytes), 0) FROM space").get + n_bytes > limit:
                return False
            connection.execute(
                "INSERT INTO space VALUES(?, ?) ON CONFLICT DO UPDATE SET n_bytes = n_bytes + excluded.n_bytes",
                (stream, n_bytes),
            )
        return True

    def settle(self, stream: str, n_bytes: int) -> None:
        """Subtract ``n_bytes`` from what a stream takes; a stream that takes nothing is forgotten."""
        with self._database.writing() as connection:
            connection.execute("UPDATE space SET n_bytes = n_bytes - ? WHERE stream = ?", (n_bytes, stream))
            connection.execute("DELETE FROM space WHERE stream = ? AND n_bytes <= 0", (stream,))

    def account(self, exact: Mapping[str, int], assumed: Mapping[str, int]) -> None:
        """Correct the account by measured sizes, in bytes.

        Args:
            exact: of streams that nobody writes; 0 forgets one.
            assumed: of streams that are being written; used where nothing is known of them.
        """
        with self._database.writing() as connection:
            connection.executemany("INSERT OR REPLACE INTO space VALUES(?, ?)", exact.items())
            connection.executemany("INSERT OR IGNORE INTO space VALUES(?, ?)", assumed.items())
            connection.execute("DELETE FROM space WHERE n_bytes <= 0")

    def usage(self) -> dict[str, int]:
        """Return the bytes that each stream takes, grants included."""
        return dict(self._run("SELECT stream, n_bytes FROM space ORDER BY stream"))

    # -- shared ------------------------------------------------------------------------------------------------------

    def _run(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Ask the index that is there, fed or not."""
        return self._database.ask(lambda connection: executing(connection)(sql, values))

    def _chosen(self, question: Callable[[Execute], T]) -> tuple[T, Generation]:
        return self._database.ask_fed(lambda connection: question(executing(connection)))

    def _asked(self, question: Callable[[Execute], T]) -> T:
        return self._chosen(question)[0]

    def _of(self, session_id: str, question: Callable[[Execute, int], T], unknown: T) -> T:
        """Return what a question finds of a session's number, or ``unknown`` where it has none."""

        def found(run: Execute) -> T:
            for (sid,) in run("SELECT sid FROM sessions WHERE session_id = ?", (session_id,)):
                return question(run, sid)
            return unknown

        return self._asked(found)


def _writable(path: str) -> bool:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise StorageError(f"there is no folder {folder}; create it, or check the location of the spool", path=folder)
    return os.access(folder, os.W_OK) and (not os.path.exists(path) or os.access(path, os.W_OK))
