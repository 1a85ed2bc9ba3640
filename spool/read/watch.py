"""One read as an observer is told of it."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Self

from spool.errors import IntegrityError
from spool.observe import IntegrityFailed, Read, tell

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from spool.observe import Observer
    from spool.read.fetch import Batch


class Watch:
    """Adds up what the batches of a read asked for and fetched, and tells it at the end; for nobody it does nothing.

    Args:
        observer: is told.

    Attributes:
        seen: takes a batch that was executed; None where nobody is told.
    """

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._batches: list[Batch] = []
        self.seen: Callable[[Batch], object] | None = None if observer is None else self._batches.append

    def __enter__(self) -> Self:
        if self._observer is not None:
            self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._observer is None:
            return
        if isinstance(error, IntegrityError):
            tell(self._observer, _failed(error))
        elif error is None:
            fetched: Counter[str] = Counter()
            for batch in self._batches:
                for damage in batch.damage:
                    tell(self._observer, _failed(damage))
                for tier, n_bytes in batch.fetched:
                    fetched[tier] += n_bytes
            asked = sum(batch.asked_bytes() for batch in self._batches)
            tell(self._observer, Read(asked, dict(fetched), time.perf_counter() - self._began))


def _failed(error: IntegrityError) -> IntegrityFailed:
    names = {name: error.details.get(name) for name in ("stream", "field", "file")}
    return IntegrityFailed(str(error), **{k: v for k, v in names.items() if isinstance(v, str)})
