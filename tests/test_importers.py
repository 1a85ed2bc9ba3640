"""Recorded runs of other tools become sessions: every form, its traps, bad inputs, and importing twice."""

import json
import logging
import os
import random

import numpy as np
import pytest

from spool.errors import InputError, NotFoundError, StepConflictError
from spool.importers import (
    FORMS,
    Failure,
    Ignored,
    ImportedRun,
    ImportedStep,
    import_runs,
    ordered_steps,
    read_runs,
)
from spool.importers.outcomes import outcome_of
from spool.importers.routing import moe_shape
from spool.model.moe import MoEShape

GOLDEN = "trajectories/harbor-atif/tests/golden"
NEBIUS = "trajectories/nebius-swe-agent/datasets/nebius_SWE-agent-trajectories/sample_raw.json"
TAU = "trajectories/tau-bench/airline-tasks-0-7.json"
EVENTS = "trajectories/openhands/tests/runtime/trajs"
RESOLVER = "trajectories/openhands/tests/unit/resolver/mock_output/output.jsonl"


def runs(path, **options):
    found = list(read_runs(path, **options))
    assert all(isinstance(item, ImportedRun) for item in found), found
    return found


def one(path, **options):
    (run,) = runs(path, **options)
    return run


def written(tmp_path, name, content):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def chat(*contents, **more):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **more}


def same(got, want):
    """Compare JSON values, types included: 1, 1.0 and True differ."""
    assert json.dumps(got, sort_keys=True) == json.dumps(want, sort_keys=True)


# -- the whole folder -----------------------------------------------------------------------------------------------


def test_every_real_file_is_read_ignored_or_refused(shared_data):
    found = list(read_runs(shared_data))
    by_form = {}
    for item in found:
        if isinstance(item, ImportedRun):
            by_form[item.source] = by_form.get(item.source, 0) + 1
    assert by_form == {"routing": 8, "atif": 9, "nebius": 5, "openhands": 4, "swe-agent": 4, "tau-bench": 32}
    ids = [item.session_id for item in found if isinstance(item, ImportedRun)]
    assert len(set(ids)) == len(ids)
    assert "data/trajectories/tau-bench/airline-tasks-0-7.json#3" in ids
    ignored = {os.path.basename(item.where) for item in found if isinstance(item, Ignored)}
    assert ignored == {
        "README.md", "A_12L_256E.config.json", "B_8L_384E.config.json", "tokenizer.json", "infoss_dfs_prune.json",
    }  # fmt: skip
    assert not [item for item in found if isinstance(item, Failure)]


def test_ids_do_not_depend_on_where_the_import_starts(shared_data, monkeypatch):
    folder = shared_data / "routing" / "A_12L_256E"
    whole = [run.session_id for run in runs(folder)]
    monkeypatch.chdir(folder)
    assert one("taubench_airline_a.npz").session_id == "A_12L_256E/taubench_airline_a.npz"
    assert "A_12L_256E/taubench_airline_a.npz" in whole
    assert [run.session_id for run in runs(".")] == whole


# -- routing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["A_12L_256E", "B_8L_384E"])
def test_routing_steps_tile_the_recorded_rows(shared_data, folder):
    for path in sorted((shared_data / "routing" / folder).iterdir()):
        run, file = one(path), np.load(path)
        said = file["turn_role"] == "assistant"
        assert len(run.steps) == said.sum() > 0
        known = 0
        for step, start, stop in zip(
            run.steps, file["turn_content_start"][said], file["turn_content_end"][said], strict=True
        ):
            assert np.array_equal(step.prompt_token_ids, file["token_ids"][:start])
            assert np.array_equal(step.response_token_ids, file["token_ids"][start:stop])
            assert np.array_equal(step.logprobs, file["logprobs"][start:stop])
            assert step.routed_experts.dtype == file["routed_experts"].dtype
            assert step.routed_experts_start == max(known - 1, 0)
            known = stop
        rows = np.concatenate([step.routed_experts for step in run.steps])
        assert np.array_equal(rows, file["routed_experts"][: known - 1])
        assert run.metadata["n_tokens_dropped"] == run.n_tokens_dropped == len(file["token_ids"]) - known
        assert run.metadata["experts_from"] == f"{folder}.config.json"
        assert run.facts["recorded_from"] == str(file["source"])
    assert run.experts == {"A_12L_256E": MoEShape(12, 256, 8), "B_8L_384E": MoEShape(8, 384, 8)}[folder]


def npz(tmp_path, name="x.npz", drop=(), **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "token_ids": np.arange(12, dtype=np.int32),
        "routed_experts": rng.integers(0, 6, (11, 2, 2), dtype=np.uint8),
        "logprobs": -np.arange(12, dtype=np.float32),
        "turn_role": np.array(["user", "assistant", "user", "assistant"]),
        "turn_content_start": np.array([1, 4, 7, 10]),
        "turn_content_end": np.array([3, 6, 9, 11]),
        "turn_end": np.array([3, 6, 9, 12]),
        "assistant_mask": np.isin(np.arange(12), [4, 5, 10]),
        **changes,
    }
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **{key: value for key, value in arrays.items() if key not in drop})
    return path


def test_routing_without_a_config_says_what_it_assumed(tmp_path, caplog):
    path = npz(tmp_path)
    with caplog.at_level(logging.WARNING):
        run = one(path)
    largest = int(np.load(path)["routed_experts"].max())
    assert run.experts == MoEShape(2, largest + 1, 2)
    assert run.metadata["experts_from"] == "largest id" and "largest id" in caplog.text
    assert one(npz(tmp_path, "M_2L_64E/x.npz")).experts == MoEShape(2, 64, 2)
    with pytest.raises(InputError, match="folder name says 3 x 2"):
        one(npz(tmp_path, "M_3L_64E/x.npz"))


def test_routing_of_a_clipped_conversation(tmp_path):
    assert one(npz(tmp_path)).outcome == "completed"
    cut = npz(tmp_path, turn_end=np.array([3, 6, 9, 11]))
    assert one(cut).outcome == "truncated"
    empty = npz(tmp_path, turn_content_end=np.array([3, 6, 9, 10]), drop=("assistant_mask",))
    assert [len(step.response_token_ids) for step in one(empty).steps] == [2, 0]
    silent = npz(tmp_path, turn_role=np.array(["user"] * 4), drop=("assistant_mask", "logprobs"))
    assert one(silent).steps == () and one(silent).metadata["n_tokens_dropped"] == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.zeros(11, np.float32)}, r"logprobs has shape \(11,\)"),
        ({"routed_experts": np.zeros((9, 2, 2), np.uint8)}, r"expected \[11, layers, topk\]"),
        ({"routed_experts": np.zeros((11, 4), np.uint8)}, "routed_experts has shape"),
        ({"token_ids": np.zeros((12, 1), np.int32)}, "token_ids has shape"),
        ({"turn_content_start": np.array([1, 4, 7])}, "turn_content_start has shape"),
        ({"turn_content_end": np.array([3, 6, 9, 13])}, "do not ascend"),
        ({"turn_content_start": np.array([1, 7, 7, 10])}, "do not ascend"),
        ({"assistant_mask": np.zeros(12, bool)}, "disagree at token 4"),
        ({"token_ids": np.array([None] * 12)}, "damaged"),
    ],
)
def test_routing_whose_parts_do_not_fit_is_refused(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        one(npz(tmp_path, **change))


def test_other_and_damaged_npz_files(tmp_path):
    np.savez(tmp_path / "weights.npz", w=np.zeros(3))
    npz(tmp_path, "half.npz", drop=("turn_role",))
    whole = npz(tmp_path, "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    found = {os.path.basename(item.where): item for item in read_runs(tmp_path)}
    assert isinstance(found["weights.npz"], Ignored)
    assert "routed_experts" in str(found["half.npz"].error)
    assert "damaged" in str(found["cut.npz"].error)


def test_moe_shapes_of_public_configs():
    base = {"num_hidden_layers": 4, "num_experts_per_tok": 2}
    assert moe_shape({**base, "n_routed_experts": 8, "first_k_dense_replace": 1}, "c") == MoEShape(4, 8, 2, (1, 2, 3))
    nested = {"text_config": {**base, "num_experts": 8, "decoder_sparse_step": 2}}
    assert moe_shape(nested, "c") == MoEShape(4, 8, 2, (1, 3))
    with pytest.raises(InputError, match="num_hidden_layers"):
        moe_shape({"hidden_size": 8}, "c")


# -- ATIF -----------------------------------------------------------------------------------------------------------


def test_atif_tokens_and_messages(shared_data):
    path = shared_data / GOLDEN / "terminus_2" / "hello-world-context-summarization.trajectory.json"
    run, record = one(path), json.loads(path.read_text())
    agent = [step for step in record["steps"] if step["source"] == "agent"]
    assert len(run.steps) == len(agent) == 7
    for step, recorded in zip(run.steps, agent, strict=True):
        metrics = recorded["metrics"]
        assert list(step.prompt_token_ids) == metrics["prompt_token_ids"]
        assert list(step.response_token_ids) == metrics["completion_token_ids"]
        assert list(step.logprobs) == metrics["logprobs"]
        assert step.parent is None
        assert step.metadata["step_id"] == recorded["step_id"]
        assert step.metadata["metrics"]["cost_usd"] == metrics["cost_usd"]
        assert "logprobs" not in step.metadata["metrics"]
    messages = run.steps[1].messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {
        "name": "bash_command", "arguments": {"keystrokes": "mkdir test_dir\n", "duration": 0.1},
    }  # fmt: skip
    refs = record["steps"][4]["observation"]["results"][0]["subagent_trajectory_ref"]
    assert [ref["session_id"] for ref in run.facts["subagents"]] == [ref["session_id"] for ref in refs]
    assert run.facts["original_session_id"] == "NORMALIZED_SESSION_ID"
    assert refs in [message.get("subagent_trajectory_ref") for message in run.steps[-1].messages]


def test_atif_without_tokens_names_parents(shared_data):
    run = one(shared_data / GOLDEN / "terminus_2" / "hello-world-invalid-json.trajectory.json")
    assert [step.parent for step in run.steps] == [None, "0", "1", "2"]
    assert all(step.prompt_token_ids is None for step in run.steps)
    for earlier, later in zip(run.steps, run.steps[1:], strict=False):
        assert later.messages[: len(earlier.messages)] == earlier.messages
    assert run.steps[0].messages[-1]["reasoning_content"]
    tools = one(shared_data / GOLDEN / "openhands" / "hello-world.trajectory.json").steps[0].tools
    assert len(tools) == 6 and tools[0]["function"]["name"] == "execute_bash"


def test_atif_continuations_and_copied_context(shared_data):
    folder = shared_data / GOLDEN / "terminus_2"
    name = "hello-world-context-summarization-linear-history.trajectory"
    first, second = one(folder / f"{name}.json"), one(folder / f"{name}.cont-1.json")
    assert (first.outcome, first.facts["continued_in"]) == ("truncated", "trajectory.cont-1.json")
    assert (second.outcome, second.facts["continuation_index"]) == ("completed", 1)
    assert len(second.steps) == 4, "the copied agent step belongs to the first trajectory"
    assert second.steps[0].messages[2]["is_copied_context"] is True
    answers = one(folder / "hello-world-context-summarization.trajectory.summarization-1-answers.json")
    assert len(answers.steps) == 1 and answers.facts["parent_session_id"] == "NORMALIZED_SESSION_ID"


def atif(*steps, **more):
    return {"schema_version": "ATIF-v1.5", "session_id": "s", "agent": {"name": "a"}, "steps": list(steps), **more}


def test_atif_steps_are_read_by_id_and_arguments_stay_as_they_are(tmp_path):
    calls = [
        {"tool_call_id": 7, "function_name": "f", "arguments": {"x": None, "n": 10**30}},
        {"tool_call_id": None, "function_name": "f", "arguments": '{"x": 1}'},
        {"function_name": "f", "arguments": "text"},
    ]
    steps = [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "hi"}]},
        {"step_id": 2, "source": "agent", "message": None, "tool_calls": calls,
         "observation": {"results": [{"source_call_id": 7, "content": ""}, {"content": None}]}},
        {"step_id": 3, "source": "agent", "message": "done"},
    ]  # fmt: skip
    forwards = one(written(tmp_path, "a/run.json", atif(*steps)))
    shuffled = one(written(tmp_path, "a/run.json", atif(*reversed(steps))))
    for run in (forwards, shuffled):
        messages = run.steps[-1].messages
        same(
            [message.get("content") for message in messages], [[{"type": "text", "text": "hi"}], None, "", None, "done"]
        )
        same([call["function"]["arguments"] for call in messages[1]["tool_calls"]], [c["arguments"] for c in calls])
        same([call["id"] for call in messages[1]["tool_calls"]], [7, None, None])
        assert messages[2]["tool_call_id"] == 7 and "tool_call_id" not in messages[3]
    with pytest.raises(InputError, match=r"step ids twice: \[2\]"):
        one(written(tmp_path, "b.json", atif(*steps, steps[1])))
    with pytest.raises(InputError, match="source is missing"):
        one(written(tmp_path, "b.json", atif({"step_id": 1, "message": "x"})))
    with pytest.raises(InputError, match="steps is missing"):
        one(written(tmp_path, "b.json", {"schema_version": "ATIF-v1.5"}))


# -- conversations --------------------------------------------------------------------------------------------------


def test_tau_bench_runs(shared_data):
    found = runs(shared_data / TAU)
    records = json.loads((shared_data / TAU).read_text())
    for run, record in zip(found, records, strict=True):
        assert (run.group_id, run.sample_index, run.reward) == (
            str(record["task_id"]),
            record["trial"],
            record["reward"],
        )
        said = [i for i, message in enumerate(record["traj"]) if message["role"] == "assistant"]
        assert len(run.steps) == len(said)
        for step, index in zip(run.steps[:-1], said, strict=False):
            same(step.messages, record["traj"][: index + 1])
        same(run.steps[-1].messages, record["traj"])
        same(run.metadata["info"], record["info"])
        assert run.outcome == "completed"
    assert len({run.session_id for run in found}) == 32
    assert {run.group_id for run in found} == {str(task) for task in range(8)}


def test_the_same_runs_as_lines(tmp_path, shared_data):
    records = json.loads((shared_data / TAU).read_text())[:5]
    text = "\n".join(json.dumps(record) for record in records[:3]) + "\n\n" + json.dumps(records[3])
    lines = runs(written(tmp_path, "runs.jsonl", text))
    assert [run.session_id for run in lines] == [f"{tmp_path.name}/runs.jsonl#{i}" for i in range(4)]
    same([run.steps[-1].messages for run in lines], [record["traj"] for record in records[:4]])
    assert [run.session_id for run in runs(written(tmp_path, "one.jsonl", json.dumps(records[0])))] == [
        f"{tmp_path.name}/one.jsonl#0"
    ]
    by_content = runs(written(tmp_path, "lines.json", text))
    assert [run.session_id[-1] for run in by_content] == ["0", "1", "2", "3"]
    assert runs(written(tmp_path, "empty.jsonl", "")) == []


def test_a_tau_bench_run_that_raised_is_failed(tmp_path):
    run = one(
        written(tmp_path, "r.json", {"task_id": 3, "reward": 0.0, "info": {"error": "boom"}, "traj": [], "trial": 0})
    )
    assert (run.outcome, run.facts["error"], run.steps) == ("failed", "boom", ())


def test_openai_messages(tmp_path):
    record = chat("a", None, "", "b", tools=[{"type": "function"}], reward=1, exit_status="max_turns", session_id="x")
    run = one(written(tmp_path, "r.json", record))
    assert (run.source, run.reward, run.outcome, len(run.steps)) == ("chat", 1.0, "truncated", 2)
    assert run.facts == {"exit_status": "max_turns", "original_session_id": "x"}
    assert run.steps[0].tools == [{"type": "function"}]
    same(run.steps[1].messages, record["messages"])
    bare = one(written(tmp_path, "bare.json", record["messages"]))
    same(bare.steps[1].messages, record["messages"])
    assert bare.outcome == "completed"


def test_a_conversation_without_the_model_is_kept_in_one_step(tmp_path):
    run = one(written(tmp_path, "r.json", chat("only the user")))
    same([step.messages for step in run.steps], [[{"role": "user", "content": "only the user"}]])
    assert one(written(tmp_path, "e.json", {"messages": []})).steps == ()


def test_lone_surrogates_survive_escaped_and_raw(tmp_path):
    record = {"messages": [{"role": "assistant", "content": "\ud800", "tool_calls": [{"\udfff": "a\udc80b"}]}]}
    escaped = one(written(tmp_path, "e.json", json.dumps(record)))
    raw = one(written(tmp_path, "r.json", json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass")))
    for run in (escaped, raw):
        assert run.steps[0].messages == record["messages"]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": "hello"},
        {"messages": None},
        {"messages": ["hello"]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": 1, "content": "x"}]},
        {"traj": {}},
        {"trajectory": [{"role": "robot", "text": "x"}]},
        {"trajectory": [{"role": "ai", "text": "x"}, "x"]},
        {"trajectory": [{"action": "ls"}], "history": [3]},
        [{"id": 1, "action": "run", "source": "agent", "tool_call_metadata": {"model_response": {"choices": 3}}}],
        [{"id": 1, "action": "run", "source": "agent", "tool_call_metadata": "x"}],
    ],
)
def test_malformed_runs_are_input_errors_that_say_where(tmp_path, record):
    with pytest.raises(InputError, match=r"bad\.json"):
        one(written(tmp_path, "bad.json", record))


# -- Nebius, SWE-agent ----------------------------------------------------------------------------------------------


def test_nebius_runs(shared_data):
    records = json.loads((shared_data / NEBIUS).read_text())
    for run, record in zip(runs(shared_data / NEBIUS), records, strict=True):
        turns, messages = record["trajectory"], run.steps[-1].messages
        assert len(messages) == len(turns)
        assert messages[0]["role"] == "system" and messages[0]["content"] == turns[0]["system_prompt"]
        assert [message["content"] for message in messages[1:]] == [turn["text"] for turn in turns[1:]]
        assert [message["mask"] for message in messages] == [turn["mask"] for turn in turns]
        assert len(run.steps) == sum(turn["role"] == "ai" for turn in turns)
        assert (run.outcome, run.facts["exit_status"], run.group_id) == (
            "completed",
            "submitted",
            record["instance_id"],
        )
        assert run.facts["target"] is record["target"]
        assert run.metadata["generated_patch"] == record["generated_patch"]


def test_sweagent_history_is_the_record(shared_data):
    for path in sorted((shared_data / "trajectories" / "swe-agent").rglob("*.traj")):
        run, record = one(path), json.loads(path.read_text())
        assert len(run.steps) == len(record["trajectory"])
        same(run.steps[-1].messages, record["history"])
        for step, act in zip(run.steps, record["trajectory"], strict=True):
            said = step.messages[-1] if step is not run.steps[-1] else None
            assert said is None or said["content"] == act["response"]
            same(step.metadata["state"], act["state"])
        assert (run.outcome, run.facts["exit_status"]) == ("completed", "submitted")
        assert run.group_id == path.stem
        same(run.metadata["info"], record["info"])


def test_sweagent_keeps_what_only_the_trajectory_holds(shared_data):
    (path,) = (shared_data / "trajectories" / "swe-agent").rglob("pydicom*.traj")
    run, record = one(path), json.loads(path.read_text())
    assert run.steps[-1].metadata["observation"] == record["trajectory"][-1]["observation"], "no message quotes it"
    assert not any("observation" in step.metadata for step in run.steps[:2])
    assert run.steps[0].messages[1]["is_demo"] is True


def test_sweagent_demonstrations_requeries_and_missing_history(tmp_path):
    act = {"action": "ls", "observation": "a b", "response": "look", "thought": "look", "execution_time": 0.5}
    demo = {"role": "assistant", "content": "demo", "is_demo": True}
    said = {"role": "assistant", "content": "look"}
    seen = {"role": "user", "content": "(cwd)\na b\n$"}
    full = {"trajectory": [act], "history": [demo, said, seen], "info": {"exit_status": "exit_cost"}}
    run = one(written(tmp_path, "x.traj", full))
    assert (len(run.steps), run.outcome, run.steps[0].metadata) == (1, "truncated", {"execution_time": 0.5})
    unpaired = one(written(tmp_path, "x.traj", {**full, "trajectory": [act, act]}))
    assert len(unpaired.steps) == 1 and unpaired.metadata["trajectory"] == [act, act]
    told = one(written(tmp_path, "x.traj", {"trajectory": [act], "info": {}}))
    assert [message["content"] for message in told.steps[0].messages] == ["look", "a b"]
    assert told.outcome == "aborted"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("submitted", "completed"),
        ("submitted (exit_context)", "context_overflow"),
        ("exit_context", "context_overflow"),
        ("submitted (exit_cost)", "truncated"),
        ("exit_command_timeout", "timeout"),
        ("exit_total_execution_time", "timeout"),
        ("early_exit", "aborted"),
        ("exit_format", "failed"),
        ("exit_environment_error", "failed"),
        ("AgentStuckInLoopError", "failed"),
        ("Agent reached maximum iteration", "truncated"),
        ("never heard of", "failed"),
        ("", "aborted"),
        (None, "aborted"),
    ],
)
def test_exit_statuses(status, outcome):
    assert outcome_of(status, otherwise="aborted") == outcome


# -- OpenHands ------------------------------------------------------------------------------------------------------


def test_openhands_event_stream(shared_data):
    path = shared_data / EVENTS / "wrong_initial_state.json"
    run, events = one(path), json.loads(path.read_text())
    assert run.outcome == "completed" and len(run.steps) == 4
    messages = run.steps[-1].messages
    assert [message["role"] for message in messages] == ["user"] + ["assistant", "tool"] * 3 + ["assistant"]
    response = events[1]["tool_call_metadata"]["model_response"]
    same(messages[1], response["choices"][0]["message"])
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    assert messages[2]["content"] == events[2]["content"]
    assert run.steps[0].finish_reason == "tool_calls"
    assert run.steps[0].metadata["usage"] == response["usage"]
    assert run.steps[0].metadata["actions"][0]["args"] == events[1]["args"]


def test_openhands_states_are_no_messages(shared_data):
    run = one(shared_data / EVENTS / "basic_gui_mode.json")
    assert len(run.steps) == 5
    assert (run.outcome, run.facts["exit_status"]) == ("completed", "awaiting_user_input")
    assert [message["role"] for message in run.steps[-1].messages].count("tool") == 4
    assert len(run.metadata["other_events"]) == 8


def test_openhands_events_in_any_order(tmp_path, shared_data):
    path = shared_data / EVENTS / "basic_gui_mode.json"
    events = json.loads(path.read_text())
    random.Random(0).shuffle(events)
    shuffled = one(written(tmp_path, "shuffled.json", events))
    same(shuffled.steps[-1].messages, one(path).steps[-1].messages)


def events(*changes):
    whole = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "go"}},
        {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls", "thought": "look"}},
        {"id": 2, "source": "agent", "observation": "run", "cause": 1, "content": "a"},
    ]
    for index, change in changes:
        whole[index] = {**whole[index], **change}
    return whole


def test_openhands_orphans_cycles_and_double_ids_name_the_ids(tmp_path):
    assert len(one(written(tmp_path, "ok.json", events())).steps) == 1
    for change, message in (
        ((2, {"cause": 9}), "event 2 is caused by 9"),
        ((2, {"cause": 2}), "event 2 is caused by 2"),
        ((2, {"id": 1}), "1 event ids are used twice"),
        ((1, {"id": 5}), "event 2 is caused by 1"),
    ):
        with pytest.raises(InputError, match=message):
            one(written(tmp_path, "bad.json", events(change)))


def test_openhands_calls_of_one_response_are_one_step(tmp_path):
    message = {"role": "assistant", "content": "both", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    response = {"id": "r", "choices": [{"finish_reason": "tool_calls", "message": message}]}
    stream = [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "be good", "tools": [{"t": 1}]}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "go", "image_urls": ["u"]}},
    ]
    for number, call in ((2, "a"), (3, "b")):
        call_of = {"tool_call_id": call, "function_name": "bash", "model_response": response}
        stream += [
            {"id": 2 * number, "action": "run", "args": {"command": call}},
            {"id": 2 * number + 1, "observation": "run", "cause": 2 * number, "content": call},
        ]
        for event in stream[-2:]:
            event |= {"source": "agent", "tool_call_metadata": call_of}
    run = one(written(tmp_path, "r.json", stream))
    assert len(run.steps) == 1 and run.steps[0].tools == [{"t": 1}]
    assert [action["args"]["command"] for action in run.steps[0].metadata["actions"]] == ["a", "b"]
    assert [message["role"] for message in run.steps[0].messages] == ["system", "user", "assistant", "tool", "tool"]
    assert [message.get("tool_call_id") for message in run.steps[0].messages[3:]] == ["a", "b"]
    assert run.steps[0].messages[1]["image_urls"] == ["u"]


def test_openhands_resolver_output(shared_data):
    records = [json.loads(line) for line in (shared_data / RESOLVER).read_text().splitlines()]
    for run, record in zip(runs(shared_data / RESOLVER), records, strict=True):
        assert run.group_id == f"neubig/pr-viewer#{record['issue']['number']}"
        assert (run.outcome, run.facts) == ("completed", {"success": True})
        said = [event for event in record["history"] if "action" in event][1:]
        assert len(run.steps) == len(said)
        seen = [message["content"] for message in run.steps[-1].messages if message["role"] == "tool"]
        assert seen == [event["content"] for event in record["history"] if "observation" in event]
        assert run.steps[0].messages[0] == {"role": "user", "content": record["history"][0]["content"]}
        assert run.metadata["git_patch"] == record["git_patch"]


def test_openhands_resolver_errors_and_paired_history(tmp_path, shared_data):
    record = json.loads((shared_data / RESOLVER).read_text().splitlines()[0])
    lines = [
        {**record, "success": False, "error": "Agent reached maximum iteration"},
        {**record, "history": [], "success": False, "error": "RuntimeError: no sandbox"},
        {**record, "history": [record["history"][1:3], record["history"][3:5]]},
        {**record, "history": []},
    ]
    found = runs(written(tmp_path, "out.jsonl", "\n".join(map(json.dumps, lines))))
    assert [run.outcome for run in found] == ["truncated", "failed", "truncated", "failed"]
    assert found[0].facts == {
        "success": False, "error": "Agent reached maximum iteration", "exit_status": "Agent reached maximum iteration",
    }  # fmt: skip
    assert [len(run.steps) for run in found] == [4, 0, 2, 0]


# -- files ----------------------------------------------------------------------------------------------------------


def test_unknown_forms_are_refused_with_a_list_of_the_known(tmp_path, shared_data):
    for path in (
        shared_data / "trajectories" / "tree-of-thought" / "logs" / "crosswords" / "infoss_dfs_prune.json",
        shared_data / "routing" / "tokenizer.json",
        written(tmp_path, "n.json", "7"),
        written(tmp_path, "l.json", "[]"),
        written(tmp_path, "d.json", {"a": 1}),
    ):
        with pytest.raises(
            InputError, match="known forms: routing, atif, nebius, swe-agent, tau-bench, openhands, chat"
        ):
            list(read_runs(path))
    with pytest.raises(InputError, match="known forms"):
        list(read_runs(tmp_path, form="atlas"))
    with pytest.raises(NotFoundError, match="nowhere"):
        list(read_runs(tmp_path / "nowhere"))


@pytest.mark.parametrize("content", ["", "{", '{"messages": [}', b"\xff\xfe\x00", b"PK\x03\x04broken", "[" * 100_000])
def test_files_that_are_no_json(tmp_path, content):
    with pytest.raises(InputError, match=r"bad\.json"):
        list(read_runs(written(tmp_path, "bad.json", content)))


def test_a_forced_form(tmp_path, shared_data):
    path = written(tmp_path, "r.json", chat("a", "b"))
    assert one(path, form="chat").source == "chat"
    with pytest.raises(InputError, match="does not look like atif"):
        one(path, form="atif")
    with pytest.raises(InputError, match=r"no \.npz file"):
        one(path, form="routing")
    with pytest.raises(InputError, match="form chat is JSON"):
        one(shared_data / "routing" / "A_12L_256E" / "taubench_airline_a.npz", form="chat")
    assert len(runs(shared_data / TAU, form="tau-bench")) == 32


def test_one_bad_run_of_many_is_reported_and_the_others_read(tmp_path):
    mixed = [chat("a", "b"), {"messages": 3}, {"other": 1}, chat("c", "d")]
    found = list(read_runs(written(tmp_path, "m/x.json", mixed)))
    assert [type(item) for item in found] == [ImportedRun, Failure, Failure, ImportedRun]
    assert [getattr(item, "where", None) for item in found] == [None, "m/x.json#1", "m/x.json#2", None]
    lines = "\n".join([json.dumps(chat("a", "b")), "{broken", "null", json.dumps(chat("c", "d"))])
    found = list(read_runs(written(tmp_path, "m/x.jsonl", lines)))
    assert [type(item) for item in found] == [ImportedRun, Failure, Failure, ImportedRun]
    assert "line 2" in str(found[1].error)


def test_a_folder_is_searched_in_the_order_of_names(tmp_path):
    for name in ("b.json", "a/z.json", "a.jsonl", "c/x.traj"):
        written(tmp_path, f"in/{name}", chat("a", "b"))
    written(tmp_path, "in/notes.txt", "x")
    found = list(read_runs(tmp_path / "in"))
    assert [getattr(item, "session_id", None) or item.where for item in found] == [
        "in/a.jsonl#0", "in/b.json", "in/notes.txt", "in/a/z.json", "in/c/x.traj",
    ]  # fmt: skip


def test_a_file_name_that_is_no_utf8_still_makes_an_id(tmp_path):
    folder = os.fsencode(tmp_path / "in")
    os.mkdir(folder)
    with open(folder + b"/\xff.json", "w") as file:
        json.dump(chat("a", "b"), file)
    assert one(tmp_path / "in").session_id == "in/\\xff.json"


# -- steps in any order ---------------------------------------------------------------------------------------------


def chain(n):
    return [ImportedStep(step_id=str(i), parent=str(i - 1) if i else None) for i in range(n)]


def test_steps_in_any_order_give_parents_first():
    steps = chain(5000)
    for seed in range(3):
        shuffled = random.Random(seed).sample(steps, len(steps))
        assert [step.step_id for step in ordered_steps(shuffled)] == [str(i) for i in range(5000)]
    assert [step.step_id for step in ordered_steps(steps[::-1])] == [str(i) for i in range(5000)]
    tree = [
        ImportedStep(step_id="b", parent="a"), ImportedStep(step_id="c", parent="a"), ImportedStep(step_id="a"),
    ]  # fmt: skip
    assert [step.step_id for step in ordered_steps(tree)] == ["a", "b", "c"]


def test_orphans_cycles_and_double_ids_are_errors_that_name_them():
    with pytest.raises(InputError, match="4 -> 3"):
        ordered_steps(chain(3) + chain(5)[4:])
    loop = [ImportedStep(step_id="a", parent="b"), ImportedStep(step_id="b", parent="a"), *chain(2)]
    with pytest.raises(InputError, match="a, b"):
        ordered_steps(loop)
    with pytest.raises(InputError, match="twice: 1"):
        ordered_steps(chain(3) + chain(2)[1:])


# -- recording ------------------------------------------------------------------------------------------------------


def rows_of(sp):
    return {row.session_id: row for row in sp.sessions()}


def test_recorded_routing_reads_back_bit_for_bit(shared_data, sp):
    path = shared_data / "routing" / "B_8L_384E" / "taubench_airline_a.npz"
    report = import_runs(path, sp)
    assert report.imported == ("B_8L_384E/taubench_airline_a.npz",) and not report.failed
    file = np.load(path)
    stop = int(file["turn_content_end"][file["turn_role"] == "assistant"][-1])
    (segment,) = sp.segments()
    sample = sp.read(segment)
    assert np.array_equal(sample["token_ids"], file["token_ids"][:stop])
    assert sample["routed_experts"].dtype == np.int32
    assert np.array_equal(sample["routed_experts"], file["routed_experts"][: stop - 1])
    mask = file["assistant_mask"][segment.response_start : stop]
    assert np.array_equal(sample["loss_mask"][-segment.response_length :], mask)
    logprobs = np.where(mask, file["logprobs"][segment.response_start : stop], np.float32(0))
    assert np.array_equal(sample["logprobs"].view(np.uint32), logprobs.view(np.uint32))
    assert (segment.outcome, segment.source) == ("truncated", "routing")
    stored = sum(extent.n for step in sp.steps(segment.session_id)[-1:] for extent in step.extents["routed_experts"])
    assert stored == stop - 1, "every step brings its new rows, and shares the others"


def test_recorded_conversations_read_back_message_for_message(shared_data, sp):
    report = import_runs(shared_data / TAU, sp)
    assert len(report.imported) == 32 and not report.failed and not report.ignored
    records = json.loads((shared_data / TAU).read_text())
    known = rows_of(sp)
    for name, record in zip(report.imported, records, strict=True):
        row, steps = known[name], sp.steps(name)
        assert (row.group_id, row.sample_index, row.source) == (str(record["task_id"]), record["trial"], "tau-bench")
        assert (row.state, row.outcome, row.facts["reward"]) == ("final", "completed", record["reward"])
        same(sp.messages(steps[-1]), record["traj"])
        said = [i for i, message in enumerate(record["traj"]) if message["role"] == "assistant"]
        same(sp.messages(steps[len(steps) // 2 - 1]), record["traj"][: said[len(steps) // 2 - 1] + 1])
        assert [step.parent for step in steps] == [None, *range(len(steps) - 1)]
    assert {row.session_id for row in sp.sessions("reward > 0.5")} == {
        name for name, record in zip(report.imported, records, strict=True) if record["reward"] == 1.0
    }


def test_messages_are_stored_as_deltas(shared_data, sp, tmp_path):
    import_runs(shared_data / TAU, sp)
    sp.flush()
    records = json.loads((shared_data / TAU).read_text())
    once = sum(len(json.dumps(record["traj"])) for record in records)
    in_full = sum(
        len(json.dumps(record["traj"][: i + 1]))
        for record in records for i, message in enumerate(record["traj"]) if message["role"] == "assistant"
    )  # fmt: skip
    stored = sum(path.stat().st_size for path in (tmp_path / "spool" / "streams").rglob("records/*"))
    assert in_full > 8 * once
    assert stored < 2 * once


def test_every_real_run_is_recorded_and_a_second_import_changes_nothing(shared_data, open_spool):
    sp = open_spool()
    seen = []
    first = import_runs(shared_data, sp, on_error=seen.append)
    assert len(first.imported) == 62 and not first.unchanged
    assert not first.failed and not seen
    assert len(first.ignored) == 6
    assert set(first.dropped) <= set(first.imported) and all(n > 0 for n in first.dropped.values())
    before = {name: (row.n_steps, row.facts, row.finished_at) for name, row in rows_of(sp).items()}
    sp.close()
    again = open_spool()
    second = import_runs(shared_data, again)
    assert second.unchanged == first.imported and not second.imported
    assert not second.failed and second.dropped == first.dropped
    assert {name: (row.n_steps, row.facts, row.finished_at) for name, row in rows_of(again).items()} == before


def test_an_import_with_other_content_is_reported_and_changes_nothing(tmp_path, sp):
    path = written(tmp_path, "in/r.json", chat("a", "b"))
    assert import_runs(path, sp).imported == ("in/r.json",)
    written(tmp_path, "in/r.json", chat("a", "other"))
    (failure,) = import_runs(path, sp).failed
    assert isinstance(failure.error, StepConflictError) and failure.where == "in/r.json"
    same(sp.messages(sp.steps("in/r.json")[-1]), chat("a", "b")["messages"])
    sp.discard("in/r.json")
    (failure,) = import_runs(path, sp).failed
    assert "discarded" in str(failure.error)


def test_an_interrupted_import_is_gone_on_with(tmp_path, open_spool):
    path = written(tmp_path, "in/r.json", chat("a", "b", "c", "d", reward=0.5))
    sp = open_spool()
    run = one(path)
    session = sp.session(run.session_id, source=run.source)
    session.append(**run.steps[0])
    sp.close()
    again = open_spool()
    assert import_runs(path, again).imported == (run.session_id,)
    assert len(again.steps(run.session_id)) == 2
    row = rows_of(again)[run.session_id]
    assert (row.state, row.facts["reward"]) == ("final", 0.5)


def test_a_bad_run_is_reported_with_none_of_its_steps(tmp_path, sp):
    tokens = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}
    good = atif({"step_id": 1, "source": "agent", "message": "x", "metrics": tokens})
    short = {**tokens, "prompt_token_ids": [1, 2, 3, 4], "logprobs": [-0.5, -0.5]}
    bad = atif(*good["steps"], {"step_id": 2, "source": "agent", "message": "y", "metrics": short})
    path = written(tmp_path, "in/r.json", [good, bad, good])
    report = import_runs(path, sp)
    assert report.imported == ("in/r.json#0", "in/r.json#2")
    (failure,) = report.failed
    assert failure.where == "in/r.json#1" and "logprobs" in str(failure.error)
    assert {ref.session_id for ref in sp.segments()} == set(report.imported)
    sample = sp.read(next(sp.segments()))
    assert sample["token_ids"].tolist() == [1, 2, 3] and sample["logprobs"].tolist() == [-0.5]


def test_what_a_log_cannot_hold_is_kept_escaped(tmp_path, sp):
    record = chat("\ud800", "\udfff", reward=1, error="\ud801", huge=10**30)
    (name,) = import_runs(written(tmp_path, "it's.json", record), sp).imported
    assert sp.messages(sp.steps(name)[-1]) == record["messages"]
    row = rows_of(sp)[name]
    assert json.loads(row.facts["error"]) == "\ud801"
    assert json.loads(row.metadata["ascii_json"])["huge"] == 10**30
    assert row.outcome == "failed"


def test_empty_runs_are_recorded(tmp_path, sp):
    report = import_runs(written(tmp_path, "in/r.json", {"messages": [], "reward": 0.25}), sp)
    row = rows_of(sp)[report.imported[0]]
    assert (row.state, row.n_steps, row.facts["reward"]) == ("final", 0, 0.25)
    assert import_runs(tmp_path / "in" / "r.json", sp).unchanged == report.imported


def test_an_import_of_an_empty_run_that_broke_off_is_completed(tmp_path, sp, monkeypatch):
    path = written(tmp_path, "in/r.json", {"messages": [], "reward": 0.25})
    with monkeypatch.context() as broken:
        broken.setattr(type(sp), "annotate", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            import_runs(path, sp)
    (name,) = import_runs(path, sp).imported
    row = rows_of(sp)[name]
    assert (row.state, row.n_steps, row.facts["reward"]) == ("final", 0, 0.25)
    assert import_runs(path, sp).unchanged == (name,)


UNKNOWN = {
    "object.json": '{"a": 1}',
    "list.json": '[{"a": 1}, {"b": 2}]',
    "bare.json": "[[1], [2]]",
    "empty.json": "[]",
    "number.json": "7",
    "lines.jsonl": '{"a": 1}\n[1]\n7\n',
    "lines.json": '{"a": 1}\n{"b": 1}\n',
}


def test_unknown_files_of_a_folder_are_ignored_whatever_their_type(tmp_path):
    for name, text in UNKNOWN.items():
        written(tmp_path, f"in/{name}", text)
    found = list(read_runs(tmp_path / "in"))
    assert {item.where for item in found if isinstance(item, Ignored)} == {f"in/{name}" for name in UNKNOWN}
    assert len(found) == len(UNKNOWN) and all("not a run" in f.reason or "none of them" in f.reason for f in found)
    for name in UNKNOWN:
        with pytest.raises(InputError, match="known forms") as caught:
            list(read_runs(tmp_path / "in" / name))
        assert all(form in str(caught.value) for form in FORMS)


def test_damaged_files_and_strange_lines_among_runs_stay_failures(tmp_path):
    written(tmp_path, "in/torn.json", '{"messages": [')
    written(tmp_path, "in/torn.jsonl", '{"a": 1}\n{"messages": [\n{"a": 2}\n')
    written(tmp_path, "in/late.jsonl", "\n".join(json.dumps(each) for each in ({"a": 1}, chat("a", "b"), {"a": 2})))
    found = list(read_runs(tmp_path / "in"))
    assert [(type(item), getattr(item, "where", None) or item.session_id) for item in found] == [
        (Failure, "in/late.jsonl#0"), (ImportedRun, "in/late.jsonl#1"), (Failure, "in/late.jsonl#2"),
        (Failure, "in/torn.json"),
        (Failure, "in/torn.jsonl#0"), (Failure, "in/torn.jsonl#1"), (Failure, "in/torn.jsonl#2"),
    ]  # fmt: skip


def test_tokens_behind_the_last_turn_are_reported(tmp_path, sp):
    npz(tmp_path, "M_2L_64E/a.npz")
    npz(tmp_path, "M_2L_64E/b.npz", turn_content_end=np.array([3, 6, 9, 12]), drop=("assistant_mask",))
    for _ in range(2):
        assert import_runs(tmp_path / "M_2L_64E", sp).dropped == {"M_2L_64E/a.npz": 1}
    written(tmp_path, "c.json", chat("a", "b", n_tokens_dropped=9))
    assert import_runs(tmp_path / "c.json", sp).dropped == {}, "a member of another form that happens to be called so"


def test_an_unknown_file_raises_where_it_was_named(shared_data, sp):
    with pytest.raises(InputError, match="known forms"):
        import_runs(shared_data / "routing" / "tokenizer.json", sp)
    assert rows_of(sp) == {}


def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    found = list(read_runs(tmp_path))
    assert [(type(item).__name__, item.reason) for item in found] == [("Ignored", "not a file")] * 3
