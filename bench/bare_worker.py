"""An API worker without an API, for tests and measures: submits token ids to a core, counts tokens, gives credit."""

from __future__ import annotations

import secrets
import time
from types import TracebackType
from typing import Self

import msgspec
import zmq

from protos import front, step
from protos.wire import pack_int32, unpack_int32

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(front.ToWorker).decode


class BareWorker:
    """``keep``: whether outputs are kept by stream, or only counted."""

    def __init__(self, endpoint: str, keep: bool = True, window: int = 1 << 20, wait: float = 30.0) -> None:
        self.keep = keep
        self.wait = wait
        self.models: dict[str, front.ModelState] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, front.Finished | front.Failed | front.Rejected] = {}
        self.tokens = 0
        self.messages = 0
        self.status: dict[str, object] | None = None
        self._window = window
        self._credited = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)
        self.send(front.Attach(front.FRONT_VERSION, f"bare-{secrets.token_hex(4)}", secrets.randbits(63), window))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()
        self._context.term()

    def send(self, message: front.ToCore) -> None:
        self._socket.send(_encode(message))

    def submit(
        self, stream: int, model: str, prompt: list[int], max_tokens: int, seed: int = 0, logprobs: int = -1
    ) -> int:
        self.outputs[stream] = []
        self.send(
            front.Submit(
                stream=stream,
                request_id=f"r{stream}",
                model=model,
                prompt=pack_int32(prompt),
                choices=(front.Choice(0),),
                sampling=step.SamplingParams(seed=seed, logprobs=logprobs),
                max_tokens=max_tokens,
                arrival=time.time(),
            )
        )
        return stream

    def receive(self, timeout: float) -> bool:
        """Deal with what is queued, waiting up to ``timeout`` seconds for the first. Whether anything came."""
        if not self._socket.poll(int(1000 * timeout)):
            return False
        while True:
            try:
                message = _decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            self._on_message(message)
        if self.tokens - self._credited > self._window // 4:
            self._credited = self.tokens
            self.send(front.Credit(self.tokens))
        return True

    def _on_message(self, message: front.ToWorker) -> None:
        self.messages += 1
        match message:
            case front.Tokens():
                self.tokens += len(message.tokens) // 4
                if self.keep:
                    streams, tokens = unpack_int32(message.streams).tolist(), unpack_int32(message.tokens).tolist()
                    for stream, token in zip(streams, tokens, strict=True):
                        self.outputs[stream].append(token)
            case front.Finished() | front.Failed() | front.Rejected():
                self.ends[message.stream] = message
            case front.Models():
                self.models = {state.name: state for state in message.models}
            case front.Status():
                self.status = message.body

    def wait_for_model(self, name: str, executors: int = 1) -> None:
        self._until(lambda: name in self.models and self.models[name].executors_ready >= executors, f"model {name}")

    def run_until_ended(self, ends: int) -> None:
        self._until(lambda: len(self.ends) >= ends, f"{ends} ends")

    def _until(self, done: object, what: str) -> None:
        assert callable(done)
        deadline = time.monotonic() + self.wait
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come within {self.wait:g} s: {len(self.ends)} ends")
            self.receive(1.0)
