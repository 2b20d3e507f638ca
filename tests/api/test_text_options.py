"""Special tokens in the text, the stop that is kept, min_tokens: pure functions of the tokens, like all text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from protos import front
from scheduler_svc.api.text.detokenizer import Detokenizer
from scheduler_svc.api.text.output import End, Output
from scheduler_svc.api.text.stops import StopStrings
from tests.api.test_detokenizer import BYTE, BYTE_TABLE, META, META_TABLE, SPM, SPM_TABLE, cut, ids_of

QUICK = settings(max_examples=60, deadline=None)
IM_END = 2
CUTS = st.lists(st.integers(0, 40), max_size=5)
STOPS = st.lists(st.sampled_from(["a", "ab", "ba", " ", "STOP", "<|im_end|>", "\u00e9", "zzz"]), max_size=3)
TEXT = st.text("ab STOP\u00e9\U0001f600", max_size=14)


def spelled(table: object, steps: list[list[int]], starts_text: bool) -> str:
    detokenizer = Detokenizer(table, starts_text, keep_special=True)  # type: ignore[arg-type]
    return "".join(map(detokenizer.push, steps)) + detokenizer.flush()


@QUICK
@given(ids_of(BYTE), CUTS)
def test_special_tokens_are_written_out_byte_level(ids: list[int], cuts: list[int]) -> None:
    assert spelled(BYTE_TABLE, cut(ids, cuts), True) == BYTE.decode(ids, skip_special_tokens=False)


@QUICK
@given(st.lists(st.one_of(st.integers(0, 2), st.integers(260, SPM.get_vocab_size() - 1)), max_size=12), CUTS)
def test_special_tokens_are_written_out_sentencepiece(ids: list[int], cuts: list[int]) -> None:
    assert spelled(SPM_TABLE, cut(ids, cuts), True) == SPM.decode(ids, skip_special_tokens=False)


@QUICK
@given(st.lists(st.integers(0, META.get_vocab_size() - 1), max_size=12), CUTS)
def test_special_tokens_are_written_out_metaspace(ids: list[int], cuts: list[int]) -> None:
    assert spelled(META_TABLE, cut(ids, cuts), True) == META.decode(ids, skip_special_tokens=False)


def output(stops: list[str], **options: object) -> Output:
    keep = bool(options.pop("keep_special", False))
    special = {} if keep else BYTE_TABLE.special
    return Output(
        Detokenizer(BYTE_TABLE, keep_special=keep),
        eos=frozenset({IM_END}),
        stop_ids=frozenset(),
        limit=0,
        stops=StopStrings(stops, special.values()) if stops else None,
        special_text=lambda token: special.get(token, ""),
        **options,  # type: ignore[arg-type]
    )


def finished(out: Output) -> Output:
    if out.end is None:
        out.finish(End(front.LENGTH))
    return out


@QUICK
@given(TEXT, STOPS, CUTS, st.booleans(), st.booleans(), st.integers(0, 6), st.booleans())
def test_every_cut_gives_the_same(
    text: str, stops: list[str], cuts: list[int], keep: bool, include: bool, least: int, ends: bool
) -> None:
    ids = BYTE.encode(text, add_special_tokens=False).ids + ([IM_END] if ends else [])
    options = {"keep_special": keep, "include_stop": include, "min_tokens": least}
    whole = output(stops, **options)
    whole.push(ids)
    parts = output(stops, **options)
    for step in cut(ids, cuts):
        parts.push(step)
    assert (parts.ids, parts.end) == (whole.ids, whole.end)
    assert finished(parts).take_text() == finished(whole).take_text()
    # A continuation at every k goes on with the very next character.
    rest = output(stops, **options)
    rest.push(ids[: len(ids) // 2])
    before = rest.take_text()
    rest.push(ids[len(ids) // 2 :])
    whole = output(stops, **options)
    whole.push(ids)
    assert before + finished(rest).take_text() == finished(whole).take_text()


@QUICK
@given(TEXT, STOPS, st.booleans())
def test_the_kept_stop_is_what_was_cut(text: str, stops: list[str], ends: bool) -> None:
    ids = BYTE.encode(text, add_special_tokens=False).ids + ([IM_END] if ends else [])
    cut_off, kept = output(stops), output(stops, include_stop=True)
    cut_off.push(ids)
    kept.push(ids)
    assert (kept.end, kept.ids) == (cut_off.end, cut_off.ids)
    end = cut_off.end
    visible = end.stop.replace("<|im_end|>", "") if end is not None and end.reason == front.STOP_TEXT else ""
    assert finished(kept).take_text() == finished(cut_off).take_text() + visible


@QUICK
@given(TEXT, st.lists(st.sampled_from(["a", "ab", "STOP", " "]), min_size=1, max_size=3), st.integers(0, 12))
def test_min_tokens_puts_off_stop_strings(text: str, stops: list[str], least: int) -> None:
    ids = BYTE.encode(text, add_special_tokens=False).ids
    out = output(stops, min_tokens=least)
    out.push(ids)
    # By definition: the first token, from the least-th on, with which the text so far holds a new stop string's end.
    texts = [BYTE.decode(ids[:k]).rstrip("\ufffd") for k in range(len(ids) + 1)]  # without the start of a character
    for k, (before, done) in enumerate(pairwise(texts), 1):
        if k < least:
            continue
        ended = [e for e in range(len(before) + 1, len(done) + 1) if any(done[:e].endswith(stop) for stop in stops)]
        if ended:
            stop = max((s for s in stops if done[: ended[0]].endswith(s)), key=len)
            assert out.end is not None
            assert (len(out.ids), out.end.stop) == (k, stop)
            assert out.take_text() == done[: ended[0] - len(stop)]
            return
    assert out.end is None
