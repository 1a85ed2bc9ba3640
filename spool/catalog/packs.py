"""What is known of packs: their tier, who uses them, who asked for a seal, and which objects were taken in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from spool.catalog import tiers
from spool.catalog.database import Database, Execute, Generation, executing
from spool.catalog.rows import PackRow, PackState, PackUse, SessionEnd
from spool.catalog.schema import EVICTED, GONE, OPENED, STATES
from spool.catalog.space import give_back
from spool.catalog.uses import pack_id

T = TypeVar("T")

_MARK = """
UPDATE packs SET state = max(ifnull(state, 0), ?2), hot_bytes = ifnull(?3, hot_bytes),
    stored_bytes = ifnull(?4, stored_bytes), sealed_at = ifnull(?5, sealed_at)
WHERE id = ?1 AND ifnull(state, 0) <> ?6"""


class Packs:
    """The packs of a catalog; safe from many threads, many processes, and after a fork.

    Args:
        database: the catalog's.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._here: tuple[Generation | None, set[str], set[str]] = (None, set(), set())

    # -- tiers -------------------------------------------------------------------------------------------------------

    def rows(self, state: PackState | None = None, *, stream: str | None = None) -> Iterator[PackRow]:
        """Iterate packs by stream and number, of one state or all, of one stream or all."""
        return iter(self._asked(lambda run: tiers.pack_rows(run, state, stream)))

    def get(self, stream: str, pack: int) -> PackRow | None:
        """Return a pack, or None where nothing is known of it."""
        return self._asked(lambda run: tiers.pack_row(run, stream, pack))

    def states(self, stream: str) -> dict[int, PackState]:
        """Return the states of a stream's packs by number, as they are in the index that is there, fed or not."""
        sql = "SELECT pack, state FROM packs WHERE stream = ? AND state IS NOT NULL"
        return {pack: STATES[state] for pack, state in self._run(sql, (stream,))}

    def mark(
        self,
        stream: str,
        pack: int,
        state: PackState,
        *,
        hot_bytes: int | None = None,
        stored_bytes: int | None = None,
        sealed_at: float | None = None,
    ) -> None:
        """Say what became of a pack. Its state only goes forward, and what is None stays as it was.

        One that is gone stays gone; `Catalog.forget` makes it so. The room of one that leaves the hot tier is given
        back with that, once, whoever says so first.

        Raises:
            StorageError: the catalog cannot be written.
        """
        number = STATES.index(state)
        assert number != GONE, "a pack goes by Catalog.forget"
        found = tiers.pack_row(self._run, stream, pack)
        if found is not None and _says(found, number, hot_bytes, stored_bytes, sealed_at):
            return
        with self._database.writing() as connection:
            log = pack_id(connection, stream, pack)
            if number >= EVICTED:
                give_back(connection, log)
            connection.execute(_MARK, (log, number, hot_bytes, stored_bytes, sealed_at, GONE))

    # -- who uses them -----------------------------------------------------------------------------------------------

    def of(self, session_ids: Iterable[str]) -> set[tuple[str, int]]:
        """Return the packs, as (stream, number), that hold rows or events of sessions; those that are gone left out."""
        return self._asked(lambda run: tiers.packs_of(run, list(session_ids)))

    def uses(self) -> tuple[list[PackUse], dict[str, SessionEnd]]:
        """Return, as of one moment, what decides which packs may go.

        Every pack that is not gone and the sessions that it matters to, by stream and number; and how far each session
        is from being over, by id.
        """
        return self._database.at_one_moment(lambda run: (tiers.uses(run, OPENED, EVICTED), tiers.session_ends(run)))

    def sessions(self) -> dict[str, SessionEnd]:
        """Return how far each session is from being over, by id, as of one moment."""
        return self._database.at_one_moment(tiers.session_ends)

    def known(self) -> set[tuple[str, int]]:
        """Return the packs, as (stream, number), whose events are all taken in."""
        sql = "SELECT p.stream, p.pack FROM packs p JOIN logs l ON l.id = p.id WHERE l.sealed"
        return set(self._asked(lambda run: run(sql)))

    # -- requests ----------------------------------------------------------------------------------------------------

    def request_seal(self, stream: str, pack: int) -> None:
        """Ask the stream's owner to seal its packs up to and with ``pack``; asked again it is one request.

        Raises:
            StorageError: the catalog cannot be written.
        """
        if self.seal_requests().get(stream, -1) >= pack:
            return
        with self._database.writing() as connection:
            connection.execute(
                "INSERT INTO requests VALUES(?, ?) ON CONFLICT DO UPDATE SET pack = max(pack, excluded.pack)",
                (stream, pack),
            )

    def seal_requests(self) -> dict[str, int]:
        """Return the last pack that is to be sealed, by stream."""
        return dict(self._run("SELECT stream, pack FROM requests ORDER BY stream"))

    def serve(self, stream: str, pack: int) -> None:
        """Say that a stream's packs are sealed up to and with ``pack``.

        Raises:
            StorageError: the catalog cannot be written.
        """
        with self._database.writing() as connection:
            connection.execute("DELETE FROM requests WHERE stream = ? AND pack <= ?", (stream, pack))

    # -- objects -----------------------------------------------------------------------------------------------------

    def seen(self) -> set[str]:
        """Return the keys of the objects (manifests, roll-ups, fact files) that were taken in."""
        found = {key for (key,) in self._run("SELECT key FROM objects")}
        _, added, dropped = self._noted()
        return found - dropped | added

    def _noted(self) -> tuple[Generation | None, set[str], set[str]]:
        """Return the keys that this process notes for itself while it only reads the catalog's file."""
        generation = self._database.generation()
        if self._here[0] != generation:
            self._here = (generation, set(), set())
        return self._here

    def saw(self, keys: Iterable[str]) -> None:
        """Say that objects were taken in; inside `Catalog.bulk` together with what was in them.

        Raises:
            StorageError: the catalog cannot be written.
        """
        if self._database.is_borrowed:
            self._noted()[1].update(keys)
            return
        with self._database.writing() as connection:
            connection.executemany("INSERT OR IGNORE INTO objects VALUES(?)", [(key,) for key in keys])

    def unsee(self, keys: Iterable[str]) -> None:
        """Say that objects are no longer there.

        Raises:
            StorageError: the catalog cannot be written.
        """
        if self._database.is_borrowed:
            self._noted()[2].update(keys)
            return
        with self._database.writing() as connection:
            connection.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in keys])

    def _run(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._database.ask(lambda connection: executing(connection)(sql, values))

    def _asked(self, question: Callable[[Execute], T]) -> T:
        return self._database.ask_fed(lambda connection: question(executing(connection)))[0]


def _says(row: PackRow, state: int, hot: int | None, stored: int | None, sealed_at: float | None) -> bool:
    """Whether there is nothing to change in a row."""
    pairs = ((hot, row.hot_bytes), (stored, row.stored_bytes), (sealed_at, row.sealed_at))
    same = all(new is None or new == old for new, old in pairs)
    return row.state == "gone" or (same and STATES.index(row.state) >= state)
