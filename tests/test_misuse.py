"""Mistakes that people make: each is refused with a typed error that says what is wrong and what to do."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import spool
from spool import ConfigError, InputError, NotFoundError

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
