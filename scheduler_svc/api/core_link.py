"""The link to the scheduler core: one DEALER socket a session, attached, pinged, and replaced when anything is wrong.

A session ends when the socket disconnects, the core is silent, a frame is damaged, or the core says Reattach. The next
one attaches with a socket of its own (nothing queued for a dead core reaches a new one) and submits every open stream
again, under a new number, as a continuation of what has arrived: no token is lost or repeated, because ids count only
once they are here.

A stream is submitted once the session's Models names its model with the same fingerprint: the core of a restarted
service knows no model until executors return, and a continuation must never run on other weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from protos import front
from protos.step import Asset
from protos.wire import MAX_FRAME_BYTES, WireError
from scheduler_svc.api.models import AssetFault
from scheduler_svc.api.refusal import Refusal, unavailable
from scheduler_svc.api.stream import Stream
from scheduler_svc.api.token_batch import deliver, guarded
from scheduler_svc.api.token_flow import TokenFlow

log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(front.ToWorker, strict=True)

QUIET = 1.2  # seconds
_MOST_RESTS = 5
CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Times in seconds."""

    address: str  # ipc://...
    worker: str
    incarnation: int
    window: int = 65536  # tokens
    silence: float = 5.0  # nothing heard for so long (the core pings four times a second): the session is over
    pause: float = 0.05  # between two sessions
    down_limit: float = 15.0  # the link down for so long: open streams end UNAVAILABLE
    model_limit: float = 30.0  # a stream's model away for so long after a restart: the same
    asset_timeout: float = 10.0  # for one chunk of a file
    status_timeout: float = 10.0  # for one answer about the core itself
    batch: int = 256  # messages handled before others have their turn ...
    turn: float = 0.002  # ... or time spent on them
    serve: float = 0.003  # time spent on the streams that they are for, before the socket is looked at again
    busy: float = 0.004  # with so long a time of this between ...
    rest: float = 0.002  # ... two rests (`CoreLink._rest`)


class SessionOver(Exception):
    """This session is of no more use; the message says why."""


class CoreLink:
    def __init__(
        self,
        config: LinkConfig,
        context: zmq.asyncio.Context,
        *,
        on_models: Callable[[front.Models], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.open: dict[Stream, int] = {}  # -> its number in this session; 0: not submitted in it
        self.damaged_frames = 0
        self.writing = 0  # messages that gRPC has not written yet
        self._stuck = 0  # of those, at the last rest: their clients do not read
        self.down_since: float | None = time.monotonic()  # None: up
        self._context = context
        self._on_models = on_models
        self._on_change = on_change
        self._socket: zmq.asyncio.Socket | None = None  # of the session, once attached
        self._leaving = False
        self._was_up = False  # in the last session
        self._heard = 0.0
        self._told = False  # this session's Models came
        self._number = 0
        self._streams: dict[int, Stream] = {}  # submitted in this session, by number
        self._fingerprints: dict[str, str] = {}  # of this session's models
        self._session_began = time.monotonic()
        self._flow = TokenFlow(config.window, self._send, self.open)
        self._chunks: dict[tuple[str, int], asyncio.Future[front.AssetChunk]] = {}
        self._tickets: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._ticket = 0

    @property
    def up(self) -> bool:
        return self._socket is not None

    @property
    def talks(self) -> bool:
        """Up, its models known, and the core said something just now: one that is frozen serves nobody, long before it
        is given up; and what an earlier core said of the fleet is not true of a new one."""
        return self.up and self._told and time.monotonic() - self._heard < QUIET

    # ----------------------------------------------------------------------------------------------------------------
    # For the service

    def add(self, stream: Stream) -> None:
        """Opens a stream: it is submitted now, or as soon as the link and its model are there."""
        self.open[stream] = 0
        if self._socket is not None:
            self._submit(stream)

    def remove(self, stream: Stream) -> None:
        """Closes a stream, whatever its state; the core is told where it may still run."""
        number = self.open.pop(stream, 0)
        if number and self._forget(number) is not None:
            self._send(front.Cancel(number))

    async def fetch(self, asset: Asset) -> bytes:
        """One file, not yet verified. Raises AssetFault."""
        parts: list[bytes] = []
        offset = 0
        while offset < asset.size:
            if self._socket is None:
                raise AssetFault("the core is away")
            key = (asset.sha256, offset)
            future = self._chunks.get(key)
            if future is None or future.done():
                future = self._chunks[key] = asyncio.get_running_loop().create_future()
                self._send(front.FetchAsset(asset.sha256, offset, min(CHUNK_BYTES, asset.size - offset)))
            try:
                # Not wait_for: on 3.11 it forgets a cancellation that comes together with the answer.
                async with asyncio.timeout(self.config.asset_timeout):
                    chunk = await asyncio.shield(future)
            except TimeoutError:
                raise AssetFault(f"no answer for {asset.kind} at {offset}") from None
            finally:
                if self._chunks.get(key) is future:  # another fetch of the same file may wait for one of its own
                    del self._chunks[key]
            if not chunk.data or offset + len(chunk.data) > asset.size:
                raise AssetFault(f"{asset.kind}: {len(chunk.data)} bytes at {offset} of {asset.size}")
            parts.append(chunk.data)
            offset += len(chunk.data)
        return b"".join(parts)

    async def ask(self, question: Callable[[int], front.GetStatus | front.Control]) -> dict[str, object]:
        """What the core says of itself; ``question`` gets its ticket. Raises Refusal."""
        if self._socket is None:
            raise unavailable("the scheduler core is away")
        self._ticket = self._ticket % 2**31 + 1
        ticket = self._ticket
        future = self._tickets[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(ticket))
            async with asyncio.timeout(self.config.status_timeout):
                return await future
        except TimeoutError:
            raise unavailable("the scheduler core does not answer") from None
        finally:
            self._tickets.pop(ticket, None)

    def sweep(self) -> None:
        """Ends the streams for which too long a time has passed; to be called about once a second."""
        now = time.monotonic()
        if self.down_since is not None:
            if now - self.down_since > self.config.down_limit:
                for stream in list(self.open):
                    stream.fail(unavailable("the scheduler core is away"))
            return
        for stream, number in list(self.open.items()):
            waiting = now - max(self._session_began, stream.opened)
            if number == 0 and not stream.ended and waiting > self.config.model_limit:
                stream.fail(unavailable(f"no executor of model {stream.request.model.name!r} came back"))

    def detach(self) -> None:
        """Tells the core that this worker leaves."""
        self._leaving = True
        self._send(front.Detach(self.config.worker, self.config.incarnation))

    # ----------------------------------------------------------------------------------------------------------------
    # Sessions

    async def run(self) -> None:
        """Holds sessions, one after the other, until cancelled."""
        while True:
            try:
                await self._session()
            except SessionOver as over:
                level = logging.WARNING if self._was_up else logging.DEBUG  # no core yet: nothing was lost
                log.log(level, "core link lost", extra={"reason": str(over), "streams": len(self.open)})
                self._was_up = False
            except Exception:
                log.exception("core link failed", extra={"streams": len(self.open)})
            await asyncio.sleep(self.config.pause)

    async def _session(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the core: `window` tokens unacknowledged
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        tasks: list[asyncio.Task[None]] = []
        try:
            socket.connect(self.config.address)
            config = self.config
            attach = front.Attach(front.FRONT_VERSION, config.worker, config.incarnation, config.window)
            _send_now(socket, attach)
            tasks = [
                asyncio.create_task(self._receive(socket)),
                asyncio.create_task(_disconnected(monitor)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()
            monitor.close(linger=0)
            # A Detach just sent has to get out; nothing else is waited for.
            socket.close(linger=200 if self._leaving else 0)
            self._end_session()

    def _end_session(self) -> None:
        if self._socket is None:
            return
        self._socket = None
        self.down_since = time.monotonic()
        self._streams.clear()
        self._fingerprints.clear()
        self._flow.serve_all()
        for stream in self.open:
            self.open[stream] = 0
            stream.on_link_lost()
        for future in self._chunks.values():
            if not future.done():
                future.set_exception(AssetFault("the core went away"))
                future.exception()  # nobody may be waiting any more
        self._chunks.clear()
        for answer in self._tickets.values():
            if not answer.done():
                answer.set_exception(unavailable("the scheduler core went away"))
        self._on_change()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        plain: zmq.Socket = zmq.Socket.shadow(socket.underlying)
        rested = time.monotonic()
        attach_by = rested + self.config.silence
        while True:
            patience = self.config.silence
            if self._socket is None:  # pings do not count before the Attach is answered
                patience = attach_by - time.monotonic()
            if not self._flow:
                began = time.monotonic()
                if patience <= 0 or not await socket.poll(int(patience * 1000) + 1):
                    raise SessionOver(f"silent for {self.config.silence:g} s")
                if time.monotonic() - began > self.config.rest / 4 and self.writing <= self._stuck:
                    rested = time.monotonic()
            emptied = self._receive_some(plain, socket)
            # What is queued holds up what comes after it, be it a new stream's first token: it goes before the writers
            # of all others. Credit bounds it, which they bring about.
            await self._flow.serve(self.config.serve if emptied else 0.0)
            if time.monotonic() - rested > self.config.busy:
                await self._rest()
                rested = time.monotonic()
            else:
                await asyncio.sleep(0)

    async def _rest(self) -> None:
        """Lets gRPC read: new calls come in only where it has nothing else to do, and first it says of every message
        that it was written."""
        for _ in range(_MOST_RESTS):
            await asyncio.sleep(self.config.rest)
            if self.writing <= self._stuck:
                break
        self._stuck = self.writing

    def _receive_some(self, plain: zmq.Socket, socket: zmq.asyncio.Socket) -> bool:
        """Takes what is there, as far as it fits into a turn; returns whether that was all."""
        touched: set[Stream] = set()
        until = time.monotonic() + self.config.turn
        emptied = False
        for _ in range(self.config.batch):
            try:
                frames = plain.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                emptied = True
                break
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames")
                self._handle(_decoder.decode(frames[0]), socket, touched)
            except (msgspec.DecodeError, WireError) as error:
                # It may have been tokens, and none may be missing from a stream: continue from what is here.
                self.damaged_frames += 1
                raise SessionOver(f"damaged frame: {str(error)[:200]}") from error
            self._heard = time.monotonic()
            if self._heard >= until:
                break
        for stream in touched:
            self._flow.touch(stream)
        return emptied

    def _handle(self, message: front.ToWorker, socket: zmq.asyncio.Socket, touched: set[Stream]) -> None:
        if isinstance(message, front.Attached):
            self._on_attached(message, socket)
            return
        if isinstance(message, front.Reattach):
            raise SessionOver("the core does not know this worker")
        if self._socket is None:
            return  # not attached: only stray pings come before that
        if isinstance(message, front.Tokens):
            self._flow.came(*deliver(message, self._streams, touched))
        elif isinstance(message, front.Finished):
            stream = self._streams.get(message.stream)
            if stream is not None:
                guarded(stream, stream.on_finished, message)
                touched.add(stream)
                if stream.ended:
                    self._drop(message.stream)
        elif isinstance(message, front.Accepted):
            stream = self._streams.get(message.stream)
            if stream is not None:
                stream.on_accepted()
        elif isinstance(message, front.Rejected | front.Failed):
            stream = self._streams.get(message.stream)
            if stream is not None:
                self._drop(message.stream)
                guarded(stream, stream.on_refused, message)
        elif isinstance(message, front.Models):
            self._fingerprints = {state.name: state.fingerprint for state in message.models}
            self._told = True
            self._on_models(message)
            self._submit_waiting()
        elif isinstance(message, front.AssetChunk):
            future = self._chunks.get((message.sha256, message.offset))
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, front.Status):
            answer = self._tickets.get(message.ticket)
            if answer is not None and not answer.done():
                answer.set_result(message.body)
        # Ping: that something came was the news.

    def _on_attached(self, message: front.Attached, socket: zmq.asyncio.Socket) -> None:
        if self._socket is not None:
            raise SessionOver("attached twice")
        self._socket = socket
        self._told = False
        self._flow.restart()
        self._session_began = time.monotonic()
        self.down_since = None
        self._was_up = True
        log.info("attached to the core", extra={"core": f"{message.incarnation:016x}", "streams": len(self.open)})
        self._on_change()

    # ----------------------------------------------------------------------------------------------------------------
    # Sending

    def _submit_waiting(self) -> None:
        for stream, number in list(self.open.items()):
            if number == 0:
                self._submit(stream)
            elif self._other_weights(stream):
                self._fail_other_weights(stream)

    def _submit(self, stream: Stream) -> None:
        """Submits if the stream's model is there; else it waits for a Models that names it."""
        if stream.ended or stream.request.model.name not in self._fingerprints:
            return
        if self._other_weights(stream):
            self._fail_other_weights(stream)
            return
        self._number += 1
        submission = stream.submission(self._number)
        if submission is None:
            return
        self.open[stream] = self._number
        self._streams[self._number] = stream
        self._flow.choices += len(stream.choices)
        self._send(submission)

    def _other_weights(self, stream: Stream) -> bool:
        state = stream.request.model.state
        return self._fingerprints.get(state.name, state.fingerprint) != state.fingerprint

    def _fail_other_weights(self, stream: Stream) -> None:
        message = f"model {stream.request.model.name!r} came back with other weights"
        # What was not accepted has shown nothing yet, and may simply try again.
        stream.fail(Refusal(front.ABORTED, message) if stream.accepted else unavailable(message))

    def _drop(self, number: int) -> None:
        """The core has ended this submission."""
        stream = self._forget(number)
        if stream is not None and stream in self.open:
            self.open[stream] = 0

    def _forget(self, number: int) -> Stream | None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._flow.choices -= len(stream.choices)
        return stream

    def _send(self, message: front.ToCore) -> None:
        if self._socket is not None:
            _send_now(self._socket, message)


def _send_now(socket: zmq.asyncio.Socket, message: front.ToCore) -> None:
    """Without a high-water mark a send never waits; what can be sent is bounded by the open streams.

    Through the asyncio socket, not its plain one: a send may swallow the event of a message that came in meanwhile, and
    the asyncio socket looks again.
    """
    sent = cast("asyncio.Future[object]", socket.send(_encoder.encode(message), zmq.NOBLOCK))
    sent.exception()  # done already; what could go wrong is the socket's end, which ends the session by itself


async def _disconnected(monitor: zmq.asyncio.Socket) -> None:
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())
        if event["event"] == zmq.EVENT_DISCONNECTED:
            raise SessionOver("disconnected")
