"""OpenHands: event streams, and the resolver's output that holds one.

An event is an action (of the user or the agent) or an observation. Where events have ids, an observation names its
action as ``cause``; in the resolver's history it simply follows it. What the model said is its own response
(``tool_call_metadata.model_response``) where that was kept; calls of one response are one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spool.errors import InputError
from spool.importers.base import ImportedRun, given, member, message_steps, objects, optional_text, without
from spool.importers.outcomes import outcome_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spool.engines.members import Json
    from spool.importers.base import Origin
    from spool.model.outcome import Outcome

_SILENT = frozenset({"null", "agent_state_changed"})
_SAID = ("source", "message", "action", "args", "tool_call_metadata", "content")
_STATES: dict[str, Outcome] = {
    "finished": "completed",
    "awaiting_user_input": "completed",
    "error": "failed",
    "rejected": "failed",
    "stopped": "aborted",
}


def is_openhands(record: Json) -> bool:
    """Return whether this is a list of events, or an object with one as its ``history``."""
    events = record.get("history") if isinstance(record, dict) else record
    if isinstance(record, dict) and "trajectory" in record:
        return False
    if isinstance(record, dict) and not events:
        return "history" in record and "instruction" in record
    return isinstance(events, list) and bool(events) and all(map(_is_event, _flat(events)))


def _is_event(event: Json) -> bool:
    return isinstance(event, dict) and ("action" in event or "observation" in event) and "role" not in event


def _flat(events: list[Json]) -> list[Json]:
    """Return events one by one; older output pairs each action with its observation."""
    return [event for item in events for event in (item if isinstance(item, list) else [item])]


def parse_openhands(record: Json, origin: Origin) -> ImportedRun:
    """Read one run; every response of the model is a step."""
    what = origin.session_id
    fields = record if isinstance(record, dict) else {}
    events = objects(_flat(fields.get("history") or [] if fields else record), f"{what}: events")
    talk = _Conversation(_linked(events, what), str(fields.get("instruction") or ""), what)
    error, issue = fields.get("error"), fields.get("issue")
    return ImportedRun(
        session_id=what,
        source="openhands",
        steps=message_steps(talk.messages, talk.turns, tools=talk.tools, extra=lambda ordinal: talk.extras[ordinal]),
        group_id=_issue(issue) if isinstance(issue, dict) else optional_text(fields.get("instance_id")),
        outcome=outcome_of(optional_text(error), otherwise=talk.outcome if talk.turns or not fields else "failed"),
        facts=given(
            exit_status=optional_text(error) or talk.last_state,
            success=fields.get("success"),
            error=optional_text(error),
        ),
        metadata={**without(fields, "history"), **given(other_events=talk.others or None)},
    )


def _issue(issue: Mapping[str, Json]) -> str:
    return f"{issue.get('owner')}/{issue.get('repo')}#{issue.get('number')}"


def _linked(events: list[dict[str, Json]], what: str) -> list[dict[str, Json]]:
    """Return events in the order of their ids, each observation after its cause.

    Raises:
        InputError: an id twice, or an observation whose action is not there or comes later; names the ids.
    """
    if not events or not all(isinstance(event.get("id"), int) for event in events):
        return events
    by_id = {event["id"]: event for event in events}
    if len(by_id) < len(events):
        raise InputError(f"{what}: {len(events) - len(by_id)} event ids are used twice")
    for event in events:
        cause = event.get("cause")
        loose = cause is not None and (cause not in by_id or cause >= event["id"])
        if loose and event.get("observation") not in _SILENT:
            raise InputError(
                f"{what}: event {event['id']} is caused by {cause}, which does not come before it",
                event=event["id"], cause=cause,
            )  # fmt: skip
    return [by_id[number] for number in sorted(by_id)]


class _Conversation:
    """Messages and steps of an event stream.

    Attributes:
        messages, turns: as `message_steps` takes them.
        extras: by step, more arguments of append.
        tools: schemas, where the stream holds them.
        others: events that are no part of the conversation.
        last_state: of the agent.
        outcome: as far as the events tell.
    """

    def __init__(self, events: Sequence[Mapping[str, Json]], instruction: str, what: str) -> None:
        self.messages: list[dict[str, Json]] = []
        self.turns: list[int] = []
        self.extras: list[dict[str, Json]] = []
        self.others: list[Mapping[str, Json]] = []
        self.tools: list[Json] | None = None
        self.last_state: str | None = None
        self.outcome: Outcome = "truncated"
        self._what = what
        self._instruction = instruction
        self._responses: dict[str, int] = {}
        self._user_next = True
        for event in events:
            if "observation" in event:
                self._observe(event)
            else:
                self._act(event)

    def _observe(self, event: Mapping[str, Json]) -> None:
        kind = event["observation"]
        if kind in _SILENT:
            state = (event.get("extras") or {}).get("agent_state")
            if state is not None:
                self.last_state = str(state)
                self.outcome = _STATES.get(self.last_state, "truncated")
            self.others.append(event)
            return
        call = event.get("tool_call_metadata") or {}
        called = given(tool_call_id=call.get("tool_call_id"), name=call.get("function_name"))
        rest = without(event, "id", "cause", "timestamp", *_SAID)
        self.messages.append({"role": "tool", **called, "content": event.get("content"), **rest})

    def _act(self, event: Mapping[str, Json]) -> None:
        action, source = event.get("action"), event.get("source")
        args = event["args"] if isinstance(event.get("args"), dict) else without(event, "action", "source", "id")
        if source is None:
            source = self._speaker(action, args)
        if source == "user" and action == "message":
            images = given(image_urls=args.get("image_urls"))
            self.messages.append({"role": "user", "content": args.get("content"), **images})
        elif action == "system":
            self.messages.append({"role": "system", "content": args.get("content")})
            self.tools = args["tools"] if isinstance(args.get("tools"), list) else None
        elif source != "agent" or action in ("change_agent_state", "recall", "null"):
            self.others.append(event)
        else:
            self._say(event, str(action), args)

    def _speaker(self, action: Json, args: Mapping[str, Json]) -> str:
        """Return who acted in a stream that does not say: the user begins, and answers the agent's messages."""
        message = action == "message"
        user = message and (self._user_next or args.get("content") == self._instruction)
        self._user_next = message and not user
        return "user" if user else "agent"

    def _say(self, event: Mapping[str, Json], action: str, args: Mapping[str, Json]) -> None:
        call = event.get("tool_call_metadata") or {}
        response = call.get("model_response") or {}
        about = {"action": action, "args": args, **given(id=event.get("id"), timestamp=event.get("timestamp"))}
        self.outcome = (
            "completed" if action in ("finish", "message") else "failed" if action == "reject" else "truncated"
        )
        known = self._responses.get(response.get("id") or "")
        if known is not None:
            self.extras[known]["metadata"]["actions"].append(about)
            return
        choices = objects(response.get("choices") or [], f"{self._what}: model_response.choices")
        if choices:
            message = dict(member(choices[0], "message", dict, f"{self._what}: model_response.choices[0]"))
        else:
            text = args.get("content") if action == "message" else args.get("thought")
            message = {"role": "assistant", "content": text, "action": action, "args": dict(args)}
        if response.get("id"):
            self._responses[response["id"]] = len(self.turns)
        self.turns.append(len(self.messages))
        self.messages.append(message)
        self.extras.append({
            "finish_reason": optional_text(choices[0].get("finish_reason")) if choices else None,
            "metadata": {"actions": [about], **given(model=response.get("model"), usage=response.get("usage"))},
        })  # fmt: skip
