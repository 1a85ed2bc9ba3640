"""Mistakes that people make: each is refused with a typed error that says what is wrong and what to do."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

import spool
from spool import ConfigError, InputError, NotFoundError
from spool.model.events import SessionOpened

SHAPE = spool.MoEShape(num_layers=2, num_experts=8, topk=2)


def add(session, **more):
    return session.append(prompt_token_ids=[1, 2], response_token_ids=[3], **more)


def test_a_misspelt_field_in_the_uri_is_refused_before_anything_is_lost(open_spool):
    sp = open_spool(options="fields=token_ids,routed_expert")
    with pytest.raises(ConfigError, match="routed_expert"):
        sp.session("s", experts=SHAPE)


def test_fields_of_the_uri_may_be_built_in_and_unused(open_spool):
    sp = open_spool(options="fields=token_ids,routed_experts")
    assert add(sp.session("s")).n_tokens == 3


def test_too_little_room_is_refused_at_once(spool_uri):
    with pytest.raises(ConfigError, match="hot_bytes"):
        spool.open(f"{spool_uri}?hot_bytes=64KiB")


def test_a_file_is_no_root(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(spool.SpoolError, match="cannot make a spool at"):
        spool.open(str(path))


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, ["hi"], [1], 5])
def test_messages_are_a_list_of_mappings(sp, messages):
    with pytest.raises(InputError, match="message"):
        add(sp.session("s"), messages=messages)


@pytest.mark.parametrize("units", [[("k", 2)], {"k": (1, 16)}, [5], [("k", "x", 1)]])
def test_units_are_triples(sp, units):
    with pytest.raises(InputError, match="key, position, n_rows"):
        add(sp.session("s"), units=units)


def test_experts_may_be_a_models_name(sp):
    session = sp.session("s", experts="mixtral-8x7b")
    routing = np.tile([[[1, 2]]], (2, 32, 1))
    step = add(session, routed_experts=routing)
    assert (sp.read(step)["routed_experts"] == routing).all()
    with pytest.raises(NotFoundError, match="mixtral-8x7b"):
        sp.session("t", experts="mixtral")
    assert "mixtral-8x7b" in repr(spool.models)


@pytest.mark.parametrize("arguments", [{"experts": 8}, {"fields": ["kl"]}])
def test_shapes_and_fields_are_what_they_must_be(sp, arguments):
    with pytest.raises(InputError, match="spool"):
        sp.session("s", **arguments)


def test_an_alignment_that_does_not_exist(sp):
    with pytest.raises(ConfigError, match="token, response, forward, step"):
        spool.FieldSpec(name="f", dtype="int8", align="tokens")


@pytest.mark.parametrize("refs", ["abc", 5, ["abc"]])
def test_read_takes_references(sp, refs):
    with pytest.raises(InputError, match="references"):
        sp.read(refs)
    with pytest.raises(InputError, match="references"):
        sp.read(sp.session("s"))


def test_options_of_a_view_are_known(sp):
    session = sp.session("s")
    add(session)
    for call in (
        lambda: session.view(gap="cut"),
        lambda: sp.view("s", gap="cut"),
        lambda: session.finalize(reward=1.0),
    ):
        with pytest.raises(InputError, match="no option of a view"):
            call()
    assert session.finalize()[0].n_tokens == 3
    with pytest.raises(InputError, match="SegmentRef"):
        sp.annotate("s", segment=0, reward=1.0)


def test_facts_may_be_numpy_or_torch_numbers(sp):
    import torch

    add(sp.session("s"))
    sp.session("s").finalize()
    sp.annotate("s", reward=np.float32(0.5), length=np.int64(7), score=torch.tensor(0.25))
    (ref,) = sp.segments()
    assert (ref.reward, ref.facts) == (0.5, {"length": 7, "score": 0.25})


def test_how_a_block_ends_the_session(sp):
    with sp.session("open") as session:
        add(session)
    assert sp.find_session("open").state == "open"

    async def cancelled():
        async with sp.session("cancelled") as session:
            await session.append_async(prompt_token_ids=[1], response_token_ids=[2])
            await asyncio.sleep(60)

    async def main():
        task = asyncio.create_task(cancelled())
        while sp.find_session("cancelled") is None:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sp.find_session("cancelled").outcome == "aborted"


def test_a_write_that_can_never_fit_does_not_wait(open_spool):
    sp = open_spool(options="hot_bytes=32MiB&append_timeout_s=30")
    session = sp.session("s", experts=spool.MoEShape(num_layers=64, num_experts=256, topk=16))
    rows = np.tile(np.arange(16), (60_000, 64, 1)).astype(np.uint8)
    with pytest.raises(spool.CapacityError) as caught:
        session.append(prompt_token_ids=np.arange(60_000), response_token_ids=[1], routed_experts=rows)
    assert caught.value.details["need"] > caught.value.details["limit"]


POISON = [
    {"finish_reason": {"type": "stop"}}, {"finish_reason": 5}, {"step_id": 7}, {"step_id": b"x"}, {"parent": True},
    {"metadata": 5}, {"metadata": {1: 2}}, {"fields": 5}, {"routed_experts_start": "0"}, {"weight_version": [("a", 0)]},
    {"weight_version": [(None, 0, 1)]}, {"weight_version": [("a", 0.5, 1)]}, {"weight_version": "9" * 4301},
    {"weight_version": 10**5000}, {"weight_version": [("9" * 1025, 0, 1)]}, {"units": [("k", 0, 2**31)]},
    {"units": [("k", 0, 2**63)]}, {"units": [("k", 0, 10**5000)]}, {"units": [("k", 0, float("inf"))]},
    {"units": [("k", 0, 2**30), ("l", 1, 2**30)]},
]  # fmt: skip


@pytest.mark.parametrize("arguments", POISON)
def test_what_a_record_cannot_hold_never_reaches_it(sp, spool_uri, arguments):
    session = sp.session("s")
    with pytest.raises(InputError):
        add(session, **arguments)
    add(session)
    session.finalize()
    sp.annotate("s", reward=1.0)
    with spool.open(spool_uri) as other:
        assert [ref.reward for ref in other.segments()] == [1.0]
        assert other.rebuild()["n_steps"] == 1


@pytest.mark.parametrize("arguments", [{"trim": True}, {"idle_s": "x"}, {"metadata": {1: 2}}, {"attempt": 1.5}])
def test_what_an_opening_cannot_hold_never_reaches_it(sp, arguments):
    with pytest.raises(InputError):
        sp.session("s", **arguments)
    assert add(sp.session("s")).n_tokens == 3


@pytest.mark.parametrize("odd", [object(), "\ud800", 2**70, {"a": ["\ud800"]}, {1: 2}])
def test_metadata_that_cannot_be_recorded_is_named(sp, odd):
    facts = {"fine": 1, "x": odd}
    with pytest.raises(InputError, match="'x' in metadata of session 's' "):
        sp.session("s", metadata=facts)
    with pytest.raises(InputError, match="'x' in metadata of step"):
        add(sp.session("s"), metadata=facts)


def test_metadata_may_be_numpy_numbers(sp):
    add(sp.session("s", metadata={"x": np.float32(0.5)}), metadata={"y": np.int64(7)})
    assert sp.rebuild()["n_sessions"] == 1
    (opened,) = [item.event for item in sp._catalog.session_events("s") if isinstance(item.event, SessionOpened)]
    assert opened.metadata == {"x": 0.5}


def test_messages_with_cycles_or_without_bottom_are_refused(sp):
    cycle: list = []
    cycle.append(cycle)
    deep = {"role": "user", "content": []}
    inner = deep["content"]
    for _ in range(300):
        inner.append([])
        inner = inner[0]
    for content in ({"role": "user", "content": cycle}, deep):
        with pytest.raises(InputError, match="message 0"):
            add(sp.session("s"), messages=[content])
    assert add(sp.session("s")).index == 0


def test_a_step_of_another_session_is_no_parent_and_cannot_be_withdrawn(sp):
    first, second = sp.session("a"), sp.session("b")
    step = add(first)
    add(second)
    with pytest.raises(InputError, match="another session"):
        second.discard(step)
    with pytest.raises(InputError, match="another session"):
        second.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4], parent=step)
    assert len(second.steps) == 1


def test_late_arrays_and_facts_stay_with_the_tokens_they_were_made_for(sp):
    session = sp.session("s")
    session.append(prompt_token_ids=[1, 2], response_token_ids=[3])
    session.append(prompt_token_ids=[1, 2], response_token_ids=[4, 5])
    dropped, _ = session.view(superseded="keep")
    sp.attach(dropped, teacher=np.arange(1, dtype=np.float32), align="response")
    sp.annotate("s", segment=dropped, reward=9.0)
    (kept,) = session.finalize()
    assert kept.steps == (1,)
    with pytest.raises(NotFoundError, match="teacher"):
        sp.read(kept, fields=["teacher"])
    assert next(sp.segments()).reward is None
    assert sp.read(dropped, fields=["teacher"])["teacher"].tolist() == [0.0]


def test_late_arrays_have_the_length_of_what_they_belong_to(open_spool):
    spec = spool.FieldSpec(name="teacher", dtype="float32", align="response")
    sp = open_spool(fields=[spec])
    session = sp.session("s")
    session.append(prompt_token_ids=[1, 2], response_token_ids=[3, 4, 5], logprobs=[0.0] * 3)
    (ref,) = session.finalize()
    for rows, more in ((2, {}), (5, {}), (100, {}), (3, {"align": "token"}), (3, {"align": "zz"})):
        with pytest.raises(InputError):
            sp.attach(ref, teacher=np.zeros(rows, np.float32), **more)
    with pytest.raises(InputError, match="already"):
        sp.attach(ref, logprobs=np.zeros(3, np.float32))
    sp.attach(ref, teacher=np.arange(3, dtype=np.float32))
    assert sp.read(ref, fields=["teacher"])["teacher"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("stream", ["../../other/streams/20260101T000000-00000000", "/etc", ".new-x", "a\0b", ""])
def test_a_stream_in_a_reference_cannot_lead_out_of_the_root(sp, stream):
    import msgspec

    step = add(sp.session("s"))
    moved = {
        name: tuple(msgspec.structs.replace(e, stream=stream) for e in found) for name, found in step.extents.items()
    }
    with pytest.raises(spool.IntegrityError, match="stream"):
        sp.read(msgspec.structs.replace(step, extents=moved))


@pytest.mark.parametrize("change", [{"n": -1}, {"before": -5}, {"after": -(2**40)}, {"row": -1}, {"n": 2**40}])
def test_a_reference_with_impossible_rows_is_refused(sp, change):
    import msgspec

    step = add(sp.session("s"))
    changed = {name: tuple(msgspec.structs.replace(e, **change) for e in found) for name, found in step.extents.items()}
    with pytest.raises(spool.SpoolError):
        sp.read(msgspec.structs.replace(step, extents=changed))


@pytest.mark.parametrize(
    "spec",
    [
        {"dtype": "int16", "train_dtype": "int8"}, {"dtype": "int32", "train_dtype": "uint8"},
        {"dtype": "float32", "train_dtype": "int32"}, {"shape": (2,), "num_layers": 3, "layers": (1, 0)},
        {"shape": (1,), "num_layers": 3, "layers": (5,)}, {"shape": (1,), "num_layers": 3, "layers": (-1,)},
        {"shape": (2,), "num_layers": 3, "layers": (0, 0)}, {"bound": 1.5}, {"ragged": None}, {"dtype": None},
        {"missing": -1.5}, {"shape": (True,)},
    ],
)  # fmt: skip
def test_field_specs_that_would_change_data_are_refused(spec):
    with pytest.raises(ConfigError):
        spool.FieldSpec(**{"name": "f", "dtype": "int8", "align": "token", **spec})


def test_layers_of_a_token_field_may_be_sent_all_or_stored(sp):
    spec = spool.FieldSpec(name="load", dtype="int8", align="token", shape=(2, 3), num_layers=4, layers=(1, 3))
    every = np.zeros((3, 4, 3), np.int8)
    every[:, (1, 3)] = np.arange(18, dtype=np.int8).reshape(3, 2, 3)
    for number, sent in enumerate((every, every[:, (1, 3)])):
        step = add(sp.session(f"s{number}", fields=[spec]), fields={"load": sent})
        assert (sp.read(step)["load"] == every).all()


def test_versions_of_chunks_follow_rows_not_the_order_they_are_listed_in(sp):
    def versions(session_id, chunks, n_response, units=()):
        step = sp.session(session_id, experts=SHAPE).append(
            prompt_token_ids=[1, 2, 3], response_token_ids=list(range(10, 10 + n_response)), routed_experts=chunks,
            units=units,
        )  # fmt: skip
        return [(span.version, span.start, span.stop) for span in step.versions]

    def chunk(start, stop, version):
        rows = np.tile([[[1, 2], [3, 4]]], (stop - start, 1, 1))
        return spool.Chunk(rows, start, version)

    expected = [("a", 3, 5), ("b", 5, 7)]
    assert versions("plain", [chunk(0, 4, "a"), chunk(4, 6, "b")], 4) == expected
    assert versions("turned", [chunk(4, 6, "b"), chunk(0, 4, "a")], 4) == expected
    assert versions("overshoot", [chunk(0, 5, "a"), chunk(4, 6, "b")], 4) == expected
    image = [("image", 1, 10)]
    assert versions("units", [chunk(0, 13, "a"), chunk(13, 15, "b")], 4, image) == expected


def test_defaults_may_be_said(sp):
    session = sp.session("s")
    add(session)
    assert session.finalize() == session.finalize(train_shared_prefix="first", gaps="cut")


@pytest.mark.parametrize(
    "change", [{"n_tokens": -5}, {"n_tokens": 2**63 - 1}, {"n_rows": 10**12}, {"response_start": 9}]
)
def test_a_reference_with_impossible_lengths_is_refused(sp, change):
    import msgspec

    step = add(sp.session("s"))
    with pytest.raises(spool.IntegrityError, match="damaged"):
        sp.read(msgspec.structs.replace(step, **change))


def test_late_numbers_of_steps_are_one_a_step(sp):
    session = sp.session("s")
    first = add(session)
    session.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4])
    (segment,) = session.finalize()
    sp.attach(segment, align="step", value=np.array([0.5, 0.25]))
    sp.attach(first, align="step", value=np.float64(0.5), pair=np.array([1, 2]))
    assert sp.read(segment, fields=["value"])["value"].tolist() == [0.5, 0.25]
    read = sp.read(first, fields=["value", "pair"])
    assert (read["value"].tolist(), read["pair"].tolist()) == ([0.5], [[1, 2]])
    with pytest.raises(InputError, match="2 step rows"):
        sp.attach(segment, align="step", other=np.float64(1))


# -- every argument of every verb, of the wrong type ----------------------------------------------------------------

ODD = {"None": None, "5": 5, "1.5": 1.5, "bytes": b"x", "[]": [], "{}": {}, "object": object(), "[None]": [None],
       "True": True, "text": "\ud800"}  # fmt: skip

CALLS = {
    "session": lambda sp, s, ref, **odd: sp.session(**odd),
    "resume": lambda sp, s, ref, token: sp.resume(token),
    "annotate": lambda sp, s, ref, session_id="ended", segment=None, **fact: sp.annotate(
        session_id, segment=segment, **fact
    ),
    "annotate_many": lambda sp, s, ref, facts=..., said=None: sp.annotate_many(
        {"ended": {"reward": 1.0}, "live": said} if facts is ... else facts
    ),
    "attach": lambda sp, s, ref, to=..., value=(0.5,), **odd: sp.attach(ref if to is ... else to, late=value, **odd),
    "put_unit": lambda sp, s, ref, array: sp.put_unit(array),
    "put_unit_async": lambda sp, s, ref, array: asyncio.run(sp.put_unit_async(array)),
    "read_unit": lambda sp, s, ref, key: sp.read_unit(key),
    "read_units": lambda sp, s, ref, keys: sp.read_units(keys),
    "read_units_async": lambda sp, s, ref, keys: asyncio.run(sp.read_units_async(keys)),
    "discard": lambda sp, s, ref, session_id: sp.discard(session_id),
    "discard_async": lambda sp, s, ref, session_id: asyncio.run(sp.discard_async(session_id)),
    "release": lambda sp, s, ref, refs=(), tag=None: sp.release(refs, tag),
    "publish": lambda sp, s, ref, refs=(), timeout_s=0.1: sp.publish(refs, timeout_s=timeout_s),
    "publish_async": lambda sp, s, ref, refs=(), timeout_s=0.1: asyncio.run(
        sp.publish_async(refs, timeout_s=timeout_s)
    ),
    "unpublished": lambda sp, s, ref, refs: sp.unpublished(refs),
    "export": lambda sp, s, ref, what=None, path="nowhere", **odd: sp.export(what, path, dry_run=True, **odd),
    "checkpointed": lambda sp, s, ref, tag: sp.checkpointed(tag),
    "sessions": lambda sp, s, ref, **odd: list(sp.sessions(**odd)),
    "listing": lambda sp, s, ref, **odd: sp.listing(**odd),
    "groups": lambda sp, s, ref, **odd: sp.groups(**odd),
    "summary": lambda sp, s, ref, **odd: sp.summary(**odd),
    "slowest": lambda sp, s, ref, **odd: sp.slowest(**odd),
    "sample": lambda sp, s, ref, n=3, **odd: sp.sample(n, **odd),
    "news": lambda sp, s, ref, mark=0, **odd: sp.news(mark, **odd),
    "segments": lambda sp, s, ref, **odd: list(sp.segments(**odd)),
    "find_session": lambda sp, s, ref, session_id: sp.find_session(session_id),
    "final_segments": lambda sp, s, ref, session_id: sp.final_segments(session_id),
    "steps": lambda sp, s, ref, session_id: sp.steps(session_id),
    "view": lambda sp, s, ref, session_id="ended", **odd: sp.view(session_id, **odd),
    "messages": lambda sp, s, ref, of: sp.messages(of),
    "transcript": lambda sp, s, ref, session_id: list(sp.transcript(session_id)),
    "tools": lambda sp, s, ref, of: sp.tools(of),
    "read": lambda sp, s, ref, refs=..., **odd: sp.read(ref if refs is ... else refs, **odd),
    "read many": lambda sp, s, ref, **odd: sp.read([ref, ref], **odd),
    "read_async": lambda sp, s, ref, refs=..., **odd: asyncio.run(sp.read_async(ref if refs is ... else refs, **odd)),
    "locate": lambda sp, s, ref, of=..., **odd: sp.locate(ref if of is ... else of, **odd),
    "coverage": lambda sp, s, ref, refs=..., **odd: sp.coverage([ref] if refs is ... else refs, **odd),
    "train.restore": lambda sp, s, ref, refs=..., **odd: spool.train.restore(sp, ref if refs is ... else refs, **odd),
    "verify": lambda sp, s, ref, **odd: sp.verify(deep=True, **odd),
    "open": lambda sp, s, ref, uri=..., **odd: spool.open(sp.config.url if uri is ... else uri, **odd).close(),
    "append": lambda sp, s, ref, **odd: add(s, **odd),
    "append_async": lambda sp, s, ref, **odd: asyncio.run(s.append_async(**odd)),
    "Session.view": lambda sp, s, ref, **odd: s.view(**odd),
    "finalize": lambda sp, s, ref, **odd: s.finalize(**odd),
    "finalize_async": lambda sp, s, ref, **odd: asyncio.run(s.finalize_async(**odd)),
    "Session.discard": lambda sp, s, ref, step: s.discard(step),
    "Session.discard_async": lambda sp, s, ref, step: asyncio.run(s.discard_async(step)),
    "ref_from_json": lambda sp, s, ref, text: spool.ref_from_json(text),
    "models": lambda sp, s, ref, name: spool.models[name],
}
READ = "fields tokens layers dtype out missing verify"
VIEW = "view train_shared_prefix superseded trailing gaps"
STEP = (
    "response_token_ids logprobs loss_mask routed_experts routed_experts_start weight_version messages tools "
    "finish_reason step_id parent units fields metadata"
)
ARGUMENTS = {
    "session": "session_id group_id sample_index rollout_step source prompt_id split attempt experts fields prefer "
    "trim idle_s metadata",
    "resume": "token", "annotate": "session_id segment reward judge", "annotate_many": "facts said",
    "attach": "to align value",
    "discard": "session_id", "discard_async": "session_id", "release": "refs tag", "checkpointed": "tag",
    "listing": "where order limit", "groups": "where order limit",
    "summary": "where current_version", "slowest": "where limit", "sample": "n where", "news": "mark where",
    "sessions": "where discarded", "segments": "where view", "find_session": "session_id",
    "final_segments": "session_id", "steps": "session_id", "transcript": "session_id",
    "view": f"session_id {VIEW}", "messages": "of", "tools": "of",
    "read": f"refs {READ}", "read many": READ, "read_async": f"refs {READ}", "locate": "of fields tokens layers",
    "verify": "progress", "open": "uri fields observer",
    "append": STEP.removeprefix("response_token_ids "),
    "append_async": f"prompt_token_ids {STEP}", "Session.view": VIEW, "finalize": f"{VIEW} outcome inline",
    "finalize_async": f"{VIEW} outcome inline", "Session.discard": "step", "Session.discard_async": "step",
    "unpublished": "refs", "export": "what path format view dtype", "coverage": "refs fields",
    "train.restore": "refs layout fields lengths experts rank_slice framework device missing version mask_versions "
    "drop max_staleness lazy verify",
    "put_unit": "array", "put_unit_async": "array", "read_unit": "key", "read_units": "keys",
    "read_units_async": "keys",
    "publish": "refs timeout_s", "publish_async": "refs timeout_s", "ref_from_json": "text", "models": "name",
}  # fmt: skip


def contents(sp):
    """What is recorded, as any process would find it."""
    sessions = [(row.session_id, row.state, row.n_steps, row.facts) for row in sp.sessions(discarded=True)]
    events = [len(sp._catalog.session_events(session_id)) for session_id, *_ in sessions]
    return sessions, events, [(ref.id, ref.reward, ref.facts) for ref in sp.segments()]


@pytest.mark.parametrize(("verb", "argument"), [(v, name) for v, names in ARGUMENTS.items() for name in names.split()])
def test_an_argument_of_the_wrong_type_is_refused_by_a_typed_error_and_changes_nothing(sp, verb, argument):
    add(sp.session("ended"), logprobs=[0.5])
    (ref,) = sp.session("ended").finalize()
    live = sp.session("live")
    add(live)
    before, refused = contents(sp), 0
    for shown, odd in ODD.items():
        try:
            CALLS[verb](sp, live, ref, **{argument: odd})
        except spool.SpoolError as error:
            refused += 1
            assert contents(sp) == before, shown
            assert str(error)
        except Exception as error:
            raise AssertionError(f"{verb}({argument}={shown}): {error!r}") from error
        else:
            before = contents(sp)
            if before[0] and next(row for row in before[0] if row[0] == "live")[1] != "open":
                live = sp.session(f"live{shown}")
                add(live)
                before = contents(sp)
    assert refused or (verb, argument) in {("sessions", "discarded"), ("annotate", "judge")}


def test_every_public_verb_is_swept():
    verbs = {f"{kind}{name}" for kind, cls in (("", spool.Spool), ("Session.", spool.Session)) for name in vars(cls)}
    swept = CALLS.keys() | {f"Session.{name}" for name in CALLS}
    without = {"close", "flush", "info", "usage", "rebuild", "recover", "expire_idle", "gc", "backlog",
               "spill", "status"}  # fmt: skip
    inside = {"abandon", "begin", "end", "end_async", "check_same", "expire", "is_live", "is_pending", "is_recorded",
              "is_refused", "known_step", "on_thread", "suspend", "transaction"}  # fmt: skip
    left = {verb for verb in verbs if not verb.rpartition(".")[2].startswith("_")} - swept - without
    assert left == {f"Session.{name}" for name in inside}


def test_a_filter_with_a_name_that_nothing_has_is_refused(sp):
    add(sp.session("s"))
    (ref,) = sp.session("s").finalize()
    verbs = (sp.sessions, sp.segments, lambda where: sp.segments(where, view="timeline"))
    for verb in verbs:
        with pytest.raises(InputError, match="did you mean reward") as caught:
            verb("rewrd > 0.5")
        assert "n_tokens" in str(caught.value) and "late facts here: none" in str(caught.value)
        with pytest.raises(InputError, match="at character 14: 'judge' is no column"):
            verb("reward > 0 or judge = 'rm'")
    sp.annotate("s", judge="rm")
    sp.annotate("s", segment=ref, teacher=1)
    for verb in verbs:
        assert len(list(verb("judge = 'rm'"))) == 1
        assert list(verb("judge != 'rm' or teacher = 2")) == []
        with pytest.raises(InputError, match=r"did you mean judge.*(?s:.)*late facts here: judge, teacher"):
            verb("jugde = 'rm'")


def test_columns_of_the_others_are_named(sp):
    add(sp.session("s"))
    sp.session("s").finalize()
    for view in (None, "timeline"):
        with pytest.raises(InputError, match="'state' is a column of sessions"):
            sp.segments("state = 'final'", view)
    with pytest.raises(InputError, match="'superseded' is a column of segments"):
        sp.sessions("superseded")
    assert [row.session_id for row in sp.sessions("state = 'final'")] == ["s"]


@pytest.mark.parametrize(
    "name", ["state", "n_tokens", "superseded", "and", "NULL", "a-b", "2x", "", "import time", "\u0000"]
)
def test_facts_that_filters_could_not_find_are_refused_with_the_names_taken(sp, name):
    add(sp.session("s"))
    with pytest.raises(InputError, match=r"cannot name a fact.*none of .*n_tokens") as caught:
        sp.annotate("s", **{"fine": 1, name: 2})
    assert caught.value.details["names"] == [name]
    assert sp.find_session("s").facts == {}
    sp.annotate("s", reward=1, größe=2)
    assert len(list(sp.sessions("größe = 2"))) == 1


@pytest.mark.parametrize("text", ["reward = '1.0'", "'5' < n_tokens", "n_tokens in (1, '2')", "index between 0 and '9'",
                                  "released = 'true'"])  # fmt: skip
def test_numbers_are_not_compared_with_texts(sp, text):
    with pytest.raises(InputError, match=r"(reward|n_tokens|index|released) is a number, and this is a text"):
        sp.segments(text)


def test_times_are_compared_with_dates(sp):
    add(sp.session("s"))
    sp.session("s").finalize()
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    for text in (
        "opened_at > '2026-01-01'",
        f"'{tomorrow}' >= last_at",
        f"finished_at between '2001-01-01' and '{tomorrow}'",
        f"opened_at < '{tomorrow[:10]}T23:59:59Z' and opened_at > 0",
    ):
        assert len(list(sp.sessions(text))) == len(list(sp.segments(text))) == 1, text
    assert list(sp.sessions(f"opened_at > '{tomorrow}'")) == []
    with pytest.raises(InputError, match="opened_at is a time"):
        sp.sessions("opened_at > '1767225600'")


def test_unknown_names_are_refused_however_they_are_meant(sp):
    add(sp.session("s"))
    with pytest.raises(InputError, match="did you mean reward"):
        sp.sessions("Reward > 0.5")
    with pytest.raises(InputError, match=r"'foo' is no column.*in single quotes, 'foo'"):
        sp.sessions("reward = foo")
    with pytest.raises(InputError) as caught:
        sp.sessions("xyzzy = 1")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_is_finite(sp, reward):
    add(sp.session("s"))
    with pytest.raises(InputError, match="no filter finds"):
        sp.annotate("s", reward=reward)
    assert sp.find_session("s").reward is None


def test_derived_segments_are_filtered_by_facts_that_only_other_pages_have(sp, monkeypatch):
    monkeypatch.setattr("spool.derived.PAGE", 1)
    for session_id in ("a", "b"):
        add(sp.session(session_id))
        sp.session(session_id).finalize()
    sp.annotate("b", judge="rm")
    assert [ref.session_id for ref in sp.segments("judge = 'rm'", view="timeline")] == ["b"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_has_not_are_null_in_it(sp, number):
    import json
    import pickle

    add(sp.session("s"))
    sp.session("s").finalize()
    sp.annotate("s", reward=1, kl=number)
    (ref,) = sp.final_segments("s")
    text = ref.to_json()
    assert "reward" in json.loads(text, parse_constant=pytest.fail) and '"kl":null' in text
    read = spool.ref_from_json(text)
    assert (read.reward, read.facts) == (1.0, {"kl": None})
    assert repr(pickle.loads(pickle.dumps(ref)).facts["kl"]) == repr(number)


def test_a_refused_inline_leaves_the_session_open(sp):
    session = sp.session("s")
    add(session)
    for inline, error in ((5, InputError), ("token_ids", InputError), ([None], InputError), (["nope"], NotFoundError)):
        with pytest.raises(error, match="inline"):
            session.finalize(inline=inline)
    assert sp.find_session("s").state == "open"
    assert session.finalize(inline=("token_ids",))[0].inline.keys() == {"token_ids"}


def test_segments_of_another_spool_are_not_released_here(sp, tmp_path):
    with spool.open(tmp_path / "other") as other:
        add(other.session("s"))
        refs = other.session("s").finalize()
        with pytest.raises(InputError, match="go to that one with it"):
            sp.release(refs)
        other.release(refs, tag="a")
        other.release(ref for ref in refs)
        with pytest.raises(InputError, match=r"refs must be segments.*entry 0 is StepRef"):
            other.release(other.steps("s"))


def test_a_reference_to_a_step_that_is_not_there_has_no_messages(sp):
    import msgspec

    step = add(sp.session("s"), messages=[{"role": "user", "content": "hi"}])
    assert len(sp.messages(step)) == 1
    for call in (sp.messages, sp.tools):
        with pytest.raises(NotFoundError, match="no step 7"):
            call(msgspec.structs.replace(step, index=7))


@pytest.mark.parametrize("slices", [slice("a", 2), slice(0, 1.5), [slice(0, 2), 5], 5, "ab", {}, slice(0, 2, 2)])
def test_slices_are_slices_of_integers(sp, slices):
    step = add(sp.session("s"))
    with pytest.raises(InputError, match=r"slices|integers"):
        sp.read(step, tokens=slices)
    if isinstance(slices, slice):
        with pytest.raises(InputError, match="layers"):
            sp.read(step, layers=slices)


def test_a_gap_refuses_an_inline_field_before_the_session_is_final(sp):
    session = sp.session("s")
    session.append(prompt_token_ids=[1], response_token_ids=[2], logprobs=[-1.0])
    session.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4])
    with pytest.raises(spool.GapError, match="logprobs"):
        session.finalize(inline=["logprobs"])
    assert sp.find_session("s").state == "open"
    session.append(prompt_token_ids=[1, 2, 3, 4], response_token_ids=[5], logprobs=[-1.0])
    assert session.finalize(inline=["token_ids"])[0].inline.keys() == {"token_ids"}


@pytest.mark.parametrize("inline", [["nope"], ["logprobs"]])
def test_a_block_that_a_refused_finalize_ends_is_failed(sp, inline):
    async def rollout():
        async with sp.session("s") as session:
            await session.append_async(prompt_token_ids=[1], response_token_ids=[2])
            await session.finalize_async(outcome="completed", inline=inline)

    with pytest.raises(NotFoundError):
        asyncio.run(rollout())
    assert sp.find_session("s").outcome == "failed"


def test_a_gap_outside_the_forward_says_what_helps(sp):
    session = sp.session("s", experts=SHAPE)
    session.append(prompt_token_ids=[1], response_token_ids=[2], logprobs=[-1.0])
    session.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4, 5])
    (ref,) = session.finalize()
    with pytest.raises(spool.GapError, match=r"leave it out \(fields=\)") as found:
        sp.read(ref)
    assert "gaps='cut'" not in str(found.value) and "missing=" in str(found.value)
    assert sp.read(ref, fields=["token_ids", "loss_mask"])["loss_mask"].tolist() == [0, 1, 0, 1, 1]
    assert sp.read(ref, missing=0)["logprobs"].tolist() == [-1.0, 0.0, 0.0, 0.0]
    (late,) = sp.view("s", gaps="cut")
    assert late.n_tokens == 5


@pytest.mark.parametrize(
    "spans", [[("7", 0, 5), ("8", 2, 4)], [("7", 0, 3), ("8", 2, 5)], [("7", 0, 5), ("8", 0, 5)], [("7", 0, 5)] * 2]
)
def test_weight_versions_that_overlap_are_refused_by_name(sp, spans):
    session = sp.session("s")
    with pytest.raises(spool.PayloadError, match="overlap") as found:
        session.append(prompt_token_ids=[1], response_token_ids=[1, 2, 3, 4, 5], weight_version=spans)
    assert all(repr(version) in str(found.value) for version, _, _ in spans)
    assert session.steps == []


@pytest.mark.parametrize("spans", [[("7", 0, 5), ("8", 6, 7)], [("7", 0, 5), ("8", 5, 3)], [("7", -1, 5)]])
def test_weight_versions_outside_the_response_are_refused(sp, spans):
    with pytest.raises(spool.PayloadError, match="every generated token needs one version"):
        sp.session("s").append(prompt_token_ids=[1], response_token_ids=[1, 2, 3, 4, 5], weight_version=spans)


def test_a_closed_spool_is_asked_nothing(tmp_path):
    with spool.open(tmp_path / "s") as sp:
        step = add(sp.session("s"))
    calls = [
        *(sp.sessions, sp.segments, sp.info, sp.verify, sp.usage, lambda: sp.read(step), lambda: sp.locate(step)),
        *(lambda: sp.find_session("s"), lambda: sp.steps("s"), lambda: sp.view("s"), lambda: sp.session("t")),
    ]
    for call in calls:
        with pytest.raises(spool.SessionStateError, match="was closed; open it again"):
            call()
    sp.close()


def test_an_empty_step_id_is_refused(sp):
    with pytest.raises(InputError, match="step_id of step '' of session 's' is empty"):
        add(sp.session("s"), step_id="")


@pytest.mark.parametrize(("dtype", "meant"), [("float", "float32"), ("bf16", "bfloat16"), ("unit8", "uint8")])
def test_a_dtype_that_is_close_is_suggested(dtype, meant):
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        spool.FieldSpec(name="x", dtype=dtype, align="token")


def test_the_module_shows_its_own_names_only():
    shown = {name for name in dir(spool) if not name.startswith("__")}
    assert shown == {*spool.__all__, "engines", "importers", "testing", "train"}
