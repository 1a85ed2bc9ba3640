"""``spool demo``."""

from __future__ import annotations

import itertools
import pickle
import shlex
import shutil
import tempfile
import time
import zlib
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from spool.cli.exits import Exit
from spool.cli.output import json_option, write_json, write_line
from spool.cli.places import check_hot
from spool.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from spool.handle import Spool
    from spool.model.moe import MoEShape
    from spool.model.refs import Ref, SegmentRef, StepRef
    from spool.testing.rollouts import SyntheticStep

MODEL, SOURCE = "qwen3.6-35b-a3b", "demo"
SAMPLES, TURNS, SLICE_TOKENS = 4, 8, 256
_SHARED = ("token_ids", "routed_experts")


@click.command("demo")
@click.argument("location", required=False)
@click.option("--groups", default=12, show_default=True, type=click.IntRange(1),
              help=f"Groups of {SAMPLES} sessions of {TURNS} steps each.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be recorded.")
@json_option
def command(location: str | None, groups: int, dry_run: bool, as_json: bool) -> int:
    """Record a synthetic rollout, read it back, check every value.

    Branches, retries and context rewrites are among its steps, and sessions get rewards. LOCATION keeps the spool, for
    spool browse to look at, also one that is there already; where it is left out ($SPOOL_URI does not count here),
    a temporary directory is used and removed.
    """
    if dry_run:
        facts: dict[str, Any] = {"model": MODEL, "n_sessions": groups * SAMPLES, "n_steps": groups * SAMPLES * TURNS}
        where = location or "a temporary directory"
        text = [f"would record {facts['n_steps']} steps of {facts['n_sessions']} sessions of {MODEL} in {where}"]
    else:
        with _place(location) as root:
            facts = _run(root, groups)
        text = [*_lines(facts), *([f"look         spool browse {shlex.quote(location)}"] if location else [])]
    if as_json:
        write_json(facts)
    else:
        write_line("\n".join(text))
    return Exit.FAILED if facts.get("n_wrong") else Exit.OK


@contextmanager
def _place(location: str | None) -> Iterator[str]:
    root = location or tempfile.mkdtemp(prefix="spool-demo-")
    try:
        yield root
    finally:
        if location is None:
            shutil.rmtree(root, ignore_errors=True)


def _run(root: str, groups: int) -> dict[str, Any]:
    import spool
    from spool.model.fields import expert_field, numpy_dtype
    from spool.testing.rollouts import rollouts

    check_hot(root)
    shape = spool.models[MODEL]
    with spool.open(root) as sp:
        earlier = [row.rollout_step or 0 for row in sp.sessions(f"source = '{SOURCE}'")]
        # equal arguments yield equal steps: what must be read back is made a second time, not kept
        workload = partial(
            rollouts, shape, groups=groups, samples=SAMPLES, turns=TURNS, source=SOURCE,
            rollout_step=max(earlier, default=-1) + 1,
        )  # fmt: skip
        before = _file_bytes(sp)
        written = _record(sp, workload(), shape)
        sp.flush()
        file_bytes = _file_bytes(sp) - before
        checked = _Checked(written, itemsize=numpy_dtype(expert_field(shape).dtype).itemsize)
        for steps in _groups(workload()):
            checked.group(sp, steps)
    return {
        "model": MODEL, "num_layers": shape.num_layers, "topk": shape.topk,
        **written.facts(), "file_bytes": file_bytes, **checked.facts(),
    }  # fmt: skip


def _file_bytes(sp: Spool) -> int:
    return sum(row["file_bytes"] for row in sp.usage())


def _groups(steps: Iterator[SyntheticStep]) -> Iterator[list[SyntheticStep]]:
    while group := list(itertools.islice(steps, SAMPLES * TURNS)):
        yield group


class _Written:
    """What was recorded."""

    def __init__(self) -> None:
        self.steps: dict[tuple[str, int], StepRef] = {}
        self.segments: dict[tuple[str, int], SegmentRef] = {}
        self.kinds: Counter[str] = Counter()
        self.sent_bytes = 0
        self.append_s = 0.0

    def facts(self) -> dict[str, Any]:
        segments = self.segments.values()
        return {
            "n_sessions": len({session_id for session_id, _ in self.steps}),
            "n_steps": len(self.steps),
            "kinds": dict(self.kinds),
            "n_segments": len(segments),
            "n_tokens": sum(ref.n_tokens for ref in segments),
            "sent_bytes": self.sent_bytes,
            "append_s": self.append_s,
            "ref_bytes": sum(len(pickle.dumps(ref)) for ref in segments),
        }


def _record(sp: Spool, steps: Iterator[SyntheticStep], shape: MoEShape) -> _Written:
    written = _Written()
    for step in steps:
        began = time.perf_counter()
        session = sp.session(**step.session, experts=shape)
        ref = session.append(**step.append)
        segments = session.finalize(view="lineage") if step.last else []
        written.append_s += time.perf_counter() - began
        if step.last:
            sp.annotate(ref.session_id, reward=_reward(ref.session_id))
        written.sent_bytes += sum(getattr(value, "nbytes", 0) for value in step.append.values())
        written.kinds[step.kind] += 1
        written.steps[ref.session_id, ref.index] = ref
        written.segments.update({(segment.session_id, segment.steps[-1]): segment for segment in segments})
    return written


def _reward(session_id: str) -> float:
    """Return what a session is said to be worth: the same for one id each time, 1 or 0, or now and then a half."""
    return (0.0, 1.0, 0.0, 1.0, 0.5)[zlib.crc32(session_id.encode()) % 5]


class _Checked:
    """What was read back, whole and in slices, and compared with what was sent.

    Args:
        written: the references.
        itemsize: bytes of a stored expert id.
    """

    def __init__(self, written: _Written, *, itemsize: int) -> None:
        self._written = written
        self._itemsize = itemsize
        self._counts: Counter[str] = Counter()
        self._read_s = self._slice_s = 0.0
        self._counted = True

    def facts(self) -> dict[str, Any]:
        facts = {"read_s": self._read_s, "slice_tokens": SLICE_TOKENS, "slice_s": self._slice_s, **self._counts}
        return facts if self._counted else {**facts, "slice_bytes_read": None}

    def group(self, sp: Spool, steps: Sequence[SyntheticStep]) -> None:
        """Read a group's steps, slices of them, and its segments."""
        names = [(step.session["session_id"], step.index) for step in steps]
        sent = [step.expected for step in steps]
        refs = [self._written.steps[name] for name in names]
        self._whole(sp, refs, sent)
        self._slices(sp, refs, sent)
        # a segment has the tokens and the routing of its last step
        leaves = [(self._written.segments.get(name), arrays) for name, arrays in zip(names, sent, strict=True)]
        found = [(ref, {name: arrays[name] for name in _SHARED}) for ref, arrays in leaves if ref is not None]
        self._whole(sp, [ref for ref, _ in found], [arrays for _, arrays in found])
        self._counts["segment_bytes"] += sum(array.nbytes for _, arrays in found for array in arrays.values())

    def _whole(self, sp: Spool, refs: Sequence[Ref], sent: Sequence[dict[str, NDArray[Any]]]) -> None:
        began = time.perf_counter()
        samples = [sp.read(ref) for ref in refs]
        self._read_s += time.perf_counter() - began
        for sample, arrays in zip(samples, sent, strict=True):
            self._counts["read_bytes"] += sum(array.nbytes for array in sample.values())
            for name, array in arrays.items():
                self._compare(sample[name], array)

    def _slices(self, sp: Spool, refs: Sequence[Ref], sent: Sequence[dict[str, NDArray[Any]]]) -> None:
        """Read the middle of each step's routing, as a context-parallel rank does."""
        middles = [max(ref.n_tokens // 2 - SLICE_TOKENS // 2, 0) for ref in refs]
        tokens = [slice(start, start + SLICE_TOKENS) for start in middles]
        before, began = _io_bytes(), time.perf_counter()
        samples = [sp.read(ref, fields=["routed_experts"], tokens=part) for ref, part in zip(refs, tokens, strict=True)]
        self._slice_s += time.perf_counter() - began
        after = _io_bytes()
        self._counted = before is not None and after is not None
        self._counts["n_slices"] += len(refs)
        self._counts["slice_bytes_read"] += (after or 0) - (before or 0)
        for sample, arrays, part in zip(samples, sent, tokens, strict=True):
            wanted = arrays["routed_experts"][part]
            self._counts["slice_bytes_needed"] += wanted.size * self._itemsize
            self._compare(sample["routed_experts"], wanted)

    def _compare(self, got: NDArray[Any], sent: NDArray[Any]) -> None:
        self._counts["n_values"] += sent.size
        if (got.shape, got.dtype) != (sent.shape, sent.dtype):
            self._counts["n_wrong"] += sent.size
        else:
            bits = f"u{sent.itemsize}"
            self._counts["n_wrong"] += int((got.view(bits) != sent.view(bits)).sum())


def _io_bytes() -> int | None:
    """Return the bytes that this process's read calls returned so far, from disk or cache; None where not counted."""
    try:
        with open("/proc/self/io", "rb") as file:
            return int(file.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _lines(facts: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{number} {kind}" for kind, number in facts["kinds"].items())
    n_refs, n_slices, read = facts["n_segments"], facts["n_slices"], facts["slice_bytes_read"]
    ratio = "not counted here" if read is None else f"{read / facts['slice_bytes_needed']:.3f}"
    return [
        f"model        {facts['model']}: {facts['num_layers']} layers, {facts['topk']} experts a token and layer",
        f"recorded     {facts['n_sessions']} sessions, {facts['n_steps']} steps: {kinds}",
        f"             {format_size(facts['sent_bytes'])} sent, {_rate(facts['sent_bytes'], facts['append_s'])}; "
        f"{format_size(facts['file_bytes'])} in files",
        f"references   {n_refs} segments, {format_size(facts['ref_bytes'] // n_refs)} each for "
        f"{format_size(facts['segment_bytes'] // n_refs)} of arrays (mean, pickled)",
        f"read back    {format_size(facts['read_bytes'])} in training dtypes, "
        f"{_rate(facts['read_bytes'], facts['read_s'])}",
        f"slices       {SLICE_TOKENS} tokens of each step, {1e6 * facts['slice_s'] / n_slices:.0f} us each",
        f"             bytes read for each byte needed: {ratio}",
        f"checked      {facts['n_values']:,} values, "
        + (f"{facts['n_wrong']:,} OF THEM WRONG" if facts["n_wrong"] else "each bit for bit as it was sent"),
    ]


def _rate(n_bytes: int, seconds: float) -> str:
    return f"{format_size(int(n_bytes / seconds))}/s"
