"""The index: SQLite fed from the commit logs. It may be deleted at any time; the logs make it again."""

from spool.catalog.catalog import Catalog
from spool.catalog.files import DamagedError
from spool.catalog.rows import (
    GroupLook,
    Located,
    LogItem,
    LogState,
    PackRow,
    PackState,
    PackUse,
    Place,
    Release,
    SessionEnd,
    SessionLook,
    SessionRow,
    Totals,
)
from spool.catalog.space import Space
from spool.catalog.uses import StreamSizes

__all__ = [
    "Catalog",
    "DamagedError",
    "GroupLook",
    "Located",
    "LogItem",
    "LogState",
    "PackRow",
    "PackState",
    "PackUse",
    "Place",
    "Release",
    "SessionEnd",
    "SessionLook",
    "SessionRow",
    "Space",
    "StreamSizes",
    "Totals",
]
