"""The names of multimodal units: what their keys look like, and where they lie below a root.

A key says what is in the unit: it is ``unit-`` and the SHA-256 of the unit's file, which follows from dtype, shape and
values alone. Units come from anywhere, so two that somebody made to collide must not: a cryptographic digest, and this
one because ``sha256sum`` checks a file with no Spool installed, and CPUs have instructions for it. The prefix keeps
keys apart from those that callers make up themselves, which may well be digests too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spool.model.refs import Unit

UNITS = "units/"
PREFIX = "unit-"

_KEY = re.compile(r"unit-[0-9a-f]{64}")


def is_unit_key(key: str) -> bool:
    """Whether ``key`` is one that ``put_unit`` returns, and not a caller's own."""
    return _KEY.fullmatch(key) is not None


def unit_path(key: str) -> str:
    """Return where the unit of a key lies, relative to either root: ``units/<first two digits>/<key>``."""
    return f"{UNITS}{key[len(PREFIX) : len(PREFIX) + 2]}/{key}"


def parse_unit_path(path: str) -> str | None:
    """Return the key of the unit at ``path``, relative to a root; None for anything else."""
    key = path.rpartition("/")[2]
    return key if is_unit_key(key) and unit_path(key) == path else None


def own_keys(units: Iterable[Unit]) -> list[str]:
    """Return the keys among ``units`` that ``put_unit`` returns, each once, in order."""
    return list(dict.fromkeys(unit.key for unit in units if is_unit_key(unit.key)))
