"""Multimodal units: those that sessions name are there, and what is there is what its key says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from spool.audit.report import Finding, Findings
from spool.errors import IntegrityError, NotFoundError
from spool.formats.units import check
from spool.model.units import UNITS, parse_unit_path, unit_path
from spool.stores.objects import Objects
from spool.stores.units import HotUnits

FIELD = "units"


class NamedUnits(NamedTuple):
    """What should be there.

    Attributes:
        sessions: ids of the sessions that name each unit.
        needed: keys of the units that a live session names.
    """

    sessions: Mapping[str, Collection[str]]
    needed: Collection[str]


class UnitTotals(NamedTuple):
    """Units by tier, and their bytes; of the cold one None where there is none."""

    n_hot: int
    hot_bytes: int
    n_cold: int | None
    cold_bytes: int | None


def count(root: str | None, objects: Objects | None) -> UnitTotals:
    """Return how many units each tier has.

    Raises:
        StorageError: a root cannot be read.
    """
    hot = [unit.size for unit in HotUnits(root).all()] if root is not None else []
    cold = list(_cold_sizes(objects).values()) if objects is not None else None
    return UnitTotals(len(hot), sum(hot), None if cold is None else len(cold), None if cold is None else sum(cold))


def usage_row(totals: UnitTotals) -> dict[str, Any] | None:
    """Return the row of `spool.audit.usage` that stands for units; None where there are none."""
    if not totals.n_hot and not totals.n_cold:
        return None
    none = dict.fromkeys(("rows", "stored_bytes", "sent_bytes", "cold_rows", "cold_sent_bytes"))
    return {"stream": "", "field": FIELD, **none, "file_bytes": totals.hot_bytes, "cold_bytes": totals.cold_bytes}


def check_units(
    root: str | None, objects: Objects | None, named: NamedUnits, findings: Findings, *, deep: bool
) -> tuple[int, int]:
    """Check the units of both tiers; return how many there are, and their bytes.

    Args:
        root: the hot root; None where there is none here.
        objects: the cold root; None where there is none.
        named: what should be there.
        findings: takes what is wrong.
        deep: read each unit again.

    Raises:
        StorageError: a root cannot be read.
    """
    checked = _Units(root, objects, named.sessions)
    if deep:
        for finding, sessions in checked.damaged():
            findings.add(finding, sessions)
    for finding, sessions in checked.missing(named.needed):
        findings.add(finding, sessions)
    return checked.totals


class _Units:
    def __init__(self, root: str | None, objects: Objects | None, sessions: Mapping[str, Collection[str]]) -> None:
        self._units = None if root is None else HotUnits(root)
        self._objects = objects
        self._sessions = sessions
        self._hot = {unit.key: unit.size for unit in self._units.all()} if self._units is not None else {}
        self._cold = _cold_sizes(objects) if objects is not None else {}

    @property
    def totals(self) -> tuple[int, int]:
        """How many units there are in either tier, and their bytes."""
        both = {**self._cold, **self._hot}
        return len(both), sum(both.values())

    def missing(self, needed: Collection[str]) -> Iterator[tuple[Finding, Collection[str]]]:
        """Yield the units that live sessions name and no tier has."""
        for key in sorted(set(needed) - self._hot.keys() - self._cold.keys()):
            where = unit_path(key) if self._objects is None else f"{self._objects.url}/{unit_path(key)}"
            if self._units is not None:
                where = self._units.path(key)
            if self._is_gone(key):
                text = f"unit {key} is named and in no tier: it was never put here, or its files are lost; put it again"
                yield self._finding(text, where, hot=self._units is not None), self._sessions.get(key, ())

    def _is_gone(self, key: str) -> bool:
        """Whether a unit is missing still: a spiller may have moved it meanwhile."""
        here = self._units is not None and self._units.info(key) is not None
        return not here and (self._objects is None or self._objects.info(unit_path(key)) is None)

    def damaged(self) -> Iterator[tuple[Finding, Collection[str]]]:
        """Yield the units that are not what their keys say."""
        for key in sorted(self._hot):
            assert self._units is not None
            yield from self._checked(key, self._units.read(key), self._units.path(key), hot=True)
        for key in sorted(self._cold):
            assert self._objects is not None
            path = unit_path(key)
            try:
                data = self._objects.get(path)
            except NotFoundError:  # it is deleted just now
                continue
            except IntegrityError as error:
                yield self._finding(str(error), f"{self._objects.url}/{path}", hot=False), self._sessions.get(key, ())
                continue
            yield from self._checked(key, data, f"{self._objects.url}/{path}", hot=False)

    def _checked(
        self, key: str, data: bytes | bytearray | None, where: str, *, hot: bool
    ) -> Iterator[tuple[Finding, Collection[str]]]:
        if data is not None:
            try:
                check(data, key, where=where)
            except IntegrityError as error:
                yield self._finding(str(error), where, hot=hot), self._sessions.get(key, ())

    def _finding(self, text: str, where: str, *, hot: bool) -> Finding:
        return Finding(kind="integrity", text=text, field=FIELD, file=where, tier="hot" if hot else "cold")


def _cold_sizes(objects: Objects) -> dict[str, int]:
    found = ((parse_unit_path(info.key), info.size) for info in objects.list(UNITS))
    return {key: size for key, size in found if key is not None}
