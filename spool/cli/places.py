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

    Found = StepRef | SegmentRef

location_argument = click.argument("location", required=False)
reference_arguments = click.argument("args", nargs=-1, metavar="[LOCATION] REF...")

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_RANGE = re.compile(r"(-?[0-9]{1,18})?:(-?[0-9]{1,18})?")


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
    """Return the references that one text names: what `spool.look.references.named` finds, or those in a file.

    Raises:
        NotFoundError: nothing is recorded under that name.
        InputError: it is not a reference.
    """
    from spool.look.references import named, parsed

    found = named(sp, text)
    if found is not None:
        return found
    if text.startswith("@"):
        return parsed(_read(text[1:]))
    hint = f"; {text} is a directory, but no spool" if "\0" not in text and os.path.isdir(text) else ""
    raise NotFoundError(f"no session, step or segment {text!r} in {sp.config.url}{hint}", ref=text)


def is_session(sp: Spool, text: str) -> bool:
    """Whether a session of exactly this id is recorded."""
    from spool.look.references import is_session

    return is_session(sp, text)


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
