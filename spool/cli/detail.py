"""What ``spool show`` prints of a reference, or of a session's tree, beyond its facts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from spool.cli.facts import STEP_COLUMNS
from spool.cli.output import Column, write_line, write_rows

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.look.session import SessionView
    from spool.look.tokens import TokenRow
    from spool.model.refs import SegmentRef, StepRef

PAGE = 1024
"""Tokens that are read at once."""

_FIELD_COLUMNS = (
    Column("field", "FIELD"),
    Column("kind", "KIND"),
    Column("align", "A ROW A"),
    Column("n_rows", "ROWS", "count"),
    Column("n_missing", "MISSING", "count"),
    Column("hot_bytes", "HOT", "size"),
    Column("cold_bytes", "COLD", "size"),
    Column("gaps", "GAPS"),
)
_VERSION_COLUMNS = (Column("version", "VERSION"), Column("start", "FROM", "count"), Column("stop", "TO", "count"))
_LAYER_COLUMNS = (
    Column("layer", "LAYER", "number"),
    Column("imbalance", "IMBALANCE", "ratio"),
    Column("entropy", "ENTROPY", "ratio"),
    Column("overlap", "OVERLAP", "ratio"),
    Column("unused", "UNUSED", "ratio"),
)
_TOKEN_COLUMNS = (
    Column("position", "TOKEN", "number"),
    Column("token_id", "ID", "number"),
    Column("text", "TEXT"),
    Column("step", "STEP", "number"),
    Column("mask", "MASK", "number"),
    Column("logprob", "LOGPROB", "number"),
    Column("version", "VERSION"),
    Column("unit", "UNIT"),
)
_TREE_COLUMNS = (Column("tree", "STEP"), *STEP_COLUMNS[2:8], Column("segments", "SEGMENTS"))


def detail_facts(sp: Spool, ref: StepRef | SegmentRef) -> dict[str, Any]:
    """Return weight versions, and of each field what it is, what is missing, and where its bytes are."""
    from spool.look.detail import detail

    found = detail(sp, ref)
    versions = [msgspec.structs.asdict(span) for span in ref.versions]
    return {"versions": versions, "coverage": msgspec.to_builtins(found.fields), "problem": found.problem}


def tree_facts(view: SessionView) -> dict[int, dict[str, Any]]:
    """Return of each step where and how it is drawn, whether it is superseded, and which segments have it."""
    from spool.look.tree import glyph, rails

    return {
        row.step.index: {
            "line": line,
            "tree": f"{rails(row)}{glyph(row)} {row.step.index}",
            "superseded": row.superseded,
            "segments": list(row.segments),
        }
        for line, row in enumerate(view.rows)
    }


def routing_facts(sp: Spool, refs: Iterable[StepRef | SegmentRef]) -> list[dict[str, Any]]:
    """Return the routing of references together, for each shape of model."""
    from spool.look.stats import model_routing, sample_routing

    return [msgspec.to_builtins(model_routing(model)) for model in sample_routing(sp, refs).models]


def token_facts(sp: Spool, ref: StepRef | SegmentRef, tokens: slice, tokenizer: str | None) -> Iterator[dict[str, Any]]:
    """Yield the tokens of a slice, read a page at a time."""
    from spool.look.tokens import Tokens
    from spool.look.vocabulary import Vocabulary

    vocabulary = None if tokenizer is None else Vocabulary.load(tokenizer)
    reader = Tokens(sp, ref, vocabulary)
    start, stop, _ = tokens.indices(ref.n_tokens)
    for low in range(start, stop, PAGE):
        for row in reader.rows(low, min(low + PAGE, stop)):
            yield _token(row)


def _token(row: TokenRow) -> dict[str, Any]:
    return {
        "position": row.position,
        "token_id": row.token_id,
        "text": None if row.text is None else row.text.text,
        "step": row.step,
        "mask": int(row.mask),
        "logprob": row.logprob,
        "version": row.version,
        "unit": None if row.unit is None else row.unit.key,
    }


def write_tree(steps: Sequence[Mapping[str, Any]]) -> None:
    """Print a session's steps: on a terminal as a tree, elsewhere in the order of append."""
    if not sys.stdout.isatty():
        write_rows(steps, (*STEP_COLUMNS, Column("superseded"), Column("segments")))
        return
    write_rows(sorted(steps, key=lambda step: int(step["line"])), _TREE_COLUMNS)


def write_detail(facts: Mapping[str, Any]) -> None:
    """Print the tables of a segment or step."""
    fields = [{"field": name, **found, "gaps": _gaps(found["gaps"])} for name, found in facts["coverage"].items()]
    _table(fields, _FIELD_COLUMNS)
    _table(facts["versions"] if len(facts["versions"]) > 1 else (), _VERSION_COLUMNS)


def write_more(facts: Mapping[str, Any]) -> None:
    """Print routing and tokens, where they were asked for."""
    for model in facts.get("routing", ()):
        write_line("")
        write_line(
            f"routing of {len(model['layers'])} layers, {model['num_experts']} experts, top {model['topk']}: "
            f"{model['n_rows']} rows, {model['n_missing']} were never sent"
        )
        write_rows(model["layers"], _LAYER_COLUMNS)
    _table(facts.get("tokens", ()), _TOKEN_COLUMNS)


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> None:
    if rows:
        write_line("")
        write_rows(rows, columns)


def _gaps(gaps: Sequence[Sequence[int]]) -> str | None:
    return " ".join(f"{start}:{stop}" for start, stop in gaps) or None
