"""Tokens a window at a time: against the whole arrays, and text that is cut anywhere."""

import math

import numpy as np
import pytest
from kit import SHAPE, add, counting, probabilities, routing
from tokenizers import AddedToken, Tokenizer, decoders, models

from spool.errors import InputError, NotFoundError
from spool.importers import import_runs
from spool.look.tokens import Tokens
from spool.look.vocabulary import Vocabulary
from spool.model.fields import FieldSpec


@pytest.fixture(scope="module")
def tokenizer_path(shared_data):
    return str(shared_data / "routing" / "tokenizer.json")


@pytest.fixture(scope="module")
def vocabulary(tokenizer_path):
    return Vocabulary.load(tokenizer_path)


# -- text -----------------------------------------------------------------------------------------------------------


def test_characters_in_pieces_are_bytes_and_the_last_piece_completes_them(vocabulary, tokenizer_path):
    encoding = Tokenizer.from_file(tokenizer_path).encode("hé 😀!\n")
    texts = vocabulary.texts(encoding.ids)
    pieces = [(text.text, text.completes) for text in texts]
    assert pieces[:3] == [("h", ""), ("\\xc3", ""), ("\\xa9", "é")]
    assert ("\\xf0", "") in pieces and ("\\x80", "😀") in pieces
    assert pieces[-2:] == [("!", ""), ("\n", "")]
    assert not any(text.special for text in texts)


def test_a_piece_cut_off_in_front_or_behind_is_bytes(vocabulary, tokenizer_path):
    ids = Tokenizer.from_file(tokenizer_path).encode("😀a").ids
    assert [text.text for text in vocabulary.texts(ids[1:])][-1] == "a"
    assert all(text.text.startswith("\\x") and not text.completes for text in vocabulary.texts(ids[1:-1]))
    assert all(text.text.startswith("\\x") and not text.completes for text in vocabulary.texts(ids[:2]))


def test_marks_are_special_and_unknown_ids_are_none(vocabulary):
    found = vocabulary.texts([1, 2, None, -1, 10**12, 8191, 8192])
    assert [(text.text, text.special) for text in found[:5]] == [
        ("<|im_start|>", True), ("<|im_end|>", True), (None, False), (None, False), (None, False),
    ]  # fmt: skip
    assert found[5].text is not None and found[6].text is None


def test_a_mark_ends_a_run_of_bytes(vocabulary, tokenizer_path):
    half = Tokenizer.from_file(tokenizer_path).encode("😀").ids
    found = vocabulary.texts([*half[:2], 2, *half[2:]])
    assert not any(text.completes for text in found)


def test_other_kinds_of_vocabulary():
    words = Tokenizer(models.WordLevel({"▁he": 0, "llo": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x98>": 4, "<0x80>": 5}))
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    words.add_special_tokens([AddedToken("</s>")])
    words.add_tokens([AddedToken("tool")])
    found = Vocabulary(words).texts([0, 1, 2, 3, 4, 5, 6, 7])
    assert [text.text for text in found] == [" he", "llo", "\\xf0", "\\x9f", "\\x98", "\\x80", "</s>", "tool"]
    assert found[5].completes == "😀" and [text.special for text in found[6:]] == [True, False]
    plain = Tokenizer(models.WordLevel({"▁he": 0, "<0xF0>": 1}))
    assert [text.text for text in Vocabulary(plain).texts([0, 1])] == ["▁he", "<0xF0>"]


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match="no tokenizer file"):
        Vocabulary.load(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"is not a tokenizer\.json"):
        Vocabulary.load(str(tmp_path / "tokenizer.json"))


def test_empty_tokens_and_nothing(vocabulary):
    empty = Tokenizer(models.WordLevel({"": 0, "a": 1}))
    assert [text.text for text in Vocabulary(empty).texts([0, 1, 0])] == ["", "a", ""]
    assert vocabulary.texts([]) == []


# -- rows -----------------------------------------------------------------------------------------------------------


def branchy(sp):
    """A segment of two versions, an observation in between, and a mask that is cleared in the middle."""
    s = sp.session(experts=SHAPE)
    add(s, counting(10), counting(6, 50), weight_version="3", loss_mask=[1, 1, 0, 0, 1, 1])
    add(s, [*counting(10), *counting(6, 50), 900, 901], counting(4, 70), weight_version="4")
    return s.finalize(view="lineage")[0]


def test_rows_are_what_whole_reads_say(sp):
    ref = branchy(sp)
    whole = sp.read(ref)
    rows = Tokens(sp, ref).rows(0, 10**9)
    assert [row.position for row in rows] == list(range(22))
    assert [row.token_id for row in rows] == whole["token_ids"].tolist()
    assert [row.mask for row in rows] == (whole["loss_mask"] != 0).tolist()
    assert [row.mask for row in rows][10:16] == [True, True, False, False, True, True]
    generated = [*range(10, 16), *range(18, 22)]
    assert [row.position for row in rows if row.step is not None] == generated
    assert [rows[p].logprob for p in generated] == whole["logprobs"][[p - 10 for p in generated]].tolist()
    assert all(row.logprob is None and row.version is None for row in rows if row.position not in generated)
    assert [rows[p].version for p in generated] == ["3"] * 6 + ["4"] * 4
    assert [row.position for row in rows if row.new_version] == [18]
    assert [row.position for row in rows if row.starts_response] == [10]
    assert {rows[p].step for p in range(18, 22)} == {1} and rows[0].text is None


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (3, 11), (9, 10), (10, 11), (15, 19), (21, 22), (22, 99)])
def test_a_window_is_a_part_of_the_whole(sp, start, stop):
    ref = branchy(sp)
    tokens = Tokens(sp, ref)
    assert tokens.rows(start, stop) == tokens.rows(0, 22)[start:stop]


def test_only_the_window_is_read(sp, monkeypatch, vocabulary):
    ref = branchy(sp)
    tokens, asked, read = Tokens(sp, ref, vocabulary), [], sp.read
    monkeypatch.setattr(sp, "read", lambda ref, **options: asked.append(options["tokens"]) or read(ref, **options))
    tokens.rows(12, 15)
    tokens.experts(13)
    assert asked == [slice(8, 15), slice(12, 14)]


def test_edges_are_where_mask_or_version_changes(sp):
    ref = branchy(sp)
    assert Tokens(sp, ref).edges().tolist() == [10, 12, 14, 16, 18]
    s = sp.session(experts=SHAPE)
    versions = [("1", 0, 4), ("1", 4, 6), ("2", 6, 9)]
    s.append(prompt_token_ids=counting(3), response_token_ids=counting(9), weight_version=versions)
    assert Tokens(sp, s.finalize(view="timeline")[0]).edges().tolist() == [3, 9]


def test_odd_logprobs_come_as_they_are(sp):
    s = sp.session()
    ref = s.append(prompt_token_ids=[1], response_token_ids=counting(4),
                   logprobs=np.array([-0.1, math.nan, -math.inf, -0.0], np.float32))  # fmt: skip
    found = [row.logprob for row in Tokens(sp, ref).rows(0, 5)]
    assert found[0] is None and found[1] == np.float32(-0.1) and math.isnan(found[2]) and found[3] == -math.inf
    assert math.copysign(1, found[4]) == -1


def test_what_was_not_stored_is_none(open_spool):
    sp = open_spool(options="fields=logprobs")
    s = sp.session()
    add(s, counting(3), counting(2, 9), routed_experts=None)
    rows = Tokens(sp, s.finalize(view="timeline")[0]).rows(0, 5)
    assert [row.token_id for row in rows] == [None] * 5
    assert [row.logprob for row in rows][3:] == probabilities([*counting(3), *counting(2, 9)], 3).tolist()


def test_a_step_without_logprobs_has_none_among_others(sp):
    s = sp.session()
    s.append(prompt_token_ids=[1, 2], response_token_ids=[3, 4], logprobs=[-1.0, -2.0])
    s.append(prompt_token_ids=[1, 2, 3, 4, 5], response_token_ids=[6, 7])
    ref = s.append(prompt_token_ids=[1, 2, 3, 4, 5, 6, 7, 8], response_token_ids=[9], logprobs=[-3.0])
    (segment,) = s.finalize(view="lineage")
    wanted = [None, None, -1.0, -2.0, None, None, None, None, -3.0]
    assert [row.logprob for row in Tokens(sp, segment).rows(0, 9)] == wanted
    assert [row.logprob for row in Tokens(sp, ref).rows(0, 9)] == [None] * 8 + [-3.0]


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_tokens(sp, n):
    ref = sp.session(experts=SHAPE).append(prompt_token_ids=counting(n), response_token_ids=[])
    tokens = Tokens(sp, ref)
    assert [row.token_id for row in tokens.rows(0, 50)] == counting(n)
    assert tokens.edges().tolist() == []


# -- experts and other fields ----------------------------------------------------------------------------------------


def test_experts_of_each_token(sp):
    ref = branchy(sp)
    tokens, rows = Tokens(sp, ref), sp.read(ref, fields=["routed_experts"])["routed_experts"]
    for token in range(21):
        found = tokens.experts(token)
        assert found.layers == (1, 2) and found.n_rows == 1 and not found.is_gap
        assert found.experts.tolist() == rows[token, [1, 2]].tolist()
        before = rows[token - 1, [1, 2]].tolist() if token else [[], []]
        assert found.kept.tolist() == [[e in before[n] for e in found.experts[n]] for n in (0, 1)]
    last = tokens.experts(21)
    assert last.experts is None and last.n_rows == 0 and not last.is_gap


def test_gaps_and_missing_routing_are_told(sp):
    s = sp.session(experts=SHAPE)
    tokens = counting(9)
    ref = s.append(prompt_token_ids=tokens[:6], response_token_ids=tokens[6:], routed_experts=routing(tokens)[5:],
                   routed_experts_start=5)  # fmt: skip
    about = Tokens(sp, ref)
    assert [about.experts(token).is_gap for token in range(9)] == [True] * 5 + [False] * 4
    assert about.experts(4).experts is None and about.experts(5).experts is not None
    plain = sp.session().append(prompt_token_ids=tokens, response_token_ids=[1])
    found = Tokens(sp, plain).experts(0)
    assert found.layers == () and found.is_gap and found.experts is None


def test_a_unit_shows_the_first_of_its_rows(sp):
    s = sp.session(experts=SHAPE)
    rows = np.repeat(routing(counting(6)), 4, axis=0)[:12]
    ref = s.append(prompt_token_ids=counting(4), response_token_ids=[1], routed_experts=rows, units=[("image", 1, 9)])
    about = Tokens(sp, ref)
    assert about.experts(1).n_rows == 9 and about.experts(1).experts.tolist() == rows[1, 1:].tolist()
    assert about.experts(2).experts.tolist() == rows[10, 1:].tolist()
    assert [row.unit.key if row.unit else None for row in about.rows(0, 5)] == [None, "image", None, None, None]


def test_fields_of_the_user(open_spool):
    kinds = [
        FieldSpec(name="value", dtype="float32", align="response"),
        FieldSpec(name="kept", dtype="int32", align="token", ragged=True),
        FieldSpec(name="hidden", dtype="bfloat16", align="token", shape=(20,)),
        FieldSpec(name="turn", dtype="int32", align="step"),
        FieldSpec(name="gate", dtype="float32", align="forward"),
    ]
    sp = open_spool(fields=kinds)
    s = sp.session()
    more = {
        "value": np.array([0.5, math.nan], np.float32),
        "kept": [[], [7, 8], list(range(40)), [], [1]],
        "hidden": np.ones((5, 20), np.float32),
        "turn": 9,
        "gate": np.array([0.25, 0.5, 0.75, 1], np.float32),
    }
    ref = s.append(prompt_token_ids=counting(3), response_token_ids=[1, 2], fields=more)
    about = Tokens(sp, ref)
    assert about.fields == ("gate", "hidden", "kept", "turn", "value")
    first, third, last = about.values(0), about.values(2), about.values(4)
    assert (first["value"], first["kept"], first["turn"], first["gate"]) == ("-", "(none)", "-", "0.25")
    assert third["kept"] == " ".join(map(str, range(16))) + " ... (40)"
    assert third["hidden"] == " ".join(["1"] * 16) + " ... (20)"
    assert (last["value"], last["kept"], last["turn"], last["gate"]) == ("nan", "1", "9", "-")


def test_recorded_tokens_read_as_their_text(sp, shared_data, tokenizer_path, vocabulary):
    import_runs(shared_data / "routing" / "A_12L_256E", sp)
    library = Tokenizer.from_file(tokenizer_path)
    for ref in sp.segments():
        file = np.load(shared_data / f"routing/A_12L_256E/{ref.session_id.rpartition('/')[2]}")
        rows = Tokens(sp, ref, vocabulary).rows(0, ref.n_tokens)
        assert [row.token_id for row in rows] == file["token_ids"][: ref.n_tokens].tolist()
        assert [row.mask for row in rows] == file["assistant_mask"][: ref.n_tokens].tolist()
        said = [row.position for row in rows if row.logprob is not None]
        assert said == np.flatnonzero(file["assistant_mask"][: ref.n_tokens]).tolist()
        assert [rows[p].logprob for p in said] == file["logprobs"][said].tolist()
        for row in rows[::7]:
            alone = library.decode([row.token_id], skip_special_tokens=False)
            assert row.text.text == alone or ("\ufffd" in alone and "\\x" in row.text.text)
        window = Tokens(sp, ref, vocabulary).rows(1000, 1200)
        assert window == rows[1000:1200]
