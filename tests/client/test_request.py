"""Arguments -> request: what is absent stays absent."""

from __future__ import annotations

import pytest

from stepwire.channels import split_addresses
from stepwire.request import build


def test_absent_arguments_stay_absent() -> None:
    request = build("hi")
    assert request.WhichOneof("prompt") == "text"
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "n"):
        assert not request.sampling.HasField(name)
    assert not request.stopping.HasField("max_tokens")


def test_zero_is_not_absent() -> None:
    request = build("hi", temperature=0.0, seed=0, top_k=0)
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert request.sampling.HasField("top_k")


def test_prompts() -> None:
    assert list(build([1, 2, 3]).token_ids.ids) == [1, 2, 3]
    assert build([]).WhichOneof("prompt") == "token_ids"
    chat = build([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]).chat
    assert [(message.role, message.content) for message in chat.messages] == [("system", "s"), ("user", "u")]


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": "u", "name": "n"}])
def test_a_chat_message_has_a_role_and_a_content(message: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="a role and a content"):
        build([message])


def test_one_stop_string_may_stand_alone() -> None:
    assert list(build("hi", stop="###").stopping.stop) == ["###"]
    assert list(build("hi", stop=["a", "b"]).stopping.stop) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -1), ("seed", 2**64), ("priority", 2**31), ("stop_token_ids", [3, -2]), ("logit_bias", {2**32: 1.0})],
)
def test_a_number_that_no_field_can_hold_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is -?\d+: must be -?\d+ to \d+$"):
        build("hi", **{name: value})
    with pytest.raises(ValueError, match=r"^prompt is -1"):
        build([5, -1])


def test_addresses() -> None:
    assert split_addresses("a:1, b:2,") == ["a:1", "b:2"]
    with pytest.raises(ValueError, match="at least one"):
        split_addresses(" ,")
