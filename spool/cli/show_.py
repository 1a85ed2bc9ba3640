"""``spool show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from spool.cli.common import (
    arguments,
    find_ref,
    json_option,
    open_spool,
    safe_text,
    split_arguments,
    write_json,
)
from spool.errors import NotFoundError

if TYPE_CHECKING:
    from spool.handle import Spool


@click.command("show")
@arguments
@click.option("--messages", is_flag=True, help="Print the chat messages too.")
@click.option("--ref", "as_ref", is_flag=True, help="Print the whole reference as JSON, for read, cat and locate.")
@json_option
def command(args: tuple[str, ...], messages: bool, as_ref: bool, as_json: bool) -> None:
    """Show sessions, steps or segments: identity, lengths, versions, extents' sizes, messages."""
    location, texts = split_arguments(args)
    if not texts:
        raise click.UsageError("name a session, SESSION:STEP or SESSION@VIEW/INDEX")
    with open_spool(location) as sp:
        if as_ref:
            for text in texts:
                for ref in find_ref(sp, text):
                    click.echo(ref.to_json())
            return
        shown = [_facts(sp, text, messages=messages) for text in texts]
    if as_json:
        write_json(shown)
    else:
        for facts in shown:
            _print(facts)


def _facts(sp: Spool, text: str, *, messages: bool) -> dict[str, Any]:
    from spool.cli.facts import segment_facts, session_facts, step_facts
    from spool.model.refs import StepRef

    row = sp.find_session(text)
    if row is not None:
        facts = session_facts(row)
        facts["steps"] = [step_facts(step) for step in sp.steps(text)]
        facts["segments"] = [segment_facts(ref) for ref in sp.final_segments(text)]
        if messages:
            facts["messages"] = {str(step.index): sp.messages(step) for step in sp.steps(text)}
        return facts
    refs = find_ref(sp, text)
    if len(refs) != 1:
        raise NotFoundError(f"no session, step or segment {text!r}")
    ref = refs[0]
    facts = step_facts(ref) if isinstance(ref, StepRef) else segment_facts(ref)
    if messages:
        facts["messages"] = sp.messages(ref)
    return facts


def _print(facts: dict[str, Any], indent: str = "") -> None:
    for name, value in facts.items():
        if value is None or value in ([], {}):
            continue
        if isinstance(value, list) and isinstance(value[0], dict):
            click.echo(f"{indent}{name}:")
            for item in value:
                click.echo(f"{indent}  " + _line(item))
        else:
            click.echo(f"{indent}{name}: {safe_text(str(value))}")


def _line(item: dict[str, Any]) -> str:
    if "role" in item:
        return f"{item['role']}: {safe_text(str(item.get('content') or item.get('tool_calls') or ''))}"
    skipped = {"session_id", "group_id", "sample_index", "rollout_step", "source", "view", "count"}
    parts = (
        f"{name}={value}" for name, value in item.items() if name not in skipped and value not in (None, [], {}, ())
    )
    return safe_text("  ".join(parts))
