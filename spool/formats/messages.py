"""Messages and tool schemas <-> JSON, reversible for every str, lone surrogates included.

The JSON is ASCII, and a lone surrogate its escape. But the escapes of two neighbours that make a pair are read as one
character; a message that could hold such is stored as UTF-8 instead, with surrogates as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from spool.errors import InputError

MAX_DEPTH = 200
"""How deep messages may be nested: readers of JSON recurse."""

_PAIR = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def encode_message(message: object, *, what: str) -> bytes:
    """Return one message as JSON; `decode_messages` gives it back equal, NaN (as the literal ``NaN``) included.

    Objects with ``model_dump()`` (pydantic) are dumped first.

    Raises:
        InputError: the message cannot be JSON, or JSON would change it (a mapping's key that is not a string).
    """
    plain: str | None = None
    try:
        text = json.dumps(message, separators=(",", ":"), default=_dump)
        if _PAIR.search(text):
            plain = json.dumps(message, separators=(",", ":"), default=_dump, ensure_ascii=False)
            plain = plain if _SURROGATE.search(plain) else None
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what} cannot be stored as JSON: {error}; pass dicts, lists, strings and numbers") from error
    if not _is_plain(message):
        raise InputError(
            f"{what} has a mapping key that is not a string, which JSON would turn into one, or is nested more than "
            f"{MAX_DEPTH} deep"
        )
    return (text if plain is None else plain).encode("utf-8", "surrogatepass")


def _dump(value: object) -> object:
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump()
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a numpy or torch number
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _is_plain(value: object) -> bool:
    """Whether all keys are strings and nesting is moderate; ``value`` has no cycles."""
    pending: list[tuple[object, int]] = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                return False
            inner: Iterable[object] = item.values()
        elif isinstance(item, list | tuple):
            inner = item
        else:
            continue
        if depth == MAX_DEPTH:
            return False
        pending.extend((part, depth + 1) for part in inner)
    return True


def join_messages(messages: Sequence[bytes]) -> bytes:
    """Return a JSON array of already encoded messages; nothing for none."""
    return b"[" + b",".join(messages) + b"]" if messages else b""


def decode_messages(data: bytes) -> list[Any]:
    """Return the messages of a JSON array that `join_messages` made."""
    return list(json.loads(data.decode("utf-8", "surrogatepass"))) if data else []


def split_messages(data: bytes) -> list[bytes]:
    """Return the encoded messages of a JSON array that `join_messages` made."""
    return [encode_message(message, what="message") for message in decode_messages(data)]


def printable(value: object) -> Any:
    """Return ``value`` as valid JSON: lone surrogates replaced by U+FFFD, NaN and infinities as text."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [printable(item) for item in value]
    return value
