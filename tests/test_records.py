import json
import mmap
import subprocess
import sys
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.errors import IntegrityError
from spool.formats import records
from spool.formats.frames import encode_event
from spool.model.events import (
    Annotated,
    Attached,
    Checkpointed,
    SessionFinalized,
    SessionOpened,
    StepCommitted,
    StepDiscarded,
    ToolsStored,
    Transaction,
)
from spool.model.fields import LOGPROBS
from spool.model.refs import Extent


def step(index, **facts):
    return StepCommitted(
        "u1", index, f"id-{index}", 1.5 + index, index - 1 if index else None, 0, 4, 9, 9,
        {"token_ids": (Extent("s", 10, 9, 0, 2**32 - 1, 1, 2),)}, **facts,
    )  # fmt: skip


MIXED = [
    SessionOpened("u1", 1.0, metadata={"who": "é"}),
    ToolsStored("k", b'[{"name":"run"}]'),
    step(0, messages=b'[{"role":"user","content":"\\ud800"}]', finish_reason="weird_reason", tools_key="k"),
    Transaction((step(1, metadata={"a": 1}), StepDiscarded("u1", 1, 3.0))),
    Annotated("u1", 4.0, {"reward": float("nan"), "ok": [1, None]}, "lineage/0"),
    Attached("u1", 4.5, ":0", LOGPROBS, {"logprobs": (Extent("s", 0, 5, 4, 1), Extent("t", 7, 1, 9, 2))}),
    SessionFinalized("u1", 5.0, "truncated", "lineage"),
    Checkpointed("c", 6.0),
]


def test_columns_say_what_the_events_do():
    payloads = [encode_event(event) for event in MIXED]
    table = pa.ipc.open_file(pa.py_buffer(records.encode(payloads))).read_all()
    assert table.column("event").to_pylist() == payloads
    assert table.column("kind").to_pylist() == ["open", "tools", "step", "all", "note", "attach", "final", "ckpt"]
    rows = table.to_pylist()
    assert [row["session_id"] for row in rows] == ["u1", None, "u1", None, "u1", "u1", "u1", None]
    assert [row["at"] for row in rows] == [1.0, None, 1.5, None, 4.0, 4.5, 5.0, 6.0]
    assert json.loads(rows[0]["facts"]) == {"who": "é"}
    assert (rows[1]["tools_key"], json.loads(rows[1]["tools"])) == ("k", [{"name": "run"}])
    got = rows[2]
    assert (got["index"], got["step_id"], got["parent"], got["n_prompt"], got["n_tokens"]) == (0, "id-0", None, 4, 9)
    assert (got["finish_reason"], got["tools_key"], got["inner"]) == ("weird_reason", "k", None)
    assert json.loads(got["messages"])[0]["content"] == "\ud800"
    extent = {"stream": "s", "row": 10, "n": 9, "position": 0, "crc": 2**32 - 1, "before": 1, "after": 2}
    assert got["extents"] == [{"array": "token_ids", **extent}]
    inner = rows[3]["inner"]
    assert [(part["kind"], part["index"], part["facts"]) for part in inner] == [
        ("step", 1, '{"a":1}'),
        ("undo", 1, None),
    ]
    assert inner[0]["extents"] == got["extents"]
    assert json.loads(rows[4]["facts"]) == {"reward": None, "ok": [1, None]}
    assert [run["stream"] for run in rows[5]["extents"]] == ["s", "t"]
    assert rows[6]["outcome"] == "truncated"


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 700])
def test_any_number_of_rows_comes_back_in_order(n):
    payloads = [encode_event(step(i)) for i in range(n)]
    file = records.encode(payloads)
    assert records.decode(file) == payloads
    for row in {0, 254, 255, 256, 511, n - 1} & set(range(n)):
        assert records.one(file, row) == payloads[row]
    for row in (-1, n, n + 256):
        with pytest.raises(IntegrityError, match=f"no row {row}"):
            records.one(file, row)


def test_one_row_of_a_memory_map_touches_one_batch(tmp_path):
    blob = [encode_event(step(i, messages=b"[%d]" % i * 300)) for i in range(256 * 12)]
    path = tmp_path / "0.arrow"
    path.write_bytes(records.encode(blob))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = pa.total_allocated_bytes()
        assert records.one(mapped, 256 * 7 + 3) == blob[256 * 7 + 3]
        assert pa.total_allocated_bytes() == before
        damaged = bytearray(mapped)
    # everything but the schema, the footer and the wanted batch's neighbourhood may be garbage
    reader = pa.ipc.open_file(pa.py_buffer(bytes(damaged)))
    assert reader.num_record_batches == 12
    size = len(damaged) // 12
    damaged[size * 2 : size * 5] = b"\xff" * (size * 3)
    assert records.one(damaged, 256 * 7 + 3) == blob[256 * 7 + 3]
    with pytest.raises(IntegrityError):
        records.decode(damaged)


@given(st.lists(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-5, 5) | st.none())))
@settings(max_examples=30, deadline=None)
def test_any_facts_survive(facts):
    payloads = [encode_event(Annotated("u", 1.0, each)) for each in facts]
    file = records.encode(payloads)
    assert records.decode(file) == payloads
    table = pa.ipc.open_file(pa.py_buffer(file)).read_all()
    assert [json.loads(text) if text else {} for text in table.column("facts").to_pylist()] == facts


def test_what_the_columns_cannot_say_does_not_stop_a_seal():
    odd = [
        Annotated("u", 1.0, {"x": {(1, 2): 3}}),
        step(0, messages=b"\xff\xfe"),
        Transaction(()),
    ]
    payloads = [encode_event(event) for event in odd]
    rows = pa.ipc.open_file(pa.py_buffer(records.encode(payloads))).read_all().to_pylist()
    assert [row["event"] for row in rows] == payloads
    assert (rows[0]["facts"], rows[1]["messages"], rows[2]["inner"]) == (None, "��", [])


def test_a_damaged_payload_is_not_sealed():
    with pytest.raises(IntegrityError, match="not an event"):
        records.encode([b"\x93\xa4what\x01\x02"])


def test_a_damaged_file_is_an_integrity_error():
    file = bytes(records.encode([encode_event(step(i)) for i in range(300)]))
    for bad in (b"", b"ARROW1", file[:-1], file[: len(file) // 2], bytes(len(file))):
        with pytest.raises(IntegrityError, match="damaged"):
            records.decode(bad)
        with pytest.raises(IntegrityError, match="damaged"):
            records.one(bad, 0)


def test_no_flipped_bit_alters_events_or_ends_the_process():
    events = [encode_event(event) for event in MIXED] + [encode_event(step(i)) for i in range(300)]
    file, random, n_damaged = bytes(records.encode(events)), Random(3), 0
    for _ in range(6000):
        bit, bad = random.randrange(8 * len(file)), bytearray(file)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            assert records.decode(bytes(bad)) == events
        except IntegrityError:
            n_damaged += 1
    assert n_damaged > 1000


def test_pyarrow_alone_reads_it(tmp_path):
    path = tmp_path / "0.arrow"
    path.write_bytes(records.encode([encode_event(event) for event in MIXED]))
    code = (
        "import sys, pyarrow as pa; table = pa.ipc.open_file(sys.argv[1]).read_all();"
        "assert not any(name.split('.')[0] == 'spool' for name in sys.modules);"
        "print(table.num_rows, table.column('step_id').to_pylist()[2])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert run.stdout == "8 id-0\n"
