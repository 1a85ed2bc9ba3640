"""What brings the index up to date: the logs of the hot root, the manifests of the cold one, or both."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from spool.catalog import Catalog, Place
from spool.errors import StorageError
from spool.logs import LogFeeder, Problem
from spool.logs.cold import ColdFeeder
from spool.model.events import Single
from spool.root import Standing
from spool.stores.retry import hurried

log = logging.getLogger("spool.logs")

FRESH_S = 1.0
"""Looks at the cold root that are closer together are left out where what was seen last will do."""
PATIENCE_S = 5.0
"""How long an answer about what a hot root has waits for a cold one that does not answer."""
START_PATIENCE_S = 2.0
"""How long the start of a session waits for it."""
AGAIN_S = 30.0
"""After that it is not asked for so long."""


class Feeds:
    """The sources of one spool's index.

    Args:
        hot: feeds it from the hot root; of a spool that is open from its cold root it finds nothing.
        cold: feeds it from the cold root; None where there is none.
        local: there is a hot root, whose own news do not wait for a cold root that cannot be reached.
        catalog: the index. What is asked of it is answered by what was fed here.
        standing: notices that another spool is in its place.
    """

    def __init__(
        self, hot: LogFeeder, cold: ColdFeeder | None, catalog: Catalog, standing: Standing, *, local: bool
    ) -> None:
        self.hot = hot
        self.cold = cold
        self._catalog = catalog
        self._standing = standing
        self._local = local
        self._ask_again_at = 0.0
        catalog.fed_by(lambda: self.catch_up(fresh=True))

    def catch_up(self, *, fresh: bool = False, whole: bool = False) -> list[Problem]:
        """Take in what is new.

        Args:
            fresh: look at the cold root even if that was done just now.
            whole: nothing may be missing: an unreachable cold root is an error, whatever the hot one has.

        Returns:
            What cannot be taken in.

        Raises:
            StorageError: a root cannot be read. Where there is a hot root, an unreachable cold one is only logged, once
                and after `PATIENCE_S`.
            ReplacedError: another spool is where the hot root was.
        """
        self._standing.check()
        with self._catalog.feeding() as is_another:
            problems = self.hot.catch_up()
            if self.cold is None:
                return problems
            return self._catch_up_with_cold(self.cold, problems, fresh=fresh or is_another, whole=whole)

    def _catch_up_with_cold(
        self, cold: ColdFeeder, problems: list[Problem], *, fresh: bool, whole: bool
    ) -> list[Problem]:
        after_s = 0.0 if fresh or whole else FRESH_S
        if whole or not self._local:
            found = cold.catch_up(after_s=after_s)
            self._ask_again_at = 0.0
            return [*problems, *found]
        self._look_at_cold(cold, after_s, PATIENCE_S)
        return [*problems, *cold.problems()]

    def catch_up_elsewhere(self) -> list[Problem]:
        """Take in what other nodes published, if that was not done just now; the hot root is not looked at.

        Returns:
            What could not be taken in, of the hot root as far as it was seen.
        """
        if self.cold is None:
            return self.hot.problems()
        self._look_at_cold(self.cold, FRESH_S, START_PATIENCE_S)
        return [*self.hot.problems(), *self.cold.problems()]

    def _look_at_cold(self, cold: ColdFeeder, after_s: float, patience_s: float) -> None:
        if time.monotonic() < self._ask_again_at:
            return
        try:
            with hurried(patience_s):
                cold.catch_up(after_s=after_s)
            self._ask_again_at = 0.0
        except StorageError as error:
            if not self._ask_again_at:
                log.warning(
                    "what other nodes and processes without a hot root said lately is not known here (sessions, "
                    "rewards, discards, releases, deletions): %s",
                    error,
                )
            self._ask_again_at = time.monotonic() + AGAIN_S

    def are_whole(self) -> bool:
        """Whether the index has all that there is, as far as it was looked: no record is damaged or out of reach."""
        if self._ask_again_at:
            return False
        rows = self._catalog.packs.rows()
        unknown = any(not row.known for row in rows if row.state not in ("open", "gone"))
        lost = any(problem.kind != "torn" for problem in self.hot.problems())
        return not unknown and not lost and not (self.cold is not None and self.cold.problems())

    def rebuild(self) -> list[Problem]:
        """Empty the index and feed it from the first event on; return what cannot be taken in.

        Raises:
            StorageError: a root cannot be read. The old index is still there, or what the hot root has of it.
        """
        if not self._local and self.cold is not None:
            return self.cold.rebuild()
        problems = self.hot.rebuild()
        if self.cold is not None:
            problems = [*problems, *self.cold.catch_up()]
        return problems

    def read_events(self, places: Sequence[Place]) -> list[Single]:
        """Return the whole events at ``places``, in their order.

        Raises:
            NotFoundError, IntegrityError, StorageError: as `LogFeeder.read_events`.
        """
        return self.hot.read_events(places)
