"""Chat messages as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from spool.cli.output import to_json, write_line
from spool.look.conversation import n_shared
from spool.look.text import one_line

if TYPE_CHECKING:
    from spool.history import StepMessages


def write_steps(steps: Iterable[StepMessages]) -> None:
    """Print what each step adds to the conversation, in their order."""
    known: dict[int, StepMessages] = {}
    for step in steps:
        known[step.step] = step
        shared, added = step.n_inherited, step.messages
        if step.parent is None and step.step - 1 in known:
            # a chain often goes on with the same conversation in other tokens
            shared = n_shared(_whole(known, step.step - 1), added)
            added = added[shared:]
        write_line(f"\n--- step {step.step}" + (f", after {shared} messages that are shown above" if shared else ""))
        write_messages(added)


def _whole(steps: Mapping[int, StepMessages], index: int) -> list[Any]:
    """Return the full list of a step's messages."""
    chain = [steps[index]]
    while chain[-1].parent is not None and chain[-1].n_inherited:
        chain.append(steps[chain[-1].parent])
    messages: list[Any] = []
    for step in reversed(chain):
        messages[step.n_inherited :] = step.messages
    return messages


def write_messages(messages: Iterable[Any]) -> None:
    """Print messages: the role, what was said, reasoning and tool calls."""
    for message in messages:
        if not isinstance(message, Mapping):
            write_line(to_json(message))
            continue
        called = message.get("name") or message.get("tool_call_id")
        role = one_line(str(message.get("role", "?"))) + (f" ({one_line(str(called))})" if called else "")
        parts = [*_spoken("", message.get("content")), *_spoken("thought: ", message.get("reasoning_content"))]
        parts += [f"call: {_call(call)}" for call in message.get("tool_calls") or ()]
        first, *rest = "\n".join(parts).rstrip().split("\n")
        write_line(f"{role}: {first}".rstrip())
        for line in rest:
            write_line(f"  {line}".rstrip())


def _spoken(label: str, content: Any) -> list[str]:
    if content is None or content == "":
        return []
    parts = content if isinstance(content, list) else [content]
    return [label + _part(part) for part in parts]


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return part if isinstance(part, str) else to_json(part)


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return to_json(call)
    arguments = function.get("arguments")
    return f"{function.get('name')} {arguments if isinstance(arguments, str) else to_json(arguments)}"
