"""``spool demo``."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
from typing import TYPE_CHECKING, Any

import click

from spool.cli.common import json_option, write_json
from spool.cli.exits import Exit
from spool.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spool.handle import Spool
    from spool.model.refs import SegmentRef, StepRef
    from spool.testing.rollouts import SyntheticStep

MODEL = "qwen3.6-35b-a3b"
SLICE_TOKENS, SLICE_LAYERS = 256, slice(0, 20)


@click.command("demo")
@click.argument("location", required=False)
@click.option("--groups", default=12, show_default=True, help="Groups of 4 sessions of 8 steps each.")
@json_option
def command(location: str | None, groups: int, as_json: bool) -> int:
    """Record a synthetic MoE rollout, read it all back, check every value, and say how it went.

    Branches, retries and context rewrites are among its steps. LOCATION keeps the spool; a temporary directory, removed
    afterwards, where it is left out.
    """
    root = location or tempfile.mkdtemp(prefix="spool-demo-")
    try:
        facts = _run(root, groups)
    finally:
        if location is None:
            shutil.rmtree(root, ignore_errors=True)
    if as_json:
        write_json(facts)
    else:
        _print(facts, location)
    return Exit.FAILED if facts["wrong_values"] else Exit.OK


def _run(root: str, groups: int) -> dict[str, Any]:
    import spool

    shape = spool.models[MODEL]
    with spool.open(root) as sp:
        sample, written = _record(sp, shape, groups)
        read = _check(sp, sample, written)
        sp.flush()
        files = sum(row["file_bytes"] for row in sp.usage())
    return {"model": MODEL, "shape": [shape.num_layers, shape.topk], **written.facts(), "file_bytes": files, **read}


class _Written:
    """What was recorded: counts, and the references by session."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepRef, SyntheticStep]] = []
        self.segments: list[SegmentRef] = []
        self.append_s = 0.0
        self.sent_bytes = 0

    def facts(self) -> dict[str, Any]:
        kinds: dict[str, int] = {}
        for _, step in self.steps:
            kinds[step.kind] = kinds.get(step.kind, 0) + 1
        sizes = [len(pickle.dumps(ref)) for ref in self.segments]
        return {
            "n_sessions": len({ref.session_id for ref, _ in self.steps}),
            "n_steps": len(self.steps),
            "kinds": kinds,
            "n_segments": len(self.segments),
            "n_tokens": sum(ref.n_tokens for ref in self.segments),
            "sent_bytes": self.sent_bytes,
            "append_s": round(self.append_s, 3),
            "ref_bytes_mean": round(sum(sizes) / len(sizes)),
            "segment_bytes_mean": round(sum(self._segment_bytes(ref) for ref in self.segments) / len(self.segments)),
        }

    def _segment_bytes(self, ref: SegmentRef) -> int:
        layers, topk = self.shape
        return ref.n_tokens * 9 + (ref.n_rows - 1) * layers * topk * 4

    shape = (0, 0)


def _record(sp: Spool, shape: Any, groups: int) -> tuple[list[SyntheticStep], _Written]:
    from spool.testing.rollouts import rollouts

    written = _Written()
    written.shape = (shape.num_layers, shape.topk)
    steps: Iterator[SyntheticStep] = rollouts(shape, groups=groups, samples=4, turns=8)
    recorded = []
    for step in steps:
        written.sent_bytes += sum(getattr(value, "nbytes", 0) for value in step.append.values())
        started = time.perf_counter()
        session = sp.session(**step.session, experts=shape)
        ref = session.append(**step.append)
        if step.last:
            written.segments += session.finalize(view="lineage", outcome="completed")
        written.append_s += time.perf_counter() - started
        written.steps.append((ref, step))
        recorded.append(step)
    return recorded, written


def _check(sp: Spool, steps: list[SyntheticStep], written: _Written) -> dict[str, Any]:
    import numpy as np

    wrong = n_values = read_bytes = 0
    read_s = 0.0
    for ref, step in written.steps:
        started = time.perf_counter()
        sample = sp.read(ref)
        read_s += time.perf_counter() - started
        for name, expected in step.expected.items():
            wrong += int(not np.array_equal(sample[name], expected))
            n_values += expected.size
            read_bytes += expected.nbytes
    slices = _check_slices(sp, steps, written)
    wrong += slices.pop("wrong")
    return {
        "n_values_checked": n_values + slices.pop("n_values"),
        "wrong_values": wrong,
        "read_bytes": read_bytes,
        "read_s": round(read_s, 3),
        **slices,
    }


def _check_slices(sp: Spool, steps: list[SyntheticStep], written: _Written) -> dict[str, Any]:
    """Read a slice of each step, as a context-parallel rank of a pipeline stage does; count bytes read and needed."""
    import numpy as np

    wrong = n_values = located = needed = 0
    started, n_slices = time.perf_counter(), 0
    for (ref, step), _ in zip(written.steps, steps, strict=True):
        low = max(0, ref.n_tokens // 2 - SLICE_TOKENS // 2)
        tokens = slice(low, low + SLICE_TOKENS)
        sample = sp.read(ref, fields=["routed_experts"], tokens=tokens, layers=SLICE_LAYERS)
        expected = step.expected["routed_experts"][tokens, SLICE_LAYERS]
        wrong += int(not np.array_equal(sample["routed_experts"], expected))
        n_values += expected.size
        n_slices += 1
    elapsed = time.perf_counter() - started
    for ref, step in written.steps:
        low = max(0, ref.n_tokens // 2 - SLICE_TOKENS // 2)
        tokens = slice(low, low + SLICE_TOKENS)
        located += sum(found.length for found in sp.locate(ref, fields=["routed_experts"], tokens=tokens))
        needed += step.expected["routed_experts"][tokens].size
    return {
        "wrong": wrong,
        "n_values": n_values,
        "slice_bytes_read": located,
        "slice_bytes_needed": needed,
        "slice_mean_us": round(1e6 * elapsed / n_slices),
    }


def _print(facts: dict[str, Any], location: str | None) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts["kinds"].items())
    sent, read = facts["sent_bytes"], facts["read_bytes"]
    amplification = facts["slice_bytes_read"] / facts["slice_bytes_needed"]
    lines = [
        f"recorded   {facts['n_sessions']} sessions, {facts['n_steps']} steps ({kinds}), {facts['model']}",
        f"           {format_size(sent)} sent by the engine, {format_size(facts['file_bytes'])} on disk, "
        f"{format_size(int(sent / facts['append_s']))}/s",
        f"references {facts['n_segments']} segments, {facts['ref_bytes_mean']} B each (mean) for "
        f"{format_size(facts['segment_bytes_mean'])} of arrays",
        f"read back  {format_size(read)} in training dtypes, {format_size(int(read / facts['read_s']))}/s",
        f"slices     {SLICE_TOKENS} tokens of each step in {facts['slice_mean_us']} us (mean), "
        f"{amplification:.3f} bytes read for a byte needed",
        f"checked    {facts['n_values_checked']:,} values, "
        + ("all equal" if not facts["wrong_values"] else f"{facts['wrong_values']} ARRAYS DIFFER"),
    ]
    for line in lines:
        click.echo(line)
    if location:
        click.echo(f"look inside: spool ls {location}")
