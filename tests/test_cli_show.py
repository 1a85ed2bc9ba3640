"""`spool show` beyond the facts: the tree, fields and gaps, where bytes are, versions, routing, tokens."""

from __future__ import annotations

import re

import numpy as np
import pytest
from kit import add, counting, session
from shell import HOSTILE, on_terminal, run
from tiers import record, wait_for

import spool
from spool import history
from spool.importers import import_runs
from spool.look.session import look_at


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The root of a spool with a session of a branch, a repeated request, a new chain, and one with gaps."""
    root = str(tmp_path_factory.mktemp("show") / "s")
    with spool.open(root) as sp:
        s = session(sp, "tree")
        zero = [*counting(4), 1, 2]
        add(s, zero[:4], [1, 2], weight_version="7")
        add(s, [*zero, 8], [3, 4], weight_version="7")
        add(s, [*zero, 8], [5, 6], weight_version="8")
        add(s, [*zero, 8, 5, 6, 9], [3], weight_version="9")
        add(s, [*zero, 5, 5], [4], weight_version="9")
        add(s, [70, 71], [5], weight_version="9")
        s.finalize()
        gap = session(sp, "gap")
        gap.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4, 5], weight_version="1")
        rows = np.array([[[0, 0], [1, 2], [3, 4]]] * 2)
        gap.append(
            prompt_token_ids=[1, 2, 3, 4, 5, 6], response_token_ids=[7], weight_version="2", routed_experts=rows,
            routed_experts_start=4,
        )  # fmt: skip
        gap.finalize()
    return root


def test_a_session_is_drawn_as_a_tree(tree):
    lines = plain(on_terminal("show", tree, "tree", columns=100)).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("STEP"))
    drawn = [line[:8].rstrip() for line in lines[start + 1 : start + 7]]
    assert drawn == ["◆ 0", "├─✗ 1", "├─■ 4", "● 2", "■ 3", "◆ 5"]
    (facts,) = run("show", tree, "tree", "--json").json
    assert [step["index"] for step in facts["steps"]] == list(range(6))
    assert [step["superseded"] for step in facts["steps"]] == [False, True, False, False, False, False]
    assert [step["segments"] for step in facts["steps"]] == [[0, 1], [], [0], [0], [1], [2]]
    assert [step["line"] for step in facts["steps"]] == [0, 1, 3, 4, 2, 5]
    assert (facts["n_branches"], facts["tier"], facts["first_version"], facts["last_version"]) == (4, "hot", 7, 9)
    assert facts["stored_bytes"] > 0 and facts["n_released"] == 0


def test_a_segment_says_where_versions_change_what_is_missing_and_where_bytes_are(tree):
    (facts,) = run("show", tree, "tree@lineage/0", "--json").json
    assert [(span["version"], span["start"], span["stop"]) for span in facts["versions"]] == [
        ("7", 4, 6), ("8", 7, 9), ("9", 10, 11)
    ]  # fmt: skip
    experts = facts["coverage"]["routed_experts"]
    assert (experts["kind"], experts["align"], experts["n_rows"], experts["n_missing"]) == (
        "uint8[2, 2]",
        "forward",
        10,
        0,
    )
    assert (experts["hot_bytes"], experts["cold_bytes"]) == (10 * 2 * 2, 0) and facts["problem"] is None
    gap = run("show", tree, "gap:1", "--json").json[0]["coverage"]
    assert gap["routed_experts"]["gaps"] == [[0, 4]] and gap["routed_experts"]["n_missing"] == 4
    assert gap["token_ids"]["gaps"] == [] and "logprobs" not in gap
    text = run("show", tree, "gap:1").text
    assert "field\tkind\talign" in text and "\t0:4" in text
    shown = plain(on_terminal("show", tree, "tree@lineage/0"))
    assert "MISSING" in shown and re.search(r"^8 +7 +9$", shown, re.MULTILINE)


def test_bytes_of_a_cold_root_are_cold(tmp_path):
    with spool.open(f"{tmp_path}/hot?spill=file://{tmp_path}/cold") as sp:
        sp.publish(record(sp, "a"))
    (facts,) = run("show", f"file://{tmp_path}/cold", "a@lineage/0", "--json").json
    fields = facts["coverage"]
    mask = fields.pop("loss_mask")
    assert (mask["kind"], mask["align"], mask["n_rows"], mask["n_missing"]) == ("uint8", "token", facts["n_tokens"], 0)
    assert all(field["cold_bytes"] > 0 and field["hot_bytes"] == 0 for field in fields.values())


def test_routing_and_tokens(tree):
    (facts,) = run("show", tree, "tree@lineage/0", "--routing", "--tokens", "3:9", "--json").json
    (model,) = facts["routing"]
    assert (model["num_experts"], model["topk"], model["n_rows"]) == (256, 2, 10)
    assert [layer["layer"] for layer in model["layers"]] == [1, 2]
    rows = facts["tokens"]
    assert [row["position"] for row in rows] == list(range(3, 9))
    assert [row["token_id"] for row in rows] == [1003, 1, 2, 8, 5, 6]
    assert [row["version"] for row in rows] == [None, "7", "7", None, "8", "8"]
    assert [row["mask"] for row in rows] == [0, 1, 1, 0, 1, 1] and rows[0]["logprob"] is None
    text = run("show", tree, "tree:2", "--routing", "--tokens", ":2").text
    assert "layer\timbalance" in text and "position\ttoken_id\ttext" in text
    assert len(run("show", tree, "tree", "--routing", "--json").json[0]["routing"]) == 1
    (nothing,) = run("show", tree, "gap:0", "--routing", "--json").json[0]["routing"]
    assert (nothing["n_rows"], nothing["n_missing"]) == (0, 4)
    assert all(set(layer.values()) == {layer["layer"], None} for layer in nothing["layers"])
    assert "--tokens is for segments" in run("show", tree, "tree", "--tokens", ":5", code=2).err
    assert "START:STOP" in run("show", tree, "tree:0", "--tokens", "5", code=2).err
    assert "is for --tokens" in run("show", tree, "tree:0", "--tokenizer", "x", code=2).err
    run("show", tree, "tree:0", "--tokens", ":", "--tokenizer", "/nowhere", code=3)


def test_text_of_real_tokens(sp, shared_data):
    import_runs(shared_data / "routing" / "A_12L_256E" / "taubench_airline_a.npz", sp)
    (row,) = sp.sessions()
    args = (
        sp.config.root,
        f"{row.session_id}:0",
        "--tokens",
        "0:200",
        "--tokenizer",
        shared_data / "routing/tokenizer.json",
    )
    (facts,) = run("show", *args, "--json").json
    text = "".join(row["text"] for row in facts["tokens"])
    assert len(facts["tokens"]) == 200 and "policy" in text.lower()
    shown = on_terminal("show", *args, columns=120)
    assert not any(char in plain(shown) for char in HOSTILE)


def test_lost_payload_does_not_keep_facts_away(tmp_path):
    with spool.open(f"{tmp_path}/hot?spill=file://{tmp_path}/cold&retention=released&grace_s=0.001") as sp:
        segments = record(sp, "a")
        record(sp, "b")
        sp.publish(segments)
    import shutil

    shutil.rmtree(tmp_path / "cold" / "streams")
    (facts,) = run("show", f"file://{tmp_path}/cold", "a:0", "--json").json
    assert facts["n_tokens"] == 100 and facts["problem"]


@pytest.mark.parametrize("state", ["live", "sealed", "spilled"])
def test_rows_are_the_same_however_they_are_counted(tmp_path, state):
    with spool.open(f"{tmp_path}/hot?spill=file://{tmp_path}/cold") as sp:
        for number in range(5):
            record(sp, f"s{number}")
        if state != "live":
            sp.flush()
        if state == "spilled":
            sp.publish(list(sp.segments()))
        wait_for(lambda: sp.usage() == sp.usage(quick=True), what="a moment in which nothing is spilled")
        assert sum(row["rows"] or 0 for row in sp.usage(quick=True)) > 0
    if state == "spilled":
        with spool.open(f"file://{tmp_path}/cold", readonly=True) as cold:
            assert cold.usage() == cold.usage(quick=True)


def test_a_discarded_session_is_shown_until_it_is_deleted(sp):
    add(s := session(sp, "a", metadata={"task": "t" * 500}), [1, 2], [3])
    add(s, [1, 2, 3, 4], [5, 6])
    s.finalize()
    sp.discard("a")
    (found,) = run("show", sp.config.root, "a", "--json").json
    assert (found["state"], [step["n_tokens"] for step in found["steps"]]) == ("discarded", [3, 6])
    assert [segment["n_tokens"] for segment in found["segments"]] == [6] and found["metadata"]["task"] == "t" * 500
    shown = on_terminal("show", sp.config.root, "a")
    assert "discarded" in shown and "t" * 20 + "..." in shown and "t" * 80 not in shown and "\u25c6 0" in shown
    for call in (sp.steps, sp.view, sp.final_segments):
        with pytest.raises(spool.ReleasedError, match="discarded"):
            call("a")
    with spool.open(sp.config.root, readonly=True) as other:
        assert [row.step.index for row in look_at(other, "a").rows] == [0, 1]


def test_the_messages_of_a_session_are_read_once(tmp_path, monkeypatch):
    """Whatever branches, begins anew or was withdrawn; the lists joined again are those of each step."""
    root = str(tmp_path / "s")
    with spool.open(root) as sp:
        s = session(sp, "talk")
        said, ids = [{"role": "user", "content": "begin"}], counting(4)
        for turn in range(700):
            add(s, ids, [turn], messages=said)
            ids = [*ids, turn, 9]
            said = [*said, {"role": "assistant", "content": f"turn {turn}"}]
        s.discard(add(s, [*counting(4), 0, 5], [1], messages=[*said[:2], {"role": "user", "content": "not so"}]))
        back = [*said[:2], {"role": "user", "content": "back"}]
        add(s, [*counting(4), 0, 6], [2], messages=back)
        add(s, [77], [3], messages=[*back, {"role": "user", "content": "anew"}])
        s.finalize()
        refs = sp.steps("talk")
        wanted = {index: sp.messages(refs[index]) for index in (0, 1, 699, -2, -1)}
        decoded, decode = [], history.message_format.decode_messages
        monkeypatch.setattr(history.message_format, "decode_messages", lambda data: decoded.append(0) or decode(data))
        steps = list(sp.transcript("talk"))
        assert [step.step for step in steps] == [ref.index for ref in refs] and len(decoded) == len(refs) == 702
        monkeypatch.undo()
    known = {}
    for step in steps:
        assert not step.messages or step.n_inherited + len(step.messages) <= 702
        known[step.step] = [*known.get(step.parent, ())[: step.n_inherited], *step.messages]
    assert {index: known[refs[index].index] for index in wanted} == wanted
    (facts,) = run("show", root, "talk", "--messages", "--json").json
    assert facts["messages"] == [step._asdict() for step in steps]
    text = run("show", root, "talk", "--messages").text
    assert "not so" not in text and text.count("turn 400") == 1
    assert text.endswith("--- step 702, after 3 messages that are shown above\nuser: anew\n")
