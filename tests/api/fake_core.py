"""A scripted scheduler core on a ROUTER socket: tokens are a pure function of (choice, position), as the real ones are.

It answers what the contract asks (Attach, Submit, Stop, Cancel, assets) and steps only when told to, or, with ``auto``,
whenever something runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from protos import front
from protos.step import Asset
from protos.wire import pack_int32, unpack_int32
from tests.api.vocabularies import byte_level

EOS = 2  # <|im_end|>
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FILES = {
    "tokenizer.json": byte_level().to_str().encode(),
    "chat_template.jinja": TEMPLATE.encode(),
    "generation_config.json": json.dumps({"temperature": 0.25, "top_k": 7, "top_p": 0.5}).encode(),
    "tokenizer_config.json": json.dumps(
        {"eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>"}}
    ).encode(),
}
_decoder = msgspec.msgpack.Decoder(front.ToCore)


def assets_of(files: dict[str, bytes]) -> tuple[Asset, ...]:
    return tuple(Asset(kind, hashlib.sha256(data).hexdigest(), len(data)) for kind, data in files.items())


def model_state(name: str = "m", files: dict[str, bytes] | None = None, **changes: object) -> front.ModelState:
    state = front.ModelState(
        name=name,
        architecture="llama",
        fingerprint="f" * 64,
        vocab_size=401,
        context_length=256,
        block_size=16,
        eos_token_ids=(EOS,),
        assets=assets_of(FILES if files is None else files),
        executors_ready=1,
        executors_expected=1,
        max_sequence_tokens=256,
        total_blocks=64,
        free_blocks=64,
        running=0,
        waiting=0,
    )
    return msgspec.structs.replace(state, **changes)


@dataclass
class Run:
    """One choice being run."""

    submit: front.Submit
    choice: int
    outputs: list[int]
    context_length: int

    @property
    def max_tokens(self) -> int:
        room = self.context_length - len(self.submit.prompt) // 4
        return min(self.submit.max_tokens or room, room)


class FakeCore:
    def __init__(self, context: zmq.asyncio.Context, address: str, tokens: Callable[[int, int], int]) -> None:
        self.tokens = tokens
        self.auto = True
        self.per_row = 1
        self.context_length = 256
        self.incarnation = secrets.randbits(63)
        self.models: tuple[front.ModelState, ...] = (model_state(),)
        self.files = dict(FILES)
        self.answer: Callable[[front.Submit], front.ToWorker | None] = lambda submit: front.Accepted(submit.stream)
        self.known = True  # else every frame is answered with Reattach first
        self.received: list[front.ToCore] = []
        self.runs: dict[tuple[int, int], Run] = {}
        self.cached_tokens = 0
        self.sent_tokens = 0
        self.silent = False
        self._peer: bytes | None = None
        self._changed = asyncio.Condition()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._ping())]

    async def die(self) -> None:
        """As a killed process: nothing is said, the socket is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)

    async def until(self, condition: Callable[[], object], seconds: float = 90.0) -> None:
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: bool(condition()))

    def got(self, kind: type) -> list:
        return [message for message in self.received if isinstance(message, kind)]

    async def send(self, message: front.ToWorker) -> None:
        if self._peer is not None and not self.silent:
            await self._socket.send_multipart([self._peer, msgspec.msgpack.encode(message)])

    async def announce(self, *models: front.ModelState) -> None:
        self.models = models
        await self.send(front.Models(models))

    async def step(self, per_row: int = 1) -> None:
        """Up to ``per_row`` tokens for every running choice, in one message, then the ends that they brought."""
        rows: list[tuple[int, int, list[int]]] = []
        finished = []
        for (stream, choice), run in list(self.runs.items()):
            new: list[int] = []
            end: tuple[int, int] | None = None
            if len(run.outputs) >= run.max_tokens:
                end = (front.LENGTH, -1)
            while end is None and len(new) < per_row:
                token = self.tokens(choice, len(run.outputs))
                run.outputs.append(token)
                new.append(token)
                if token == EOS and not run.submit.ignore_eos:
                    end = (front.STOP_EOS, token)
                elif token in unpack_int32(run.submit.stop_ids):
                    end = (front.STOP_ID, token)
                elif len(run.outputs) >= run.max_tokens:
                    end = (front.LENGTH, -1)
            rows.append((stream, choice, new))
            if end is not None:
                del self.runs[stream, choice]
                finished.append(
                    front.Finished(stream, choice, end[0], len(run.outputs), self.cached_tokens, stop_token=end[1])
                )
        flat = [token for _, _, new in rows for token in new]
        plain = per_row == 1 and all(choice == 0 and len(new) == 1 for _, choice, new in rows)
        await self.send(
            front.Tokens(
                pack_int32([stream for stream, _, _ in rows]),
                pack_int32(flat),
                b"" if plain else bytes(choice for _, choice, _ in rows),
                b"" if plain else bytes(len(new) for _, _, new in rows),
            )
        )
        self.sent_tokens += len(flat)
        for message in finished:
            await self.send(message)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            await self.send(front.Ping(self.incarnation))

    async def _serve(self) -> None:
        while True:
            if self.auto and self.runs and not await self._socket.poll(0):
                await self.step(self.per_row)
                async with self._changed:
                    self._changed.notify_all()
                await asyncio.sleep(0.001)
                continue
            if not await self._socket.poll(10):
                continue  # `auto` may have been set meanwhile
            peer, *frames = await self._socket.recv_multipart()
            await self._handle(peer, _decoder.decode(frames[0]))
            async with self._changed:
                self._changed.notify_all()

    async def _handle(self, peer: bytes, message: front.ToCore) -> None:
        self.received.append(message)
        if isinstance(message, front.Attach):
            self._peer = peer
            if not self.known:
                self.known = True
                await self.send(front.Reattach())
                return
            await self.send(front.Attached(self.incarnation))
            await self.send(front.Models(self.models))
        elif isinstance(message, front.Submit):
            answer = self.answer(message)
            if isinstance(answer, front.Accepted):
                for choice in message.choices:
                    outputs = np.frombuffer(choice.outputs, "<i4").tolist()
                    self.runs[message.stream, choice.index] = Run(message, choice.index, outputs, self.context_length)
            if answer is not None:
                await self.send(answer)
        elif isinstance(message, front.Stop):
            run = self.runs.pop((message.stream, message.choice), None)
            if run is not None:
                await self.send(
                    front.Finished(message.stream, message.choice, front.STOP_TEXT, message.outputs, self.cached_tokens)
                )
        elif isinstance(message, front.Cancel):
            for key in [key for key in self.runs if key[0] == message.stream]:
                del self.runs[key]
        elif isinstance(message, front.FetchAsset):
            by_hash = {asset.sha256: self.files[asset.kind] for state in self.models for asset in state.assets}
            data = by_hash.get(message.sha256, b"")
            part = data[message.offset : message.offset + message.length]
            await self.send(front.AssetChunk(message.sha256, message.offset, len(data), part))
