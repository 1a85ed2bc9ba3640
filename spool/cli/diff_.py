"""``spool diff``."""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
import msgspec

from spool.cli.exits import Exit
from spool.cli.output import Column, json_option, pretty, say, write_json, write_line, write_rows
from spool.cli.places import find, is_location, is_session, open_spool
from spool.config import default_location
from spool.errors import NotFoundError, SpoolError
from spool.look.text import one_line, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spool.handle import Spool
    from spool.look.diff import Difference, Side
    from spool.model.refs import Ref

APART = "::"

_COLUMNS = (
    Column("place", "PLACE"),
    Column("part", "PART"),
    Column("what", "WHAT"),
    Column("a", "A"),
    Column("b", "B"),
    Column("how", "HOW"),
)


@click.command("diff")
@click.argument("args", nargs=-1, metavar="[LOCATION] A B")
@click.option("--field", "fields", multiple=True, help="Only this field of the payload; may be repeated.")
@click.option("--first", is_flag=True, help="Stop at the first difference; nothing is read behind it.")
@json_option
def command(args: tuple[str, ...], fields: tuple[str, ...], first: bool, as_json: bool) -> int:
    """Say where two sessions, or two segments or steps, differ first, and how.

    A and B are REFs, of which each may be of a spool of its own: LOCATION::REF, or a reference as JSON that says where
    its spool is. For each part that differs there is a line with the first place and what is there, which a terminal
    shows under it, shortened to fit; of all the first one comes first. The parts are, in this order: of things of one
    name their identity; what the records say (steps, lengths, finish reasons, versions, messages, late facts); and each
    field.

    Fields are compared as stored, bit for bit, as far as both go: NaN is equal to NaN of the same bits, 0.0 differs
    from -0.0. What was never sent differs from all that was. Exits 1 where something differs.
    """
    if len(args) not in (2, 3):
        raise click.UsageError("name two things to compare: [LOCATION] A B")
    if len(args) == 2 and APART not in args[0] and is_location(args[0]):
        raise click.UsageError(f"name two things of {args[0]} to compare, not one: [LOCATION] A B")
    location, (one, other) = (args[0] if len(args) == 3 else None), args[-2:]
    with ExitStack() as stack:
        from spool.look.diff import Comparison, diff

        spools = _Spools(stack, location)
        found = diff(spools.side(one), spools.side(other), list(fields) or None)
        differences = tuple(islice(found, 1) if first else found)
    comparison = Comparison(a=one, b=other, equal=not differences, differences=differences)
    if as_json:
        write_json(msgspec.to_builtins(comparison))
    elif differences:
        _write(differences)
    else:
        say("they are equal")
    return Exit.FAILED if differences else Exit.OK


class _Spools:
    """The spools of one call, each opened once."""

    def __init__(self, stack: ExitStack, location: str | None) -> None:
        self._stack = stack
        self._open: dict[str | None, Spool] = {}
        self._location = location

    def side(self, text: str) -> Side:
        """Return what a REF names, and the spool that has it.

        Raises:
            NotFoundError: it names nothing.
            UsageError: it names several things.
        """
        from spool.look.diff import Side
        from spool.look.references import parsed

        sp = self._default()
        if sp is not None and is_session(sp, text):
            return Side(sp, text)
        place, apart, rest = text.partition(APART)
        if apart and is_location(place):
            sp, text = self._at(place), rest
            if is_session(sp, text):
                return Side(sp, text)
        if sp is None and not text.startswith("{"):
            raise NotFoundError(f"{text!r} names no spool (LOCATION::REF does), and SPOOL_URI is not set")
        refs = parsed(text) if sp is None else find(sp, text)
        if len(refs) != 1:
            raise click.UsageError(f"{text!r} names {len(refs)} things; name one")
        return Side(self._of(refs[0], sp), refs[0])

    def _default(self) -> Spool | None:
        return self._at(self._location) if self._location or default_location() is not None else None

    def _at(self, location: str | None) -> Spool:
        if location not in self._open:
            self._open[location] = self._stack.enter_context(open_spool(location))
        return self._open[location]

    def _of(self, ref: Ref, sp: Spool | None) -> Spool:
        """Return the spool of a reference: the one at hand, or where its hints lead."""
        if sp is not None and sp.spool_id == ref.spool_id:
            return sp
        for root in ref.roots:
            try:
                found = self._at(root)
            except SpoolError:
                continue
            if found.spool_id == ref.spool_id:
                return found
        raise NotFoundError(
            f"the spool {ref.spool_id} of the reference {getattr(ref, 'id', '')!r} is not where it says"
        )


def _write(differences: Sequence[Difference]) -> None:
    """Print where things differ: on a terminal a place a line, and both values under it, shortened to fit."""
    if not sys.stdout.isatty():
        write_rows([_row(found) for found in differences], _COLUMNS)
        return
    width = shutil.get_terminal_size().columns
    for found in differences:
        row = _row(found)
        write_line("  ".join(one_line(str(row[name])) for name in ("place", "part", "what", "how") if row[name]))
        for side in ("a", "b"):
            write_line(f"  {side.upper()}  {shortened(pretty(row[side]) or '-', width - 5)}")


def _row(found: Difference) -> dict[str, Any]:
    return {
        "place": ", ".join(f"{name.replace('_', ' ')} {pretty(value)}" for name, value in found.place.items())
        or "whole",
        "part": found.part,
        "what": found.what,
        "a": found.a,
        "b": found.b,
        "how": found.how or None,
    }
