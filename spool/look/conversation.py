"""Chat messages as blocks: who says what, calls and results apart from what is said. Any JSON is taken, and any text.

Text is as it was recorded; make it safe where it is shown, and no more of it than is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.look.tree import StepLook

Kind = Literal["text", "thought", "call", "result", "raw"]
"""What is said, what is thought, a call of a tool, what a tool gave back, anything else as JSON."""

KEPT = 4
"""Lists of messages that are kept."""

_TOOLS = ("tool", "function", "observation")
_THOUGHTS = ("reasoning_content", "reasoning")
_SHOWN = {"role", "name", "content", "tool_call_id", "tool_calls", "function_call", *_THOUGHTS}


class Block(Struct, frozen=True, gc=False):
    """A part of a message.

    Attributes:
        message: place of the message in the list.
        role: who says it.
        kind: what it is.
        text: as recorded: any characters at all, of any length.
        name: of the tool.
    """

    message: int
    role: str
    kind: Kind
    text: str
    name: str = ""


class Conversation(NamedTuple):
    """The messages of a step.

    Attributes:
        blocks: of all of them, in order.
        n_messages: how many there are.
        n_shared: how many of them the step before it has too.
    """

    blocks: list[Block]
    n_messages: int
    n_shared: int


class Messages:
    """Fetches the messages of a session's steps, and keeps the last few lists: who goes along a chain needs each twice.

    For one thread at a time.

    Args:
        sp: the spool.
    """

    def __init__(self, sp: Spool) -> None:
        self._sp = sp
        self._kept: dict[int, list[Any]] = {}

    def of(self, step: StepLook) -> list[Any]:
        """Return the full list of a step's messages; it is not to be changed."""
        found = self._kept.pop(step.index, None)
        self._kept[step.index] = self._sp.messages(step.ref) if found is None else found
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return self._kept[step.index]

    def conversation(self, step: StepLook, before: StepLook | None) -> Conversation:
        """Return the messages of a step, and how many of them it has in common with the one before it."""
        messages = self.of(step)
        shared = 0 if before is None else n_shared(self.of(before), messages)
        return Conversation(blocks(messages), len(messages), shared)


def step_before(step: StepLook, steps: Mapping[int, StepLook]) -> StepLook | None:
    """Return whose conversation a step goes on with: its parent, or, where a chain begins, the step recorded before it.

    A chain often goes on with the same conversation in other tokens.
    """
    if step.parent is not None:
        return steps.get(step.parent)
    return next((steps[index] for index in range(step.index - 1, -1, -1) if index in steps), None)


def n_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many messages two lists begin with in common."""
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def blocks(messages: Sequence[Any]) -> list[Block]:
    """Return the parts of messages, in order; a message with nothing in it is one empty block."""
    tools: dict[str, str] = {}
    found: list[Block] = []
    for place, message in enumerate(messages):
        found += _blocks(place, message, tools)
        tools.update(_called(message))
    return found


def _called(message: Any) -> Iterator[tuple[str, str]]:
    """Yield id and name of each tool that a message calls."""
    for call in _calls(message) if isinstance(message, Mapping) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and call.get("id") and function.get("name"):
            yield str(call["id"]), str(function["name"])


def _calls(message: Mapping[Any, Any]) -> list[Any]:
    calls, only = message.get("tool_calls"), message.get("function_call")  # what it was called before 2024
    found = calls if isinstance(calls, list) else [calls] if calls else []
    return [*found, {"function": only}] if only else found


def _blocks(place: int, message: Any, tools: Mapping[str, str]) -> list[Block]:
    if not isinstance(message, Mapping):
        return [Block(place, "?", "raw", to_text(message))]
    role = str(message.get("role", "?"))
    answered = str(message.get("tool_call_id") or "")
    name = str(message.get("name") or tools.get(answered, answered))
    kind: Kind = "result" if role in _TOOLS else "text"
    found = [Block(place, role, "thought", text) for key in _THOUGHTS for text in _texts(message.get(key))]
    found += [Block(place, role, kind, text, name) for text in _texts(message.get("content"))]
    found += [_call(place, role, call) for call in _calls(message)]
    more = {key: value for key, value in message.items() if key not in _SHOWN and value not in (None, "", [], {})}
    if "role" not in message and not found:
        return [Block(place, "?", "raw", to_text(message))]
    found += [Block(place, role, "raw", to_text(more))] if more else []
    return found or [Block(place, role, kind, "", name)]


def _texts(content: Any) -> Iterator[str]:
    if content is None or content == "":
        return
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]
        else:
            yield part if isinstance(part, str) else to_text(part)


def _call(place: int, role: str, call: Any) -> Block:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return Block(place, role, "call", to_text(call))
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else "" if arguments is None else to_text(arguments)
    return Block(place, role, "call", text, str(function.get("name") or "?"))


def to_text(value: Any) -> str:
    """Return any JSON as text."""
    from spool.formats.messages import printable

    return json.dumps(printable(value), ensure_ascii=False)


def spelled(block: Block) -> str:
    """Return a block's text as people read it: of a call with a JSON object, each argument with its own lines.

    Arguments of which one is given twice stay as they are.
    """
    if block.kind != "call" or not block.text.startswith("{"):
        return block.text
    try:
        found = json.loads(block.text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return block.text
    said = ((name, value if isinstance(value, str) else to_text(value)) for name, value in found.items())
    return "\n".join(f"{name}:\n{value}" if "\n" in value else f"{name}: {value}" for name, value in said)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


class Place(NamedTuple):
    """A character of a conversation.

    Attributes:
        block: place of the block in the conversation.
        at: place of the character in what `spelled` makes of the block; -1 for before all of them.
    """

    block: int
    at: int


def occurrences(wanted: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield where a text has what is looked for, in upper or lower case, as half-open ranges."""
    yield from (match.span() for match in re.finditer(re.escape(wanted), text, re.IGNORECASE))


def search(blocks: Sequence[Block], wanted: str, start: Place, by: int) -> Place | None:
    """Return the next place behind ``start`` where a conversation has a text, beginning anew at its end.

    Args:
        blocks: the conversation.
        wanted: the text, in upper or lower case.
        start: where to begin; what is there itself is found last.
        by: 1, or -1 for the nearest place before it.
    """
    around = [(start.block + by * n) % len(blocks) for n in range(len(blocks) + 1)] if blocks else []
    for turn, block in enumerate(around):
        found = [at for at, _ in occurrences(wanted, spelled(blocks[block]))]
        if turn == 0:
            found = [at for at in found if (at > start.at if by > 0 else at < start.at)]
        if found:
            return Place(block, found[0 if by > 0 else -1])
    return None
