"""Stop strings and the other ends of an output: exact, and independent of how the tokens came."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.front import LENGTH, STOP_EOS, STOP_ID, STOP_TEXT
from scheduler_svc.api.text.detokenizer import Detokenizer
from scheduler_svc.api.text.output import End, Output
from scheduler_svc.api.text.pieces import PieceTable
from scheduler_svc.api.text.stops import StopMatch, StopMatcher, StopStrings
from tests.api.vocabularies import byte_level

TOKENIZER = byte_level()
TABLE = PieceTable(TOKENIZER)
IM_END = 2


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def output(
    stop: tuple[str, ...] = (), *, eos: tuple[int, ...] = (0,), stop_ids: tuple[int, ...] = (), limit: int = 0
) -> Output:
    return Output(
        Detokenizer(TABLE),
        eos=frozenset(eos),
        stop_ids=frozenset(stop_ids),
        limit=limit,
        stops=StopStrings(stop, TABLE.special.values()) if stop else None,
        special_text=lambda token: TABLE.special.get(token, ""),
    )


def reference(text: str, stops: list[str]) -> tuple[str, str] | None:
    """(text before the match, stop): the match that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return None


AB = st.text("ab<", min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("ab<", max_size=4), max_size=8), st.lists(AB, min_size=1, max_size=4))
def test_matcher_against_search(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    expected = reference("".join(pieces), stops)
    sent = ""
    for piece in pieces:
        released = matcher.push(piece)
        if isinstance(released, StopMatch):
            assert expected == (sent + released.text, released.stop)
            return
        sent += released
        if expected is not None:
            assert expected[0].startswith(sent)  # nothing of the match was ever sent
    assert expected is None
    assert sent + matcher.flush() == "".join(pieces)


@settings(max_examples=100, deadline=None)
@given(
    st.text("ab STOP\u4f60", max_size=20),
    st.lists(st.sampled_from(["STOP", "OP", "a b", "\u4f60", "ba", "STO", "P S"]), min_size=1, max_size=3),
    st.lists(st.integers(0, 20), max_size=4),
)
def test_cut_into_steps_makes_no_difference(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = encode(text)
    whole = output(tuple(stops))
    whole.push(ids)
    bounds = [0, *sorted({min(c, len(ids)) for c in cuts}), len(ids)]
    stepped = output(tuple(stops))
    for a, b in pairwise(bounds):
        stepped.push(ids[a:b])
    assert stepped.ids == whole.ids
    assert stepped.end == whole.end
    assert stepped.take_text() == whole.take_text()
    expected = reference(text, stops)
    if expected is not None:
        assert whole.end == End(STOP_TEXT, stop=expected[1])
        again = output(tuple(stops))
        again.push(whole.ids)
        assert again.end == whole.end  # completed by the last id kept ...
        short = output(tuple(stops))
        short.push(whole.ids[:-1])
        assert short.end is None  # ... and by no earlier one


def test_stop_that_begins_and_ends_inside_tokens() -> None:
    out = output(("he en",))
    out.push(encode("of the end of"))
    assert out.take_text() == "of t"
    assert out.end == End(STOP_TEXT, stop="he en")
    assert TOKENIZER.decode(out.ids).startswith("of the en")


def test_special_token_as_a_stop_string() -> None:
    for stop, text in (("<|im_end|>", "hello"), ("lo<|im_end|>", "hel"), ("<|im_end|> x", "hello")):
        out = output((stop,))
        out.push([*encode("hello"), IM_END, *encode(" x y")])
        assert out.end == End(STOP_TEXT, stop=stop)
        assert out.take_text() == text


def test_special_token_stop_that_does_not_complete_is_given_out() -> None:
    out = output(("lo<|im_end|>x",))
    out.push([*encode("hello"), IM_END])
    assert out.take_text() == "hel"
    out.push(encode("y"))
    assert out.take_text() == "loy"


def test_stop_text_wins_over_eos_and_limit_at_the_same_token() -> None:
    ids = encode("one two.")
    out = output((".",), eos=(ids[-1],), limit=len(ids))
    out.push(ids)
    assert out.end == End(STOP_TEXT, stop=".")
    assert out.take_text() == "one two"


def test_end_ids_have_no_text_either_way() -> None:
    hello, dot = encode("hello"), encode(".")[0]
    for stops in ((), ("never",)):
        by_eos, by_id = output(stops, eos=(dot,)), output(stops, stop_ids=(dot,))
        for out in (by_eos, by_id):
            out.push([*hello, dot, *hello])
            assert out.take_text() == "hello"
            assert out.ids.tolist() == [*hello, dot]
        assert by_eos.end == End(STOP_EOS, dot)
        assert by_id.end == End(STOP_ID, dot)


def test_held_text_is_given_out_at_an_end() -> None:
    out = output(("STOPPED",), limit=4)
    ids = encode("a STOP")
    out.push(ids[:4])
    emoji = encode("\U0001f600")
    assert len(ids) >= 4 or out.end is None
    cut_short = output(limit=1)
    cut_short.push(emoji)
    assert cut_short.end == End(LENGTH)
    assert cut_short.take_text() == TOKENIZER.decode(emoji[:1])
    held = output(("hello!!",))
    held.push(encode("hello"))
    assert held.take_text() == ""
    held.finish(End(LENGTH))
    assert held.take_text() == "hello"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 399), max_size=14), st.integers(1, 14), st.integers(0, 14))
def test_seam(ids: list[int], limit: int, k: int) -> None:
    """Continued from its first k ids, an output goes on with the very byte that the former would have sent next."""
    stops = ("e", "\ufffd\ufffd", "<|im_end|>the")
    whole = output(stops, limit=limit)
    whole.push(ids)
    first, second = output(stops, limit=limit), output(stops, limit=limit)
    k = min(k, len(whole.ids))
    first.push(ids[:k])
    assert second.push(ids[:k]) == k
    second.take_text()
    second.push(ids[k:])
    assert first.take_text() + second.take_text() == whole.take_text()
    assert second.ids == whole.ids
    assert second.end == whole.end
