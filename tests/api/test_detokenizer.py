"""Incremental decoding: the full decode, however the tokens are cut, and always valid UTF-8."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from scheduler_svc.api.text.detokenizer import Detokenizer
from scheduler_svc.api.text.pieces import PieceTable, UnsupportedDecoder
from tests.api import vocabularies

QUICK = settings(max_examples=100, deadline=None)

BYTE = vocabularies.byte_level()
BYTE_TABLE = PieceTable(BYTE)
SPM = vocabularies.sentencepiece()
SPM_TABLE = PieceTable(SPM)
META = vocabularies.metaspace()
META_TABLE = PieceTable(META)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, with some beyond the vocabulary, mixed with the ids of real text."""
    anything = st.integers(0, tokenizer.get_vocab_size() + 3).map(lambda i: [i])
    text = st.text(max_size=6).map(lambda t: tokenizer.encode(t, add_special_tokens=False).ids)
    emoji = st.sampled_from("\U0001f600\U0001f680\u4f60\u00e9\u0442").map(
        lambda t: tokenizer.encode(t, add_special_tokens=False).ids
    )
    special = st.integers(0, 2).map(lambda i: [i])
    return st.lists(st.one_of(anything, text, emoji, special), max_size=12).map(
        lambda parts: list(chain.from_iterable(parts))
    )


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted({min(c, len(ids)) for c in cuts}), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def released(table: PieceTable, steps: list[list[int]], starts_text: bool = True) -> str:
    detokenizer = Detokenizer(table, starts_text)
    text = ""
    for step in steps:
        new = detokenizer.push(step)
        new.encode()  # valid: no lone surrogates
        text += new
    return text + detokenizer.flush()


@QUICK
@given(ids_of(BYTE), st.lists(st.integers(0, 40), max_size=6))
def test_byte_level_is_the_full_decode_however_cut(ids: list[int], cuts: list[int]) -> None:
    full = BYTE.decode(ids, skip_special_tokens=True)
    assert released(BYTE_TABLE, cut(ids, cuts)) == full
    assert released(BYTE_TABLE, [[i] for i in ids]) == full


@QUICK
@given(ids_of(BYTE), st.integers(0, 40))
def test_text_after_k_tokens_depends_on_those_k_alone(ids: list[int], k: int) -> None:
    together, apart = Detokenizer(BYTE_TABLE), Detokenizer(BYTE_TABLE)
    whole = together.push(ids[:k])
    assert whole == "".join(apart.push([i]) for i in ids[:k])
    full = BYTE.decode(ids[:k], skip_special_tokens=True)
    assert full.startswith(whole)
    assert len(full) - len(whole) <= 1  # at most the character under way is held back


def well_formed(ids: list[int], tokenizer: Tokenizer) -> bool:
    """Every run of byte pieces is UTF-8 (the library's decode turns a whole broken run into U+FFFD)."""
    run = b""
    for i in [*ids, -1]:
        if i in (0, 1, 2) or i >= tokenizer.get_vocab_size():
            continue
        if 3 <= i < 259:
            run += bytes([i - 3])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


@QUICK
@given(ids_of(SPM), st.lists(st.integers(0, 40), max_size=6))
def test_sentencepiece(ids: list[int], cuts: list[int]) -> None:
    text = released(SPM_TABLE, cut(ids, cuts))
    assert text == released(SPM_TABLE, [[i] for i in ids])
    full = SPM.decode(ids, skip_special_tokens=True)
    if well_formed(ids, SPM):
        assert text == full
    else:
        # Characters that were whole before the break stay; all else is as there, byte for byte.
        assert len(text.encode()) <= len(full.encode())
        assert "\ufffd" in text


@pytest.mark.parametrize(
    "text", ["the end", "caf\u00e9 \u4f60\u597d \U0001f600!", "  two spaces", "\u0442\u0435\u043a\u0441\u0442"]
)
@pytest.mark.parametrize("tokenizer", [BYTE, SPM], ids=["byte", "spm"])
def test_round_trip_token_by_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert released(PieceTable(tokenizer), [[i] for i in ids]) == text


def test_broken_byte_runs_of_sentencepiece() -> None:
    byte = lambda value: value + 3  # noqa: E731
    letter = SPM.token_to_id("e")
    for values in ([0xE2], [0xE2, 0x82], [0xFF], [0xE2, 0x41, 0x42], [0xC3, 0xC3, 0xA9]):
        ids = [letter, *map(byte, values), letter]
        assert released(SPM_TABLE, [[i] for i in ids]) == SPM.decode(ids)
    # "A" was whole, and sent, before the run broke.
    assert released(SPM_TABLE, [[byte(0x41)], [byte(0xFF)]]) == "A\ufffd"


@QUICK
@given(ids_of(META).map(lambda ids: [i for i in ids if not 3 <= i < 259]))
def test_metaspace(ids: list[int]) -> None:
    assert released(META_TABLE, [[i] for i in ids]) == META.decode(ids, skip_special_tokens=True)


def test_output_that_goes_on_from_the_prompt_keeps_its_first_space() -> None:
    ids = [SPM.token_to_id("\u2581the"), SPM.token_to_id("\u2581end")]
    assert released(SPM_TABLE, [ids], starts_text=True) == "the end"
    assert released(SPM_TABLE, [ids], starts_text=False) == " the end"
    assert released(META_TABLE, [ids], starts_text=False) == " the end"


def test_state_can_be_taken_back() -> None:
    ids = BYTE.encode("\U0001f600", add_special_tokens=False).ids
    assert len(ids) > 1
    detokenizer = Detokenizer(BYTE_TABLE)
    detokenizer.push(ids[:1])
    state = detokenizer.state()
    detokenizer.push(ids[1:])
    detokenizer.restore(state)
    assert detokenizer.push(ids[1:]) == "\U0001f600"


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.CTC(), decoders.Sequence([decoders.BPEDecoder()])]
)
def test_other_decoders_are_refused_by_name(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer.from_str(BYTE.to_str())
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedDecoder):
        PieceTable(tokenizer)
