"""A small core for tests: ``Planner`` keeps the core's side of the mirror, ``ScriptedCore`` is a ROUTER that obeys the
test. Both are written from the protocol alone and share no code with the executor or the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from protos.digest import epoch_digest, plan_digest
from protos.step import Admission, Hello, SamplingParams, StepPlan, ToCore, ToExecutor, Welcome
from protos.wire import Epoch, pack_int32
from tests.ports import free_port

TIMEOUT_MS = 90_000
FIRST_EPOCH = Epoch(7, 1)
GREEDY = SamplingParams(temperature=0.0)
T = TypeVar("T")


class Planner:
    """Builds plans with right digests. Blocks are given out by the test."""

    def __init__(self, epoch: Epoch = FIRST_EPOCH, max_slots: int = 64) -> None:
        self.epoch = epoch
        self.seq = 0
        self.digest = epoch_digest(epoch)
        self.generation = np.full(max_slots, 0, dtype=np.int32)
        self.num_blocks = np.zeros(max_slots, dtype=np.int32)
        self.last_block = np.full(max_slots, -1, dtype=np.int32)

    def admission(self, slot: int, prompt: list[int], blocks: list[int], **fields: Any) -> Admission:
        values: dict[str, Any] = {
            "generation": int(self.generation[slot]) + 1,
            "request_id": f"request-{slot}",
            "choice": 0,
            "outputs": b"",
            "computed": 0,
            "sampling": GREEDY,
        }
        values.update(fields)
        if isinstance(values["outputs"], list):
            values["outputs"] = pack_int32(values["outputs"])
        return Admission(slot=slot, prompt=pack_int32(prompt), blocks=pack_int32(blocks), **values)

    def plan(
        self,
        released: list[int] | None = None,
        admitted: list[Admission] | None = None,
        appended: list[tuple[int, int]] | None = None,
        decode: list[int] | None = None,
        prefill: list[tuple[int, int]] | None = None,
        **fields: Any,
    ) -> StepPlan:
        released, admitted, appended = released or [], admitted or [], appended or []
        decode, prefill = decode or [], prefill or []
        for slot in released:
            self.num_blocks[slot], self.last_block[slot] = 0, -1
        for a in admitted:
            blocks = np.frombuffer(a.blocks, dtype="<i4")
            self.generation[a.slot] = a.generation
            self.num_blocks[a.slot] = len(blocks)
            self.last_block[a.slot] = blocks[-1] if len(blocks) else -1
        for slot, block in appended:
            self.num_blocks[slot] += 1
            self.last_block[slot] = block
        touched = [a.slot for a in admitted] + [s for s, _ in appended] + decode + [s for s, _ in prefill]
        self.seq += 1
        self.digest = plan_digest(
            self.digest,
            self.seq,
            np.array(released, dtype=np.int32),
            np.array(touched, dtype=np.int32),
            self.generation,
            self.num_blocks,
            self.last_block,
        )
        values: dict[str, Any] = {
            "epoch": self.epoch,
            "seq": self.seq,
            "digest": self.digest,
            "released": pack_int32(released),
            "admitted": tuple(admitted),
            "appended": pack_int32([x for pair in appended for x in pair]),
            "decode": pack_int32(decode),
            "prefill": pack_int32([x for pair in prefill for x in pair]),
        }
        values.update(fields)
        return StepPlan(**values)


class ScriptedCore:
    """A ROUTER on a loopback port that does what the test says and nothing else."""

    def __init__(self, configure: Callable[[zmq.Socket[bytes]], None] | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._configure = configure
        self.peer = b""
        self.port = free_port()
        self.bind()

    def bind(self) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = 1
        if self._configure:
            self._configure(self.socket)
        self.socket.bind(f"tcp://127.0.0.1:{self.port}")
        self.address = self.socket.last_endpoint.decode()

    def unbind(self) -> None:
        """As if the core died: its connections end. Returns when its port is free."""
        monitor = self.socket.get_monitor_socket(zmq.Event.CLOSED)
        self.socket.unbind(self.address)
        assert monitor.poll(TIMEOUT_MS), "the listener did not close"
        self.socket.disable_monitor()
        monitor.close(linger=0)
        self.socket.close(linger=0)

    def receive(self) -> ToCore:
        assert self.socket.poll(TIMEOUT_MS), "the executor sent nothing"
        self.peer, frame = self.socket.recv_multipart()
        message: ToCore = self._decoder.decode(frame)
        return message

    def expect(self, kind: type[T]) -> T:
        """The next message of a kind; loads and others are passed over."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message

    def send(self, *messages: ToExecutor) -> None:
        for message in messages:
            self.send_raw(self._encoder.encode(message))

    def send_raw(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def welcome(self, epoch: Epoch = FIRST_EPOCH) -> Planner:
        """Wait for a Hello, welcome it, and start planning."""
        self.expect(Hello)
        self.send(Welcome(epoch=epoch, version=1, depth=2))
        return Planner(epoch)

    def __enter__(self) -> ScriptedCore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close(linger=0)
        self.context.term()
