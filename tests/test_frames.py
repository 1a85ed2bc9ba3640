import mmap

import msgspec
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.errors import InputError, IntegrityError
from spool.formats.frames import (
    LOG_HEADER,
    Frame,
    check_header,
    decode_event,
    encode_event,
    find_frame,
    frame,
    scan,
)
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
)
from spool.model.fields import LOGPROBS, FieldSpec
from spool.model.refs import Extent, SegmentRef, Span, Unit, VersionSpan

EXTENTS = {"token_ids": (Extent("s", 0, 9, 0, 2**32 - 1), Extent("t", 2**40, 1, 9, 7, 3, 4)), "routed_experts": ()}
STEP = StepCommitted(
    "u1", 3, "third", 1.25, 2, 10, 12, 19, 30, EXTENTS, (VersionSpan("12", 12, 19),), "stop", (Unit("k", 4, 12),), 1,
    b"h" * 32, b"p" * 16, b"e" * 16, b"s" * 16, 2, b'[{"role":"user","content":"\\ud800"}]', "tools", {"a": [1, None]},
)  # fmt: skip
EVENTS = [
    SessionOpened("u1", 1.0, "g", 3, 40, "swe", fields=(LOGPROBS, FieldSpec(name="x", dtype="int8", align="step"))),
    STEP,
    ToolsStored("tools", b"[]"),
    StepDiscarded("u1", 3, 2.0),
    SessionFinalized(
        "u1",
        2.5,
        "completed",
        "lineage",
        (SegmentRef(spool_id="i", session_id="u1", view="lineage", spans=(Span(0, 1, 2),), extents=EXTENTS),),
    ),
    SessionDiscarded("u1", 3.0),
    Annotated("u1", 3.5, {"reward": 1.0, "deep": {"a": ["é", True]}}, "lineage/0"),
    Attached("u1", 4.0, ":3", LOGPROBS, EXTENTS),
    Released("u1", 5.0, ("lineage/0",), "ckpt-40"),
    Checkpointed("ckpt-40", 6.0),
]


def log_of(payloads):
    return LOG_HEADER + b"".join(map(frame, payloads))


@pytest.mark.parametrize("event", [*EVENTS, Transaction(tuple(EVENTS))], ids=lambda event: type(event).__name__)
def test_events_come_back_equal(event):
    again = decode_event(encode_event(event))
    assert again == event
    assert type(again) is type(event)
    assert decode_event(memoryview(encode_event(event))) == event


def test_the_format_on_disk_does_not_drift():
    payload = encode_event(Checkpointed("a", 1.0))
    assert payload.hex() == "93a4636b7074a161cb3ff0000000000000"
    assert frame(payload) == (17).to_bytes(4, "little") + crc32c(payload).to_bytes(4, "little") + payload
    assert crc32c(b"123456789") == 0xE3069283
    assert LOG_HEADER == b"spoollog\x01\x00\x00\x00\x00\x00\x00\x00"
    assert msgspec.msgpack.decode(payload) == ["ckpt", "a", 1.0]


def test_an_event_of_a_newer_writer_is_read_and_one_of_an_older_gets_defaults():
    values = msgspec.msgpack.decode(encode_event(STEP))
    assert decode_event(msgspec.msgpack.encode([*values, "new"])) == STEP
    old = decode_event(msgspec.msgpack.encode(values[:11]))
    assert (old.extents, old.messages, old.metadata, old.finish_reason) == (EXTENTS, b"", {}, None)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93\xa4what\x01\x02", b"\x93\xa4ckpt\x01\x02", encode_event(STEP)[:-1], encode_event(STEP) + b"x",
     b"\x93\xa4ckpt\xa1\xff\xcb\x00\x00\x00\x00\x00\x00\x00\x00"],
)  # fmt: skip
def test_a_payload_that_is_no_event_is_an_integrity_error(payload):
    with pytest.raises(IntegrityError, match="not an event"):
        decode_event(payload)


@pytest.mark.parametrize("fact", ["\ud800", {"\udfff": 1}, object(), 1 << 70])
def test_facts_that_cannot_be_recorded_are_the_callers_mistake(fact):
    with pytest.raises(InputError, match="Annotated cannot be recorded"):
        encode_event(Annotated("u", 1.0, {"x": fact}))


def test_an_empty_payload_is_not_framed():
    with pytest.raises(InputError, match="1 to 4294967295 bytes, not 0"):
        frame(b"")


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=30))
def test_a_whole_log_scans_to_its_payloads(payloads):
    log, offset = log_of(payloads), len(LOG_HEADER)
    scanned = scan(log)
    frames = list(scanned)
    assert [f.payload for f in frames] == payloads
    for f in frames:
        assert (f.offset, f.end) == (offset, offset + 8 + len(f.payload))
        offset = f.end
    assert (scanned.end, scanned.stop) == (len(log), "end")
    if frames:
        middle = len(frames) // 2
        assert list(scan(log, frames[middle].offset)) == frames[middle:]


def test_a_log_cut_at_any_byte_gives_the_frames_before_and_says_torn():
    payloads = [encode_event(event) for event in EVENTS]
    log = log_of(payloads)
    ends = [f.end for f in scan(log)]
    for size in range(len(LOG_HEADER), len(log) + 1):
        scanned = scan(log[:size])
        n = len(list(scanned))
        assert n == sum(end <= size for end in ends)
        whole = ends[n - 1] if n else len(LOG_HEADER)
        assert (scanned.end, scanned.stop) == (whole, "end" if size == whole else "torn")
        assert find_frame(log[:size], scanned.end) is None


@given(st.data())
@settings(max_examples=300)
def test_damage_in_the_middle_is_told_from_a_torn_end(data):
    payloads = [encode_event(event) for event in EVENTS]
    log = bytearray(log_of(payloads))
    frames = list(scan(bytes(log)))
    victim = data.draw(st.integers(0, len(frames) - 1))
    at = data.draw(st.integers(frames[victim].offset, frames[victim].end - 1))
    log[at] ^= data.draw(st.integers(1, 255))
    scanned = scan(log)
    assert list(scanned) == frames[:victim]
    assert scanned.end == frames[victim].offset
    assert scanned.stop in ("crc", "torn")
    behind = find_frame(log, scanned.end)
    assert behind == (frames[victim + 1].offset if victim + 1 < len(frames) else None)
    if behind is not None:
        assert list(scan(log, behind)) == frames[victim + 1 :]


@pytest.mark.parametrize("zeros", [1, 7, 8, 9, 4096])
def test_zeros_behind_the_last_frame_are_a_torn_end(zeros):
    log = log_of([b"abc"]) + bytes(zeros)
    scanned = scan(log)
    assert [f.payload for f in scanned] == [b"abc"]
    assert (scanned.end, scanned.stop) == (len(log) - zeros, "torn")
    assert find_frame(log, scanned.end) is None


def test_a_hole_of_zeros_before_valid_frames_is_damage():
    payload = encode_event(STEP)
    log = log_of([payload]) + bytes(5000) + frame(payload)
    scanned = scan(log)
    assert len(list(scanned)) == 1
    assert find_frame(log, scanned.end) == len(log) - len(frame(payload))


def test_the_search_crosses_its_pieces_and_does_not_believe_look_alikes():
    rng, payload = np.random.default_rng(0), encode_event(STEP)
    for gap in ((1 << 20) - 9, (1 << 20) - 8, 1 << 20, (2 << 20) + 3):
        noise = bytearray(rng.bytes(gap))
        noise[100:112] = b"\x10\x00\x00\x00\x00\x00\x00\x00\x93\xa4ck"
        log = log_of([payload]) + bytes(noise) + frame(payload)
        scanned = scan(log)
        list(scanned)
        assert find_frame(log, scanned.end) == len(LOG_HEADER) + len(frame(payload)) + gap
        assert find_frame(log, len(log) - len(frame(payload))) is None


def test_no_length_makes_the_scan_leave_the_buffer():
    for length in (1, 2**31, 2**32 - 1):
        scanned = scan(LOG_HEADER + length.to_bytes(4, "little") + bytes(4))
        assert list(scanned) == []
        assert (scanned.end, scanned.stop) == (16, "torn")


@pytest.mark.parametrize("head", [b"", LOG_HEADER[:15], b"x" * 16, LOG_HEADER[:8] + b"\x02" + bytes(7), bytes(16)])
def test_a_foreign_header_is_refused(head):
    with pytest.raises(IntegrityError, match="not a commit log"):
        check_header(head)
    check_header(LOG_HEADER + b"anything")


def test_a_memory_map_is_scanned_and_can_be_closed_after(tmp_path):
    path = tmp_path / "0.log"
    path.write_bytes(log_of([b"one", b"two"]))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
        check_header(log)
        scanned = scan(log)
        frames = list(scanned)
        assert frames == [Frame(16, 27, b"one"), Frame(27, 38, b"two")]
        assert find_frame(log, 16) is None
    assert frames[0].payload == b"one"


def test_a_log_of_many_frames_is_scanned_with_one_pass():
    payloads = [encode_event(StepDiscarded("u", i, 1.0)) for i in range(20_000)]
    scanned = scan(log_of(payloads))
    assert [decode_event(f.payload).index for f in scanned] == list(range(20_000))
