"""A spool of format 1, written once and kept: every later version reads it, as it is, rebuilt and recovered."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zarr

import spool
from spool.errors import GapError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.make_fixture import SHAPE, TEXT, TOOLS, WIDE, flat, hidden, kept_ids, logprobs, routing

FIXTURE = Path(__file__).parent / "fixtures" / "format-1"
REFERENCES = json.loads((FIXTURE / "references.json").read_text())


@pytest.fixture(scope="module")
def expected():
    with np.load(FIXTURE / "expected.npz") as found:
        return dict(found)


@pytest.fixture
def root(tmp_path):
    """A copy of the spool."""
    with tarfile.open(FIXTURE / "spool.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "spool"


def references(kind):
    return [spool.ref_from_json(json.dumps(facts)) for facts in REFERENCES[kind]]


def of(expected, ref):
    """The arrays that were noted for a reference."""
    parts = [(name.split("|"), array) for name, array in expected.items() if name.startswith(f"{ref.id}|")]
    return {part[1]: array for part, array in parts if len(part) == 2}


def check_references(sp, expected):
    for ref in [*references("steps"), *references("segments")]:
        got, wanted = flat(sp.read(ref, verify="always", missing=-1)), of(expected, ref)
        assert got.keys() == wanted.keys(), ref.id
        for name, array in wanted.items():
            assert got[name].dtype == array.dtype and got[name].shape == array.shape, (ref.id, name)
            assert got[name].tobytes() == array.tobytes(), (ref.id, name)
    late = references("steps")[0]
    teacher = sp.read(late, fields=["teacher"], verify="always")["teacher"]
    assert np.array_equal(teacher, expected[f"{late.id}|late|teacher"])
    gap = spool.ref_from_json(json.dumps(REFERENCES["missing"]))
    with pytest.raises(GapError):
        sp.read(gap)
    assert np.array_equal(sp.read(gap, missing=-1)["routed_experts"], expected[f"{gap.id}|missing|routed_experts"])


def check_index(sp):
    assert {row.session_id: row.state for row in sp.sessions(discarded=True)} == REFERENCES["states"]
    for name in ("agent", "killed"):
        noted = [ref for ref in references("steps") if ref.session_id == name]
        assert [(ref.step_id, ref.index, ref.parent, ref.extents) for ref in sp.steps(name)] == [
            (ref.step_id, ref.index, ref.parent, ref.extents) for ref in noted
        ]
    agent = sp.find_session("agent")
    assert agent.facts == REFERENCES["facts"]["agent"]
    assert (agent.group_id, agent.sample_index, agent.source, agent.metadata) == ("g@1", 2, "swe", {"task": "t1"})
    found = {ref.id: ref for ref in sp.segments()}
    for noted in references("segments"):
        ref = found[noted.id]
        assert (ref.steps, ref.spans, ref.versions, ref.outcome) == (
            noted.steps,
            noted.spans,
            noted.versions,
            noted.outcome,
        )
        assert ref.extents == noted.extents
    assert {ref.reward for ref in found.values() if ref.session_id == "agent"} == {0.75}
    for ref in references("steps"):
        if ref.id in REFERENCES["messages"]:
            assert sp.messages(ref) == REFERENCES["messages"][ref.id]
    first = references("steps")[0]
    assert sp.messages(first)[0]["content"] == TEXT and sp.tools(first) == TOOLS
    assert len(sp.view("killed", "lineage")) == 1


def test_the_fixture_is_what_its_generator_says(expected):
    """Independent of what any version reads: the noted arrays are functions of the noted tokens."""
    assert len(references("steps")) == 8 and len(references("segments")) >= 5
    for ref in references("steps"):
        arrays = of(expected, ref)
        tokens, n_prompt = arrays["token_ids"].tolist(), ref.response_start
        shape = WIDE if ref.session_id == "gaps" else SHAPE
        assert np.array_equal(arrays["routed_experts"], routing(tokens, shape))
        assert np.array_equal(arrays["logprobs"], logprobs(tokens, n_prompt))
        if shape is SHAPE:
            assert arrays["hidden"].tobytes() == hidden(tokens, n_prompt).tobytes()
            assert arrays["kept_ids.values"].tolist() == [i for row in kept_ids(tokens, n_prompt) for i in row]


def test_references_read_as_they_did_without_an_index(root, expected):
    with spool.open(str(root), readonly=True) as sp:
        check_references(sp, expected)


def test_the_index_is_made_from_the_logs(root, expected):
    with spool.open(str(root)) as sp:
        check_index(sp)
        sp.rebuild()
        check_index(sp)
        check_references(sp, expected)
        released = {ref.session_id for ref in sp.segments("released")}
        assert released == {"agent"} and not list(sp.segments("not released and session_id = 'agent'"))
        assert [f for f in sp.verify(deep=True).findings if f.kind == "integrity"] == []


def test_recovery_seals_what_the_dead_writer_left(root, expected):
    assert len(list(root.glob("streams/*/records/*.log"))) == 1
    with spool.open(str(root)) as sp:
        reports = sp.recover()
        assert [(report.packs, report.error, report.shortfalls, report.torn_bytes) for report in reports] == [
            ((0,), None, (), 0)
        ]
        check_references(sp, expected)
        check_index(sp)
        sp.rebuild()
        check_index(sp)
    assert list(root.glob("streams/*/records/*.log")) == []


def test_the_session_of_the_dead_writer_goes_on(root, expected):
    with spool.open(str(root)) as sp:
        s = sp.session("killed")
        noted = [ref for ref in references("steps") if ref.session_id == "killed"]
        tokens = of(expected, noted[-1])["token_ids"].tolist()
        ref = s.append(
            prompt_token_ids=[*tokens, 9], response_token_ids=[9], routed_experts=routing([*tokens, 9, 9], SHAPE)
        )
        assert (ref.index, ref.parent) == (2, 1)
        assert np.array_equal(sp.read(ref)["routed_experts"], routing([*tokens, 9, 9], SHAPE))


def test_any_zarr_reader_opens_the_sealed_shards(root, expected):
    for ref in references("steps"):
        for name, position in (("token_ids", 0), ("logprobs", ref.response_start)):
            for extent in ref.extents[name]:
                array = zarr.open_array(str(root / "streams" / extent.stream / name), mode="r")
                if ref.session_id in ("killed", "done"):
                    assert array.shape == (0,)
                    continue
                rows = array[extent.row : extent.row + extent.n]
                at = extent.position - position
                assert np.array_equal(rows, of(expected, ref)[name][at : at + extent.n])
