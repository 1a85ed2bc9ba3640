"""The records of every pack: the commit log, or what it was sealed into."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping

from spool.audit.report import Finding, Findings
from spool.catalog import LogState
from spool.errors import SpoolError
from spool.formats import records
from spool.formats.frames import decode_event
from spool.logs import Problem
from spool.logs.events import map_file
from spool.logs.packs import has_left
from spool.logs.streams import is_live, log_path, records_path
from spool.write.log import read_log


def known_problem(root: str, problem: Problem) -> Finding:
    """Return what the index could not take in as a finding."""
    if problem.file is not None:
        text = problem.message.removeprefix(f"{problem.file}: ")
        return Finding(
            kind="integrity", text=text, stream=problem.stream, field="records", file=problem.file, tier="cold"
        )
    log, sealed = log_path(root, problem.stream, problem.pack), records_path(root, problem.stream, problem.pack)
    return Finding(
        kind="unfinished" if problem.kind == "torn" else "integrity",
        text=problem.message.partition(": ")[2],
        stream=problem.stream,
        field="records",
        file=log if os.path.exists(log) else sealed,
    )


def check_records(
    root: str,
    stream: str,
    packs: Mapping[int, LogState],
    findings: Findings,
    *,
    deep: bool,
    told: Collection[int] = (),
) -> None:
    """Check that the records of each pack are there; with ``deep`` that each event can be read.

    Args:
        root: the hot root.
        stream: the stream's name.
        packs: how far each pack's records are known.
        findings: takes what is wrong.
        deep: read them.
        told: packs of which it is reported already what is wrong with their records; they must be there.
    """
    for pack, state in packs.items():
        log, sealed = log_path(root, stream, pack), records_path(root, stream, pack)
        file = log if os.path.exists(log) else sealed
        try:
            text = _check(log, sealed, state, live=is_live(root, stream), deep=deep, told=pack in told)
        except (SpoolError, OSError) as error:
            text = str(error)
        if text is not None and not has_left(root, stream, pack, sealed):
            findings.add(Finding(kind="integrity", text=text, stream=stream, field="records", file=file))


def _check(log: str, sealed: str, state: LogState, *, live: bool, deep: bool, told: bool) -> str | None:
    # a log is removed after its sealed form is there: looked for in this order one of them is found
    if os.path.exists(log):
        with contextlib.suppress(FileNotFoundError):
            return None if told else _check_log(log, state, live=live, deep=deep)
    if os.path.exists(sealed):
        return _check_sealed(sealed, state) if deep and not told else None
    return "the records are missing: messages of this pack are lost, and after `spool rebuild` its steps are, too"


def _check_log(file: str, state: LogState, *, live: bool, deep: bool) -> str | None:
    size = os.stat(file).st_size
    if size < state.offset:
        return f"the log has only {size} bytes, and events were read up to {state.offset}: the last ones are lost"
    if not deep:
        return None
    found = read_log(file)
    if found.damaged_bytes:
        return f"{found.damaged_bytes} bytes between events are damaged; `spool recover` saves the events behind them"
    if found.torn_bytes and len(found.payloads) < state.n_events and not live:
        return f"{found.torn_bytes} bytes at the end are damaged"
    return _fewer(len(found.payloads), state)


def _check_sealed(file: str, state: LogState) -> str | None:
    payloads = records.decode(map_file(file))
    for payload in payloads:
        decode_event(payload)
    return _fewer(len(payloads), state)


def _fewer(n_events: int, state: LogState) -> str | None:
    if n_events < state.n_events:
        return f"there are {n_events} events, and {state.n_events} were read before: some are lost"
    return None
