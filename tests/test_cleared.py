"""Tokens that a loss mask cleared: `trainable_tokens` counts what is left, as exactly as a read does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import add, routing, session

import spool
from spool.errors import IntegrityError
from spool.formats.masks import cleared_before, pack_cleared
from spool.train import restore, select


def ones(sp, refs):
    return [int(sample["loss_mask"].sum()) for sample in sp.read(refs, fields=["loss_mask"])]


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_bits_are_counted(kept):
    mask = np.array(kept, np.uint8)
    expected = np.concatenate(([0], np.cumsum(mask == 0)))
    assert cleared_before(pack_cleared(mask), len(mask)).tolist() == expected.tolist()
    assert cleared_before(b"", len(mask)).tolist() == [0] * (len(mask) + 1)


@pytest.mark.parametrize("data", [b"x", pack_cleared(np.zeros(8, np.uint8))[:3], pack_cleared(np.zeros(8, np.uint8))])
def test_torn_bits_are_refused(data):
    with pytest.raises(IntegrityError, match="9 generated tokens"):
        cleared_before(data, 9)


def test_references_and_filters_count_what_is_left(sp):
    s = session(sp)
    step = add(s, [1, 2], [3, 4, 5, 6], loss_mask=[1, 0, 0, 1])
    add(s, [1, 2, 3, 4, 5, 6, 7], [8, 9], loss_mask=[1, 1])
    add(s, [1, 2, 3, 4, 5, 6, 17], [18], loss_mask=[0])
    segments = s.finalize()
    assert (step.trainable_tokens, [ref.trainable_tokens for ref in segments]) == (2, [4, 0])
    for view, options in (("lineage", {"train_shared_prefix": "all"}), ("timeline", {})):
        refs = sp.view("s", view, **options)
        assert [ref.trainable_tokens for ref in refs] == ones(sp, refs)
    assert ones(sp, [step, *segments]) == [2, 4, 0]
    assert [ref.index for ref in sp.segments(where="trainable_tokens = 4")] == [0]
    assert [ref.index for ref in sp.segments(where="trainable_tokens = 0")] == [1]
    assert [ref.steps for ref in sp.segments(where="trainable_tokens = 2", view="timeline")] == [(0,), (1,)]
    again = spool.ref_from_json(segments[0].to_json())
    assert again == segments[0] and again.trainable_tokens == 4


def test_a_segment_that_a_gap_ends_inside_a_mask_counts_exactly(sp):
    s = session(sp)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    rows = routing(tokens)
    add(s, tokens[:2], tokens[2:], loss_mask=[0, 1, 0, 1, 0], routed_experts=[spool.Chunk(rows[:4], 0)])
    (cut,) = s.finalize()
    assert cut.n_tokens == 5 and [cut.trainable_tokens] == ones(sp, [cut]) == [1]


def test_a_trimmed_token_is_not_counted(sp):
    s = session(sp, trim=1)
    add(s, [1, 2], [3, 4, 5], loss_mask=[1, 0, 0])
    add(s, [1, 2, 3, 4, 6], [7])
    (segment,) = s.finalize()
    assert [segment.trainable_tokens] == ones(sp, [segment]) == [2]
    assert segment.spans[0].n_cleared == 1


def test_a_mask_that_is_not_stored_clears_nothing(open_spool):
    sp = open_spool(options="fields=token_ids")
    s = sp.session("s")
    step = s.append(prompt_token_ids=[1], response_token_ids=[2, 3], loss_mask=[0, 1])
    assert [step.trainable_tokens] == ones(sp, [step]) == [2]


def test_a_session_that_is_gone_on_with_knows_its_masks(open_spool, spool_uri):
    with spool.open(spool_uri) as sp:
        add(session(sp), [1, 2], [3, 4], loss_mask=[0, 1])
    sp = open_spool()
    s = session(sp)
    add(s, [1, 2, 3, 4], [5])
    (segment,) = s.finalize()
    assert [segment.trainable_tokens] == ones(sp, [segment]) == [2]


@settings(max_examples=60)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 24), min_size=1, max_size=3),
)
def test_a_head_that_trains_something_is_never_dropped_as_untrained(shared_sp, masks, cuts):
    s, tokens = session(shared_sp, None), [1, 2]
    for mask in masks:
        add(s, tokens, response := [*range(len(tokens), len(tokens) + len(mask))], loss_mask=mask)
        tokens = [*tokens, *response]
    (ref,) = s.view(trailing="keep")
    exact = {0, *(span.start for span in ref.spans), *(span.stop for span in ref.spans)}
    for cut in sorted({min(cut, ref.n_tokens) for cut in cuts}, reverse=True):
        ref = ref.head(cut)
        (n_ones,) = ones(shared_sp, [ref])
        assert ref.trainable_tokens >= n_ones
        assert ref.trainable_tokens == n_ones or cut not in exact
        kept = restore(shared_sp, [ref], fields=[], drop=["untrained"])["kept"]
        assert len(select([ref], drop=["untrained"])) == len(kept) == (ref.trainable_tokens > 0)
