"""Arguments of verbs: where the spool is, and what in it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from spool.config import default_location, parse_uri
from spool.errors import InputError, NotFoundError, SessionStateError, StorageError

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.model.refs import SegmentRef, StepRef
    from spool.rollout.views import View

    Found = StepRef | SegmentRef

location_argument = click.argument("location", required=False)
reference_arguments = click.argument("args", nargs=-1, metavar="[LOCATION] REF...")

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_INDEX = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"(-?[0-9]{1,18})?:(-?[0-9]{1,18})?")
_VIEWS: tuple[View, ...] = ("lineage", "timeline")


def open_spool(location: str | None, *, readonly: bool = True) -> Spool:
    """Open an existing spool for a verb; unless ``readonly`` is false nothing in it is written or locked.

    Raises:
        NotFoundError: there is none.
        UsageError: no location is given and SPOOL_URI is not set.
    """
    if location is None and default_location() is None:
        raise click.UsageError("no LOCATION given, and SPOOL_URI is not set")
    from spool.handle import open  # noqa: A004

    return open(location, create=False, readonly=readonly)


def check_hot(location: str | None) -> None:
    """Check that a location can be recorded into, before anything is made or read for it.

    Raises:
        ConfigError: the location does not fit.
        SessionStateError: it is a cold root.
    """
    from spool.root import read_identity

    config = parse_uri(location)
    identity = read_identity(config.root) if config.root is not None and os.path.isdir(config.root) else None
    if config.root is None or (identity is not None and identity.tier == "cold"):
        raise SessionStateError(
            f"{config.url} is a cold root: recording needs a hot root in front, file:///nvme/spool?spill={config.url}"
        )


def split_arguments(args: Sequence[str], what: str) -> tuple[str | None, list[str]]:
    """Return the location, if the first argument is one, and the references.

    Raises:
        UsageError: there is no reference; ``what`` says what the verb does with one.
        NotFoundError: the first argument cannot be a reference, since there is no spool to look in.
    """
    location = args[0] if args and is_location(args[0]) else None
    texts = list(args if location is None else args[1:])
    if not texts:
        raise click.UsageError(f"name what to {what}: a session, SESSION:STEP or SESSION@VIEW/INDEX")
    if location is None and default_location() is None:
        raise NotFoundError(f"{texts[0]!r} is no spool (no spool.json there), and SPOOL_URI is not set")
    return location, texts


def is_location(text: str) -> bool:
    """Whether ``text`` is a URL or a directory that holds a spool."""
    path = os.path.expanduser(text.partition("?")[0])
    return bool(_URL.match(text)) or ("\0" not in path and os.path.exists(os.path.join(path, "spool.json")))


def find_refs(sp: Spool, texts: Iterable[str]) -> list[Found]:
    """Return the references that ``texts`` name, in their order; see `find`."""
    return [ref for text in texts for ref in find(sp, text)]


def find(sp: Spool, text: str) -> list[Found]:
    """Return the references that one text names.

    In this order: the session of exactly this id (its final segments, those of ``lineage`` while it lives); a step; a
    segment; a reference as JSON; those in a file.

    Raises:
        NotFoundError: nothing is recorded under that name.
        InputError: it is not a reference.
    """
    if is_session(sp, text):
        return list(sp.final_segments(text))
    part = _step(sp, text) or _segment(sp, text)
    if part:
        return part
    if text.startswith("{"):
        return _parsed(text)
    return _parsed(_read(text[1:])) if text.startswith("@") else _nothing(sp, text)


def is_session(sp: Spool, text: str) -> bool:
    """Whether a session of exactly this id is recorded."""
    return _is_id(text) and sp.find_session(text) is not None


def _is_id(text: str) -> bool:
    return bool(text) and not any("\ud800" <= char <= "\udfff" for char in text)


def _parsed(text: str) -> list[Found]:
    """Read one reference as JSON, or one a line, as ``spool show --ref`` prints them."""
    from spool.model.refs import ref_from_json

    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) > 1 and all(line.lstrip().startswith('{"type"') for line in lines):
        return [ref_from_json(line) for line in lines]
    return [ref_from_json(text)]


def _read(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {path!r} with a reference, and no session '@{path}'") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path!r} is not a text of references") from error
    except OSError as error:
        raise StorageError(f"cannot read {path!r}: {error.strerror}") from error


def _step(sp: Spool, text: str) -> list[Found]:
    session_id, _, index = text.rpartition(":")
    if not _INDEX.fullmatch(index) or not is_session(sp, session_id):
        return []
    steps = sp.steps(session_id)
    chosen: list[Found] = [step for step in steps if step.index == int(index)]
    if not chosen:
        raise NotFoundError(
            f"session {session_id!r} has no step {index}; its steps: {_indexes(s.index for s in steps)}"
        )
    return chosen


def _segment(sp: Spool, text: str) -> list[Found]:
    session_id, _, rest = text.rpartition("@")
    name, _, index = rest.partition("/")
    view = next((view for view in _VIEWS if view == name), None)
    if view is None and _INDEX.fullmatch(index) and is_session(sp, session_id):
        raise NotFoundError(f"session {session_id!r} has no view {name!r}; views are {', '.join(_VIEWS)}", ref=text)
    if view is None or not _INDEX.fullmatch(index) or not is_session(sp, session_id):
        return []
    segments = sp.view(session_id, view)
    chosen: list[Found] = [ref for ref in segments if ref.index == int(index)]
    if not chosen:
        shown = _indexes(ref.index for ref in segments)
        raise NotFoundError(f"session {session_id!r} has no {view} segment {index}; it has {shown}")
    return chosen


def _indexes(found: Iterable[int]) -> str:
    shown = [str(index) for index in found]
    return ", ".join(shown[:10]) + (", ..." if len(shown) > 10 else "") if shown else "none"


def _nothing(sp: Spool, text: str) -> list[Found]:
    hint = f"; {text} is a directory, but no spool" if "\0" not in text and os.path.isdir(text) else ""
    raise NotFoundError(f"no session, step or segment {text!r} in {sp.config.url}{hint}", ref=text)


def parse_range(text: str | None, option: str) -> slice | None:
    """Return the slice that ``START:STOP`` names; either may be left out, or count from the end.

    Raises:
        UsageError: it is something else.
    """
    if text is None:
        return None
    match = _RANGE.fullmatch(text)
    if match is None:
        raise click.UsageError(f"{option} takes START:STOP, two numbers of which either may be left out; got {text!r}")
    start, stop = (int(part) if part else None for part in match.groups())
    return slice(start, stop)
