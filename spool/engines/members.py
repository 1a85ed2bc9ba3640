"""Members of parsed JSON, each in the shape that a reader needs; what has another one is refused with its path.

Absent and null read the same everywhere: engines send either for what was not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from spool.errors import PayloadError
from spool.formats.arrays import as_token_ids

Json: TypeAlias = Any
"""A value of parsed JSON."""


class Members:
    """The members of one mapping.

    Args:
        values: the mapping.
        path: where it stands, as errors call it; empty for the response itself.
    """

    __slots__ = ("_path", "_values")

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def at(self, key: str) -> str:
        """Return the path of a member, e.g. ``choices[0].logprobs``."""
        return f"{self._path}.{key}" if self._path else key

    def get(self, key: str) -> Json:
        """Return a member of whatever shape."""
        return self._values.get(key)

    def members(self, key: str) -> Members:
        """Return the members of a mapping; of none where it is absent.

        Raises:
            PayloadError: it is no mapping.
        """
        return as_members(self.get(key), self.at(key))

    def list(self, key: str) -> Sequence[Any] | None:
        """Return a list, or None.

        Raises:
            PayloadError: it is no list.
        """
        return as_list(self.get(key), self.at(key))

    def count(self, key: str) -> int | None:
        """Return an integer from 0 on, or None.

        Raises:
            PayloadError: it is none.
        """
        return as_count(self.get(key), self.at(key))

    def text(self, key: str) -> str | None:
        """Return a text, or None.

        Raises:
            PayloadError: it is no text.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise refused(self.at(key), "text", value)
        return value

    def ids(self, key: str) -> NDArray[np.int32] | None:
        """Return a list of token ids as int32, or None.

        Raises:
            PayloadError: it is no list of token ids.
        """
        return as_ids(self.get(key), self.at(key))


def as_members(value: object, path: str) -> Members:
    """Return the members of ``value``, which must be a mapping or None; see `Members.members`."""
    if value is not None and not isinstance(value, Mapping):
        raise refused(path, "an object", value)
    return Members(value or {}, path)


def as_list(value: object, path: str) -> Sequence[Any] | None:
    """Return ``value``, which must be a list or None; see `Members.list`."""
    if value is not None and (isinstance(value, str | bytes) or not isinstance(value, Sequence)):
        raise refused(path, "a list", value)
    return value


def as_count(value: object, path: str) -> int | None:
    """Return ``value``, which must be an integer from 0 on or None; see `Members.count`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise refused(path, "an integer from 0 on", value)
    return int(value)


def as_ids(value: object, path: str) -> NDArray[np.int32] | None:
    """Return ``value``, which must be token ids (a list or an array) or None; see `Members.ids`."""
    return None if value is None else as_token_ids(value, what=path)


def refused(path: str, expected: str, got: object) -> PayloadError:
    """Return the error for a value of another shape than the reader knows."""
    return PayloadError(
        f"{path} must be {expected}, got {type(got).__name__} {got!r:.80}; is this what the engine sent?",
        field=path, expected=expected, got=f"{got!r:.80}",
    )  # fmt: skip


def first_given(*values: Json) -> Json:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def first_of(key: str, *places: Members) -> Json:
    """Return the first member of that name, of whatever shape."""
    return first_given(*(place.get(key) for place in places))


def first_ids(*members: tuple[Members, str]) -> NDArray[np.int32] | None:
    """Return the token ids of the first member that is there; those behind it are not looked at.

    Raises:
        PayloadError: it is no list of token ids.
    """
    return next((place.ids(key) for place, key in members if place.get(key) is not None), None)


def column(entries: Sequence[Any], index: int | str, *, what: str) -> list[Any]:
    """Return one member of every entry, without a Python loop.

    Raises:
        PayloadError: an entry has no such member.
    """
    try:
        return list(map(itemgetter(index), entries))
    except (TypeError, IndexError, KeyError) as error:
        raise PayloadError(f"{what} has an entry without {index!r}: {error!r}", field=what) from error
