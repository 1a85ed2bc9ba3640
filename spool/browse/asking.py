"""Questions to a spool, answered on threads: of one key one at a time, and of those that wait the latest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class _Waiting(NamedTuple):
    token: object
    call: Callable[[], Any]
    answer: Callable[[Any, BaseException | None], None]


class Asking:
    """Runs calls on daemon threads, so that one that hangs holds nobody: neither the next key nor the exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[str, object] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._running: set[str] = set()

    def ask(
        self, key: str, token: object, call: Callable[[], Any], answer: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run ``call`` on a thread, once what runs under ``key`` has come back; a later call of the key replaces it.

        Args:
            key: of the question.
            token: stands for this call, for `settle`.
            call: what is asked.
            answer: called on the thread with what it returned, or with what it raised.
        """
        with self._lock:
            self._latest[key] = token
            self._waiting[key] = _Waiting(token, call, answer)
            if key in self._running:
                return
            self._running.add(key)
        threading.Thread(target=self._run, args=(key,), name=f"spool-browse-{key}", daemon=True).start()

    def settle(self, key: str, token: object) -> bool:
        """Tell whether ``token`` is the latest of its key; then nothing is awaited under it any more."""
        with self._lock:
            if self._latest.get(key) is not token:
                return False
            del self._latest[key]
            return True

    @property
    def is_busy(self) -> bool:
        """Whether an answer is awaited."""
        with self._lock:
            return bool(self._latest)

    def _run(self, key: str) -> None:
        while True:
            with self._lock:
                waiting = self._waiting.pop(key, None)
                if waiting is None:
                    self._running.discard(key)
                    return
            try:
                value, error = waiting.call(), None
            except BaseException as raised:  # noqa: BLE001  (whoever asked decides what it means)
                value, error = None, raised
            waiting.answer(value, error)
