"""Which form a record has, by its content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spool.errors import InputError
from spool.importers.atif import is_atif, parse_atif
from spool.importers.base import ImportedRun, Origin
from spool.importers.chat import is_chat, is_tau, parse_chat, parse_tau
from spool.importers.nebius import is_nebius, parse_nebius
from spool.importers.openhands import is_openhands, parse_openhands
from spool.importers.sweagent import is_sweagent, parse_sweagent

ROUTING = "routing"
"""The form of ``.npz`` files; the others are JSON."""


class Form(NamedTuple):
    """A JSON form: whether a record has it, and how it is read."""

    matches: Callable[[Any], bool]
    parse: Callable[[Any, Origin], ImportedRun]


JSON_FORMS: dict[str, Form] = {
    "atif": Form(is_atif, parse_atif),
    "nebius": Form(is_nebius, parse_nebius),
    "swe-agent": Form(is_sweagent, parse_sweagent),
    "tau-bench": Form(is_tau, parse_tau),
    "openhands": Form(is_openhands, parse_openhands),
    "chat": Form(is_chat, parse_chat),
}

FORMS: tuple[str, ...] = (ROUTING, *JSON_FORMS)
"""Names of the known forms."""


class UnknownFormError(InputError):
    """A file or record of no known form.

    Attributes:
        plain: it is whole, and something else than runs (a configuration, another tool's log), which in a folder of
            runs is no surprise.
    """

    def __init__(self, message: str, *, plain: bool = False, **details: object) -> None:
        super().__init__(f"{message}; known forms: {', '.join(FORMS)}", **details)
        self.plain = plain


def form_of(record: object) -> str | None:
    """Return the name of the JSON form that a record (or a whole document) has, or None."""
    return next((name for name, form in JSON_FORMS.items() if form.matches(record)), None)


def parse(record: object, origin: Origin, form: str | None) -> ImportedRun:
    """Read one record.

    Args:
        record: parsed JSON.
        origin: where it was found.
        form: its form; found by content where None.

    Raises:
        InputError: it has no known form, or is malformed.
    """
    name = form or form_of(record)
    if name is None:
        raise UnknownFormError(f"{origin.session_id} is not a run", where=origin.session_id)
    if not JSON_FORMS[name].matches(record):
        raise InputError(f"{origin.session_id} does not look like {name}", where=origin.session_id, form=name)
    try:
        return JSON_FORMS[name].parse(record, origin)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        # Parsers check what they rely on; this is for files that are wrong in a way nobody thought of.
        raise InputError(
            f"{origin.session_id} is malformed {name}: {error!r}", where=origin.session_id, form=name
        ) from error
