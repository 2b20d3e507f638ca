"""A scheduler core that only talks: it attaches a worker, accepts every stream and sends tokens as fast as credit lets.

The streams of a wave begin together, once all of it were submitted, and get one token each in every batch, as from a
core whose executor takes no time. A probe (a stream whose request id starts with ``probe``) is answered at once.
"""

from __future__ import annotations

import hashlib
import threading
import time

import msgspec
import numpy as np
import zmq

from protos import front
from protos.step import Asset
from protos.wire import Int32, pack_int32

PROBE = "probe"
IDS_MODEL, TEXT_MODEL = "ids", "text"


class ScriptedCore(threading.Thread):
    """``sample``: ids of a text, which every stream repeats from another place; ``tokenizer``: a tokenizer.json."""

    def __init__(self, address: str, tokenizer: bytes, vocab_size: int, sample: Int32) -> None:
        super().__init__(name="core", daemon=True)
        self.probes_answered: dict[str, float] = {}  # by request id; monotonic
        self.wave_began = threading.Event()
        self.wave_ended = threading.Event()
        self._tokenizer = tokenizer
        self._asset = Asset("tokenizer.json", hashlib.sha256(tokenizer).hexdigest(), len(tokenizer))
        self._models = front.Models(
            (self._state(IDS_MODEL, vocab_size, ()), self._state(TEXT_MODEL, vocab_size, (self._asset,)))
        )
        self._sample = sample
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._stopping = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(front.ToCore).decode
        self._peer = b""
        self._allowance = 0
        self._sent = self._credited = 0
        self._wave: list[int] = []  # stream numbers
        self._wave_size = 0
        self._seconds = 0.0
        self.ends_at = 0.0  # of the wave, monotonic
        self.position = 0  # tokens of each stream of the wave so far

    def expect(self, streams: int, seconds: float) -> None:
        """The next wave: so many streams, ended after so long a time."""
        self._wave, self.position, self._seconds = [], 0, seconds
        self.wave_began.clear()
        self.wave_ended.clear()
        self._wave_size = streams

    def stop(self) -> None:
        self._stopping = True
        self.join()
        self._socket.close()
        self._context.term()

    def run(self) -> None:
        pinged = 0.0
        while not self._stopping:
            flowing = self._flowing()
            if self._socket.poll(0 if flowing else 20):
                while True:
                    try:
                        peer, frame = self._socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self._handle(peer, self._decode(frame))
            if flowing:
                self._batch()
            now = time.monotonic()
            if self._peer and now - pinged > 0.25:
                pinged = now
                self._send(front.Ping(1))

    def _flowing(self) -> bool:
        if not self._wave_size or len(self._wave) < self._wave_size or self.wave_ended.is_set():
            return False
        return self._sent - self._credited + self._wave_size <= self._allowance

    def _batch(self) -> None:
        if self.position == 0:
            self.ends_at = time.monotonic() + self._seconds
            self._numbers = pack_int32(self._wave)
            self._offsets = np.arange(self._wave_size) * 7
            self.wave_began.set()
        tokens = self._sample.take((self._offsets + self.position) % len(self._sample))
        self._send(front.Tokens(self._numbers, tokens.tobytes()))
        self._sent += self._wave_size
        self.position += 1
        if time.monotonic() >= self.ends_at:
            for number in self._wave:
                self._send(front.Finished(number, 0, front.LENGTH, self.position, 0))
            self.wave_ended.set()

    def _handle(self, peer: bytes, message: front.ToCore) -> None:
        if isinstance(message, front.Attach):
            self._peer, self._allowance = peer, message.window
            self._sent = self._credited = 0
            self._send(front.Attached(1))
            self._send(self._models)
        elif isinstance(message, front.Submit):
            self._submit(message)
        elif isinstance(message, front.Credit):
            self._credited = message.tokens
            self._allowance = message.allowance or self._allowance
        elif isinstance(message, front.FetchAsset):
            part = self._tokenizer[message.offset : message.offset + message.length]
            self._send(front.AssetChunk(message.sha256, message.offset, len(self._tokenizer), part))
        # Seen: a real core would let the stream run on. Cancel comes after every end.

    def _submit(self, message: front.Submit) -> None:
        self._send(front.Accepted(message.stream))
        if not message.request_id.startswith(PROBE):
            self._wave.append(message.stream)
            return
        self._send(front.Tokens(pack_int32([message.stream]), self._sample[:1].tobytes()))
        self._send(front.Finished(message.stream, 0, front.LENGTH, 1, 0))
        self._sent += 1
        self.probes_answered[message.request_id] = time.monotonic()

    def _send(self, message: front.ToWorker) -> None:
        self._socket.send_multipart((self._peer, self._encode(message)))

    def _state(self, name: str, vocab_size: int, assets: tuple[Asset, ...]) -> front.ModelState:
        return front.ModelState(
            name=name, architecture="bench", fingerprint="f" * 64, vocab_size=vocab_size, context_length=1_000_000,
            block_size=16, eos_token_ids=(0,), assets=assets, executors_ready=1, executors_expected=0,
            max_sequence_tokens=1_000_000, total_blocks=65536, free_blocks=65536, running=0, waiting=0,
        )  # fmt: skip
