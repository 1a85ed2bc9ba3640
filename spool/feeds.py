"""What brings the index up to date: the logs of the hot root, the manifests of the cold one, or both."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spool.catalog import Place
from spool.errors import StorageError
from spool.logs import LogFeeder, Problem
from spool.logs.cold import ColdFeeder
from spool.model.events import Single

log = logging.getLogger("spool.logs")

FRESH_S = 1.0
"""Looks at the cold root that are closer together are left out where what was seen last will do."""


class Feeds:
    """The sources of one spool's index.

    Args:
        hot: feeds it from the hot root; of a spool that is open from its cold root it finds nothing.
        cold: feeds it from the cold root; None where there is none.
        local: there is a hot root, whose own news do not wait for a cold root that cannot be reached.
    """

    def __init__(self, hot: LogFeeder, cold: ColdFeeder | None, *, local: bool) -> None:
        self.hot = hot
        self.cold = cold
        self._local = local

    def catch_up(self, *, fresh: bool = False) -> list[Problem]:
        """Take in what is new.

        Args:
            fresh: look at the cold root even if that was done just now.

        Returns:
            What of the hot root cannot be taken in.

        Raises:
            StorageError: a root cannot be read. Where there is a hot root, an unreachable cold one is only logged.
        """
        problems = self.hot.catch_up()
        if self.cold is not None:
            try:
                self.cold.catch_up(after_s=0.0 if fresh else FRESH_S)
            except StorageError as error:
                if not self._local:
                    raise
                log.warning("what other nodes published lately is not listed: %s", error)
        return problems

    def read_events(self, places: Sequence[Place]) -> list[Single]:
        """Return the whole events at ``places``, in their order.

        Raises:
            NotFoundError, IntegrityError, StorageError: as `LogFeeder.read_events`.
        """
        return self.hot.read_events(places)
