"""What is typed after ``/``: an expression where it reads as one, else a text to look for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spool.errors import InputError

_EXPRESSION = re.compile(r"[=<>]|\b(?:in\s*\(|like\s+'|between\s|is\s+(?:not\s+)?null)", re.IGNORECASE)
_TEXT_COLUMNS = ("session_id", "group_id", "source")


class Typed(NamedTuple):
    """What was typed.

    Attributes:
        where: the filter, as `Spool.listing` takes it; None for no filter.
        kind: what it was taken for; nothing where nothing was typed.
        text: as it was typed.
    """

    where: str | None
    kind: str
    text: str = ""


def read_typed(text: str) -> Typed:
    """Return the filter that a text stands for.

    With a comparison in it it is an expression, right or wrong. Anything else is looked for in ids of sessions and
    groups and in sources; case does not matter, ``%`` stands for any text and ``_`` for any character.
    """
    text = text.strip()
    if not text:
        return Typed(None, "")
    if _EXPRESSION.search(text):
        return Typed(text, "expression", text)
    # whole characters only: a lone surrogate is in no recorded text
    quoted = "".join(char for char in text if not "\ud800" <= char <= "\udfff").replace("'", "''")
    return Typed(" or ".join(f"{name} like '%{quoted}%'" for name in _TEXT_COLUMNS), "text", text)


def explain(error: InputError) -> str:
    """Return what is wrong with an expression, in at most three lines: the problem, the place, and an arrow at it."""
    lines = str(error).split("\n")
    problem = lines[0].partition(": ")[2] or lines[0]
    return "\n".join([problem, *(line[:120] for line in lines[1:3])])
