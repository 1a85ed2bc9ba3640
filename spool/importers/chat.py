"""Conversations in OpenAI's chat form, and tau-bench's runs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spool.errors import InputError
from spool.importers.base import (
    ImportedRun,
    given,
    member,
    message_steps,
    objects,
    optional_text,
    reward_of,
    without,
)
from spool.importers.outcomes import outcome_of

if TYPE_CHECKING:
    from spool.engines.members import Json
    from spool.importers.base import Origin


def is_chat(record: Json) -> bool:
    """Return whether this is ``{"messages": [...]}`` or a bare list of messages."""
    if isinstance(record, dict):
        return "messages" in record
    return (
        isinstance(record, list) and bool(record) and all(isinstance(item, dict) and "role" in item for item in record)
    )


def is_tau(record: Json) -> bool:
    """Return whether this is one of tau-bench's runs."""
    return isinstance(record, dict) and "traj" in record


def parse_chat(record: Json, origin: Origin) -> ImportedRun:
    """Read one conversation; every assistant message is a step."""
    fields = record if isinstance(record, dict) else {"messages": record}
    return _run(fields, "messages", "chat", origin)


def parse_tau(record: Json, origin: Origin) -> ImportedRun:
    """Read one run of tau-bench: its task is the group, its trial the sample.

    A run that raised has an error and no conversation; it is recorded as failed.
    """
    return _run(record, "traj", "tau-bench", origin)


def _run(record: dict[str, Json], name: str, form: str, origin: Origin) -> ImportedRun:
    messages = objects(member(record, name, list, origin.session_id), f"{origin.session_id}: {name}")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InputError(f"{origin.session_id}: {name}[{index}] has no role", index=index)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    tools = record.get("tools")
    info = record.get("info")
    error = record.get("error", info.get("error") if isinstance(info, dict) else None)
    status = optional_text(record.get("exit_status"))
    trial = record.get("trial", record.get("sample_index"))
    return ImportedRun(
        session_id=origin.session_id,
        source=form,
        steps=message_steps(messages, turns, tools=tools if isinstance(tools, list) else None),
        group_id=optional_text(
            next((record[key] for key in ("task_id", "group_id", "instance_id") if key in record), None)
        ),
        sample_index=trial if isinstance(trial, int) else None,
        outcome="failed" if error else outcome_of(status, otherwise="completed"),
        reward=reward_of(record.get("reward")),
        facts=given(
            exit_status=status,
            error=optional_text(error),
            original_session_id=record.get("session_id", record.get("id")),
        ),
        metadata=without(record, name, "tools"),
    )
