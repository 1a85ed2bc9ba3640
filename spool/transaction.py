"""Transactions: what a task appends inside ``with session.transaction():`` holds together, or is gone."""

from __future__ import annotations

import contextvars
from types import TracebackType
from typing import TYPE_CHECKING

from spool.errors import SessionStateError
from spool.model.events import Single

if TYPE_CHECKING:
    from spool.session import Session


class Held:
    """The events of one transaction, until its block ends.

    Attributes:
        events: in the order they happened.
        open: the block has not ended.
    """

    def __init__(self) -> None:
        self.events: list[Single] = []
        self.open = True


_current: contextvars.ContextVar[dict[str, Held] | None] = contextvars.ContextVar("spool_transactions", default=None)


def held_by_task(session_id: str) -> Held | None:
    """Return the transaction that the calling task has open on a session, or None.

    Raises:
        SessionStateError: it had one, which has ended; what this call wanted to append is not part of anything.
    """
    held = (_current.get() or {}).get(session_id)
    if held is not None and not held.open:
        raise SessionStateError(f"the transaction of session {session_id!r} that this task began has ended")
    return held


class TransactionBlock:
    """``with session.transaction():`` or ``async with``; see `Session.transaction`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: Held | None = None
        self._reset: contextvars.Token[dict[str, Held] | None] | None = None

    def __enter__(self) -> Session:
        self._held = self._session.begin()
        self._reset = _current.set({**(_current.get() or {}), self._session.session_id: self._held})
        return self._session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is None or self._reset is None:
            raise SessionStateError("a transaction block ends once, after it was entered")
        _current.reset(self._reset)
        self._session.end(self._held, keep=kind is None)

    async def __aenter__(self) -> Session:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)
