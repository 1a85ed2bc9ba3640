"""Which multimodal units sessions name, by the keys that ``put_unit`` returns."""

from __future__ import annotations

from typing import Any

from spool.catalog.database import Database, executing
from spool.catalog.schema import OPENED, SEALED

_NAMED = "SELECT u.key, s.session_id FROM units u JOIN sessions s ON s.sid = u.sid GROUP BY u.key, u.sid"
_UNPUBLISHED = "SELECT DISTINCT u.key FROM units u JOIN packs p ON p.id = u.log WHERE p.state BETWEEN ? AND ?"
_ANY = "SELECT EXISTS(SELECT 1 FROM units)"


class NamedUnits:
    """The units that the steps in a catalog name; safe from many threads, many processes, and after a fork.

    Args:
        database: the catalog's.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def any(self) -> bool:
        """Whether a step names a unit."""
        return bool(self._run(_ANY)[0][0])

    def named(self) -> dict[str, list[str]]:
        """Return the ids of the sessions that name each unit."""
        found: dict[str, list[str]] = {}
        for key, session_id in self._run(_NAMED):
            found.setdefault(key, []).append(session_id)
        return found

    def unpublished(self) -> set[str]:
        """Return the units that packs name which are not in a cold root."""
        return {key for (key,) in self._run(_UNPUBLISHED, (OPENED, SEALED))}

    def _run(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return self._database.ask_fed(lambda connection: executing(connection)(sql, values))[0]
