"""The index: SQLite fed from the commit logs. It may be deleted at any time; the logs make it again."""

from spool.catalog.catalog import Catalog
from spool.catalog.rows import (
    Located,
    LogItem,
    LogState,
    PackRow,
    PackState,
    PackUse,
    Place,
    Release,
    SessionEnd,
    SessionRow,
    Totals,
)
from spool.catalog.schema import DamagedError
from spool.catalog.space import Space
from spool.catalog.uses import ShardRows

__all__ = [
    "Catalog",
    "DamagedError",
    "Located",
    "LogItem",
    "LogState",
    "PackRow",
    "PackState",
    "PackUse",
    "Place",
    "Release",
    "SessionEnd",
    "SessionRow",
    "ShardRows",
    "Space",
    "Totals",
]
