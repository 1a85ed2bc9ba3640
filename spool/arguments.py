"""Arguments of the public verbs, checked where they come in: what has the wrong type is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from spool.errors import InputError
from spool.sizes import parse_size

T = TypeVar("T")

MAX_TEXT_BYTES = 1024


def refused(name: str, wanted: str, got: object, *, entry: int | None = None) -> InputError:
    """Return the error for an argument of the wrong type or value.

    Args:
        name: the argument, as the caller writes it.
        wanted: what to pass instead.
        got: what came.
        entry: where in a list it stands.
    """
    shown = "None" if got is None else f"{type(got).__name__} {got!r:.80}"
    came = f", got {shown}" if entry is None else f"; entry {entry} is {shown}"
    return InputError(f"{name} must be {wanted}{came}", argument=name, got=f"{got!r:.80}")


def instance(name: str, value: object, kind: type[T] | tuple[type[T], ...], wanted: str) -> T:
    """Return ``value`` if it is a ``kind``.

    Raises:
        InputError: it is not.
    """
    if not isinstance(value, kind):
        raise refused(name, wanted, value)
    return value


def listed(name: str, value: Any, kind: type[T] | tuple[type[T], ...], wanted: str) -> list[T]:
    """Return the items of ``value``, any iterable but a text or a mapping, if each is a ``kind``.

    Raises:
        InputError: they are not.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise refused(name, wanted, value)
    found = list(value)
    for i, item in enumerate(found):
        if not isinstance(item, kind):
            raise refused(name, wanted, item, entry=i)
    return found


def names(name: str, value: object) -> list[str]:
    """Return a list of names.

    Raises:
        InputError: it is something else, such as one name alone.
    """
    hint = f"; write {name}=[{value!r:.80}]" if isinstance(value, str) else ""
    return listed(name, value, str, f"a list of names{hint}")


def mapping(name: str, value: object, wanted: str) -> Mapping[Any, Any]:
    """Return ``value`` if it is a mapping.

    Raises:
        InputError: it is not.
    """
    if not isinstance(value, Mapping):
        raise refused(name, wanted, value)
    return value


def one_of(name: str, value: object, choices: Collection[str]) -> None:
    """Check that ``value`` is one of a few texts.

    Raises:
        InputError: it is not; names them.
    """
    if not isinstance(value, str) or value not in choices:
        raise refused(name, f"one of {', '.join(choices)}", value)


def integer(name: str, value: object) -> int:
    """Return an integer that an index can hold: of 64 bits.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise refused(name, "an integer of at most 64 bits", value)
    return value


def size(name: str, value: object, *, least: int = 0) -> int:
    """Return the bytes of ``value``: a number of them, or a text such as ``256MiB``.

    Raises:
        InputError: it is neither, fewer than ``least``, or more than 63 bits count.
    """
    if isinstance(value, bool) or not isinstance(value, int | str) or not least <= parse_size(value) < 1 << 63:
        raise refused(name, f"a size, as 256MiB, at least {least} and less than 8 EiB", value)
    return parse_size(value)


def seconds(name: str, value: object) -> float:
    """Return ``value`` if it is a duration: a number, at least 0.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise refused(name, "seconds, at least 0", value)
    return float(value)


def text(name: str, value: object) -> str:
    """Return ``value`` if it is a text that files and indexes can hold: one without lone surrogates.

    Raises:
        InputError: it is not.
    """
    found = instance(name, value, str, "text")
    if not found.isascii() and any("\ud800" <= char <= "\udfff" for char in found):
        raise InputError(f"{name} {found!r:.80} holds a lone surrogate, which no file or index can hold", argument=name)
    return found


def label(name: str, value: object) -> str:
    """Return ``value`` if it can name something: 1 to 1,024 bytes of UTF-8.

    Raises:
        InputError: it cannot.
    """
    found = text(name, value)
    size = len(found.encode())
    if not 0 < size <= MAX_TEXT_BYTES:
        raise InputError(f"{name} must be 1 to {MAX_TEXT_BYTES} bytes long, got {size}", argument=name, got=size)
    return found


def optional(check: Callable[[str, object], T], name: str, value: object) -> T | None:
    """Return ``check(name, value)``, or None for None."""
    return None if value is None else check(name, value)
