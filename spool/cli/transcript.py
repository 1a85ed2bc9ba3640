"""Chat messages as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spool.cli.output import to_json, write_line
from spool.look.text import one_line


def write_steps(steps: Iterable[tuple[int, int | None, Sequence[Any]]]) -> None:
    """Print what each step adds to the conversation.

    Args:
        steps: index, parent, and the full list of messages of each, in order.
    """
    known: dict[int | None, Sequence[Any]] = {}
    for index, parent, messages in steps:
        # a step without a parent often goes on with the same conversation in other tokens
        before = known.get(parent) or known.get(index - 1) or ()
        shared = _shared(before, messages)
        known[index] = messages
        write_line(f"\n--- step {index}" + (f", after {shared} messages that are shown above" if shared else ""))
        write_messages(messages[shared:])


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


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
