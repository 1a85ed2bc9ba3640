"""The main job on real data: import it by the command line, and read every value back, from other processes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorstore
import zarr
from shell import run, spool

import spool as library
from spool.importers import ImportedRun, read_runs
from spool.model.moe import MoEShape

SHAPES = {"A_12L_256E": MoEShape(12, 256, 8), "B_8L_384E": MoEShape(8, 384, 8)}
LONGEST = "routing/A_12L_256E/taubench_airline_a.npz"


@pytest.fixture(scope="module")
def recorded(shared_data, tmp_path_factory):
    """A spool that ``spool import`` made of the routing archives; its URI."""
    uri = f"file://{tmp_path_factory.mktemp('main') / 's'}"
    done = spool("import", shared_data / "routing", uri)
    assert done.text == "8 imported, 0 unchanged, 0 failed, 4 ignored\n"
    return uri


@pytest.fixture(scope="module")
def archives(shared_data):
    """The arrays of each archive by session id."""
    found = {}
    for path in sorted((shared_data / "routing").glob("*/*.npz")):
        with np.load(path) as file:
            found[f"routing/{path.parent.name}/{path.name}"] = {name: file[name] for name in file.files}
    assert len(found) == 8
    return found


def turns(archive):
    """Return start and stop of what the assistant said in each of its turns."""
    said = archive["turn_role"] == "assistant"
    return list(zip(archive["turn_content_start"][said], archive["turn_content_end"][said], strict=True))


def same_bits(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.tobytes() == want.tobytes()


def check_every_value(uri, archives):
    with library.open(uri) as sp:
        assert sorted(row.session_id for row in sp.sessions()) == sorted(archives)
        for session_id, archive in archives.items():
            steps = sp.steps(session_id)
            check_steps(sp, steps, archive)
            (segment,) = sp.final_segments(session_id)
            assert [ref.id for ref in sp.segments(f"session_id = '{session_id}'")] == [segment.id]
            check_segment(sp, segment, archive)
            check_slices(sp, segment, archive)


def check_steps(sp, steps, archive):
    tokens, rows = archive["token_ids"], archive["routed_experts"]
    assert len(steps) == len(turns(archive)) > 0
    for ref, (start, stop) in zip(steps, turns(archive), strict=True):
        sample, stored = sp.read(ref), sp.read(ref, dtype="stored")
        same_bits(sample["token_ids"], tokens[:stop].astype(np.int32))
        same_bits(sample["logprobs"], archive["logprobs"][start:stop])
        same_bits(sample["routed_experts"], rows[: stop - 1].astype(np.int32))
        same_bits(stored["routed_experts"], rows[: stop - 1])
        same_bits(sample["loss_mask"], (np.arange(stop) >= start).astype(np.uint8))


def check_segment(sp, segment, archive):
    """The segment is all that the turns cover; logprobs of observations are 0, whatever was in the archive."""
    first, last = turns(archive)[0][0], turns(archive)[-1][1]
    sample, mask = sp.read(segment), archive["assistant_mask"][:last]
    same_bits(sample["token_ids"], archive["token_ids"][:last].astype(np.int32))
    same_bits(sample["routed_experts"], archive["routed_experts"][: last - 1].astype(np.int32))
    same_bits(sp.read(segment, dtype="stored")["routed_experts"], archive["routed_experts"][: last - 1])
    same_bits(sample["loss_mask"], mask.astype(np.uint8))
    same_bits(sample["logprobs"], np.where(mask, archive["logprobs"][:last], np.float32(0))[first:])
    assert (segment.n_tokens, segment.trainable_tokens) == (last, mask.sum())


def check_slices(sp, segment, archive):
    n, first, rows = segment.n_tokens, segment.response_start, archive["routed_experts"][: segment.n_tokens - 1]
    layers = rows.shape[1]
    for tokens in (slice(0, 1), slice(n - 1, n), slice(first - 3, first + 3), slice(n // 3, n // 3 + 257), slice(5, 5)):
        for part in (slice(0, layers), slice(0, 1), slice(layers // 2, layers), slice(layers - 1, layers)):
            got = sp.read(segment, tokens=tokens, layers=part)
            same_bits(got["routed_experts"], np.ascontiguousarray(rows[tokens, part]).astype(np.int32))
            same_bits(got["token_ids"], archive["token_ids"][tokens].astype(np.int32))
    pieces = [slice(n - 100, n), slice(0, 100)]
    got = sp.read([segment, segment], fields=["routed_experts"], tokens=[pieces, None], dtype="stored")
    same_bits(got[0]["routed_experts"], np.concatenate([rows[n - 100 :], rows[:100]]))
    same_bits(got[1]["routed_experts"], rows)


def test_every_value_is_read_back_as_it_was_and_again_after_a_rebuild(recorded, archives):
    check_every_value(recorded, archives)
    assert spool("rebuild", recorded, "--json").json["n_steps"] == sum(len(turns(a)) for a in archives.values())
    check_every_value(recorded, archives)


def test_a_second_import_changes_nothing(recorded, shared_data):
    assert run("import", shared_data / "routing", recorded).text == "0 imported, 8 unchanged, 0 failed, 4 ignored\n"
    assert run("info", recorded, "--json").json["n_sessions"] == 8


def test_sessions_are_listed(recorded, archives):
    rows = run("ls", recorded, "--json").json
    assert [row["session_id"] for row in rows] == sorted(archives)
    assert {row["session_id"]: row["n_steps"] for row in rows} == {n: len(turns(a)) for n, a in archives.items()}
    for line, row in zip(run("ls", recorded).rows, rows, strict=True):
        assert line["session_id"] == row["session_id"]
        assert (line["outcome"], line["n_tokens"]) == (row["outcome"], str(row["n_tokens"]))
    chosen = run("ls", recorded, "--where", "outcome = 'truncated'", "--segments", "--json").json
    assert [row["id"] for row in chosen] == [f"{name}@lineage/0" for name in archives if "taubench" in name]
    assert len(run("ls", recorded, "--view", "timeline", "--json").json) == sum(
        len(turns(a)) for a in archives.values()
    )


def test_sessions_steps_and_segments_are_shown(recorded, archives):
    (session,) = run("show", recorded, LONGEST, "--json").json
    assert [step["id"] for step in session["steps"]] == [f"{LONGEST}:{n}" for n in range(len(turns(archives[LONGEST])))]
    step, segment = run("show", recorded, f"{LONGEST}:3", f"{LONGEST}@lineage/0", "--json").json
    start, stop = turns(archives[LONGEST])[3]
    assert (step["n_tokens"], step["response_length"], step["parent"]) == (stop, stop - start, 2)
    assert segment["trainable_tokens"] == archives[LONGEST]["assistant_mask"].sum()
    text = run("show", recorded, LONGEST).text
    assert f"session_id\t{LONGEST}\n" in text
    assert f"{LONGEST}:22\t22\t21\t" in text


def test_arrays_are_printed_as_json_npz_and_raw(recorded, archives, tmp_path):
    archive, (start, stop) = archives[LONGEST], turns(archives[LONGEST])[4]
    ref = f"{LONGEST}:4"
    (found,) = run("cat", recorded, ref).json
    assert found["id"] == ref
    assert found["fields"]["token_ids"] == archive["token_ids"][:stop].tolist()
    same_bits(np.array(found["fields"]["logprobs"], np.float32), archive["logprobs"][start:stop])
    assert found["fields"]["routed_experts"] == archive["routed_experts"][: stop - 1].tolist()

    run("cat", recorded, ref, "--stored", "--format", "npz", "-o", tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz", allow_pickle=False) as file:
        same_bits(file["routed_experts"], archive["routed_experts"][: stop - 1])
        same_bits(file["logprobs"], archive["logprobs"][start:stop])
    run("cat", recorded, LONGEST, ref, "--format", "npz", "-o", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz", allow_pickle=False) as file:
        assert file["refs"].tolist() == [f"{LONGEST}@lineage/0", ref]
        same_bits(file["1/logprobs"], archive["logprobs"][start:stop])

    raw = run("cat", recorded, ref, "--field", "routed_experts", "--stored", "--format", "raw", "--tokens", "7:70")
    assert raw.out == archive["routed_experts"][7:70].tobytes()
    raw = run(
        "cat", recorded, ref, "--field", "routed_experts", "--format", "raw", "--layers", "2:5", "--tokens", "-9:"
    )
    assert raw.out == archive["routed_experts"][stop - 9 : stop - 1, 2:5].astype("<i4").tobytes()


def test_totals_are_those_of_the_archives(recorded, archives):
    rows = {row["field"]: row for row in run("du", recorded, "--json").json["fields"]}
    routing = [archive["routed_experts"][: turns(archive)[-1][1] - 1] for archive in archives.values()]
    assert rows["routed_experts"]["stored_bytes"] == sum(array.nbytes for array in routing)
    assert rows["routed_experts"]["sent_bytes"] == sum(array.size * 4 for array in routing)
    assert rows["token_ids"]["rows"] == sum(turns(archive)[-1][1] for archive in archives.values())
    info = run("info", recorded, "--json").json
    assert (info["n_sessions"], info["n_final"], info["n_live"]) == (8, 8, 0)
    assert info["n_generated"] == sum(int(archive["assistant_mask"].sum()) for archive in archives.values())


@pytest.mark.parametrize("options", [(), ("--deep",)])
def test_nothing_is_wrong(recorded, options):
    done = spool("verify", recorded, *options)
    assert done.out == b""
    assert "8 sessions" in done.err
    assert done.err.endswith("nothing wrong\n")
    assert run("verify", recorded, *options, "--json").json["findings"] == []


# -- locate and dd --------------------------------------------------------------------------------------------------


def dd(row):
    place = ["iflag=skip_bytes,count_bytes", "bs=64K", f"skip={row['offset']}", f"count={row['length']}"]
    return subprocess.run(["dd", f"if={row['file']}", *place, "status=none"], capture_output=True, check=True).stdout


def check_dd(uri, session_id, index, archive, *, some=False):
    """What dd takes from the files is, field by field, what was recorded; return the files."""
    ref, (start, stop) = f"{session_id}:{index}", turns(archive)[index]
    part = slice(stop // 3, stop - 2) if some else slice(0, stop)
    options = ["--tokens", f"{part.start}:{part.stop}"] if some else []
    want = {
        "token_ids": archive["token_ids"][part].astype("<i4").tobytes(),
        "routed_experts": archive["routed_experts"][part.start : min(part.stop, stop - 1)].tobytes(),
        "logprobs": archive["logprobs"][max(part.start, start) : part.stop].tobytes(),
    }
    want = {field: data for field, data in want.items() if data}
    rows = run("locate", uri, ref, *options, "--json").json
    got = {}
    for row in rows:
        got[row["field"]] = got.get(row["field"], b"") + dd(row)
    assert got == want
    command = run("locate", uri, ref, *options, "--field", "routed_experts", "--dd").text
    made = subprocess.run(["sh", "-ec", command], capture_output=True, check=True)
    assert made.stdout == want["routed_experts"]
    return {row["file"] for row in rows}


def test_dd_finds_the_bytes_while_they_are_recorded_and_when_they_are_sealed(archives, tmp_path):
    uri = f"file://{tmp_path}/dir with 'quote'"
    names = [name for name in archives if "A_12L" in name]
    with library.open(uri) as sp:
        for name in names:
            archive, s = archives[name], sp.session(name, experts=SHAPES["A_12L_256E"])
            for start, stop in turns(archive):
                s.append(
                    prompt_token_ids=archive["token_ids"][:start],
                    response_token_ids=archive["token_ids"][start:stop],
                    logprobs=archive["logprobs"][start:stop],
                    routed_experts=archive["routed_experts"][: stop - 1],
                )
        files = set()
        for name in names:
            files |= check_dd(uri, name, 3, archives[name])
            files |= check_dd(uri, name, 4, archives[name], some=True)
        # rows lie in shards that still grow, in tails, and across both
        assert any("/tail-" in file for file in files)
        assert any("/routed_experts/c/" in file for file in files)
        sp.flush()
        for name in names:
            assert not any("/tail-" in file for file in check_dd(uri, name, 3, archives[name]))
    check_dd(uri, LONGEST, 22, archives[LONGEST])


# -- without Spool --------------------------------------------------------------------------------------------------


def test_sealed_streams_open_in_zarr_and_tensorstore(recorded, archives):
    with library.open(recorded, readonly=True) as sp:
        for session_id, archive in archives.items():
            (segment,) = sp.final_segments(session_id)
            wanted = {"token_ids": archive["token_ids"], "routed_experts": archive["routed_experts"]}
            for field, array in wanted.items():
                for extent in segment.extents[field]:
                    folder = f"{sp.config.root}/streams/{extent.stream}"
                    rows = slice(extent.row, extent.row + extent.n)
                    want = array[extent.position : extent.position + extent.n]
                    assert np.array_equal(zarr.open_group(folder, mode="r")[field][rows], want)
                    kvstore = {"driver": "file", "path": f"{folder}/{field}"}
                    opened = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result()
                    assert np.array_equal(opened[rows].read().result(), want)


PYARROW_ALONE = """
import glob, json, sys
import pyarrow as pa
tables = [pa.ipc.open_file(path).read_all() for path in glob.glob(sys.argv[1] + "/streams/*/records/*.arrow")]
rows = [row for table in tables for row in table.to_pylist()]
rows = [part for row in rows for part in (row["inner"] or [row])]
assert "spool" not in sys.modules
steps = [row for row in rows if row["kind"] == "step"]
print(json.dumps({
    "kinds": sorted({row["kind"] for row in rows}),
    "steps": [[row["session_id"], row["index"], row["n_prompt"], row["n_tokens"]] for row in steps],
    "extents": sum(extent["n"] for row in steps for extent in row["extents"] if extent["array"] == "token_ids"),
}))
"""


def test_sealed_records_open_with_pyarrow_alone(recorded, archives):
    root = recorded.removeprefix("file://")
    done = subprocess.run([sys.executable, "-I", "-c", PYARROW_ALONE, root], capture_output=True, check=True)
    found = json.loads(done.stdout)
    want = [
        [name, index, int(start), int(stop)]
        for name, archive in archives.items()
        for index, (start, stop) in enumerate(turns(archive))
    ]
    assert sorted(found["steps"]) == sorted(want)
    assert {"open", "step", "final", "note"} <= set(found["kinds"])
    assert found["extents"] >= sum(int(turns(archive)[-1][1]) for archive in archives.values())


# -- trajectories ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversations(shared_data, tmp_path_factory):
    """A spool of the recorded agent runs; one file holds none, and is said to."""
    uri = f"file://{tmp_path_factory.mktemp('main') / 't'}"
    done = spool("import", shared_data / "trajectories", uri)
    assert done.text == "54 imported, 0 unchanged, 0 failed, 1 ignored\n"
    assert "infoss_dfs_prune.json" in done.err
    assert "none of them a run" in done.err
    return uri


def check_conversations(uri, shared_data):
    found = [run for run in read_runs(shared_data / "trajectories") if isinstance(run, ImportedRun)]
    with library.open(uri, readonly=True) as sp:
        for run_ in found:
            steps = {step.step_id: step for step in sp.steps(run_.session_id)}
            assert list(steps) == [step.step_id for step in run_.steps]
            for step in run_.steps:
                assert sp.messages(steps[step.step_id]) == list(step.messages or [])
                assert sp.tools(steps[step.step_id]) == list(step.tools or [])
        tau = json.loads((shared_data / "trajectories/tau-bench/airline-tasks-0-7.json").read_text())
        for number, record in enumerate(tau):
            session_id = f"trajectories/tau-bench/airline-tasks-0-7.json#{number}"
            assert sp.messages(sp.steps(session_id)[-1]) == record["traj"]
            assert sp.find_session(session_id).reward == record["reward"]


def test_counts_and_messages_of_every_form(conversations, shared_data):
    by_form = {}
    for row in run("ls", conversations, "--json").json:
        by_form[row["source"]] = by_form.get(row["source"], 0) + 1
    assert by_form == {"atif": 9, "nebius": 5, "openhands": 4, "swe-agent": 4, "tau-bench": 32}
    check_conversations(conversations, shared_data)
    assert spool("rebuild", conversations, "--json").json["n_sessions"] == 54
    check_conversations(conversations, shared_data)
    assert run("verify", conversations, "--deep").err.endswith("nothing wrong\n")


def test_tokens_of_atif_are_those_of_the_file(conversations, shared_data):
    name = "trajectories/harbor-atif/tests/golden/terminus_2/hello-world-timeout.trajectory.json"
    record = json.loads((shared_data / name).read_text())
    metrics = [step["metrics"] for step in record["steps"] if step["source"] == "agent"]
    found = run("cat", conversations, *(f"{name}:{n}" for n in range(len(metrics)))).json
    for step, sample in zip(metrics, found, strict=True):
        assert sample["fields"]["token_ids"] == step["prompt_token_ids"] + step["completion_token_ids"]
        want = np.array(step["logprobs"], np.float32)
        same_bits(np.array(sample["fields"]["logprobs"], np.float32), want)


def test_messages_are_shown_as_json_and_as_text(conversations, shared_data):
    ref = "trajectories/tau-bench/airline-tasks-0-7.json#3"
    record = json.loads((shared_data / "trajectories/tau-bench/airline-tasks-0-7.json").read_text())[3]
    (session,) = run("show", conversations, ref, "--messages", "--json").json
    said = []
    for step in session["messages"]:
        said[step["n_inherited"] :] = step["messages"]
    assert said == record["traj"]
    text = run("show", conversations, ref, "--messages").text
    for message in record["traj"]:
        for line in (message["content"] or "").splitlines():
            assert line.strip() in text
        for call in message.get("tool_calls") or ():
            assert call["function"]["name"] in text
