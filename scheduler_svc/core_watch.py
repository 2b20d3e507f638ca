"""Tells a frozen core from a busy one: its event loop pings every attached peer several times a second.

The supervisor attaches like an API worker, submits nothing, and counts the seconds since it last heard anything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

import msgspec
import zmq
import zmq.asyncio

from protos import front

log = logging.getLogger(__name__)

_OVERSLEPT = 0.5  # seconds

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(front.ToWorker).decode


async def until_silent(
    context: zmq.asyncio.Context, address: str, *, startup: float, silence: float, heard_first: asyncio.Event
) -> float:
    """Attach to the core at `address`; return how long it said nothing once that is more than `silence` seconds (or
    `startup` seconds, before its first word, at which ``heard_first`` is set)."""
    attach = _encode(front.Attach(front.FRONT_VERSION, "supervisor", secrets.randbits(64)))
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.maxmsgsize = 64 * 1024 * 1024
    socket.connect(address)
    try:
        await socket.send(attach)
        heard = time.monotonic()
        limit = startup
        while True:
            try:
                frame = await asyncio.wait_for(socket.recv(), max(0.0, heard + limit - time.monotonic()))
            except TimeoutError:
                now = time.monotonic()
                if now - heard - limit > _OVERSLEPT:  # this process stood still: what came meanwhile is to be read
                    heard = now - limit + _OVERSLEPT
                    continue
                return now - heard
            heard = time.monotonic()
            heard_first.set()
            limit = silence
            try:
                message = _decode(frame)
            except msgspec.DecodeError:
                log.warning("the core sent a frame that is no message", extra={"bytes": len(frame)})
                continue
            if isinstance(message, front.Reattach):
                await socket.send(attach)
    finally:
        socket.close()
