"""Hostile names, texts, filters and trees."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import unicodedata

import numpy as np
import pytest
from kit import SHAPE, add, counting, session
from numpy.testing import assert_array_equal

import spool
from spool import ConfigError, FieldSpec, InputError, NotFoundError, SpoolError

spawn = multiprocessing.get_context("spawn")
fork = multiprocessing.get_context("fork")


def tree(folder):
    """Return every path under ``folder``, as bytes: what a name may have created."""
    return {
        os.path.join(base, name) for base, folders, files in os.walk(os.fsencode(folder)) for name in folders + files
    }


def test_a_root_that_cannot_be_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "spool.json").write_text("{}")
    for path in ("file", "file/below", "full"):
        with pytest.raises(SpoolError):
            spool.open(str(tmp_path / path))
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "full" / "spool.json").read_text() == "{}"
    for uri in (
        "nosuch://host/x",
        "file://host/x",
        "file:///x?nosuch=1",
        f"{tmp_path}/y?hot_bytes=many",
        "nul\0",
        "s3://",
        "s3://key:secret@bucket/x",
    ):
        with pytest.raises(ConfigError):
            spool.open(uri)
    shutil.rmtree(tmp_path / "full")


# ------------------------------------------------------------------------------------------------------ names

NAMES = [
    "../../escape", "..", ".", "/etc/absolute", "a/b/c", "a\\b", "C:\\x", "~", "~root", "-rf", "", " ", "  lead",
    "trail ", "x" * 300, "é" * 300, "x" * 70_000, "a:0", "a@lineage/0", "a:0@timeline/1", "a?b=c&d", "a%2Fb", "%00",
    "a\nb", "a\tb", "a\rb", "nul\0byte", "\0", "emoji-\U0001f600-\U0001f468\u200d\U0001f469", "\u202egnp.exe",
    "caf\u00e9", "cafe\u0301",
    "\u0430dmin", "admin", "\uff21", "A", "a", "\ufeffbom", "\u2028line", "'; DROP TABLE sessions; --", "%s%n", "*",
    "[a]", "true", "null", "1", "\x7f", "\x1b[31mred", "con", "spool.json", "lock",
]  # fmt: skip
LONE = ["lone-\ud800", "\udfff", "\udcff\udc80"]


@pytest.mark.parametrize("where", ["session_id", "source", "group_id", "step_id", "prompt_id", "split"])
def test_names_are_kept_exactly_or_refused_and_make_no_path(open_spool, tmp_path, where):
    sp = open_spool()
    add(session(sp, "warm"), [1, 2], [3])
    outside = {path for path in tree(tmp_path) if b"/spool/" not in path}
    shape_of_inside = {path.count(b"/") for path in tree(tmp_path / "spool")}
    kept = {}
    for number, name in enumerate(NAMES):
        at_session = {where: name} if where not in ("session_id", "step_id") else {}
        try:
            s = session(sp, name if where == "session_id" else f"number {number}", **at_session)
            ref = add(s, [number + 5, 2], [3], **({"step_id": name} if where == "step_id" else {}))
        except InputError:
            continue
        assert getattr(ref, where) == name
        kept[name] = ref
    assert {path for path in tree(tmp_path) if b"/spool/" not in path} == outside
    assert {path.count(b"/") for path in tree(tmp_path / "spool")} <= shape_of_inside
    assert not [path for path in tree(tmp_path / "spool") if b"escape" in path or b"emoji" in path]
    for plain in ("caf\u00e9", "cafe\u0301", "\u0430dmin", "admin", "A", "a", "\uff21", "a:0", "1"):
        assert plain in kept, f"{where} {plain!r} is a plain name and was refused"
    sp.close()
    again = open_spool()
    for number, (name, ref) in enumerate(kept.items()):
        (listed,) = again.steps(ref.session_id)
        assert getattr(listed, where) == name
        assert again.read(ref)["token_ids"].tolist() == again.read(listed)["token_ids"].tolist()
        assert spool.ref_from_json(ref.to_json()) == pickle.loads(pickle.dumps(ref)) == ref
        if number % 8 == 0:
            assert again.view(ref.session_id, "timeline")[0].session_id == ref.session_id
    assert len({row.session_id for row in again.sessions()}) == len(kept) + 1
    assert unicodedata.normalize("NFC", "cafe\u0301") == "caf\u00e9"


@pytest.mark.parametrize("name", LONE)
@pytest.mark.parametrize("where", ["session_id", "source", "group_id", "step_id", "finish_reason"])
def test_names_with_lone_surrogates_are_kept_or_refused_never_half_done(sp, where, name):
    at_session = {where: name} if where in ("source", "group_id") else {}
    s = None
    try:
        s = session(sp, name if where == "session_id" else "s", **at_session)
        ref = add(s, [1, 2], [3], **({where: name} if where in ("step_id", "finish_reason") else {}))
    except SpoolError as error:
        assert isinstance(error, InputError)
        assert s is None or where not in ("step_id", "finish_reason") or s.steps == []
    else:
        assert getattr(ref, where) == name
        assert getattr(sp.steps(ref.session_id)[0], where) == name
    assert add(session(sp, "after"), [1, 2], [3]).n_tokens == 3


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/etc",
        "../x",
        "a.b",
        "nul\0",
        "x" * 65,
        "é",
        "1a",
        "a-b",
        "records",
        "LOCK",
        "\ud800",
        " a",
    ],
)
def test_field_names_that_would_be_paths_are_refused(name):
    with pytest.raises(ConfigError):
        FieldSpec(name=name, dtype="int32", align="token")


def test_fields_that_differ_in_case_only_are_refused(sp):
    specs = [FieldSpec(name=name, dtype="int32", align="token") for name in ("Reward", "reward")]
    with pytest.raises(ConfigError):
        add(sp.session(session_id="s", experts=SHAPE, fields=specs), [1], [2])


@pytest.mark.parametrize("name", ["token_ids", "routed_experts", "logprobs", "loss_mask"])
def test_a_field_may_not_pose_as_a_built_in_one(shared_sp, name):
    with pytest.raises(InputError, match=name):
        add(
            shared_sp.session(fields=[FieldSpec(name=name, dtype="float64", align="step")]),
            [1],
            [2],
            fields={},
        )


@pytest.mark.parametrize("folder", ["with space", "100%", "a#b", "caf\u00e9", "\U0001f600", "a+b", "x" * 200])
def test_a_spool_lives_under_any_folder_name(tmp_path, folder):
    with spool.open(str(tmp_path / folder)) as sp:
        ref = add(session(sp), [1, 2], [3])
        assert sp.read(ref)["token_ids"].tolist() == [1, 2, 3]
    assert (tmp_path / folder / "spool.json").is_file()


# -------------------------------------------------------------------------------------- case 9: finish reasons

REASONS = [
    "stop",
    "abort",
    "tool_calls",
    "length",
    "a brand new reason",
    "content_filter",
    "",
    "\U0001f600",
    "length'; --",
]


def test_case_09_finish_reasons_are_kept_and_can_be_filtered_on(open_spool):
    sp = open_spool()
    for i, reason in enumerate(REASONS):
        s = session(sp, f"s{i}")
        add(s, [1, 2], [3], finish_reason="stop")
        add(s, [1, 2, 3, 4], [5], finish_reason=reason)
        assert [ref.finish_reason for ref in s.steps] == ["stop", reason]
        s.finalize()
    assert [ref.finish_reason for ref in sp.segments(view="lineage")] == REASONS
    for handle in (sp, open_spool()):
        for i, reason in enumerate(REASONS):
            quoted = reason.replace("'", "''")
            found = [ref.session_id for ref in handle.segments(where=f"finish_reason = '{quoted}'", view="lineage")]
            assert found == [f"s{i}"]
        assert len(list(handle.segments(where="finish_reason != 'length'", view="lineage"))) == len(REASONS) - 1


@pytest.mark.parametrize(
    "where",
    [
        "reward >",
        "1; DROP TABLE segments",
        "nosuchcolumn = 1",
        "(",
        "",
        "reward = 'a",
        "1=1) UNION SELECT 1--",
        "load_extension('x')",
        "\0",
    ],
)
def test_case_09_a_filter_is_a_filter_and_nothing_else(sp, where):
    s = session(sp)
    add(s, [1, 2], [3])
    s.finalize()
    try:
        found = list(sp.segments(where=where))
    except SpoolError as error:
        assert isinstance(error, InputError)
    else:
        assert where == "" or len(found) <= 1
    assert len(list(sp.segments())) == 1


# ------------------------------------------------------------------------------------ case 26: texts that are not

TEXTS = ["\ud800", "a\udfffb", "\udc80\ud800", "\U0001f600", "\0", "\u2028", "\x1b[31m", '"\\', ""]


def test_case_26_messages_with_any_text_come_back_equal(open_spool):
    sp = open_spool()
    s = session(sp)
    messages = []
    for text in TEXTS:
        messages += [
            {"role": "user", "content": text},
            {"role": text or "x", text: {"nested": [text, {text: text}]}},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": text})}}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": text, "arguments": {text: text}}}]},
        ]
    tools = [{"name": text, "description": text, text: None} for text in TEXTS]
    ref = add(s, [1, 2], [3], messages=messages, tools=tools)
    child = add(s, [1, 2, 3], [4], messages=[*messages, {"role": "user", "content": "\ud800 again"}])
    s.finalize()
    sp.close()
    for handle in (open_spool(), open_spool()):
        assert handle.messages(ref) == messages
        assert handle.messages(child) == [*messages, {"role": "user", "content": "\ud800 again"}]
        assert handle.tools(ref) == tools
        handle.flush()
    for found in (ref, *handle.segments(), *handle.steps("s")):
        found.to_json().encode("utf-8")


def test_case_26_a_surrogate_pair_left_in_two_pieces_is_not_joined(shared_sp):
    pieces = "\ud83d" + "\ude00"
    messages = [{"role": "user", "content": pieces, pieces: [pieces]}]
    ref = add(session(shared_sp, None), [1, 2], [3], messages=messages)
    assert shared_sp.messages(ref) == messages


def test_case_26_metadata_with_any_text_is_kept_or_refused_as_a_whole(sp):
    s = session(sp)
    for number, text in enumerate(TEXTS):
        n_before = len(s.steps)
        try:
            add(s, [number + 5], [3], metadata={"note": text, text: [text]})
        except SpoolError as error:
            assert isinstance(error, InputError)
            assert any("\ud800" <= char <= "\udfff" for char in text)
            assert len(s.steps) == n_before
    assert add(s, [1], [2]).n_tokens == 2


@pytest.mark.parametrize(
    "messages",
    [[object()], [{1, 2}], [b"bytes"], [{"a": float("nan")}], [{"a": 2**70}], [{1: 2}], "text", [{"a": (1, 2)}]],
)
def test_case_26_what_is_no_message_is_refused_or_comes_back_equal(shared_sp, messages):
    s = session(shared_sp, None)
    try:
        ref = add(s, [1, 2], [3], messages=messages)
    except SpoolError as error:
        assert isinstance(error, InputError)
        assert s.steps == []
        return
    back = shared_sp.messages(ref)
    normal = json.loads(json.dumps(messages if not isinstance(messages, str) else list(messages)))
    assert str(back) == str(normal)


def test_case_26_a_message_nested_beyond_reason_is_refused_or_kept(sp):
    s = session(sp)
    deep = "end"
    for _ in range(100_000):
        deep = [deep]
    try:
        add(s, [1, 2], [3], messages=[{"role": "user", "content": deep}])
    except SpoolError as error:
        assert isinstance(error, InputError)
        assert s.steps == []
    while isinstance(deep, list):
        deep = deep.pop()
    add(s, [5, 6], [7])


# --------------------------------------------------------------------------------------- case 27: shapes of trees


def test_case_27_a_chain_of_5000_steps(sp):
    n = 5000
    s = sp.session(session_id="s")
    tokens = np.arange(1, 2 * n + 2, dtype=np.int32)
    for number in range(n):
        ref = s.append(
            prompt_token_ids=tokens[: 2 * number + 1], response_token_ids=tokens[2 * number + 1 : 2 * number + 2]
        )
    assert (ref.index, ref.parent) == (n - 1, n - 2)
    (segment,) = s.view("lineage")
    assert segment.steps == tuple(range(n))
    assert segment.trainable_tokens == n
    assert segment.n_tokens == 2 * n
    sample = sp.read(segment, fields=["token_ids", "loss_mask"])
    assert_array_equal(sample["token_ids"], tokens[: 2 * n])
    assert_array_equal(sample["loss_mask"], [0, 1] * n)
    assert len(pickle.loads(pickle.dumps(segment)).steps) == n
    (segment,) = s.finalize()
    assert sp.view("s", "lineage")[0].steps == segment.steps


def test_case_27_steps_in_reverse_order_are_the_same_data(sp):
    """The same requests, longest first: each begins a chain of its own, and every step reads the same."""
    forward, backward = session(sp, "forward"), session(sp, "backward")
    prompts = [counting(2 * number + 1) for number in range(6)]
    for prompt in prompts:
        add(forward, prompt, [prompt[-1] + 1])
    for prompt in reversed(prompts):
        add(backward, prompt, [prompt[-1] + 1])
    for one, other in zip(sp.read(forward.steps), sp.read(backward.steps)[::-1], strict=True):
        assert set(one) == set(other) >= {"token_ids", "routed_experts", "logprobs", "loss_mask"}
        for field in one:
            assert_array_equal(one[field], other[field])
    assert [ref.parent for ref in backward.steps] == [None] * 6


@pytest.mark.parametrize("step_id", [None, "again"])
@pytest.mark.parametrize(
    "odd",
    [
        {"finish_reason": "x\ud800"}, {"weight_version": "x\ud800"}, {"metadata": {"a": "x\ud800"}},
        {"metadata": {"x\ud800": 1}}, {"metadata": {"a": 1 << 70}}, {"parent": 1 << 70}, {"parent": "x\ud800"},
    ],
)  # fmt: skip
def test_what_no_record_can_hold_is_refused_with_and_without_a_step_id(shared_sp, odd, step_id):
    s = session(shared_sp, None)
    add(s, [1, 2], [3], step_id="first")
    with pytest.raises((InputError, NotFoundError)):
        add(s, [1, 2, 3], [4], step_id=step_id, **odd)
    assert [ref.step_id for ref in s.steps] == ["first"]
    assert add(s, [1, 2, 3], [4], step_id=step_id).index == 1


@pytest.mark.parametrize("parent", ["nobody", 7, -1, "1", "7", True, 1.0, "\ud800", ""])
def test_case_27_a_missing_parent_or_a_cycle_is_an_error_that_names_it(shared_sp, parent):
    s = session(shared_sp, None)
    add(s, [1, 2], [3], step_id="first")
    with pytest.raises((InputError, NotFoundError)) as caught:
        add(s, [1, 2, 3], [4], step_id="1", parent=parent)
    if parent in ("nobody", 7):
        assert str(parent) in str(caught.value)
    assert [ref.step_id for ref in s.steps] == ["first"]
