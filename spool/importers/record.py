"""Runs -> sessions."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from spool.errors import InputError, StepConflictError
from spool.importers.base import Failure, Ignored, ImportedRun, ordered_steps
from spool.importers.files import read_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spool.catalog import SessionRow
    from spool.handle import Spool
    from spool.importers.base import ImportedStep

_DIGEST = "import_digest"
_ESCAPED = "ascii_json"


class ImportReport(Struct, frozen=True):
    """What an import did.

    Attributes:
        imported: ids of the sessions recorded, or completed after an import that was interrupted.
        unchanged: ids of those that an earlier import had recorded with equal content.
        failed: runs and files that were not imported, and why.
        ignored: files of the folder that hold no runs.
        dropped: of the sessions in ``imported`` and ``unchanged``, how many tokens of the record are in no step, where
            there are any.
        messages_only: those of the sessions in ``imported`` and ``unchanged`` whose source has no token ids.
    """

    imported: tuple[str, ...]
    unchanged: tuple[str, ...]
    failed: tuple[Failure, ...]
    ignored: tuple[Ignored, ...]
    dropped: dict[str, int] = {}
    messages_only: tuple[str, ...] = ()


def import_runs(
    path: str | os.PathLike[str],
    sp: Spool,
    *,
    form: str | None = None,
    on_error: Callable[[Failure], None] | None = None,
) -> ImportReport:
    """Record every run under ``path`` as a finalised session; importing the same again changes nothing.

    A run is recorded whole or not at all, and one bad run does not keep the others out.

    Args:
        path: a file or folder, see `read_runs`.
        sp: the spool.
        form: one of `FORMS`, where content shall not decide.
        on_error: called at once with each failure, which the report lists as well.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file, if it is one, is of no known form.
        CapacityError: no room; what was recorded stays, and the import can be repeated.
        StorageError: the spool's storage failed.
    """
    imported: list[str] = []
    unchanged: list[str] = []
    failed: list[Failure] = []
    ignored: list[Ignored] = []
    dropped: dict[str, int] = {}
    messages_only: list[str] = []
    for found in read_runs(path, form=form):
        problem = found if isinstance(found, Failure) else None
        if isinstance(found, Ignored):
            ignored.append(found)
        elif isinstance(found, ImportedRun):
            try:
                (imported if record_run(found, sp) else unchanged).append(found.session_id)
                if found.n_tokens_dropped:
                    dropped[found.session_id] = found.n_tokens_dropped
                if found.messages_only:
                    messages_only.append(found.session_id)
            except InputError as error:
                problem = Failure(found.session_id, error)
        if problem is not None:
            failed.append(problem)
            if on_error is not None:
                on_error(problem)
    return ImportReport(tuple(imported), tuple(unchanged), tuple(failed), tuple(ignored), dropped, tuple(messages_only))


def record_run(run: ImportedRun, sp: Spool) -> bool:
    """Record one run as a finalised session.

    All its steps are committed together. What an interrupted import left open is gone on with.

    Returns:
        False where it is recorded already, with equal content.

    Raises:
        StepConflictError: the session is recorded with other content, or was discarded.
        InputError: a step does not fit; no step of the run is recorded.
    """
    steps = ordered_steps(run.steps)
    digest = run_digest(run, steps)
    known = next(sp.sessions(where=f"session_id = '{run.session_id.replace(chr(39), 2 * chr(39))}'"), None)
    facts: dict[str, Any] = {name: _portable_value(value) for name, value in run.facts.items()}
    facts |= {_DIGEST: digest, **({} if run.reward is None else {"reward": run.reward})}
    if known is not None and _lacks_facts(known, run):
        sp.annotate(run.session_id, **facts)
        return True
    if known is not None and known.state != "open":
        if known.state == "final" and known.facts.get(_DIGEST) == digest:
            return False
        how = "was discarded" if known.state == "discarded" else "is recorded with other content"
        raise StepConflictError(
            f"session {run.session_id!r} {how}; import it into another spool, or from a folder of another name",
            session_id=run.session_id, state=known.state,
        )  # fmt: skip
    session = sp.session(
        run.session_id,
        group_id=run.group_id,
        sample_index=run.sample_index,
        source=run.source,
        experts=run.experts,
        metadata=_portable(run.metadata),
    )
    with session.transaction():
        for step in steps:
            session.append(**{**step, "metadata": _portable(step.metadata or {})})
    if steps:
        # Before the end, so that an import killed in between finds an open session and goes on.
        sp.annotate(run.session_id, **facts)
        session.finalize(outcome=run.outcome)
    else:  # only its end records it; see `_lacks_facts` for an import killed in between
        session.finalize(outcome=run.outcome)
        sp.annotate(run.session_id, **facts)
    return True


def _lacks_facts(known: SessionRow, run: ImportedRun) -> bool:
    """Whether an import of this run without steps broke off between the session's end and its facts."""
    if run.steps or known.n_steps or known.state != "final" or known.facts:
        return False
    recorded = (known.source, known.group_id, known.sample_index, known.outcome, known.metadata)
    return recorded == (run.source, run.group_id, run.sample_index, run.outcome, _portable(run.metadata))


def _portable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata that a commit log can hold: what msgpack cannot say goes as one string of ASCII JSON."""
    return dict(record) if _is_portable(record) else {_ESCAPED: json.dumps(record)}


def _portable_value(value: object) -> object:
    return value if _is_portable(value) else json.dumps(value)


def _is_portable(value: object) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return False
    return True


def run_digest(run: ImportedRun, steps: list[ImportedStep]) -> str:
    """Return a digest of all that a run holds, to recognise it when it is imported again."""
    digest = xxhash.xxh3_128()
    # Lists of one run share their messages; each is hashed once.
    hashed = {id(m): _hash(m) for m in {id(m): m for step in steps for m in step.messages or ()}.values()}
    about = (run.source, run.group_id, run.sample_index, run.outcome, run.reward, run.facts, run.metadata)
    digest.update(_json((*about, repr(run.experts))))
    for step in steps:
        for name in step.keys():  # noqa: SIM118
            value = step[name]
            digest.update(name.encode())
            if name == "messages":
                digest.update(b"".join(hashed[id(message)] for message in value))
            elif isinstance(value, np.ndarray):
                digest.update(f"{value.dtype.str}{value.shape}".encode())
                digest.update(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
            else:
                digest.update(_json(value))
    return digest.hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _hash(message: object) -> bytes:
    return xxhash.xxh3_128_digest(_json(message))
