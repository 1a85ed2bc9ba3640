"""Exports: Parquet that pyarrow alone reads, and spools that need no other; from every tier, whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
from kit import SHAPE, add, counting, routing
from tiers import assert_same, record

import spool
from spool.errors import NotFoundError
from spool.export import parquet
from spool.importers import import_runs

FIELDS = (
    spool.FieldSpec(name="value", dtype="bfloat16", align="response"),
    spool.FieldSpec(name="kept", dtype="int32", align="token", ragged=True),
    spool.FieldSpec(name="flag", dtype="bool", align="token"),
    spool.FieldSpec(name="half", dtype="float16", align="step", shape=(2,)),
    spool.FieldSpec(name="source", dtype="int64", align="token"),
)
SIGNALLING = np.array([0x7F81, 0xFF81, 0x7FC0, 0x8000, 0x3F80], np.uint16).view(ml_dtypes.bfloat16)


def rich(sp):
    """Record branches, retries, gaps, late arrays, own fields, tools, empty sessions; return their segments."""
    s = sp.session("rich", experts=SHAPE, fields=FIELDS, group_id="g", sample_index=2, metadata={"task": "t"}, trim=1)
    a, b = counting(300), counting(5, 5000)
    own = {"value": SIGNALLING, "kept": [[i] * (i % 3) for i in range(305)], "flag": [i % 2 for i in range(305)],
           "half": np.array([0.5, -0.0], np.float16), "source": np.arange(305)}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "bash"}}]
    add(s, a, b, fields=own, messages=[{"role": "user", "content": "hi"}], tools=tools, step_id="first",
        weight_version="1", loss_mask=[1, 0, 1, 1, 1])  # fmt: skip
    add(s, [*a, *b, 7], [8, 9], messages=[{"role": "user", "content": "hi"}, {"role": "tool", "content": "x"}],
        tools=tools, weight_version="2", finish_reason="stop")  # fmt: skip
    add(s, [*a, *b, 70], [80])
    s.discard(add(s, [1, 2], [3]))
    add(s, [*a[:280], 1], [2, 3])
    with s.transaction():
        add(s, [*a, *b, 70, 80, 90], [91])
    segments = s.finalize(outcome="truncated")
    sp.annotate("rich", reward=0.25, note="n")
    sp.annotate("rich", segment=segments[1], judge=[1, None])
    sp.attach(segments[0], teacher=np.arange(segments[0].n_tokens, dtype=np.float64))
    gap = sp.session("gap", experts=SHAPE)
    gap.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4], logprobs=[-1.0])
    gap.append(prompt_token_ids=[1, 2, 3, 4, 5], response_token_ids=[6], routed_experts=routing([1, 2, 3, 4, 5, 6])[4:],
               routed_experts_start=4)  # fmt: skip
    gap.finalize(gaps="keep")
    last = sp.session("last", experts=SHAPE, prefer="last")
    add(last, [1, 2, 3], [4])
    add(last, [1, 2, 3, 4, 5], [6], routed_experts=routing([1, 2, 3, 4, 5, 6], 1))
    last.finalize("timeline")
    empty = sp.session("empty")
    empty.append(prompt_token_ids=[], response_token_ids=[])
    empty.finalize(outcome="aborted")
    sp.session("none").finalize()
    return list(sp.segments())


def gaps_of(sp, ref, name):
    try:
        sp.read(ref, fields=[name])
    except spool.GapError as error:
        return error.details["rows"]


def contents(sp):
    """Return everything that the segments of a spool say, but for where it is."""
    found = {}
    for ref in sp.segments():
        sample = sp.read(ref, missing=0, dtype="stored")
        arrays = {
            name: (getattr(value, "values", value).tobytes(), str(getattr(value, "offsets", "")))
            for name, value in sample.items()
        }
        gaps = {name: gap for name in sample if (gap := gaps_of(sp, ref, name))}
        said = json.loads(ref.to_json())
        bare = {name: value for name, value in said.items() if name not in ("spool_id", "roots", "extents")}
        runs = {
            array: [(run.n, run.position, run.crc, run.before, run.after) for run in extents]
            for array, extents in ref.extents.items()
        }
        texts = (sp.messages(ref), sp.tools(ref)) if ref.steps else ()
        found[ref.id] = arrays, gaps, bare, runs, texts
    rows = list(sp.sessions())
    steps = {row.session_id: [(s.step_id, s.index, s.parent) for s in sp.steps(row.session_id)] for row in rows}
    return found, {row.session_id: row for row in rows}, steps


def cells(table, name):
    return table[name].to_pylist()


def test_parquet_has_a_row_for_each_segment_and_what_was_never_sent_is_null(sp, tmp_path):
    segments = rich(sp)
    made = sp.export(None, tmp_path / "out")
    assert (made.n_segments, made.n_sessions, made.format) == (
        len(segments),
        len({s.session_id for s in segments}),
        "parquet",
    )
    table = pq.read_table(tmp_path / "out")
    assert cells(table, "id") == [ref.id for ref in segments]
    assert cells(table, "reward") == [ref.reward for ref in segments]
    for row, ref in enumerate(segments):
        sample = sp.read(ref, missing=0, dtype="stored")
        got = {name: table[name][row] for name in table.schema.names}
        for name in (
            "group_id",
            "sample_index",
            "outcome",
            "n_tokens",
            "response_length",
            "trainable_tokens",
            "finish_reason",
        ):
            assert got[name].as_py() == getattr(ref, name), name
        assert json.loads(got["facts"].as_py()) == ref.facts
        assert json.loads(got["messages"].as_py()) == (sp.messages(ref) if ref.steps else [])
        assert json.loads(got["metadata"].as_py()) == sp.find_session(ref.session_id).metadata
        for name in ("token_ids", "logprobs", "loss_mask", "teacher"):
            want = sample.get(name)
            if (name, ref.session_id) != ("logprobs", "gap"):
                assert got[name].as_py() == (None if want is None else want.tolist()), name
        if "source" in sample:  # sent with the first step only, the whole or a part of which is in the segment
            n = sum(extent.n for extent in ref.extents["source"])
            assert n in (256, 305)
            assert got["flag"].as_py() == [i % 2 == 1 for i in range(n)] + [None] * (ref.n_tokens - n)
            assert got["source_field"].as_py() == [*range(n)] + [None] * (ref.n_tokens - n)
    gap = table["routed_experts"][cells(table, "id").index("gap@lineage/0")].as_py()
    assert gap[:4] == [None] * 4 and gap[4:] == routing([1, 2, 3, 4, 5, 6])[4:].tolist()
    assert cells(table, "logprobs")[cells(table, "id").index("gap@lineage/0")] == [-1.0, 0.0, None]
    first = cells(table, "id").index("rich@lineage/0")
    bits = np.array(table["value"][first].values.slice(0, 5).to_numpy(zero_copy_only=False), np.float32).view(np.uint32)
    assert (bits >> 16 == SIGNALLING.view(np.uint16)).all() and not (bits & 0xFFFF).any()
    kept = table["kept"][first].as_py()
    assert kept[:305] == [[i] * (i % 3) for i in range(305)] and set(map(str, kept[305:])) == {"None"}
    assert str(table.schema.field("routed_experts").type).count("fixed_size_list") == 2
    assert table.schema.field("half").type.value_type.list_size == 2


def test_parquet_is_read_without_spool(sp, tmp_path):
    segments = record(sp, "a")
    sp.export(segments, str(tmp_path / "out"), dtype="train")
    code = (
        "import sys, pickle, pyarrow.dataset as ds, numpy as np\n"
        f"table = ds.dataset({str(tmp_path / 'out')!r}).to_table()\n"
        "kind = table.schema.field('routed_experts').type.value_type.value_type.value_type\n"
        "rows = np.array(table['routed_experts'][0].as_py(), kind.to_pandas_dtype())\n"
        "assert 'spool' not in sys.modules\n"
        "sys.stdout.buffer.write(pickle.dumps(rows))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    rows, want = pickle.loads(done.stdout), sp.read(segments[0])["routed_experts"]
    assert rows.dtype == want.dtype == np.int32
    assert (rows == want).all()


def test_row_groups_and_files_are_bounded(sp, tmp_path, monkeypatch):
    segments = [ref for number in range(6) for ref in record(sp, f"u{number}")]
    monkeypatch.setattr(parquet, "GROUP_BYTES", 16_000)
    monkeypatch.setattr(parquet, "FILE_BYTES", 30_000)
    told = []
    made = sp.export(segments, tmp_path / "out", progress=lambda done, total: told.append((done, total)))
    files = sorted(os.listdir(tmp_path / "out"))
    assert files[0] == "part-00000.parquet" and len(files) > 1
    groups = [pq.ParquetFile(tmp_path / "out" / name).metadata.row_group(0).num_rows for name in files]
    assert set(groups) == {2}
    assert cells(pq.read_table(tmp_path / "out"), "session_id") == [f"u{number}" for number in range(6)]
    assert told == sorted(told) and told[-1] == (made.n_bytes, made.n_bytes)


def test_nothing_at_all_is_a_table_without_rows(sp, tmp_path):
    assert sp.export("n_tokens > 5", tmp_path / "out").n_segments == 0
    assert pq.read_table(tmp_path / "out").num_rows == 0


def test_shapes_that_no_column_holds_are_refused(sp, tmp_path):
    add(sp.session("a", experts=SHAPE), [1, 2], [3])
    record(sp, "b")
    sp.session("a").finalize()
    with pytest.raises(spool.InputError, match="routed_experts"):
        sp.export(None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert sp.export("session_id = 'a'", tmp_path / "out").n_segments == 1


def test_a_spool_has_everything_bit_for_bit_and_needs_no_other(sp, tmp_path):
    rich(sp)
    want = contents(sp)
    sp.release(list(sp.segments())[:1])
    made = sp.export(None, tmp_path / "out", "spool")
    assert made.n_segments == len(want[0])
    sp.close()
    shutil.rmtree(tmp_path / "spool")
    with spool.open(str(tmp_path / "out"), create=False) as copy:
        got = contents(copy)
        assert got[0] == want[0]
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            assert mine == {name: facts for name, facts in theirs.items() if name != "none"}  # it has no segment
        assert copy.spool_id != sp.spool_id
        assert {ref.spool_id for ref in copy.segments()} == {copy.spool_id}
        assert {ref.roots for ref in copy.segments()} == {(f"file://{tmp_path}/out",)}
        assert copy.verify(deep=True).findings == ()
        assert list(copy.segments("released = true")) == []
        assert copy.sessions("note = 'n'")
        before = copy._catalog.dump()
        copy.rebuild()
        assert copy._catalog.dump() == before
        s = copy.session("rich2", experts=SHAPE)
        add(s, [1, 2], [3])
    with spool.open(str(tmp_path / "out"), readonly=True) as again:
        assert len(list(again.sessions())) == len(want[1])


def test_of_chosen_segments_the_whole_sessions_are_in_a_spool(sp, tmp_path):
    segments = rich(sp)
    sp.export(segments[0], tmp_path / "out", "spool")
    with spool.open(str(tmp_path / "out")) as copy:
        assert [row.session_id for row in copy.sessions()] == ["rich"]
        assert len(copy.steps("rich")) == len(sp.steps("rich"))


@pytest.mark.parametrize("dry_run", [False, True])
def test_sessions_that_are_not_there_are_not_copied(tmp_path, dry_run):
    with spool.open(f"file://{tmp_path}/hot?retention=released&grace_s=0.01") as sp:
        collected, withdrawn = record(sp, "collected", n_prompt=11), record(sp, "withdrawn", n_prompt=7)
        sp.discard("withdrawn")
        sp.release(collected)
        sp.flush()
        sp.gc()
        for refs in (collected, withdrawn):
            with pytest.raises(NotFoundError, match=refs[0].session_id):
                sp.export(refs, tmp_path / "out", "spool", dry_run=dry_run)
    assert not (tmp_path / "out").exists()


def test_exports_come_from_hot_cold_and_both(cold, tmp_path):
    from spool.spiller.evict import evict

    with spool.open(f"file://{tmp_path}/hot?spill={cold}") as sp:
        segments = rich(sp)
        sp.publish([ref for ref in segments if ref.extents], timeout_s=120)
        for row in list(sp._catalog.packs.rows("spilled")):
            evict(str(tmp_path / "hot"), sp._catalog, row.stream, row.pack)
        fresh = record(sp, "fresh", n_prompt=11)
        want = contents(sp)
        picked = [ref for ref in segments if ref.session_id in ("rich", "gap")]
        sp.export([*picked, *fresh], tmp_path / "mixed", "spool")
        sp.export(picked, tmp_path / "evicted")
    with spool.open(str(tmp_path / "mixed")) as copy:
        got = contents(copy)
        assert got[0] == {
            name: facts for name, facts in want[0].items() if name.split("@")[0] in ("rich", "gap", "fresh")
        }
    with spool.open(cold) as there:
        there.export(picked, tmp_path / "cold-table")
        there.export("session_id = 'rich'", tmp_path / "cold-copy", "spool")
    one, other = (pq.read_table(tmp_path / name) for name in ("cold-table", "evicted"))
    assert [name for name in one.schema.names if not one[name].equals(other[name])] == ["value"]  # it has NaN
    assert str(one["value"]) == str(other["value"])
    with spool.open(str(tmp_path / "cold-copy")) as copy:
        got = contents(copy)
        assert got[0] == {name: facts for name, facts in want[0].items() if name.startswith("rich@")}


def test_real_routing(sp, tmp_path, shared_data):
    import_runs(shared_data / "routing", sp)
    segments = list(sp.segments())
    assert sum(ref.n_tokens for ref in segments) > 1000
    want = sp.read(segments, dtype="stored", missing=0)
    by_model = {}
    for ref in segments:
        by_model.setdefault(sp.read(ref, fields=["routed_experts"], missing=0)["routed_experts"].shape[1:], []).append(
            ref
        )
    for number, refs in enumerate(by_model.values()):
        sp.export(refs, tmp_path / f"table-{number}")
        table = pq.read_table(tmp_path / f"table-{number}", columns=["id", "routed_experts"])
        for row, ref in enumerate(refs):
            rows = sp.read(ref, fields=["routed_experts"], dtype="stored", missing=0)["routed_experts"]
            cell = table["routed_experts"][row].values
            flat = cell.flatten().flatten().to_numpy()
            assert flat.dtype.itemsize >= rows.dtype.itemsize
            assert (flat.reshape(rows.shape) == rows).all()
    sp.export(None, tmp_path / "copy", "spool")
    with spool.open(str(tmp_path / "copy")) as copy:
        assert_same(copy.read(list(copy.segments()), dtype="stored", missing=0), want)


# -- whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["parquet", "spool"])
def test_nothing_is_overwritten(sp, tmp_path, form):
    record(sp, "a")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    os.symlink("nowhere", tmp_path / "link")
    for name in ("file", "folder", "link", "spool"):
        with pytest.raises(spool.InputError, match="overwrites nothing"):
            sp.export(None, tmp_path / name, form)
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link", "spool"]


@pytest.mark.parametrize("form", ["parquet", "spool"])
def test_an_export_that_fails_leaves_nothing(sp, tmp_path, form):
    segments = record(sp, "a") + record(sp, "b")
    sp.flush()
    stream = sp._feeder.stream_names()[0]
    path = tmp_path / "spool" / "streams" / stream / "token_ids" / "c" / "0"
    data = bytearray(path.read_bytes())
    data[900] ^= 1
    path.write_bytes(data)
    with pytest.raises(spool.IntegrityError):
        sp.export(segments, tmp_path / "out", form)
    assert os.listdir(tmp_path) == ["spool"]


@pytest.mark.parametrize("form", ["parquet", "spool"])
def test_a_killed_export_leaves_nothing_under_its_name_and_the_next_one_cleans_up(sp, tmp_path, form):
    record(sp, "a")
    sp.flush()
    code = (
        "import os, spool\n"
        f"sp = spool.open({str(tmp_path / 'spool')!r}, readonly=True)\n"
        f"sp.export(None, {str(tmp_path / 'out')!r}, {form!r}, progress=lambda *_: os._exit(9))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert not (tmp_path / "out").exists()
    assert len(os.listdir(tmp_path)) == 2
    sp.export(None, tmp_path / "out", form)
    assert sorted(os.listdir(tmp_path)) == ["out", "spool"]


def test_exports_side_by_side_leave_each_other_alone(sp, tmp_path):
    record(sp, "a")
    inside = []

    def another(done, total):
        if not inside:
            inside.append(True)
            sp.export(None, tmp_path / "out")

    with pytest.raises(spool.InputError, match="overwrites nothing"):
        sp.export(None, tmp_path / "out", progress=another)
    assert pq.read_table(tmp_path / "out").num_rows == 1
    assert sorted(os.listdir(tmp_path)) == ["out", "spool"]


def test_references_of_another_spool_are_refused(sp, tmp_path):
    with spool.open(str(tmp_path / "other")) as other:
        refs = record(other, "a")
    with pytest.raises(spool.InputError, match="export it there"):
        sp.export(refs, tmp_path / "out")
