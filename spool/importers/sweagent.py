"""SWE-agent's ``.traj`` files.

They tell a run twice. ``history`` is what went to and came from the model, word for word, with system prompt,
demonstration and tool-call ids; ``trajectory`` is what the environment did: actions, raw observations, state, times.
The history is the record; of the trajectory each step keeps, as metadata, what the history does not hold.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spool.importers.base import ImportedRun, given, mapping, member, message_steps, objects, optional_text, without
from spool.importers.outcomes import outcome_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spool.engines.members import Json
    from spool.importers.base import Origin

_IN_HISTORY = ("action", "observation", "response", "thought", "query", "messages")


def is_sweagent(record: Json) -> bool:
    """Return whether ``trajectory`` holds actions with observations."""
    steps = record.get("trajectory") if isinstance(record, dict) else None
    if not isinstance(steps, list):
        return False
    acts = any(isinstance(step, dict) and "action" in step for step in steps)
    return acts or (not steps and isinstance(record.get("history"), list))


def parse_sweagent(record: Json, origin: Origin) -> ImportedRun:
    """Read one run; every assistant message of the history that is no demonstration is a step.

    A run without history (some tools leave it out) is told from its trajectory. The group is the problem's id or else
    the file's name, which by SWE-agent's custom is that id.
    """
    what = origin.session_id
    acts = objects(member(record, "trajectory", list, what), f"{what}: trajectory")
    history = objects(record.get("history") or _told_from(acts), f"{what}: history")
    turns = [
        i for i, message in enumerate(history) if message.get("role") == "assistant" and not message.get("is_demo")
    ]
    info = mapping(record.get("info"))
    status = optional_text(info.get("exit_status"))
    paired = len(acts) == len(turns)

    def extra(ordinal: int) -> Mapping[str, Json]:
        if not paired:
            return {}
        later = history[turns[ordinal] + 1 : turns[ordinal + 1] if ordinal + 1 < len(turns) else None]
        return {"metadata": _beyond_history(acts[ordinal], later) or None}

    return ImportedRun(
        session_id=what,
        source="swe-agent",
        steps=message_steps(history, turns, extra=extra),
        group_id=_instance(record) or os.path.splitext(os.path.basename(origin.path))[0],
        outcome=outcome_of(status, otherwise="aborted"),
        facts=given(exit_status=status, environment=record.get("environment")),
        metadata=without(record, "history", *(("trajectory",) if paired else ())),
    )


def _instance(record: Mapping[str, Json]) -> str | None:
    problem = mapping(mapping(record.get("replay_config")).get("problem_statement"))
    return optional_text(problem.get("id"))


def _told_from(acts: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    messages: list[dict[str, Json]] = []
    for act in acts:
        said = {"role": "assistant", "content": act.get("response"), **given(action=act.get("action"))}
        messages += [said, {"role": "user", "content": act.get("observation")}]
    return messages


def _beyond_history(act: Mapping[str, Json], later: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Return what the messages after the action do not hold: the observation only if no message quotes it."""
    kept = without(act, *_IN_HISTORY)
    seen = act.get("observation")
    if seen and not any(str(seen).strip() in str(message.get("content")) for message in later):
        kept["observation"] = seen
    return kept
