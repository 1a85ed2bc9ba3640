"""How much of the hot tier is taken: one row a stream, changed in one transaction each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spool.catalog.schema import STATES

if TYPE_CHECKING:
    import apsw

    from spool.catalog.catalog import Catalog

_IN_HOT = (STATES.index("sealed"), STATES.index("spilled"))
_GIVE_BACK = """
UPDATE space SET n_bytes = n_bytes - ifnull(p.hot_bytes, 0) FROM packs p
WHERE p.id = ? AND p.state IN (?, ?) AND space.stream = p.stream"""


def give_back(connection: apsw.Connection, pack: int) -> None:
    """Subtract what a pack takes, which is about to leave the hot tier, unless it has left before.

    Args:
        connection: inside the transaction that says so.
        pack: number of its row.
    """
    connection.execute(_GIVE_BACK, (pack, *_IN_HOT))
    connection.execute("DELETE FROM space WHERE n_bytes <= 0")


class Space:
    """The room that the streams of a spool share; what `write` asks before it grows a stream.

    Args:
        catalog: keeps the sums of all processes.
        limit: bytes that all streams may take together; None for no limit, then nothing is recorded.
    """

    def __init__(self, catalog: Catalog, limit: int | None) -> None:
        self._catalog = catalog
        self._limit = limit

    def reserve(self, stream: str, n_bytes: int) -> bool:
        """Grant ``n_bytes`` more to a stream, or return False where the limit would be passed.

        Raises:
            StorageError: the catalog cannot be written.
        """
        return self._limit is None or self._catalog.reserve(stream, n_bytes, self._limit)

    def settle(self, stream: str, n_bytes: int) -> None:
        """Take back ``n_bytes`` that were granted to a stream and turned out not to be needed.

        Raises:
            StorageError: the catalog cannot be written.
        """
        if self._limit is not None:
            self._catalog.settle(stream, n_bytes)
