"""`spool diff`: the first place where two things differ, and how."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from kit import SHAPE, add, counting, probabilities, routing, session
from shell import HOSTILE, on_terminal, run

import spool
from spool.importers import import_runs
from spool.look import differing
from spool.look.diff import Side, diff

FIELDS = (
    spool.FieldSpec(name="kept", dtype="int32", align="token", ragged=True),
    spool.FieldSpec(name="value", dtype="bfloat16", align="response", shape=(2,)),
    spool.FieldSpec(name="kl", dtype="float32", align="step"),
)


def recorded(sp, name, *, change=None, **identity):
    """Record a session of two steps and a branch; ``change`` alters what is sent of each step."""
    s = sp.session(name, experts=SHAPE, fields=FIELDS, **identity)
    first, second = counting(6), counting(5, 2000)
    prompts = (first, [*first, *second, 7, 8], [*first, *second, 9])
    for number, prompt in enumerate(prompts):
        response = second if not number else counting(4, 3000 + number)
        tokens = [*prompt, *response]
        step = {
            "prompt_token_ids": prompt, "response_token_ids": response, "logprobs": probabilities(tokens, len(prompt)),
            "routed_experts": routing(tokens), "weight_version": str(number), "finish_reason": "stop",
            "messages": [{"role": "user", "content": f"turn {turn}"} for turn in range(number + 1)],
            "fields": {
                "kept": [[position, 5] for position in range(len(tokens))],
                "value": np.arange(2 * len(response), dtype=np.float32).reshape(-1, 2), "kl": 0.5 + number,
            },
        }  # fmt: skip
        if change is not None:
            change(number, step)
        s.append(**step)
    return s.finalize(outcome="completed")


def told(sp, a, b, **options):
    return [(found.part, found.what, found.place) for found in diff(Side(sp, a), Side(sp, b), **options)]


def changing(step, name, alter):
    """Return a change of one entry of one step."""

    def change(number, sent):
        if number == step:
            holder = sent if name in sent else sent["fields"]
            holder[name] = alter(holder[name])

    return change


def altered(array, place, value):
    array = np.array(array)
    array[place] = value
    return array


def test_what_is_equal_is_equal(sp, tmp_path):
    for name in ("a", "b"):
        recorded(sp, name)
    assert told(sp, "a", "b") == told(sp, "a", "a") == []
    for part in ("lineage/0", "lineage/1", "timeline/1"):
        (one,), (other,) = (
            [ref for ref in sp.view(name, part.split("/")[0]) if ref.index == int(part[-1])] for name in ("a", "b")
        )
        assert told(sp, one, other) == []
    sp.flush()
    done = run("diff", sp.config.root, "a", "b", "--json")
    assert done.json == {"a": "a", "b": "b", "equal": True, "differences": []}
    assert run("diff", sp.config.root, "a:2", "b:2").err == "they are equal\n"
    with spool.open(tmp_path / "other") as other:
        recorded(other, "x")
    for args in (
        (sp.config.root, "a", f"{tmp_path}/other::x"),
        (f"{sp.config.root}::a", f"file://{tmp_path}/other::x"),
        (sp.config.root, "a@timeline/2", f"{tmp_path}/other::x@timeline/2"),
        (sp.config.root, "a:1", run("show", f"{tmp_path}/other", "x:1", "--ref").text),
        (run("show", sp.config.root, "a:1", "--ref").text, run("show", f"{tmp_path}/other", "x:1", "--ref").text),
    ):
        run("diff", *args)


@pytest.mark.parametrize(
    ("change", "part", "place", "values"),
    [
        (changing(1, "routed_experts", lambda x: altered(x, (11, 2), [9, 8])), "routed_experts",
         {"step": 1, "token": 11, "layer": 2}, ([9, 8],)),
        (changing(0, "logprobs", lambda x: altered(x, 3, 0.25)), "logprobs", {"step": 0, "token": 9}, (0.25,)),
        (changing(2, "value", lambda x: altered(x, (1, 1), -4.0)), "value",
         {"step": 2, "token": 13, "index": [1]}, (-4.0,)),
        (changing(1, "kl", lambda _: 0.75), "kl", {"step": 1}, (0.75,)),
        (changing(1, "kept", lambda x: [*x[:-1], [16, 6]]), "kept", {"step": 1, "token": 16, "index": [1]}, (6,)),
        (changing(0, "kept", lambda x: [x[0], [1], *x[2:]]), "kept", {"step": 0, "token": 1}, (1,)),
        (changing(2, "messages", lambda x: [*x[:-1], {"role": "user", "content": "turn b"}]), "messages",
         {"step": 2, "message": 2, "at": ["content"], "character": 5}, ("turn b",)),
        (changing(1, "weight_version", lambda _: "9"), "versions", {"step": 1, "index": 0, "start": 13},
         ({"version": "9", "start": 13, "stop": 17},)),
        (changing(2, "finish_reason", lambda _: "length"), "steps", {"step": 2}, ("length",)),
        (changing(2, "loss_mask", lambda x: x), "loss_mask", {}, ()),
    ],
)  # fmt: skip
def test_each_kind_of_difference_has_its_place(sp, change, part, place, values):
    recorded(sp, "a")
    if part == "loss_mask":

        def change(number, sent):
            sent["loss_mask"] = [1, 0, 1, 1] if number == 2 else [1] * len(sent["response_token_ids"])

        place, values = {"step": 2, "token": 13}, (0,)
    recorded(sp, "b", change=change)
    found = [one for one in diff(Side(sp, "a"), Side(sp, "b")) if one.part == part]
    where = {name: value for name, value in found[0].place.items() if name != "chain_of_step"}
    assert where == place
    assert (found[0].b,) == values and found[0].a != found[0].b
    others = {one.part for one in diff(Side(sp, "a"), Side(sp, "b"))} - {part}
    assert others <= {"steps": set(), "loss_mask": {"segments", "spans", "steps"}}.get(part, set())


def test_tokens_come_before_what_follows_from_them(sp):
    recorded(sp, "a")
    recorded(sp, "b", change=changing(0, "response_token_ids", lambda x: [*x[:-1], 4]))
    parts = [part for part, _, _ in told(sp, "a", "b") if part in ("token_ids", "logprobs", "routed_experts")]
    assert parts[0] == "token_ids"
    first = run("diff", sp.config.root, "a:0", "b:0", "--first", "--json", code=1).json["differences"]
    assert [(found["part"], found["place"], found["a"], found["b"]) for found in first] == [
        ("token_ids", {"step": 0, "token": 10}, 2004, 4)
    ]  # fmt: skip


def test_floats_are_compared_bit_for_bit(sp):
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    for name, values in (
        ("a", [np.nan, -0.0, np.inf, -1, nans[0]]), ("same", [np.nan, -0.0, np.inf, -1, nans[0]]),
        ("zero", [np.nan, 0.0, np.inf, -1, nans[0]]), ("bits", [np.nan, -0.0, np.inf, -1, nans[1]]),
    ):  # fmt: skip
        add(s := session(sp, name), [1, 2], [3, 4, 5, 6, 7], logprobs=np.array(values, np.float32))
        s.finalize()
    assert told(sp, "a", "same") == []
    (zero,), (bits,) = (list(diff(Side(sp, "a"), Side(sp, name))) for name in ("zero", "bits"))
    assert (zero.place["token"], zero.how) == (3, "zeros of different sign")
    assert (bits.place["token"], bits.how) == (6, "NaNs of different bits, 0x7fc00000 and 0x7fc00001")
    shown = run("diff", sp.config.root, "a", "bits", "--json", code=1).json["differences"]
    assert (shown[0]["a"], shown[0]["b"]) == ("nan", "nan")


def test_what_was_never_sent_differs_from_what_was(sp):
    tokens = counting(12)
    for name, rows, start in (("a", 11, 0), ("b", 11, 0), ("gap", 7, 4), ("none", 0, 11)):
        s = session(sp, name)
        s.append(
            prompt_token_ids=tokens[:8], response_token_ids=tokens[8:],
            routed_experts=routing(tokens)[11 - rows :] if rows else None, routed_experts_start=start,
        )  # fmt: skip
        s.finalize(view="timeline")
    assert told(sp, "a", "b") == []
    found = [one for one in diff(Side(sp, "a"), Side(sp, "gap")) if one.part == "routed_experts"]
    assert [(one.what, one.place["token"], one.a, one.b) for one in found] == [("gap", 0, "sent", "never sent")]
    none = [one for one in diff(Side(sp, "a"), Side(sp, "none")) if one.part == "routed_experts"]
    assert none[0].what in ("field", "gap") and none[0].b != none[0].a


def test_lengths_differ_and_the_common_part_is_compared(sp):
    recorded(sp, "a")
    recorded(sp, "b", change=changing(2, "response_token_ids", lambda x: x))
    s = session(sp, "short")
    add(s, counting(6), counting(5, 2000), weight_version="0")
    s.finalize()
    parts = [part for part, _, _ in told(sp, "a", "short")]
    assert "steps" in parts and "token_ids" not in parts
    (one, *_), (other,) = sp.final_segments("a"), sp.final_segments("short")
    assert [found[:2] for found in told(sp, one, other, fields=["token_ids"])][1:3] == [
        ("segment", "steps"), ("lengths", "n_tokens")
    ] or told(sp, one, other, fields=["token_ids"])[0][0] == "segment"  # fmt: skip


def test_identity_is_compared_of_what_has_one_name(sp, tmp_path):
    recorded(sp, "a", group_id="g1", sample_index=1)
    recorded(sp, "b", group_id="g2", sample_index=2)
    assert told(sp, "a", "b") == []
    with spool.open(tmp_path / "other") as other:
        recorded(other, "a", group_id="g1", sample_index=5)
        other.annotate("a", reward=1.0)
        found = list(diff(Side(sp, "a"), Side(other, "a")))
    assert [(one.part, one.what, one.a, one.b) for one in found] == [
        ("identity", "sample_index", 1, 5), ("facts", "value", None, 1.0)
    ]  # fmt: skip
    assert found[1].place == {"key": "reward"}


@pytest.mark.parametrize("window", [1, 7, 64])
def test_windows_find_the_first_place(sp, monkeypatch, window):
    monkeypatch.setattr(differing, "_window_tokens", lambda _: window)
    prompt, response = counting(40), counting(60, 5000)
    tokens = [*prompt, *response]
    for name, at in (("a", None), ("b", 71), ("c", 98), ("d", 0)):
        rows = routing(tokens)
        if at is not None:
            rows[at:, 1] = [250, 251]
        add(s := session(sp, name), prompt, response, routed_experts=rows)
        s.finalize()
    for name, at in (("b", 71), ("c", 98), ("d", 0)):
        (found,) = diff(Side(sp, "a"), Side(sp, name))
        assert (found.place["token"], found.place["layer"], found.b) == (at, 1, [250, 251])


def test_a_shared_prefix_is_read_once(sp, monkeypatch):
    for name in ("a", "b"):
        recorded(sp, name)
    read, real = [], sp.read
    monkeypatch.setattr(sp, "read", lambda ref, **options: read.append(options) or real(ref, **options))
    assert told(sp, "a", "b", fields=["routed_experts"]) == []
    starts = [options["tokens"].start for options in read]
    assert starts == [0, 0, 10, 10]


def test_hostile_messages_are_shown_in_part(sp):
    long = "x" * 50_000 + "".join(HOSTILE)
    for name, end in (("a", "1"), ("b", "2")):
        add(s := session(sp, name), [1], [2], messages=[{"role": "tool", "content": long + end, "n": [1, {"k": 1.0}]}])
        s.finalize()
    (found,) = run("diff", sp.config.root, "a", "b", "--json", code=1).json["differences"]
    assert found["place"]["character"] == len(long) and len(found["a"]) < 100
    shown = on_terminal("diff", sp.config.root, "a", "b", code=1)
    assert not any(char in shown.replace("\x1b[1m", "").replace("\x1b[0m", "") for char in HOSTILE)


def test_a_terminal_shows_both_values(sp):
    recorded(sp, "a")
    recorded(sp, "b", change=changing(1, "finish_reason", lambda _: "length"))
    recorded(sp, "c", change=changing(1, "messages", lambda said: [said[0], {**said[1], "content": "\u5bbd" * 90}]))
    for columns in (40, 120):
        shown = on_terminal("diff", sp.config.root, "a", "b", columns=columns, code=1)
        assert "A  stop" in shown and "B  length" in shown, shown
    shown = on_terminal("diff", sp.config.root, "a", "c", columns=40, code=1)
    assert "A  turn 1" in shown and "B  " + "\u5bbd" * 16 + "...\n" in shown, shown


def test_wrong_calls_are_refused(sp):
    recorded(sp, "a")
    root = sp.config.root
    assert "two things" in run("diff", root, code=2).err
    assert "two things" in run("diff", root, "a", "a", "a", code=2).err
    assert "session is compared with a session" in run("diff", root, "a", "a:0", code=2).err
    assert "neither has a field 'nothing'" in run("diff", root, "a", "a", "--field", "nothing", code=3).err
    run("diff", root, "a", "b", code=3)
    assert "no spool" in run("diff", "a", "b", code=3).err
    assert "names 2 things" in run("diff", root, "a:0", "@-", stdin=run("show", root, "a", "--ref").text, code=2).err


def test_real_runs(tmp_path, shared_data):
    roots = [str(tmp_path / name) for name in ("one", "other")]
    for root in roots:
        with spool.open(root) as sp:
            import_runs(shared_data / "routing" / "B_8L_384E" / "taubench_airline_a.npz", sp)
            (row,) = sp.sessions()
    run("diff", f"{roots[0]}::{row.session_id}", f"{roots[1]}::{row.session_id}")
    with spool.open(roots[0]) as sp:
        step = sp.steps(row.session_id)[-1]
        sample = sp.read(step)
        altered_rows = sample["routed_experts"].copy()
        altered_rows[4001, 5, 3] = (altered_rows[4001, 5, 3] + 1) % 384
        shape = spool.MoEShape(num_layers=8, num_experts=384, topk=8)
        for name, rows in (("as it was", sample["routed_experts"]), ("changed", altered_rows)):
            ids = sample["token_ids"]
            with sp.session(name, experts=shape) as s:
                s.append(
                    prompt_token_ids=ids[: step.response_start], response_token_ids=ids[step.response_start :],
                    logprobs=sample["logprobs"], routed_experts=rows,
                )  # fmt: skip
                s.finalize()
    (found,) = run("diff", roots[0], "as it was", "changed", "--json", code=1).json["differences"]
    assert (found["part"], found["place"]["token"], found["place"]["layer"]) == ("routed_experts", 4001, 5)
    assert found["a"] == sample["routed_experts"][4001, 5].tolist() and found["b"] == altered_rows[4001, 5].tolist()
    shutil.rmtree(roots[1])


def test_one_thing_is_not_enough(tmp_path):
    root = str(tmp_path / "s")
    with spool.open(root) as sp:
        recorded(sp, "a")
    done = run("diff", root, "a", code=2)
    assert f"name two things of {root} to compare, not one" in done.err
