"""``spool show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from spool.cli.output import Column, flat, json_option, write_facts, write_json, write_line, write_rows
from spool.cli.places import find, is_session, open_spool, parse_range, reference_arguments, split_arguments
from spool.errors import NotFoundError, ReleasedError
from spool.look.text import json_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spool.cli.output import Kind
    from spool.cli.places import Found
    from spool.handle import Spool

_USUAL: dict[str, object] = {
    "attempt": 0, "trim": 0, "prefer": "first", "n_nonfinite": 0, "cut_tokens": 0, "superseded": False,
}  # fmt: skip
_LISTED = ("n_branches", "stored_bytes", "tier", "first_version", "last_version", "n_released")
_OF_SESSION = ("steps", "segments", "messages", "routing")
_OF_PART = ("messages", "version_span", "versions", "coverage", "routing", "tokens")


@click.command("show")
@reference_arguments
@click.option("--messages", is_flag=True, help="Print the chat messages too; of a session, what each step adds.")
@click.option(
    "--ref", "as_ref", is_flag=True, help="Print whole references as JSON, one a line, for show, cat, locate."
)
@click.option("--routing", is_flag=True, help="Count the routing, layer by layer; this reads payload.")
@click.option("--tokens", metavar="START:STOP", help="Print these tokens of segments or steps, too.")
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json, for the text of --tokens.")
@json_option
def command(
    args: tuple[str, ...],
    messages: bool,
    as_ref: bool,
    routing: bool,
    tokens: str | None,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Show sessions, steps or segments.

    Identity, lengths, weight versions, late facts, and what they are made of. Of a session its steps, on a terminal as
    a tree: a branch is indented, a diamond begins a chain, a cross marks a step whose request was sent again; of a
    discarded one, which nothing else reads any more, what is there until it is deleted. Of a segment or step what of
    each field was never sent, the bytes that a read fetches from each tier (each once; of a compressed object whole
    chunks, wider than the rows), and where versions change. A terminal shows the beginning of long values, JSON all.

    n_tokens of a session are the tokens that its steps add to the chains of their parents: those of a request that was
    sent again count again, a prefix that steps share through their parent counts once.

    What is printed of a session or a segment are columns of ls --where, but for id, steps, fields, metadata, n_extents
    and what is counted by field or by layer. n_prompt of a segment is response_start there, version is first_version
    and last_version, and a fact is named alone, without "facts.". NaN and infinities are text in JSON. What --routing
    counts is what stats --routing does; experts of single tokens are printed by cat --field routed_experts.
    """
    location, texts = split_arguments(args, "show")
    chosen = parse_range(tokens, "--tokens")
    if tokenizer is not None and chosen is None:
        raise click.UsageError("--tokenizer is for --tokens START:STOP")
    with open_spool(location) as sp:
        if as_ref:
            for text in texts:
                for ref in find(sp, text):
                    write_line(json_text(ref.to_json()))
            return
        asked = _Asked(messages, routing, chosen, tokenizer)
        shown = [facts for text in texts for facts in _facts(sp, text, asked)]
    if as_json:
        write_json(shown)
        return
    for number, facts in enumerate(shown):
        if number:
            write_line("")
        _print(facts)


class _Asked(NamedTuple):
    """What is to be shown beyond the facts."""

    messages: bool
    routing: bool
    tokens: slice | None
    tokenizer: str | None


def _facts(sp: Spool, text: str, asked: _Asked) -> list[dict[str, Any]]:
    if is_session(sp, text):
        if asked.tokens is not None:
            raise click.UsageError(f"--tokens is for segments and steps: name {text}@lineage/0 or {text}:0")
        return [_session(sp, text, asked)]
    return [_part(sp, ref, asked) for ref in find(sp, text)]


def _session(sp: Spool, session_id: str, asked: _Asked) -> dict[str, Any]:
    from spool.cli.detail import routing_facts, tree_facts
    from spool.cli.facts import segment_facts, session_facts, step_facts
    from spool.look.session import look_at

    row = sp.find_session(session_id)
    assert row is not None
    facts = session_facts(row)
    facts |= _looked_up(sp, session_id)
    try:
        steps, drawn = sp.steps(session_id, discarded=True), tree_facts(look_at(sp, session_id))
        segments = sp.final_segments(session_id, discarded=True)
    except (NotFoundError, ReleasedError) as error:
        if row.state != "discarded":
            raise
        return facts | {"problem": str(error), "steps": [], "segments": []}
    facts["steps"] = [{**step_facts(step), **drawn[step.index]} for step in steps]
    facts["segments"] = [segment_facts(ref) for ref in segments]
    if asked.messages:
        facts["messages"] = [said._asdict() for said in sp.transcript(session_id, discarded=True)]
    if asked.routing:
        facts["routing"] = routing_facts(sp, segments)
    return facts


def _looked_up(sp: Spool, session_id: str) -> dict[str, Any]:
    """Return what a listing says of a session, beyond its row."""
    quoted = session_id.replace("'", "''")
    (look,) = sp.listing(f"session_id = '{quoted}'", limit=1).rows(0, 1)
    return {name: getattr(look, name) for name in _LISTED}


def _part(sp: Spool, ref: Found, asked: _Asked) -> dict[str, Any]:
    from spool.cli.detail import detail_facts, routing_facts, token_facts
    from spool.cli.facts import segment_facts, step_facts
    from spool.model.refs import StepRef

    facts = step_facts(ref) if isinstance(ref, StepRef) else segment_facts(ref)
    facts |= detail_facts(sp, ref)
    if asked.messages:
        facts["messages"] = sp.messages(ref)
    if asked.routing:
        facts["routing"] = routing_facts(sp, [ref])
    if asked.tokens is not None:
        facts["tokens"] = list(token_facts(sp, ref, asked.tokens, asked.tokenizer))
    return facts


def _print(facts: Mapping[str, Any]) -> None:
    from spool.cli.detail import write_detail, write_more, write_tree
    from spool.cli.facts import SEGMENT_COLUMNS
    from spool.cli.transcript import write_messages, write_steps
    from spool.history import StepMessages

    whole = "n_segments" in facts
    apart = _OF_SESSION if whole else _OF_PART
    own = ((name, value) for name, value in facts.items() if name not in apart)
    found = (
        (name, value, _kind(label))
        for label, nested in own
        if _USUAL.get(label, _USUAL) != nested
        for name, value, _ in flat(label, nested)
    )
    write_facts(found, short=True)
    messages = facts.get("messages")
    if not whole:
        write_detail(facts)
        write_more(facts)
        write_messages(messages or ())
        return
    segments = [{**row, "part": f"{row['view']}/{row['index']}"} for row in facts["segments"]]
    if facts["steps"]:
        write_line("")
        write_tree(facts["steps"])
    if segments:
        write_line("")
        write_rows(segments, (Column("id"), Column("part", "SEGMENT"), *SEGMENT_COLUMNS[1:]))
    write_more(facts)
    if messages:
        write_steps(StepMessages(**said) for said in messages)


def _kind(name: str) -> Kind:
    if name.endswith("_at"):
        return "time"
    if name.endswith("_bytes"):
        return "size"
    return "count" if name.startswith("n_") or name in ("response_length", "trainable_tokens") else "text"
