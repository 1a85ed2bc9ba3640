"""How much of the hot tier is taken: one row a stream, changed in one transaction each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spool.catalog.catalog import Catalog


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
