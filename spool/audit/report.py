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
            `recover` puts in order; ``lint``: stored as it was sent, but implausible.
        text: what is wrong.
        stream: the stream's name.
        field: the stored array, or ``records``.
        rows: the stored rows ``[start, stop)`` that it is about.
        file: the file.
        n_steps: recorded steps that name those rows.
        steps: ids of the first `MAX_STEPS` of them.
    """

    kind: Kind
    text: str
    stream: str | None = None
    field: str | None = None
    rows: tuple[int, int] | None = None
    file: str | None = None
    n_steps: int = 0
    steps: tuple[str, ...] = ()


class Report(Struct, frozen=True):
    """What `Spool.verify` looked at and found.

    Attributes:
        deep: everything was read again.
        n_sessions, n_packs, n_extents, n_bytes: what was looked at; bytes are those of the rows.
        findings: in the order of the files.
    """

    deep: bool
    n_sessions: int
    n_packs: int
    n_extents: int
    n_bytes: int
    findings: tuple[Finding, ...]

    def summary(self) -> str:
        """Return the report as one line."""
        done = "re-read and checked" if self.deep else "found in place"
        number = len(self.findings)
        problems = f"{number} finding{'s' if number > 1 else ''}" if number else "nothing wrong"
        return (
            f"{self.n_sessions:,} sessions, {self.n_packs:,} packs, {self.n_extents:,} extents, "
            f"{format_size(self.n_bytes)} {done}: {problems}"
        )


class Findings:
    """Collects findings; one that goes on where the last one ended is merged into it."""

    def __init__(self) -> None:
        self._found: list[tuple[Finding, dict[str, None]]] = []

    def add(self, finding: Finding, steps: Iterable[str] = ()) -> None:
        """Take in a finding about rows that ``steps`` name."""
        if self._found:
            last, known = self._found[-1]
            rows = _joined(last, finding)
            if rows is not None:
                known.update(dict.fromkeys(steps))
                self._found[-1] = replace(last, rows=rows), known
                return
        self._found.append((finding, dict.fromkeys(steps)))

    def all(self) -> tuple[Finding, ...]:
        """Return what was found."""
        return tuple(
            replace(finding, n_steps=len(steps), steps=tuple(islice(steps, MAX_STEPS)))
            for finding, steps in self._found
        )


def _joined(last: Finding, new: Finding) -> tuple[int, int] | None:
    """Return the rows of both where the new one says the same of the rows that follow, or some of the same."""
    if last.rows is None or new.rows is None or new != replace(last, rows=new.rows) or new.rows[0] > last.rows[1]:
        return None
    return last.rows[0], max(last.rows[1], new.rows[1])
