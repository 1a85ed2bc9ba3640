"""Responses of inference engines become append keywords: every wire form, and what is wrong with a bad one."""

import base64
import copy
import inspect
import io
import json
import pickle
import threading
import tracemalloc

import numpy as np
import pytest

import spool.engines as engines
from spool.engines import decode_routing, from_sglang, from_vllm
from spool.errors import InputError, NotFoundError, PayloadError, SpoolError
from spool.model.moe import MoEShape, models
from spool.session import Session

SHAPE = MoEShape(num_layers=3, num_experts=300, topk=2)
SPARSE = MoEShape(num_layers=3, num_experts=300, topk=2, moe_layers=(1, 2))
PROMPT, RESPONSE, LOGPROBS = [11, 12, 13], [21, 22], [-0.25, -1.5]


def rows(n, layers=3, topk=2, dtype=np.int32, seed=0):
    high = min(300, np.iinfo(dtype).max + 1)
    return np.random.default_rng(seed).integers(0, high, (n, layers, topk)).astype(dtype)


def b64(array):
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def npy(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return base64.b64encode(file.getvalue()).decode()


def generate(routing=None, **meta):
    logprobs = [[logprob, token, None] for logprob, token in zip(LOGPROBS, RESPONSE, strict=True)]
    return {
        "text": "hi",
        "output_ids": RESPONSE,
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "stop", "matched": 22},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "weight_version": "12",
            "output_token_logprobs": logprobs,
            "routed_experts": routing,
            **meta,
        },
    }


def chat(routing=None, **choice):
    content = [{"token": "x", "logprob": logprob, "top_logprobs": []} for logprob in LOGPROBS]
    return {
        "id": "chatcmpl-1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi"},
                "logprobs": {"content": content},
                "finish_reason": "length",
                "token_ids": RESPONSE,
                "routed_experts": routing,
                **choice,
            }
        ],
        "prompt_token_ids": PROMPT,
        "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
    }


# -- SGLang ---------------------------------------------------------------------------------------------------------


def test_sglang_generate_gives_every_append_keyword():
    routing = rows(4)
    step = from_sglang(generate(b64(routing)), prompt_token_ids=PROMPT, experts=SHAPE)
    assert dict(step).keys() == {
        "prompt_token_ids", "response_token_ids", "logprobs", "routed_experts", "routed_experts_start",
        "weight_version", "finish_reason", "metadata",
    }  # fmt: skip
    assert step.prompt_token_ids.tolist() == PROMPT and step.prompt_token_ids.dtype == np.int32
    assert step.response_token_ids.tolist() == RESPONSE
    assert step.logprobs.tolist() == LOGPROBS and step.logprobs.dtype == np.float32
    assert step.routed_experts.dtype == np.int32
    np.testing.assert_array_equal(step.routed_experts, routing)
    assert (step.routed_experts_start, step.weight_version, step.finish_reason) == (0, "12", "stop")
    assert step.metadata == {"cached_tokens": 1}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_sglang_keeps_the_dtype_the_response_names(dtype):
    routing = rows(4, dtype=np.dtype(dtype))
    step = from_sglang(
        generate(b64(routing), routed_experts_dtype=dtype), prompt_token_ids=PROMPT, experts=MoEShape(3, 300, 2)
    )
    assert step.routed_experts.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(step.routed_experts, routing)


def test_sglang_bare_uint8_that_begins_like_a_npy_file_is_still_ids():
    routing = np.frombuffer(b"\x93NUMPY", np.uint8).reshape(1, 3, 2)
    body = generate(b64(routing), routed_experts_dtype="uint8")
    np.testing.assert_array_equal(from_sglang(body, prompt_token_ids=PROMPT, experts=SHAPE).routed_experts, routing)


def test_a_model_is_named_instead_of_its_shape():
    shape = models["qwen3.6-35b-a3b"]
    routing = np.zeros((4, shape.num_layers, shape.topk), np.int32)
    for read in (
        lambda experts: from_sglang(generate(b64(routing)), prompt_token_ids=PROMPT, experts=experts).routed_experts,
        lambda experts: decode_routing(b64(routing), experts=experts).rows,
    ):
        np.testing.assert_array_equal(read("Qwen3.6-35B-A3B"), read(shape))
        with pytest.raises(NotFoundError, match="no MoE shape named 'nobody'"):
            read("nobody")
        with pytest.raises(InputError, match=r"experts must be a spool\.MoEShape or a name"):
            read(3)


def test_sglang_nested_lists_of_older_servers_keep_their_row_count():
    routing = rows(5)
    step = from_sglang(generate(routing.tolist()), prompt_token_ids=PROMPT, experts=SHAPE)
    np.testing.assert_array_equal(step.routed_experts, routing)
    negative = rows(4)
    negative[1] = -1
    step = from_sglang(generate(negative.tolist()), prompt_token_ids=PROMPT)
    np.testing.assert_array_equal(step.routed_experts, negative)


def test_sglang_start_is_passed_on_even_where_the_server_ignored_it():
    request = {"input_ids": PROMPT, "routed_experts_start_len": 2}
    asked = from_sglang(generate(b64(rows(2))), request=request, experts=SHAPE)
    ignored = from_sglang(generate(b64(rows(4))), request=request, experts=SHAPE)
    assert (asked.routed_experts_start, len(asked.routed_experts)) == (2, 2)
    assert (ignored.routed_experts_start, len(ignored.routed_experts)) == (2, 4)
    assert ignored.prompt_token_ids.tolist() == PROMPT


def test_sglang_weight_version_spans():
    spans = [
        {"version": "7", "start": 0, "end": 0},
        {"version": "8", "start": 0, "end": 1},
        {"version": 9, "start": 1, "end": 2},
    ]
    assert from_sglang(generate(weight_versions=spans), prompt_token_ids=PROMPT).weight_version == (
        ("8", 0, 1), ("9", 1, 2),
    )  # fmt: skip
    one = [{"version": "8", "start": 0, "end": 2}]
    assert from_sglang(generate(weight_versions=one), prompt_token_ids=PROMPT).weight_version == "8"
    assert from_sglang(generate(weight_version=None), prompt_token_ids=PROMPT).weight_version is None


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "8", "start": 0, "end": 3}],
        [{"version": "8", "start": 1, "end": 2}],
        [{"version": "8", "start": 0, "end": 2}, {"version": "9", "start": 1, "end": 2}],
        [{"version": "8", "start": 2, "end": 0}],
        [{"start": 0, "end": 2}],
        ["8"],
        "8",
    ],
)
def test_sglang_weight_version_spans_that_do_not_fit_are_refused(spans):
    with pytest.raises(PayloadError, match="weight_versions"):
        from_sglang(generate(weight_versions=spans), prompt_token_ids=PROMPT)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"type": "length", "length": 2}, "length"),
        ("stop", "stop"),
        (None, None),
        ("tool_calls", "tool_calls"),
        ({"type": "new"}, "new"),
    ],
)
def test_finish_reasons_come_as_object_string_or_null(given, reason):
    step = from_sglang(generate(finish_reason=given), prompt_token_ids=PROMPT)
    assert step.finish_reason == reason
    assert ("finish_reason" in step.keys()) == (reason is not None)  # noqa: SIM118


@pytest.mark.parametrize("routing", [None, "", []])
def test_sglang_aborted_before_any_forward(routing):
    body = {
        "text": "",
        "meta_info": {
            "finish_reason": {"type": "abort", "message": "queue full"},
            "completion_tokens": 0,
            "routed_experts": routing,
        },
    }
    step = from_sglang(body, prompt_token_ids=PROMPT, experts=SHAPE)
    assert step.response_token_ids.tolist() == [] and step.response_token_ids.dtype == np.int32
    assert step.routed_experts is None and step.logprobs is None
    assert (step.finish_reason, step.metadata) == ("abort", {"finish_message": "queue full"})


def test_an_empty_routing_of_a_finished_response_stays_zero_rows_for_append_to_refuse():
    step = from_sglang(generate(""), prompt_token_ids=PROMPT, experts=SHAPE)
    assert step.routed_experts.shape == (0, 3, 2)


def test_sglang_openai_endpoints():
    routing = rows(4)
    body = chat(token_ids=None)
    body["sglext"] = {"routed_experts": b64(routing), "input_ids": PROMPT, "output_ids": [RESPONSE]}
    body["metadata"] = {"weight_version": "3", "weight_versions": None}
    step = from_sglang(body, experts=SHAPE)
    np.testing.assert_array_equal(step.routed_experts, routing)
    assert step.response_token_ids.tolist() == RESPONSE and step.prompt_token_ids.tolist() == PROMPT
    assert (step.weight_version, step.finish_reason, step.logprobs.tolist()) == ("3", "length", LOGPROBS)


def test_sglang_whole_prompt_from_input_logprobs():
    entries = [[None, 11, None], [-0.5, 12, None], [-0.5, 13, None]]
    assert from_sglang(generate(input_token_logprobs=entries)).prompt_token_ids.tolist() == PROMPT
    with pytest.raises(InputError, match="prompt_token_ids="):
        from_sglang(generate(input_token_logprobs=entries[1:]))


def test_sglang_ids_and_scored_ids_must_be_the_same():
    body = generate()
    body["output_ids"] = [21, 99]
    with pytest.raises(PayloadError, match="generated token 1: 99 and 22"):
        from_sglang(body, prompt_token_ids=PROMPT)
    del body["output_ids"]
    assert from_sglang(body, prompt_token_ids=PROMPT).response_token_ids.tolist() == RESPONSE
    del body["meta_info"]["output_token_logprobs"]
    with pytest.raises(InputError, match="return_logprob"):
        from_sglang(body, prompt_token_ids=PROMPT)


@pytest.mark.parametrize("said", [10, None])
@pytest.mark.parametrize("reason", ["stop", "abort", None])
@pytest.mark.parametrize("n_scored", [0, 1, 9, 11])
def test_sglang_loses_and_adds_no_token_where_fewer_or_more_were_scored(n_scored, reason, said):
    ids = list(range(100, 110))
    scored = [[-0.5, token, None] for token in range(100, 100 + n_scored)]
    body = generate(output_token_logprobs=scored, completion_tokens=said, finish_reason={"type": reason})
    body["output_ids"] = ids
    if not n_scored:
        step = from_sglang(body, prompt_token_ids=PROMPT)
        assert step.response_token_ids.tolist() == ids and step.logprobs is None
        return
    with pytest.raises(PayloadError, match=f"output_ids has 10 .* output_token_logprobs has {n_scored}:"):
        from_sglang(body, prompt_token_ids=PROMPT)
    body["output_ids"] = []
    with pytest.raises(PayloadError, match=f"output_ids has 0 .* output_token_logprobs has {n_scored}:"):
        from_sglang(body, prompt_token_ids=PROMPT)


def test_sglang_ids_without_scores():
    body = generate(output_token_logprobs=None)
    step = from_sglang(body, prompt_token_ids=PROMPT)
    assert step.response_token_ids.tolist() == RESPONSE and step.logprobs is None


@pytest.mark.parametrize("said", [0, 1, 3])
def test_sglang_completion_tokens_must_agree(said):
    listed, scored, aborted = generate(completion_tokens=said), generate(completion_tokens=said), generate()
    listed["meta_info"]["output_token_logprobs"] = None
    del scored["output_ids"]
    aborted["meta_info"].update(completion_tokens=said, finish_reason={"type": "abort"})
    for body in (listed, scored, aborted):
        with pytest.raises(PayloadError, match=f"holds 2 generated tokens and meta_info.completion_tokens says {said}"):
            from_sglang(body, prompt_token_ids=PROMPT)
    lost = {"meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": said or 5}}
    with pytest.raises(PayloadError, match="holds 0 generated tokens"):
        from_sglang(lost, prompt_token_ids=PROMPT)


def test_sglang_ids_of_the_choice_that_was_asked_for():
    body = chat(token_ids=None)
    body["choices"].append({**body["choices"][0], "index": 1})
    body["sglext"] = {"output_ids": [[31, 32], RESPONSE]}
    assert from_sglang(body, choice=0).response_token_ids.tolist() == [31, 32]
    assert from_sglang(body, choice=1).response_token_ids.tolist() == RESPONSE
    body["choices"].append(body["choices"][0])
    with pytest.raises(PayloadError, match="no list of ids for choice 2"):
        from_sglang(body, choice=2)


@pytest.mark.parametrize("read", [from_sglang, from_vllm])
def test_choices_lose_and_add_no_token_either(read):
    content = [{"token": "x", "logprob": -0.5}] * 3
    for given in (content[:1], content):
        with pytest.raises(PayloadError, match=f"token_ids has 2 generated tokens and logprobs has {len(given)}:"):
            read(chat(logprobs={"content": given}))
    for empty in ({"content": []}, {"content": None}, {"token_logprobs": []}, None):
        step = read(chat(logprobs=empty))
        assert step.response_token_ids.tolist() == RESPONSE and step.logprobs is None
    spelt = {"tokens": ["token_id:21", "token_id:23"], "token_logprobs": LOGPROBS}
    with pytest.raises(PayloadError, match="generated token 1: 22 and 23"):
        read(chat(logprobs=spelt))
    with pytest.raises(PayloadError, match="has 2 generated tokens and logprobs has 1:"):
        read(chat(token_ids=None, logprobs={**spelt, "token_logprobs": LOGPROBS[:1]}))
    assert read(chat(token_ids=None, logprobs=spelt)).response_token_ids.tolist() == [21, 23]
    with pytest.raises(InputError, match="generated token ids"):
        read(chat(token_ids=None, finish_reason="abort"))


@pytest.mark.parametrize("read", [from_sglang, from_vllm])
def test_usage_must_agree_where_it_is_of_one_choice(read):
    body = chat()
    body["usage"]["completion_tokens"] = 2
    assert read(body).response_token_ids.tolist() == RESPONSE
    body["usage"]["completion_tokens"] = 3
    with pytest.raises(PayloadError, match=r"holds 2 generated tokens and usage\.completion_tokens says 3"):
        read(body)
    body["choices"].append(body["choices"][0])
    assert read(body, choice=1).response_token_ids.tolist() == RESPONSE


@pytest.mark.parametrize("read", [from_sglang, from_vllm])
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "the queue is full", "type": "ServiceUnavailable", "code": 503}},
        {"error": "the queue is full"},
        {"error": {"reason": "the queue is full"}, "choices": []},
        {"object": "error", "message": "the queue is full", "code": 400},
        {"detail": "the queue is full"},
        {"detail": [{"loc": ["body"], "msg": "the queue is full"}]},
    ],
)
def test_what_a_server_says_instead_of_a_response_is_quoted(read, body):
    for given in (body, json.dumps(body)):
        with pytest.raises(PayloadError, match=r"the server sent an error.*the queue is full"):
            read(given, prompt_token_ids=PROMPT)


def test_an_empty_error_is_none():
    body = chat()
    body["error"] = None
    assert from_vllm(body).response_token_ids.tolist() == RESPONSE


@pytest.mark.parametrize("text", ["<html>502 Bad Gateway" + "x" * 5000, b"<html>502 Bad Gateway\xff"])
def test_what_is_not_json_is_quoted_from_its_beginning(text):
    with pytest.raises(InputError, match=r"not JSON.*begins '<html>502 Bad Gateway") as caught:
        from_sglang(text, prompt_token_ids=PROMPT)
    assert len(str(caught.value)) < 500


def test_help_of_decode_routing_shows_the_forms():
    for form in ("prime-rl", "NeMo-RL", "SGLang", "vLLM 0.22", "nrlre1:"):
        assert form in decode_routing.__doc__


def test_a_null_logprob_is_refused_with_its_index():
    body = generate()
    body["meta_info"]["output_token_logprobs"][1][0] = None
    with pytest.raises(PayloadError, match=r"logprobs.*1"):
        from_sglang(body, prompt_token_ids=PROMPT)
    body["meta_info"]["output_token_logprobs"][1] = [-0.5]
    with pytest.raises(PayloadError, match="output_token_logprobs"):
        from_sglang(body, prompt_token_ids=PROMPT)


def test_json_text_with_what_python_servers_write():
    body = generate(b64(rows(4)))
    body["meta_info"]["output_token_logprobs"] = [[float("-inf"), 21, "\ud800"], [-0.0, 22, None]]
    for text in (json.dumps(body), json.dumps(body).encode()):
        step = from_sglang(text, prompt_token_ids=PROMPT, experts=SHAPE)
        assert step.logprobs[0] == -np.inf and np.signbit(step.logprobs[1])
    plain = from_sglang(json.dumps(generate(b64(rows(4)))), prompt_token_ids=PROMPT, experts=SHAPE)
    np.testing.assert_array_equal(plain.routed_experts, rows(4))


@pytest.mark.parametrize("bad", ["{", "[]", "7", b"\xff", [generate()], 7])
def test_what_is_no_response_is_refused(bad):
    with pytest.raises(InputError):
        from_sglang(bad, prompt_token_ids=PROMPT)


# -- vLLM -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_vllm_npy(dtype, version):
    routing = rows(4, dtype=dtype)
    step = from_vllm(chat(npy(routing, version)), experts=SHAPE)
    assert step.routed_experts.dtype == dtype
    np.testing.assert_array_equal(step.routed_experts, routing)
    assert step.prompt_token_ids.tolist() == PROMPT and step.response_token_ids.tolist() == RESPONSE
    assert step.logprobs.tolist() == LOGPROBS
    assert (step.finish_reason, step.metadata) == ("length", {"cached_tokens": 2})


def test_vllm_npy_fortran_order_and_big_endian():
    routing = rows(4)
    np.testing.assert_array_equal(from_vllm(chat(npy(np.asfortranarray(routing)))).routed_experts, routing)
    np.testing.assert_array_equal(from_vllm(chat(npy(routing.astype(">i4")))).routed_experts, routing)
    np.testing.assert_array_equal(from_vllm(chat(npy(rows(0)))).routed_experts.shape, (0, 3, 2))


def test_vllm_completions_form():
    body = {
        "choices": [
            {"token_ids": [1], "logprobs": {"token_logprobs": [-9.0]}, "finish_reason": "stop"},
            {
                "prompt_token_ids": PROMPT,
                "logprobs": {"tokens": ["token_id:21", "token_id:22"], "token_logprobs": LOGPROBS},
                "finish_reason": "stop",
                "routed_experts": npy(rows(4, dtype=np.uint8)),
            },
        ]
    }
    step = from_vllm(body, choice=1)
    assert step.response_token_ids.tolist() == RESPONSE and step.logprobs.tolist() == LOGPROBS
    assert len(step.routed_experts) == 4
    with pytest.raises(InputError, match="no choice 2"):
        from_vllm(body, choice=2)


def test_vllm_prompt_and_generated_rows_of_0_21_are_put_together():
    prompt, generated = rows(3, layers=2, dtype=np.int16), rows(1, layers=2, dtype=np.int16, seed=1)
    prompt[:2] = -1
    body = chat(generated.tolist())
    body["prompt_routed_experts"] = prompt.tolist()
    step = from_vllm(body, experts=SPARSE)
    assert step.routed_experts_start == 0
    np.testing.assert_array_equal(step.routed_experts, np.concatenate((prompt, generated)))

    body["choices"][0]["routed_experts"] = None
    assert len(from_vllm(body, experts=SPARSE).routed_experts) == 3
    body["prompt_routed_experts"] = prompt[1:].tolist()
    with pytest.raises(PayloadError, match="2 rows for 3 prompt tokens"):
        from_vllm(body, experts=SPARSE)


def test_vllm_generated_rows_alone_stand_behind_the_prompt():
    assert from_vllm(chat(rows(1).tolist())).routed_experts_start == 3
    assert from_vllm(chat(rows(4).tolist())).routed_experts_start == 0
    assert from_vllm(chat(rows(2).tolist()), routed_experts_start=2).routed_experts_start == 2


def test_vllm_aborted():
    step = from_vllm(chat(None, token_ids=[], logprobs=None, finish_reason="abort"))
    assert step.routed_experts is None and step.logprobs is None and not len(step.response_token_ids)
    assert step.finish_reason == "abort"


def test_vllm_request_holds_what_the_response_lacks():
    body = chat(npy(rows(2)))
    del body["prompt_token_ids"]
    with pytest.raises(InputError, match="prompt_token_ids="):
        from_vllm(body)
    step = from_vllm(body, request={"prompt": PROMPT, "routed_experts_prompt_start": 2})
    assert (step.routed_experts_start, step.prompt_token_ids.tolist()) == (2, PROMPT)
    with pytest.raises(InputError, match="return_token_ids"):
        from_vllm(chat(token_ids=None))


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def hand_made(header, data=b"\x01\x02"):
    text = header.encode() if isinstance(header, str) else header
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data).decode()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (npy(np.array([[[Bomb()]]], dtype=object)), "dtype"),
        (npy(rows(4).astype(np.float32)), "dtype"),
        (npy(rows(4)[0]), "shape"),
        (npy(rows(4))[:-8], "bytes"),
        (hand_made("{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (1, 1, 2)}"), "dtype"),
        (hand_made("{'descr': '|u1', 'fortran_order': False, 'shape': (1, -1, 2)}"), "shape"),
        (hand_made("{'descr': '|u1', 'fortran_order': False, 'shape': (1, True, 2)}"), "shape"),
        (hand_made("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 3)}"), "2 bytes"),
        (hand_made("{'descr': '|u1', 'fortran_order': False}"), "header"),
        (hand_made("__import__('os').getpid()"), "header"),
        (hand_made(b"\xff\xfe"), "header"),
        (base64.b64encode(b"\x93NUMPY").decode(), "version"),
        (base64.b64encode(b"\x93NUMPY\x09\x00\x00\x00\x00").decode(), "version 9"),
        (base64.b64encode(b"\x93NUMPY\x01\x00\xff\xff{}").decode(), "header"),
    ],
)
def test_bad_npy_files_are_refused_unread(payload, message):
    with pytest.raises(PayloadError, match=message):
        from_vllm(chat(payload))


# -- wires ----------------------------------------------------------------------------------------------------------


def test_prime_rl_and_nemo_envelopes():
    routing = rows(4, dtype=np.uint16)
    got = decode_routing({"data": b64(routing), "shape": [4, 3, 2], "start": 2, "dtype": "uint16"}, experts=SHAPE)
    np.testing.assert_array_equal(got.rows, routing)
    assert (got.rows.dtype, got.start) == (np.uint16, 2)
    for dtype in ("int8", "int16", "int32", "uint16"):
        routing = rows(4, dtype=np.dtype(dtype))
        for text in (f"nrlre1:{dtype}:4x3x2:{b64(routing)}", f"nrlre1:{dtype}:4x3x2:{b64(routing)}".encode()):
            got = decode_routing(text)
            np.testing.assert_array_equal(got.rows, routing)
            assert got.rows.dtype == np.dtype(dtype)


def test_an_envelope_says_its_own_start():
    envelope = {"data": b64(rows(2)), "shape": [2, 3, 2], "start": 2, "dtype": "int32"}
    assert from_vllm(chat(envelope)).routed_experts_start == 2
    assert from_sglang(generate(envelope), prompt_token_ids=PROMPT).routed_experts_start == 2


def test_arrays_of_the_same_process_pass_through():
    routing = rows(4, dtype=np.uint8)
    assert decode_routing(routing).rows is routing


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b64(rows(4))[:-1], "cut off"),
        (b64(rows(4))[:-4], "whole number of rows"),
        (b64(rows(3, topk=1)), "whole number of rows"),
        ("*" * 32, "not base64"),
        ("AAAA\nAAAA===", "not base64"),
        ("é" * 32, "not base64"),
        ("AA==" * 8, "not base64"),
        ("====", "not base64"),
        ("nrlre1:int32:4x3:" + b64(rows(4)), "shape"),
        ("nrlre1:int32:4x3xz:" + b64(rows(4)), "shape"),
        ("nrlre1:float32:4x3x2:" + b64(rows(4)), "dtype"),
        ("nrlre1:int16:4x3x2:" + b64(rows(4)), "bytes"),
        ("nrlre1:int16", "must read"),
        ({"data": b64(rows(4)), "shape": [4, 3, 2]}, "without dtype"),
        ({"data": b64(rows(4)), "shape": [4, 3, 2], "dtype": "object"}, "dtype"),
        ({"data": b64(rows(4)), "shape": [4, 3, 2], "dtype": "int31"}, "dtype"),
        ({"data": b64(rows(4)), "shape": [4, 3, 2], "dtype": 4}, "dtype"),
        ({"data": b64(rows(4)), "shape": "4x3x2", "dtype": "int32"}, "shape"),
        ({"data": b64(rows(4)), "shape": [5, 3, 2], "dtype": "int32"}, "96 bytes"),
        ({"data": b64(rows(4)), "shape": [3, 4, 2], "dtype": "int32"}, "4 layers"),
        ({"data": b64(rows(4)), "shape": [4, 2, 3], "dtype": "int32"}, "3 experts"),
        ({"data": b64(rows(4)), "shape": [4, 3, 2], "dtype": "int32", "start": -1}, "start"),
        ({"data": [1, 2], "shape": [4, 3, 2], "dtype": "int32"}, "base64 text"),
        ([[[1, 2], [3]]], "ragged"),
        ([[[1, 2]] * 3] * 1500 + [[[1, 2]] * 2], "ragged"),
        ([[[1, 2]] * 3] * 1024 + [[[1, 2]] * 2], "ragged"),
        ([[[1.0, 2.0]] * 3], "integers"),
        ([[[True, False]] * 3], "integers"),
        ([[[1, None]] * 3], "integers"),
        ([[["1", "2"]] * 3], "integers"),
        ([[[1, 1 << 40]] * 3], "32 bits"),
        ([[[1, -(1 << 40)]] * 3], "32 bits"),
        ([[1, 2], [3, 4]], "shape"),
        (7, "shape"),
    ],
)
def test_what_is_wrong_with_a_payload_is_named(payload, message):
    with pytest.raises(PayloadError, match=message) as caught:
        decode_routing(payload, experts=SHAPE)
    assert caught.value.details["field"].startswith("routed_experts")


def test_bare_base64_needs_the_shape():
    with pytest.raises(PayloadError, match="experts="):
        decode_routing(b64(rows(4)))
    with pytest.raises(PayloadError, match="experts="):
        decode_routing("")


def test_padding_inside_is_refused_at_piece_borders():
    piece = 1 << 20
    text = "AAAA" * (piece // 4 - 1) + "AAA=" + "AAAA" * 6
    with pytest.raises(PayloadError, match="padding before character 1048576"):
        decode_routing(text, experts=SHAPE, dtype="uint8")


def test_every_length_around_a_piece_border_round_trips():
    for n in (786431, 786432, 786433, 786434):
        data = np.random.default_rng(n).integers(0, 256, (n, 1, 1), dtype=np.uint8)
        got = decode_routing(b64(data), experts=MoEShape(1, 256, 1), dtype="uint8").rows
        np.testing.assert_array_equal(got, data)


def peak_bytes(call):
    tracemalloc.start()
    try:
        result = call()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_decoding_costs_the_decoded_bytes_once():
    shape = MoEShape(num_layers=40, num_experts=256, topk=8)
    routing = np.random.default_rng(0).integers(0, 256, (16_384, 40, 8), dtype=np.int32)
    payloads = {
        "bare": b64(routing),
        "npy": npy(routing),
        "nemo": f"nrlre1:int32:16384x40x8:{b64(routing)}",
        "envelope": {"data": b64(routing), "shape": [16384, 40, 8], "dtype": "int32", "start": 0},
    }
    for name, payload in payloads.items():
        got, peak = peak_bytes(lambda payload=payload: decode_routing(payload, experts=shape).rows)
        assert peak < 1.15 * routing.nbytes + (4 << 20), (name, peak / routing.nbytes)
        np.testing.assert_array_equal(got, routing)


def test_json_text_stays_one_string_until_it_is_decoded():
    shape = MoEShape(num_layers=40, num_experts=256, topk=8)
    routing = np.random.default_rng(0).integers(0, 256, (16_384, 40, 8), dtype=np.int32)
    text = json.dumps(generate(b64(routing))).encode()
    got, peak = peak_bytes(lambda: from_sglang(text, prompt_token_ids=PROMPT, experts=shape))
    assert peak < len(text) + 1.15 * routing.nbytes + (4 << 20), peak / routing.nbytes
    np.testing.assert_array_equal(got.routed_experts, routing)


def test_other_threads_run_while_a_large_payload_is_decoded():
    payload = b64(np.zeros((65_536, 40, 8), np.int32))
    done, ticks = threading.Event(), []

    def tick():
        while not done.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        decode_routing(payload, experts=MoEShape(40, 256, 8))
        during = len(ticks)
    finally:
        done.set()
        thread.join()
    assert during >= 3


def test_a_step_pickles_and_merges_into_keywords():
    step = from_sglang(generate(b64(rows(4))), prompt_token_ids=PROMPT, experts=SHAPE)
    merged = {**step, "messages": []}
    assert merged["messages"] == [] and merged["finish_reason"] == "stop"
    with pytest.raises(KeyError):
        step["messages"]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(step)).routed_experts, step.routed_experts)
    assert set(engines.EngineStep.__struct_fields__) <= set(inspect.signature(Session.append).parameters)


# -- every node of a payload, replaced ------------------------------------------------------------------------------

ODD = [None, 5, -1, 1.5, "x", [], {}, [[]], True]
GONE = object()


def bare():
    return generate(b64(rows(4)), routed_experts_dtype="int32")


def with_spans():
    spans = [{"version": "8", "start": 0, "end": 1}, {"version": 9, "start": 1, "end": 2}]
    prompt = [[None, 11, None], [-0.5, 12, None], [-0.5, 13, None]]
    return generate(rows(4).tolist(), weight_versions=spans, input_token_logprobs=prompt)


def openai_sglang():
    body = chat(token_ids=None)
    body["sglext"] = {"routed_experts": b64(rows(4)), "input_ids": PROMPT, "output_ids": [RESPONSE]}
    return {**body, "metadata": {"weight_version": "3", "weight_versions": None}}


def completions():
    logprobs = {"tokens": ["token_id:21", "token_id:22"], "token_logprobs": LOGPROBS}
    choice = {"prompt_token_ids": PROMPT, "logprobs": logprobs, "finish_reason": "stop", "routed_experts": npy(rows(4))}
    return {"choices": [choice], "usage": {"completion_tokens": 2}}


def apart():
    return {**chat(rows(1, layers=2).tolist()), "prompt_routed_experts": rows(3, layers=2).tolist()}


def enveloped():
    return chat({"data": b64(rows(4)), "shape": [4, 3, 2], "dtype": "int32", "start": 0})


def asked():
    return {"prompt": PROMPT, "input_ids": PROMPT, "routed_experts_prompt_start": 0, "routed_experts_start_len": 0}


PAYLOADS = {
    "generate": (from_sglang, bare, {"prompt_token_ids": PROMPT, "experts": SHAPE}),
    "spans": (from_sglang, with_spans, {"experts": SHAPE}),
    "aborted": (from_sglang, lambda: {"meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}},
                {"prompt_token_ids": PROMPT}),
    "sglext": (from_sglang, openai_sglang, {"experts": SHAPE}),
    "npy": (from_vllm, lambda: chat(npy(rows(4))), {"experts": SHAPE}),
    "completions": (from_vllm, completions, {}),
    "0.21": (from_vllm, apart, {"experts": SPARSE}),
    "envelope": (from_vllm, enveloped, {}),
    "envelope of sglang": (from_sglang, enveloped, {"experts": SHAPE}),
}  # fmt: skip


def nodes(value, path=()):
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in members:
        yield from nodes(inner, (*path, key))


def replaced(value, path, new):
    """Return a copy with the node at ``path`` replaced, or left out."""
    if not path:
        return new
    out = copy.copy(value)
    if len(path) == 1 and new is GONE:
        del out[path[0]]
    else:
        out[path[0]] = replaced(value[path[0]], path[1:], new)
    return out


def check_step(step):
    for ids in (step.prompt_token_ids, step.response_token_ids):
        assert ids.dtype == np.int32 and ids.ndim == 1
    assert step.logprobs is None or step.logprobs.shape == step.response_token_ids.shape
    assert step.routed_experts is None or (step.routed_experts.ndim == 3 and step.routed_experts.dtype.kind in "iu")
    assert type(step.routed_experts_start) is int and step.routed_experts_start >= 0
    assert step.weight_version is None or isinstance(step.weight_version, str | tuple)
    assert step.finish_reason is None or isinstance(step.finish_reason, str)
    assert step.metadata is None or json.dumps(step.metadata)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_with_any_node_replaced_is_read_or_refused(name):
    read, make, arguments = PAYLOADS[name]
    body = make()
    check_step(read(body, **arguments))
    refused = 0
    for path in nodes(body):
        for new in [*ODD, GONE] if path else ODD:
            try:
                check_step(read(replaced(body, path, new), **arguments))
            except SpoolError as error:
                refused += 1
                assert str(error)
            except Exception as error:
                raise AssertionError(f"{path} = {new!r}: {error!r}") from error
    assert refused > 50 or name == "aborted"


@pytest.mark.parametrize("read", [from_sglang, from_vllm])
def test_a_request_with_any_node_replaced_is_read_or_refused(read):
    body = chat(npy(rows(4)))
    del body["prompt_token_ids"]
    check_step(read(body, request=asked(), experts=SHAPE))
    for path in nodes(asked()):
        for new in [*ODD, GONE] if path else ODD:
            try:
                check_step(read(body, request=replaced(asked(), path, new), experts=SHAPE))
            except SpoolError as error:
                assert str(error)


@pytest.mark.parametrize("read", [from_sglang, from_vllm])
@pytest.mark.parametrize("odd", [5, -1, 1.5, "x", b"x", [], {}, object(), [None], [[]]])
@pytest.mark.parametrize("name", ["prompt_token_ids", "experts", "routed_experts_start", "request", "choice"])
def test_arguments_of_readers_are_checked(read, name, odd):
    try:
        check_step(read(chat(npy(rows(4))), **{name: odd}))
    except SpoolError as error:
        assert name == "choice" or name in str(error) or "request" in str(error) or name == "prompt_token_ids"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"meta_info": 5}, "meta_info"), ({"output_ids": "x"}, "output_ids"), ({"output_ids": {}}, "output_ids"),
        ({"meta_info": {"output_token_logprobs": {}}}, "meta_info.output_token_logprobs"),
        ({"meta_info": {"completion_tokens": "2"}}, "meta_info.completion_tokens"),
        ({"meta_info": {"finish_reason": []}}, "meta_info.finish_reason"),
        ({"choices": [[]]}, r"choices\[0\]"), ({"choices": {}}, "choices"),
        ({"choices": [{"logprobs": 5}]}, r"choices\[0\]\.logprobs"),
        ({"choices": [{"token_ids": [1], "logprobs": {"content": "x"}}]}, r"choices\[0\]\.logprobs\.content"),
        ({"choices": [{"token_ids": [1]}], "usage": []}, "usage"), ({"sglext": [1], "output_ids": [1]}, "sglext"),
    ],
)  # fmt: skip
def test_a_member_of_another_shape_is_named_by_its_path(change, path):
    with pytest.raises(PayloadError, match=path):
        from_sglang(change, prompt_token_ids=PROMPT, experts=SHAPE)


def test_arrays_of_the_same_process_are_read_like_lists():
    body = chat(rows(4), token_ids=np.array(RESPONSE))
    step = from_vllm(body, prompt_token_ids=np.array(PROMPT))
    assert (step.prompt_token_ids.tolist(), step.response_token_ids.tolist()) == (PROMPT, RESPONSE)
    assert from_vllm(apart(), prompt_token_ids=np.array(PROMPT)).routed_experts.shape == (4, 2, 2)


def test_json_without_bottom_and_arrays_without_end_are_refused():
    with pytest.raises(InputError, match="not JSON"):
        from_sglang("[" * 200_000, prompt_token_ids=PROMPT)
    with pytest.raises(PayloadError, match="shape"):
        decode_routing({"data": "", "shape": [0, 1 << 70, 2], "dtype": "int32"})


# -- recording ------------------------------------------------------------------------------------------------------


def sparse(n, seed=0):
    """Rows of a model whose layer 0 is dense, experts distinct in a row."""
    out = np.zeros((n, 3, 2), np.int32)
    first = np.random.default_rng(seed).integers(0, 300, (n, 2))
    out[:, 1:, 0], out[:, 1:, 1] = first, (first + 7) % 300
    return out


def read_back(sp, step):
    session = sp.session(experts=SPARSE)
    ref = session.append(**step)
    return sp.read(ref)


def test_each_wire_form_is_stored_the_same(sp):
    routing = sparse(4)
    narrow = routing.astype(np.uint16)
    forms = [
        from_sglang(generate(b64(routing)), prompt_token_ids=PROMPT, experts=SPARSE),
        from_sglang(generate(b64(narrow), routed_experts_dtype="uint16"), prompt_token_ids=PROMPT, experts=SPARSE),
        from_sglang(generate([*routing.tolist(), [[0, 0]] * 3]), prompt_token_ids=PROMPT, experts=SPARSE),
        from_sglang(generate(b64(routing)), prompt_token_ids=PROMPT, experts=SPARSE, routed_experts_start=2),
        from_vllm(chat(npy(narrow)), experts=SPARSE),
        from_vllm(chat(npy(np.asfortranarray(routing).astype(">i4"))), experts=SPARSE),
        from_vllm(chat(f"nrlre1:int16:4x3x2:{b64(routing.astype(np.int16))}"), experts=SPARSE),
        from_vllm(chat({"data": b64(narrow), "shape": [4, 3, 2], "dtype": "uint16", "start": 0}), experts=SPARSE),
        from_vllm(
            {**chat(routing[3:, 1:].tolist()), "prompt_routed_experts": routing[:3, 1:].tolist()}, experts=SPARSE
        ),
    ]
    for step in forms:
        sample = read_back(sp, step)
        np.testing.assert_array_equal(sample["routed_experts"], routing)
        assert sample["routed_experts"].dtype == np.int32
        assert sample["token_ids"].tolist() == PROMPT + RESPONSE
        assert sample["logprobs"].tolist() == LOGPROBS
        assert sample.ref.finish_reason == step.finish_reason


def test_cached_rows_are_a_gap_that_the_chain_fills(sp):
    routing = sparse(6)
    session = sp.session(experts=SPARSE)
    session.append(**from_sglang(generate(b64(routing[:4])), prompt_token_ids=PROMPT, experts=SPARSE))
    cached = routing[:, 1:].astype(np.int16)
    cached[:4] = -1
    body = chat(cached[6:].tolist(), token_ids=[31])
    body |= {"prompt_token_ids": PROMPT + RESPONSE + [30], "prompt_routed_experts": cached.tolist()}
    body["choices"][0]["logprobs"] = None
    sample = sp.read(session.append(**from_vllm(body, experts=SPARSE)))
    np.testing.assert_array_equal(sample["routed_experts"], routing)


def test_aborted_and_weight_versions(sp):
    body = {
        "text": "",
        "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0, "routed_experts": None},
    }
    sample = read_back(sp, from_sglang(body, prompt_token_ids=PROMPT, experts=SPARSE))
    assert (sample.ref.n_tokens, sample.ref.finish_reason) == (3, "abort")
    spans = [{"version": "8", "start": 0, "end": 1}, {"version": "9", "start": 1, "end": 2}]
    sample = read_back(sp, from_sglang(generate(weight_versions=spans), prompt_token_ids=PROMPT))
    assert [(span.version, span.start, span.stop) for span in sample.ref.versions] == [("8", 3, 4), ("9", 4, 5)]


@pytest.mark.parametrize("n_rows", [0, 1, 2, 3, 6])
def test_a_row_count_that_fits_nothing_is_refused(sp, n_rows):
    with pytest.raises(PayloadError) as caught:
        read_back(sp, from_sglang(generate(b64(sparse(n_rows))), prompt_token_ids=PROMPT, experts=SPARSE))
    assert caught.value.details["got"] == n_rows


def test_an_id_out_of_range_is_refused_by_append(sp):
    routing = sparse(4)
    routing[2, 1, 0] = 300
    with pytest.raises(PayloadError, match="300"):
        read_back(sp, from_sglang(generate(b64(routing)), prompt_token_ids=PROMPT, experts=SPARSE))
