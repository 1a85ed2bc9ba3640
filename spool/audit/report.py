"""What a check found, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from spool.sizes import format_size

Kind = Literal["integrity", "unfinished", "lint"]

MAX_STEPS = 8
"""Steps that a finding names; it counts them all."""


class Finding(Struct, frozen=True, kw_only=True):
    """Something that is not as it should be.

    Attributes:
        kind: ``integrity``: bytes are missing, short or altered; ``unfinished``: what a killed writer left, which
            `recover` puts in order, or a killed spiller, which the next one does; ``lint``: stored as it was sent, but
            implausible.
        text: what is wrong.
        stream: the stream's name.
        field: the stored array, ``records``, or ``units``.
        rows: the stored rows ``[start, stop)`` that it is about.
        file: the file.
        n_steps: recorded steps that name those rows; of a unit, sessions.
        steps: ids of the first `MAX_STEPS` of them.
        tier: where it is; ``file`` is a URL where that is ``cold``.
    """

    kind: Kind
    text: str
    stream: str | None = None
    field: str | None = None
    rows: tuple[int, int] | None = None
    file: str | None = None
    n_steps: int = 0
    steps: tuple[str, ...] = ()
    tier: Literal["hot", "cold"] = "hot"


class Report(Struct, frozen=True):
    """What `Spool.verify` looked at and found.

    Attributes:
        deep: everything was read again.
        n_sessions, n_packs, n_extents, n_bytes: what was looked at; bytes are those of the rows.
        findings: in the order of the files.
        n_units, unit_bytes: multimodal units that are there, in either tier, and their bytes.
    """

    deep: bool
    n_sessions: int
    n_packs: int
    n_extents: int
    n_bytes: int
    findings: tuple[Finding, ...]
    n_units: int = 0
    unit_bytes: int = 0

    def summary(self) -> str:
        """Return the report as one line."""
        done = "re-read and checked" if self.deep else "found in place"
        number = len(self.findings)
        problems = f"{number} finding{'s' if number > 1 else ''}" if number else "nothing wrong"
        units = f", {self.n_units:,} units" if self.n_units else ""
        return (
            f"{self.n_sessions:,} sessions, {self.n_packs:,} packs, {self.n_extents:,} extents{units}, "
            f"{format_size(self.n_bytes + self.unit_bytes)} {done}: {problems}"
        )


class Findings:
    """Collects findings.

    One that goes on where the last one ended is merged into it. Those of one group, an array and a sort of fault, are
    one finding: what it says is the first place's, and in how many others the like is found.
    """

    def __init__(self) -> None:
        self._found: list[_Entry] = []
        self._groups: dict[tuple[str | None, str | None, str], _Entry] = {}

    def add(self, finding: Finding, steps: Iterable[str] = (), *, group: str | None = None) -> None:
        """Take in a finding about rows that ``steps`` name; of those of a group, in the order of the rows."""
        key = None if group is None else (finding.stream, finding.field, group)
        entry = self._groups.get(key) if key is not None else self._found[-1] if self._found else None
        if entry is None or not entry.take(finding, grouped=key is not None):
            entry = _Entry(finding)
            self._found.append(entry)
            if key is not None:
                self._groups[key] = entry
        entry.steps.update(dict.fromkeys(steps))

    def all(self) -> tuple[Finding, ...]:
        """Return what was found."""
        return tuple(entry.finding() for entry in self._found)


class _Entry:
    """A finding, the steps it is about, and in how many places it is found.

    Attributes:
        steps: ids, each once, in order.
    """

    def __init__(self, first: Finding) -> None:
        self.steps: dict[str, None] = {}
        self._first = self._last = first
        self._n_others = 0

    def take(self, new: Finding, *, grouped: bool) -> bool:
        """Take in another finding, if it is this one going on, or one of its group."""
        rows = _joined(self._last, new)
        if rows is not None:
            self._last = replace(self._last, rows=rows)
            if not self._n_others:
                self._first = self._last
            return True
        if grouped:
            self._n_others += not _overlap(self._last, new)
            self._last = new
        return grouped

    def finding(self) -> Finding:
        """Return what is to be reported."""
        found, n = self._first, self._n_others
        more = f"; the like in {n} other run{'s' if n > 1 else ''} of rows" if n else ""
        return replace(
            found, text=found.text + more, n_steps=len(self.steps), steps=tuple(islice(self.steps, MAX_STEPS))
        )


def _overlap(last: Finding, new: Finding) -> bool:
    # a large extent is looked at in pieces, each of which may show the fault
    return last.rows is not None and new.rows is not None and new.rows[0] < last.rows[1]


def _joined(last: Finding, new: Finding) -> tuple[int, int] | None:
    """Return the rows of both where the new one says the same of the rows that follow, or some of the same."""
    if last.rows is None or new.rows is None or new != replace(last, rows=new.rows) or new.rows[0] > last.rows[1]:
        return None
    return last.rows[0], max(last.rows[1], new.rows[1])
