"""ATIF, the trajectory format of Harbor."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from spool.errors import InputError
from spool.importers.base import ImportedRun, ImportedStep, given, mapping, member, objects, without

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spool.engines.members import Json
    from spool.importers.base import Origin

_TOKENS = ("prompt_token_ids", "completion_token_ids", "logprobs")
_SAID = ("source", "message", "reasoning_content", "tool_calls", "observation", "metrics")


def is_atif(record: Json) -> bool:
    """Return whether the record says it is ATIF, or has its steps."""
    if not isinstance(record, dict):
        return False
    steps = record.get("steps")
    stepwise = (
        isinstance(steps, list)
        and bool(steps)
        and isinstance(steps[0], dict)
        and {"step_id", "source"} <= steps[0].keys()
    )
    return str(record.get("schema_version", "")).startswith("ATIF") or stepwise


def parse_atif(record: Json, origin: Origin) -> ImportedRun:
    """Read one trajectory; every agent step of its own is a step.

    Steps copied from another trajectory (``is_copied_context``) are context: they are in the messages, and are steps of
    the session that they were copied from. Where an agent step has token ids, they say what it extends.
    """
    what = origin.session_id
    steps = _sorted(objects(member(record, "steps", list, what), f"{what}: steps"), what)
    agent = mapping(record.get("agent"))
    tools = agent.get("tool_definitions")
    continued = record.get("continued_trajectory_ref")
    extra = mapping(agent.get("extra"))
    messages, turns = _conversation(steps, what)
    return ImportedRun(
        session_id=what,
        source="atif",
        steps=_steps(messages, turns, tools if isinstance(tools, list) else None),
        outcome="completed" if continued is None else "truncated",
        facts=given(
            original_session_id=record.get("session_id"),
            agent=agent.get("name"),
            continued_in=continued,
            continuation_index=extra.get("continuation_index"),
            parent_session_id=extra.get("parent_session_id"),
            subagents=_subagents(steps) or None,
        ),
        metadata={**without(record, "steps", "agent"), "agent": without(agent, "tool_definitions")},
    )


def _sorted(steps: list[dict[str, Json]], what: str) -> list[dict[str, Json]]:
    """Return steps by their ids, in whatever order they were written."""
    ids: list[Json] = [step.get("step_id") for step in steps]
    if not all(isinstance(step_id, int) for step_id in ids):
        return steps
    twice = sorted(step_id for step_id, count in Counter(ids).items() if count > 1)
    if twice:
        raise InputError(f"{what}: step ids twice: {twice}", steps=twice)
    return sorted(steps, key=lambda step: int(step["step_id"]))


def _conversation(
    steps: Sequence[Mapping[str, Json]], what: str
) -> tuple[list[dict[str, Json]], list[tuple[int, Mapping[str, Json]]]]:
    """Return all messages, and of each agent step of this trajectory the message's index and the step."""
    messages: list[dict[str, Json]] = []
    turns = []
    for number, step in enumerate(steps):
        source = member(step, "source", str, f"{what}: steps[{number}]")
        own = source == "agent" and not step.get("is_copied_context")
        if own:
            turns.append((len(messages), step))
        messages.append(_message(step, source, own))
        results = mapping(step.get("observation")).get("results")
        for result in objects(results or [], f"{what}: steps[{number}].observation.results"):
            called = given(tool_call_id=result.get("source_call_id"))
            messages.append(
                {
                    "role": "tool",
                    **called,
                    "content": result.get("content"),
                    **without(result, "source_call_id", "content"),
                }
            )
    return messages, turns


def _message(step: Mapping[str, Json], source: str, own: bool) -> dict[str, Json]:
    message = {"role": "assistant" if source == "agent" else source, "content": step.get("message")}
    message |= given(reasoning_content=step.get("reasoning_content"))
    calls = step.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = [_call(call) for call in objects(calls, "tool_calls")]
    return message if own else {**message, **without(step, "step_id", *_SAID)}


def _call(call: Mapping[str, Json]) -> dict[str, Json]:
    function = {"name": call.get("function_name"), "arguments": call.get("arguments")}
    rest = without(call, "tool_call_id", "function_name", "arguments")
    return {"id": call.get("tool_call_id"), "type": "function", "function": function, **rest}


def _steps(
    messages: list[dict[str, Json]], turns: Sequence[tuple[int, Mapping[str, Json]]], tools: list[Json] | None
) -> tuple[ImportedStep, ...]:
    made: list[ImportedStep] = []
    # Without a step of the agent's own there is still a conversation to keep.
    for ordinal, (index, step) in enumerate(turns or [(len(messages), {})] if messages else []):
        metrics = mapping(step.get("metrics"))
        prompt, response = (metrics.get(name) for name in _TOKENS[:2])
        tokens = {}
        if prompt is not None and response is not None:
            tokens = {"prompt_token_ids": prompt, "response_token_ids": response, "logprobs": metrics.get("logprobs")}
            metrics = without(metrics, *_TOKENS)
        before = made[-1] if made else None
        made.append(
            ImportedStep(
                step_id=str(ordinal),
                parent=before.step_id if before and not tokens and before.prompt_token_ids is None else None,
                messages=messages[: index + 1] if ordinal < len(turns) - 1 else messages,
                tools=tools,
                metadata={**without(step, *_SAID), **given(metrics=metrics or None)} or None,
                **tokens,
            )
        )
    return tuple(made)


def _subagents(steps: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    found = []
    for step in steps:
        for result in mapping(step.get("observation")).get("results") or []:
            found += [without(ref, "extra") for ref in result.get("subagent_trajectory_ref") or []]
    return found
