"""Manifests and fact files: what they keep of events, who can read them, and what damage does."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.errors import IntegrityError
from spool.formats import manifest
from spool.formats.frames import decode_event, encode_event
from spool.formats.manifest import PackEntry
from spool.model.events import (
    Annotated,
    Attached,
    Checkpointed,
    Released,
    SessionDiscarded,
    SessionFinalized,
    SessionOpened,
    StepCommitted,
    StepDiscarded,
    ToolsStored,
    Transaction,
    without_text,
)
from spool.model.fields import LOGPROBS
from spool.model.refs import Extent, SegmentRef


def step(index, session_id="u1", **facts):
    return StepCommitted(
        session_id, index, f"id-{index}", 1.5 + index, index - 1 if index else None, 0, 4, 9, 9,
        {"token_ids": (Extent("s", 10, 9, 0, 2**32 - 1, 1, 2),)}, **facts,
    )  # fmt: skip


def segment(index=0):
    return SegmentRef(
        spool_id="0123456789abcdef", session_id="u1", view="lineage", index=index, count=2, steps=(0, 1), n_tokens=9,
        n_rows=9, response_start=4,
    )  # fmt: skip


def entry(stream="s", pack=0, n=0):
    return PackEntry(
        stream, pack, n, 12.5, {"token_ids": 9}, {f"streams/{stream}/token_ids/c/{pack}": 100}, 100, 140,
        {"token_ids": "raw"},
    )  # fmt: skip


TEXT = b'[{"role":"user","content":"a very secret message"}]'
EVENTS = [
    SessionOpened("u1", 1.0, metadata={"who": "é"}),
    ToolsStored("k", b'[{"name":"run"}]'),
    step(0, messages=TEXT, finish_reason="stop", tools_key="k", inherited_messages=3),
    Transaction((step(1, messages=TEXT, metadata={"a": 1}), StepDiscarded("u1", 1, 3.0), ToolsStored("l", TEXT))),
    Annotated("u1", 4.0, {"reward": float("inf"), "ok": [1, None]}, "lineage/0"),
    Attached("u1", 4.5, ":0", LOGPROBS, {"logprobs": (Extent("s", 0, 5, 4, 1), Extent("t", 7, 1, 9, 2))}),
    SessionFinalized("u1", 5.0, "truncated", "lineage", (segment(0), segment(1)), {"gaps": "cut"}),
    Released("u1", 5.5, ("lineage/0",), "tag"),
    SessionDiscarded("u2", 5.6),
    Checkpointed("c", 6.0),
]
PAYLOADS = [encode_event(event) for event in EVENTS]


def table_of(data):
    return pq.read_table(pa.BufferReader(data))


def test_events_come_back_without_text_and_with_everything_else():
    ((got, payloads),) = manifest.decode(manifest.encode([(entry(n=len(EVENTS)), PAYLOADS)]))
    assert got == entry(n=len(EVENTS))
    back = [decode_event(payload) for payload in payloads]
    assert back[1] == ToolsStored("k", b"")
    assert back[2] == step(0, finish_reason="stop", tools_key="k", inherited_messages=3)
    assert back[3] == Transaction((step(1, metadata={"a": 1}), StepDiscarded("u1", 1, 3.0), ToolsStored("l", b"")))
    assert back[6].segments == (segment(0), segment(1))
    kept = [n for n in range(len(EVENTS)) if n not in (1, 2, 3)]
    assert [payloads[n] for n in kept] == [PAYLOADS[n] for n in kept]
    assert not any(b"secret" in payload for payload in payloads)


def test_a_payload_without_text_is_kept_byte_for_byte():
    # what a later version adds at the end of an event is not lost when manifests are rolled up
    longer = bytearray(encode_event(Checkpointed("c", 6.0)))
    assert longer[0] == 0x93
    longer[0] = 0x94
    longer += b"\xa3new"
    first = manifest.encode([(entry(n=1), [bytes(longer)])])
    ((_, payloads),) = manifest.decode(first)
    assert payloads == [bytes(longer)]
    assert manifest.decode(manifest.encode(manifest.decode(first))) == manifest.decode(first)


def test_packs_of_a_roll_up_stay_apart_and_in_order():
    packs = [(entry("b", 1, 3), PAYLOADS[:3]), (entry("a", 7, 0), []), (entry("a", 8, 7), PAYLOADS[3:])]
    rolled = manifest.encode([pack for each in packs for pack in manifest.decode(manifest.encode([each]))])
    back = manifest.decode(memoryview(rolled))
    assert [got for got, _ in back] == [pack for pack, _ in packs]
    assert [len(payloads) for _, payloads in back] == [3, 0, 7]
    assert rolled == manifest.encode(back)
    assert manifest.decode(manifest.encode([])) == []


def test_columns_say_what_the_events_do():
    packs = [(entry("a", 3, 2), PAYLOADS[:2]), (entry("b", 0, 8), PAYLOADS[2:])]
    data = manifest.encode(packs)
    rows = table_of(data).to_pylist()
    assert list(rows[0]) == ["stream", "pack", "seq", "kind", "session_id", "at", "event"]
    assert [(row["stream"], row["pack"], row["seq"]) for row in rows] == [
        ("a", 3, 0), ("a", 3, 1), *(("b", 0, n) for n in range(8))
    ]  # fmt: skip
    kinds = ["open", "tools", "step", "all", "note", "attach", "final", "release", "discard", "ckpt"]
    assert [row["kind"] for row in rows] == kinds
    assert [row["session_id"] for row in rows] == ["u1", None, "u1", None, "u1", "u1", "u1", "u1", "u2", None]
    assert [row["at"] for row in rows] == [1.0, None, 1.5, None, 4.0, 4.5, 5.0, 5.5, 5.6, 6.0]
    assert [row["event"] for row in rows] == [payload for _, found in manifest.decode(data) for payload in found]
    facts = pq.read_metadata(pa.BufferReader(data)).metadata
    assert facts[b"spool:format"] == b"1"
    assert [pack["stream"] for pack in json.loads(facts[b"spool:packs"])] == ["a", "b"]


def test_the_checksum_is_that_of_the_file_with_zeros_for_its_digits():
    data = manifest.encode([(entry(n=len(EVENTS)), PAYLOADS)])
    digits = pq.read_metadata(pa.BufferReader(data)).metadata[b"spool:crc32c"]
    assert data.count(digits) == 1
    assert int(digits, 16) == crc32c(data.replace(digits, b"00000000"))


def test_a_session_id_that_looks_like_the_checksum_does_no_harm():
    odd = ["\x18\x0cspool:crc32c\x18\x0800000000", "\x18\x0cspool:crc32c\x18\x08ffffffff"]
    payloads = [encode_event(SessionDiscarded(name, 1.0)) for name in odd]
    packs = [(entry(odd[0], n=2), payloads)]
    data = manifest.encode(packs)
    assert manifest.decode(data) == packs
    facts = pq.read_metadata(pa.BufferReader(data))
    assert facts.metadata[b"spool:crc32c"] != b"00000000"
    sessions = facts.row_group(0).column(table_of(data).column_names.index("session_id")).statistics
    assert (sessions.min, sessions.max) == tuple(odd)


def test_fact_files_are_the_same_table_without_packs():
    payloads = [PAYLOADS[n] for n in (4, 7, 8, 9)]
    data = manifest.encode_facts(payloads)
    assert manifest.decode_facts(data) == payloads
    rows = table_of(data).to_pylist()
    assert [(row["stream"], row["pack"], row["seq"]) for row in rows] == [(None, None, n) for n in range(4)]
    assert table_of(data).schema == table_of(manifest.encode([(entry(n=1), PAYLOADS[:1])])).schema
    assert manifest.decode_facts(manifest.encode_facts([])) == []
    with pytest.raises(IntegrityError, match="4 events where its packs have 0"):
        manifest.decode(data)
    with pytest.raises(IntegrityError, match="not a fact file"):
        manifest.decode_facts(manifest.encode([(entry(), [])]))


def test_an_entry_that_counts_other_events_is_refused():
    for n in (1, 3):
        with pytest.raises(IntegrityError, match=f"2 events where its packs have {n}"):
            manifest.decode(manifest.encode([(entry(n=n), PAYLOADS[:2])]))


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.binary(max_size=40)), max_size=30))
@settings(max_examples=30, deadline=None)
def test_any_events_survive(found):
    events = [step(n, session_id, messages=text, signature=text) for n, (session_id, text) in enumerate(found)]
    packs = [(entry(n=len(events)), [encode_event(event) for event in events])]
    ((_, payloads),) = manifest.decode(manifest.encode(packs))
    assert payloads == [encode_event(without_text(event)) for event in events]


def test_many_row_groups(monkeypatch):
    monkeypatch.setattr(manifest, "_GROUP_ROWS", 64)
    payloads = [encode_event(step(n, signature=b"%d" % n * (n % 7))) for n in range(300)]
    data = manifest.encode([(entry("a", 0, 100), payloads[:100]), (entry("b", 0, 200), payloads[100:])])
    assert pq.read_metadata(pa.BufferReader(data)).num_row_groups == 5
    assert [found for _, found in manifest.decode(data)] == [payloads[:100], payloads[100:]]


def test_every_flipped_byte_is_seen():
    good = manifest.encode([(entry(n=len(EVENTS)), PAYLOADS)])
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        with pytest.raises(IntegrityError, match="damaged"):
            manifest.decode(bytes(bad))


def test_torn_and_foreign_files_are_refused():
    good = manifest.encode([(entry(n=len(EVENTS)), PAYLOADS)])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"event": [b"x"]}), sink)
    for bad in (b"", b"PAR1", good[:-1], good[1:], good[: len(good) // 2], bytes(len(good)), good + good[-8:],
                sink.getvalue().to_pybytes(), PAYLOADS[0]):  # fmt: skip
        with pytest.raises(IntegrityError, match="damaged"):
            manifest.decode(bad)
        with pytest.raises(IntegrityError, match="damaged"):
            manifest.decode_facts(bad)


def test_files_of_a_later_format_are_refused(monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", "2")
    data = manifest.encode([(entry(), [])])
    monkeypatch.undo()
    with pytest.raises(IntegrityError, match="newer Spool"):
        manifest.decode(data)


def test_a_damaged_payload_is_not_taken_in():
    with pytest.raises(IntegrityError, match="not an event"):
        manifest.encode([(entry(n=1), [b"\x93\xa4what\x01\x02"])])


def test_an_entry_is_a_small_json_file():
    data = manifest.entry_json(entry(n=4), "s3://bucket/runs")
    assert manifest.parse_entry(data) == entry(n=4)
    assert json.loads(data)["stored_bytes"] == 100
    for bad in (b"", data[:-3], b"[]", b"{}", b"\xff", data.replace(b'"pack":0', b'"pack":"x"')):
        with pytest.raises(IntegrityError, match="entry of a spilled pack"):
            manifest.parse_entry(bad)


def test_pyarrow_alone_reads_it(tmp_path):
    path = tmp_path / "0.parquet"
    path.write_bytes(manifest.encode([(entry(n=len(EVENTS)), PAYLOADS)]))
    code = (
        "import sys, json, pyarrow.parquet as pq\n"
        "table = pq.read_table(sys.argv[1], filters=[('kind', '==', 'step')])\n"
        "packs = json.loads(pq.read_metadata(sys.argv[1]).metadata[b'spool:packs'])\n"
        "assert not any(name.split('.')[0] == 'spool' for name in sys.modules)\n"
        "print(table.num_rows, packs[0]['n_events'])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert run.stdout == "1 10\n"


def test_text_is_left_out_of_events_and_nothing_else():
    for event in EVENTS:
        light = without_text(event)
        assert (light is event) == (type(event) not in (StepCommitted, ToolsStored, Transaction))
        assert without_text(light) is light
    assert without_text(step(0)) == step(0)
