"""Write a small spool of the present format, with what must be read from it, for tests of later versions.

    python -m tools.make_fixture tests/fixtures/format-1

The folder then holds ``spool.tar.xz`` (since git keeps no empty folders and sealed shards are mostly padding; no
catalog: it is made from the logs), ``references.json`` and ``expected.npz``. One writer sealed its packs; another was
killed and left a stream as it was. A fixture is written once for a format and never again: later versions must read the
one that is there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from typing import Any

import ml_dtypes
import numpy as np

import spool

SHAPE = spool.MoEShape(num_layers=4, num_experts=256, topk=2, moe_layers=(1, 3))
WIDE = spool.MoEShape(num_layers=2, num_experts=512, topk=2)
FIELDS = (
    spool.FieldSpec(name="hidden", dtype="bfloat16", align="response", shape=(3,)),
    spool.FieldSpec(name="kept_ids", dtype="int32", align="response", ragged=True),
    spool.FieldSpec(name="score", dtype="float64", align="step"),
)
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
TEXT = "grüße 漢字 \u2028 \ud83d"


# -- contents: functions of the tokens ---------------------------------------------------------------------------------


def _mixed(tokens: Any) -> Any:
    """Return int64 [T], the same for the same tokens up to here."""
    out, running = [], 17
    for token in tokens:
        running = (running * 31 + int(token) + 7) % 1_000_003
        out.append(running)
    return np.array(out, np.int64)


def routing(tokens: Any, shape: Any) -> Any:
    """Return int32 [T-1, layers, topk]; dense layers are 0."""
    mixed = _mixed(tokens)[: max(len(tokens) - 1, 0), None]
    out = np.zeros((len(mixed), shape.num_layers, shape.topk), np.int32)
    for layer in range(shape.num_layers) if shape.moe_layers is None else shape.moe_layers:
        first = mixed * (layer + 3) % shape.num_experts
        out[:, layer] = np.concatenate((first, (first + 1 + mixed % 100) % shape.num_experts), 1)
    return out


def logprobs(tokens: Any, n_prompt: int) -> Any:
    """Return float32 [T - n_prompt]."""
    return -(_mixed(tokens)[n_prompt:] % 512).astype(np.float32) / np.float32(64)


def hidden(tokens: Any, n_prompt: int) -> Any:
    """Return bfloat16 [T - n_prompt, 3]."""
    return (_mixed(tokens)[n_prompt:, None] % [251, 127, 63] - 60).astype(ml_dtypes.bfloat16)


def kept_ids(tokens: Any, n_prompt: int) -> list[list[int]]:
    """Return 0 to 3 ids a response token."""
    return [[int(value) % 1000 + i for i in range(int(value) % 4)] for value in _mixed(tokens)[n_prompt:]]


def counting(n: int, first: int = 100) -> list[int]:
    """Return ``n`` token ids."""
    return list(range(first, first + n))


# -- the writers -------------------------------------------------------------------------------------------------------


class Book:
    """What was written, and what must be read."""

    def __init__(self) -> None:
        self.references: dict[str, Any] = {"steps": [], "segments": [], "messages": {}, "facts": {}, "states": {}}
        self.expected: dict[str, Any] = {}

    def step(self, s: Any, prompt: list[int], response: list[int], shape: Any = SHAPE, **more: Any) -> Any:
        """Append a step with everything and note what it must give."""
        tokens, n_prompt = [*prompt, *response], len(prompt)
        arrays = {
            "token_ids": np.array(tokens, np.int32),
            "logprobs": logprobs(tokens, n_prompt),
            "routed_experts": routing(tokens, shape),
            "loss_mask": np.array([0] * n_prompt + list(more.get("loss_mask", [1] * len(response))), np.uint8),
        }
        given = {name: arrays[name] for name in ("logprobs", "routed_experts")}
        if shape is SHAPE:
            ids = kept_ids(tokens, n_prompt)
            arrays["hidden"], arrays["score"] = hidden(tokens, n_prompt), np.array([sum(tokens) / 7])
            arrays["kept_ids.values"] = np.array([i for row in ids for i in row], np.int32)
            arrays["kept_ids.offsets"] = np.cumsum([0, *map(len, ids)])
            given["fields"] = {"hidden": arrays["hidden"], "kept_ids": ids, "score": arrays["score"][0]}
        ref = s.append(prompt_token_ids=prompt, response_token_ids=response, **{**given, **more})
        self.note(ref, arrays)
        if "messages" in more:
            self.references["messages"][ref.id] = more["messages"]
        return ref

    def note(self, ref: Any, arrays: dict[str, Any]) -> None:
        """Note a reference and its arrays; what npz has no dtype for goes as bits."""
        kind = "steps" if isinstance(ref, spool.StepRef) else "segments"
        self.references[kind].append(json.loads(ref.to_json()))
        for name, array in arrays.items():
            self.expected[f"{ref.id}|{name}"] = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array

    def save(self, folder: str) -> None:
        """Write it down."""
        with open(f"{folder}/references.json", "w") as file:
            json.dump(self.references, file, indent=1)
        np.savez_compressed(f"{folder}/expected.npz", **self.expected)


def flat(sample: Any) -> dict[str, Any]:
    """Return what was read as plain arrays, ragged ones in two."""
    arrays: dict[str, Any] = {}
    for name, value in sample.items():
        if isinstance(value, spool.Ragged):
            arrays[f"{name}.values"], arrays[f"{name}.offsets"] = value
        else:
            arrays[name] = value.view(np.uint16) if value.dtype == ml_dtypes.bfloat16 else value
    return arrays


def write_sealed(sp: Any, book: Book) -> None:
    """Record sessions of every kind, and finish them."""
    a = sp.session("agent", group_id="g@1", sample_index=2, rollout_step=1, source="swe", split="train", experts=SHAPE,
                   metadata={"task": "t1"})  # fmt: skip
    talk = [{"role": "user", "content": TEXT}]
    first = book.step(a, counting(300), [1, 2, 3], messages=talk, tools=TOOLS, weight_version="9", finish_reason="stop")
    base = [*counting(300), 1, 2, 3]
    talk = [*talk, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    book.step(a, [*base, 50, 51], [4, 5, 6, 7], messages=talk, weight_version=[("9", 0, 2), ("10", 2, 4)],
              loss_mask=[1, 0, 1, 1], finish_reason="length")  # fmt: skip
    with a.transaction():
        book.step(a, [*base, 60], [8, 9], weight_version="10", messages=[*talk, {"role": "user", "content": "c"}])
        book.step(a, counting(280), [11], weight_version="10")
    withdrawn = a.append(prompt_token_ids=[*base, 61], response_token_ids=[1])
    a.discard(withdrawn)
    for segment in a.finalize("lineage"):
        book.note(segment, flat(sp.read(segment)))
    sp.annotate("agent", reward=0.25)
    sp.annotate("agent", reward=0.75, passed=True, note=TEXT[:-1])
    late = np.arange(first.n_tokens, dtype=np.float32) / 3
    sp.attach(first, align="token", teacher=late)
    book.expected[f"{first.id}|late|teacher"] = late
    book.references["facts"]["agent"] = {"reward": 0.75, "passed": True, "note": TEXT[:-1]}

    gaps = sp.session("gaps", experts=WIDE, prefer="last", trim=1)
    book.step(gaps, [1, 2, 3], [4, 5], WIDE)
    tokens = [1, 2, 3, 4, 7]
    rows = routing([*tokens, 8, 9], WIDE)
    rows[4] = -1
    ref = gaps.append(prompt_token_ids=tokens, response_token_ids=[8, 9], routed_experts=rows[3:], logprobs=[-1.0, 0.0],
                      routed_experts_start=3)  # fmt: skip
    book.references["missing"] = json.loads(ref.to_json())
    book.expected[f"{ref.id}|missing|routed_experts"] = rows
    for segment in gaps.finalize("timeline", outcome="truncated", gaps="keep"):
        book.references["segments"].append(json.loads(segment.to_json()))
        book.expected |= {f"{segment.id}|{n}": v for n, v in flat(sp.read(segment, missing=-1)).items()}

    empty = sp.session("empty", source="swe")
    empty.finalize(outcome="aborted")
    gone = sp.session("gone", experts=SHAPE)
    gone.append(prompt_token_ids=[1], response_token_ids=[2])
    sp.discard("gone")
    sp.release([segment for segment in sp.segments(view="lineage") if segment.session_id == "agent"], tag="step-1")
    book.references["states"] = {"agent": "final", "gaps": "final", "empty": "final", "gone": "discarded"}


def write_unsealed(sp: Any, book: Book) -> None:
    """Record an open session, and one that ended."""
    s = sp.session("killed", experts=SHAPE)
    book.step(s, counting(40), [1, 2], messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    book.step(s, [*counting(40), 1, 2, 3], [4], weight_version="11", step_id="own-id")
    done = sp.session("done", experts=SHAPE)
    book.step(done, counting(20), [5])
    for segment in done.finalize("timeline"):
        book.note(segment, flat(sp.read(segment)))
    book.references["states"] |= {"killed": "open", "done": "final"}


def make(folder: str) -> None:
    """Write the fixture to ``folder``, which must not exist."""
    os.makedirs(folder)
    root = os.path.join(tempfile.mkdtemp(), "spool")
    book = Book()
    with spool.open(root, fields=FIELDS) as sp:
        write_sealed(sp, book)
    book.save(folder)
    killed = subprocess.run([sys.executable, "-m", "tools.make_fixture", "--killed", root, folder], check=False)
    if killed.returncode != -signal.SIGKILL:
        raise SystemExit(f"the second writer ended with {killed.returncode}")
    for name in os.listdir(root):
        if name.startswith("catalog.sqlite"):
            os.unlink(f"{root}/{name}")
    with tarfile.open(f"{folder}/spool.tar.xz", "w:xz") as archive:
        archive.add(root, "spool")
    shutil.rmtree(os.path.dirname(root))


def be_killed(root: str, folder: str) -> None:
    """Go on with the fixture as a writer that dies."""
    book = Book()
    with open(f"{folder}/references.json") as file:
        book.references = json.load(file)
    with np.load(f"{folder}/expected.npz") as found:
        book.expected = dict(found)
    write_unsealed(spool.open(root, fields=FIELDS), book)
    book.save(folder)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--killed"]:
        be_killed(*sys.argv[2:])
    elif len(sys.argv) == 2:
        make(sys.argv[1])
    else:
        raise SystemExit(__doc__)
