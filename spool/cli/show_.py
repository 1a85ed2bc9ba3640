"""``spool show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from spool.cli.output import Column, flat, json_option, write_facts, write_json, write_line, write_rows
from spool.cli.places import find, is_session, open_spool, reference_arguments, split_arguments
from spool.look.text import json_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spool.cli.output import Kind
    from spool.cli.places import Found
    from spool.handle import Spool

_USUAL: dict[str, object] = {
    "attempt": 0, "trim": 0, "prefer": "first", "n_nonfinite": 0, "cut_tokens": 0, "superseded": False,
}  # fmt: skip
_TABLES = ("steps", "segments", "messages")


@click.command("show")
@reference_arguments
@click.option("--messages", is_flag=True, help="Print the chat messages too; of a session, what each step adds.")
@click.option(
    "--ref", "as_ref", is_flag=True, help="Print whole references as JSON, one a line, for show, cat, locate."
)
@json_option
def command(args: tuple[str, ...], messages: bool, as_ref: bool, as_json: bool) -> None:
    """Show sessions, steps or segments.

    Identity, lengths, weight versions, late facts, and what they are made of. What is printed of a session or a segment
    are columns of ls --where, but for id, steps, fields, metadata and n_extents. n_prompt of a segment is
    response_start there, version is first_version and last_version, and a fact is named alone, without "facts.". NaN
    and infinities are text in JSON.
    """
    location, texts = split_arguments(args, "show")
    with open_spool(location) as sp:
        if as_ref:
            for text in texts:
                for ref in find(sp, text):
                    write_line(json_text(ref.to_json()))
            return
        shown = [facts for text in texts for facts in _facts(sp, text, messages=messages)]
    if as_json:
        write_json(shown)
        return
    for number, facts in enumerate(shown):
        if number:
            write_line("")
        _print(facts)


def _facts(sp: Spool, text: str, *, messages: bool) -> list[dict[str, Any]]:
    if is_session(sp, text):
        return [_session(sp, text, messages=messages)]
    return [_part(sp, ref, messages=messages) for ref in find(sp, text)]


def _session(sp: Spool, session_id: str, *, messages: bool) -> dict[str, Any]:
    from spool.cli.facts import segment_facts, session_facts, step_facts

    row, steps = sp.find_session(session_id), sp.steps(session_id)
    assert row is not None
    facts = session_facts(row)
    facts["steps"] = [step_facts(step) for step in steps]
    facts["segments"] = [segment_facts(ref) for ref in sp.final_segments(session_id)]
    if messages:
        facts["messages"] = {str(step.index): sp.messages(step) for step in steps}
    return facts


def _part(sp: Spool, ref: Found, *, messages: bool) -> dict[str, Any]:
    from spool.cli.facts import segment_facts, step_facts
    from spool.model.refs import StepRef

    facts = step_facts(ref) if isinstance(ref, StepRef) else segment_facts(ref)
    if messages:
        facts["messages"] = sp.messages(ref)
    return facts


def _print(facts: Mapping[str, Any]) -> None:
    from spool.cli.facts import SEGMENT_COLUMNS, STEP_COLUMNS
    from spool.cli.transcript import write_messages, write_steps

    whole = "n_segments" in facts
    apart = _TABLES if whole else ("messages", "version_span")
    own = ((name, value) for name, value in facts.items() if name not in apart)
    write_facts(
        (name, value, _kind(label))
        for label, nested in own
        if _USUAL.get(label, _USUAL) != nested
        for name, value, _ in flat(label, nested)
    )
    messages = facts.get("messages")
    if not whole:
        write_messages(messages or ())
        return
    segments = [{**row, "part": f"{row['view']}/{row['index']}"} for row in facts["segments"]]
    short = (Column("id"), Column("part", "SEGMENT"), *SEGMENT_COLUMNS[1:])
    for rows, columns in ((facts["steps"], STEP_COLUMNS), (segments, short)):
        if rows:
            write_line("")
            write_rows(rows, columns)
    if messages:
        write_steps((step["index"], step["parent"], messages[str(step["index"])]) for step in facts["steps"])


def _kind(name: str) -> Kind:
    if name.endswith("_at"):
        return "time"
    return "count" if name.startswith("n_") or name in ("response_length", "trainable_tokens") else "text"
