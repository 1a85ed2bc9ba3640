"""Publishing: waiting until all that references need is in the cold root.

Whoever publishes leaves a request for each stream in the catalog and looks until it is served. The stream's owner, or
the spiller where that is dead, rolls one pack for all requests that wait; the spiller brings it over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from spool.catalog import Catalog
from spool.errors import ConfigError, InputError, NotFoundError, StorageError
from spool.model.refs import Ref

Pack = tuple[str, int]

FIRST_LOOK_S = 0.02
LONGEST_LOOK_S = 0.25


class Publisher:
    """Waits for packs to be durable in the cold root.

    Args:
        catalog: the index; knows which packs hold a session, and in which tier they are.
        catch_up: brings the index up to date with the hot root.
        catch_up_cold: brings it up to date with the cold root.
        owned: returns the streams of this hot root; those of other nodes are waited for.
        nudge: makes sure that a spiller works; None where nothing is recorded here.
        location: of the spool, for errors.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        catch_up: Callable[[], object],
        catch_up_cold: Callable[[], object],
        owned: Callable[[], Collection[str]],
        nudge: Callable[[], None] | None,
        location: str,
    ) -> None:
        self._catalog = catalog
        self._catch_up = catch_up
        self._catch_up_cold = catch_up_cold
        self._owned = owned
        self._nudge = nudge
        self._location = location

    def publish(self, refs: Sequence[Ref], timeout_s: float) -> None:
        """Return when every byte that ``refs`` need, and the records of their sessions, are in the cold root.

        Raises:
            NotFoundError: a session is not recorded anywhere.
            StorageError: they are not there in ``timeout_s``.
        """
        for wait_s in self._steps(refs, timeout_s):
            time.sleep(wait_s)

    async def publish_async(
        self, refs: Sequence[Ref], timeout_s: float, on_thread: Callable[[Callable[[], float]], Awaitable[float]]
    ) -> None:
        """`publish`; waiting holds no thread."""
