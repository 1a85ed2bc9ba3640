"""The indexes of compressed shards in the cold tier: read once each, kept up to a limit."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from spool.formats.cold import parse_index

if TYPE_CHECKING:
    from spool.formats.cold import Index
    from spool.formats.cold_arrays import ColdLayout
    from spool.read.fetch import Batch

KEPT_BYTES = 64 << 20


class Indexes:
    """Indexes by object; those that were used last are kept. Thread-safe, and usable after a fork.

    Args:
        get_range: returns bytes ``[start, stop)`` of an object, which it counts for a batch.
        kept_bytes: most bytes that are kept, of more than one index.
    """

    def __init__(
        self, get_range: Callable[[str, int, int, Batch | None], bytes], *, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._get_range = get_range
        self._limit = kept_bytes
        self._kept: OrderedDict[str, Index] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()
        _all.add(self)

    def of(self, key: str, layout: ColdLayout, batch: Batch | None = None) -> Index:
        """Return the index of an object.

        Raises:
            NotFoundError: there is no such object.
            IntegrityError: it is damaged.
            StorageError: the store failed.
        """
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        return self._keep(key, self._read(key, layout, batch))

    def renew(self, key: str, layout: ColdLayout) -> bool:
        """Read the index of an object anew; return whether it is another one now.

        Raises:
            NotFoundError, IntegrityError, StorageError: as `of`.
        """
        known, fresh = self._kept.get(key), self._read(key, layout)
        self._keep(key, fresh)
        return known is not None and not np.array_equal(known, fresh)

    def _read(self, key: str, layout: ColdLayout, batch: Batch | None = None) -> Index:
        return parse_index(layout, self._get_range(key, 0, layout.index_bytes, batch))

    def _keep(self, key: str, index: Index) -> Index:
        with self._lock:
            before = self._kept.pop(key, None)
            self._n_bytes += index.nbytes - (0 if before is None else before.nbytes)
            self._kept[key] = index
            while self._n_bytes > self._limit and len(self._kept) > 1:
                self._n_bytes -= self._kept.popitem(last=False)[1].nbytes
        return index

    def forked(self) -> None:
        """Replace the lock in a forked child, where another thread may have held it; start without indexes."""
        self._lock, self._kept, self._n_bytes = threading.Lock(), OrderedDict(), 0


_all: weakref.WeakSet[Indexes] = weakref.WeakSet()


def _after_fork() -> None:
    for indexes in list(_all):
        indexes.forked()


os.register_at_fork(after_in_child=_after_fork)
