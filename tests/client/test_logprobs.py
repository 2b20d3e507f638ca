"""Log probabilities through both clients, and over a stream that breaks off."""

from __future__ import annotations

import asyncio

import pytest

from stepwire import AsyncClient, Client, Completion, TokenLogprob
from tests.client.fake_server import Break, FakeServer, expected_ids


def check(completion: Completion) -> None:
    assert completion.started.prompt_token_ids == (11, 12, 13)
    assert [entry.token_id for entry in completion.prompt_logprobs] == [12, 13]
    choice = completion.choices[0]
    assert choice.token_ids == expected_ids(3, 0, 6)
    assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
    token = choice.token_ids[0]
    assert choice.logprobs[0] == TokenLogprob(token, pytest.approx(-token / 4096), 2, ((0, 0.0), (1, -1.0)))


@pytest.mark.parametrize("broken", [[], [Break(0)], [Break(1)], [Break(3), Break(2)]])
def test_logprobs_come_once(broken: list[Break | None]) -> None:
    options = {"max_tokens": 6, "seed": 3, "logprobs": 2, "prompt_logprobs": 0, "prompt_token_ids": True}
    with FakeServer(script=list(broken)) as server, Client(server.address) as client:
        chunks = []
        with client.stream("x", **options) as stream:
            for chunk in stream:
                assert len(chunk.logprobs) == len(chunk.token_ids)
                chunks.append(chunk)
            check(stream.result())

    async def run() -> None:
        with FakeServer(script=list(broken)) as server:
            async with AsyncClient(server.address) as client:
                check(await client.generate("x", **options))

    asyncio.run(run())


def test_tokenize_in_both_clients() -> None:
    async def run() -> None:
        with FakeServer() as server:
            async with AsyncClient(server.address) as client:
                assert await client.tokenize("a", bos=False) == [97]
                assert await client.detokenize([7], skip_special_tokens=False) == "<7><s>"

    with FakeServer() as server, Client(server.address, api_key="k") as client:
        assert client.tokenize("ab") == [1, 97, 98]
        assert client.tokenize([{"role": "u", "content": "x"}], bos=False) == list(b"u:x")
        assert client.detokenize([7, 8]) == "<7><8>"
    asyncio.run(run())
