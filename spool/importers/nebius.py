"""Nebius' SWE-agent trajectories: turns of system, user and ai."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spool.errors import InputError
from spool.importers.base import ImportedRun, given, member, message_steps, objects, optional_text, without
from spool.importers.outcomes import outcome_of

if TYPE_CHECKING:
    from spool.engines.members import Json
    from spool.importers.base import Origin

_ROLES = {"system": "system", "user": "user", "ai": "assistant"}


def is_nebius(record: Json) -> bool:
    """Return whether ``trajectory`` holds turns with a role (SWE-agent's holds actions)."""
    turns = record.get("trajectory") if isinstance(record, dict) else None
    return isinstance(turns, list) and any(isinstance(turn, dict) and "role" in turn for turn in turns)


def parse_nebius(record: Json, origin: Origin) -> ImportedRun:
    """Read one run. The system turn's text is null: its content is the ``system_prompt``."""
    what = origin.session_id
    turns = objects(member(record, "trajectory", list, what), f"{what}: trajectory")
    messages = [_message(turn, f"{what}: trajectory[{index}]") for index, turn in enumerate(turns)]
    status = optional_text(record.get("exit_status"))
    return ImportedRun(
        session_id=what,
        source="nebius",
        steps=message_steps(messages, [i for i, message in enumerate(messages) if message["role"] == "assistant"]),
        group_id=optional_text(record.get("instance_id")),
        outcome=outcome_of(status, otherwise="aborted"),
        facts=given(exit_status=status, target=record.get("target"), model_name=record.get("model_name")),
        metadata=without(record, "trajectory"),
    )


def _message(turn: dict[str, Json], what: str) -> dict[str, Json]:
    role = _ROLES.get(member(turn, "role", str, what))
    if role is None:
        raise InputError(f"{what}: role {turn['role']!r} is not one of {', '.join(_ROLES)}")
    text = turn.get("text")
    content = turn.get("system_prompt") if text is None else text
    used = ("role", "text") if text is not None else ("role", "text", "system_prompt")
    return {"role": role, "content": content, **given(**without(turn, *used))}
