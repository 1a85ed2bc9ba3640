"""What every importer produces, and what parsers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from spool.engines.members import Json
from spool.engines.step import EngineStep
from spool.errors import InputError, SpoolError
from spool.model.moe import MoEShape
from spool.model.outcome import Outcome


class Origin(Struct, frozen=True):
    """Where a run was found.

    Attributes:
        session_id: the id its session gets: the file's name below the imported folder (that folder's name first), and
            ``#n`` where the file holds many runs. The same wherever the import is started from.
        path: the file.
        item: number of the run in its file, from 0; None where the file is one run.
    """

    session_id: str
    path: str
    item: int | None = None


class ImportedStep(EngineStep, frozen=True, kw_only=True, eq=False):
    """Keyword arguments of `Session.append`, as `EngineStep`: ``session.append(**step)``.

    Attributes:
        step_id: the ordinal of the step in its run, so that a second import appends the same.
        parent: id of the step whose messages this one's begin with; None where tokens decide, and for the first.
        messages: the conversation up to what the model said in this step; the last step has all that followed, too.
        tools: tool schemas.
    """

    step_id: str
    parent: str | None = None
    messages: Sequence[Json] | None = None
    tools: Sequence[Json] | None = None


class ImportedRun(Struct, frozen=True, kw_only=True, eq=False):
    """One run, ready to be recorded as a session.

    Attributes:
        session_id: unique and stable, see `Origin`.
        source: name of the form.
        steps: in any order; see `ordered_steps`.
        group_id, sample_index: the task, and which of its samples this is, where the form says so.
        outcome: how the run ended, in Spool's words.
        reward: where the form has one.
        facts: what to filter by later; ``exit_status`` as it was, among others.
        experts: routing shape, where the run has routing.
        metadata: all else that the record holds.
        n_tokens_dropped: tokens of the record that are in no step.
    """

    session_id: str
    source: str
    steps: tuple[ImportedStep, ...]
    group_id: str | None = None
    sample_index: int | None = None
    outcome: Outcome = "completed"
    reward: float | None = None
    facts: dict[str, Any] = {}
    experts: MoEShape | None = None
    metadata: dict[str, Any] = {}
    n_tokens_dropped: int = 0

    @property
    def messages_only(self) -> bool:
        """It has steps, and token ids of none."""
        return bool(self.steps) and all(step.response_token_ids is None for step in self.steps)


class Failure(Struct, frozen=True):
    """A run, or a file, that could not be imported; ``where`` is its session id or its path."""

    where: str
    error: SpoolError


class Ignored(Struct, frozen=True):
    """A file of an imported folder that holds no runs, and how that was seen."""

    where: str
    reason: str


def ordered_steps(steps: Sequence[ImportedStep]) -> list[ImportedStep]:
    """Return steps so that every parent comes before its children; else in the order given.

    Raises:
        InputError: an id twice, a parent that is not there, or a cycle; names the ids.
    """
    by_id = {step.step_id: step for step in steps}
    if len(by_id) < len(steps):
        twice = sorted(name for name, count in Counter(step.step_id for step in steps).items() if count > 1)
        raise InputError(f"step ids must be unique; twice: {', '.join(twice)}", steps=twice)
    orphans = [step for step in steps if step.parent is not None and step.parent not in by_id]
    if orphans:
        raise InputError(
            "steps name parents that are not there: " + ", ".join(f"{s.step_id} -> {s.parent}" for s in orphans),
            steps=[step.step_id for step in orphans],
        )
    done: dict[str, ImportedStep] = {}
    for step in steps:
        waiting: dict[str, ImportedStep] = {}
        current: ImportedStep | None = step
        while current is not None and current.step_id not in done:
            if current.step_id in waiting:
                raise InputError(f"steps are each other's parents: {', '.join(waiting)}", steps=list(waiting))
            waiting[current.step_id] = current
            current = None if current.parent is None else by_id[current.parent]
        done.update(reversed(waiting.items()))
    return list(done.values())


def member(record: Mapping[str, Json], name: str, kind: type | tuple[type, ...], what: str) -> Json:
    """Return ``record[name]``.

    Raises:
        InputError: it is missing or of another type; ``what`` names the record.
    """
    value = record.get(name)
    if not isinstance(value, kind):
        found = "missing" if name not in record else f"{type(value).__name__}, not {_names(kind)}"
        raise InputError(f"{what}: {name} is {found}", field=name)
    return value


def _names(kind: type | tuple[type, ...]) -> str:
    return kind.__name__ if isinstance(kind, type) else " or ".join(each.__name__ for each in kind)


def mapping(value: object) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, else an empty one: absent and null parts read the same."""
    return value if isinstance(value, Mapping) else {}


def objects(items: Json, what: str) -> list[dict[str, Json]]:
    """Return ``items`` if it is a list of JSON objects.

    Raises:
        InputError: it is not; names the item.
    """
    if not isinstance(items, list):
        raise InputError(f"{what} is {type(items).__name__}, not a list")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise InputError(f"{what}[{index}] is {type(item).__name__}, not an object", index=index)
    return items


def without(record: Mapping[str, Json], *names: str) -> dict[str, Json]:
    """Return what is left of a record."""
    return {key: value for key, value in record.items() if key not in names}


def given(**facts: Json) -> dict[str, Json]:
    """Return the facts that are not None."""
    return {name: value for name, value in facts.items() if value is not None}


def reward_of(value: Json) -> float | None:
    """Return a reward as a float; None where it is no number (then it stays in the metadata)."""
    return float(value) if isinstance(value, (int, float)) else None


def optional_text(value: Json) -> str | None:
    """Return an id as text; numbers become their digits."""
    return None if value is None or isinstance(value, (dict, list)) else str(value)


def message_steps(
    messages: Sequence[Json],
    turns: Sequence[int],
    *,
    tools: Sequence[Json] | None = None,
    extra: Callable[[int], Mapping[str, Json]] | None = None,
) -> tuple[ImportedStep, ...]:
    """Return one step for each message that the model wrote; each names the one before as its parent.

    Args:
        messages: the whole conversation.
        turns: indexes of the model's messages, ascending. Where there are none, one step keeps the conversation.
        tools: tool schemas of the run.
        extra: by ordinal of the step, more arguments of append.
    """
    ends = [turn + 1 for turn in turns[:-1]] + ([len(messages)] if messages else [])
    return tuple(
        ImportedStep(
            step_id=str(ordinal),
            parent=str(ordinal - 1) if ordinal else None,
            messages=messages[:end],
            tools=tools,
            **(extra(ordinal) if extra and ordinal < len(turns) else {}),
        )
        for ordinal, end in enumerate(ends)
    )
