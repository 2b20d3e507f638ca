"""A TCP relay between an executor and the core, whose cable can be pulled: both ways, or one."""

from __future__ import annotations

import asyncio
import contextlib


class Relay:
    """``port`` is where the executor connects. Runs in the event loop that `start` was called in.

    A pulled cable loses nothing: bytes wait in the buffers of the kernel, as TCP's do, and come late when it is put
    back, perhaps to nobody.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._up = asyncio.Event()  # towards the core
        self._down = asyncio.Event()  # towards the executor
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0
        self.heal()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def pull(self, up: bool = True, down: bool = True) -> None:
        if up:
            self._up.clear()
        if down:
            self._down.clear()

    def heal(self) -> None:
        self._up.set()
        self._down.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, to_core = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.create_task(_pump(reader, to_core, self._up)),
            asyncio.create_task(_pump(theirs, writer, self._down)),
        ]
        self._pumps.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
                self._pumps.discard(pump)
            for end in (writer, to_core):
                end.close()

    async def close(self) -> None:
        self.heal()
        if self._server is not None:
            self._server.close()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, open_: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            await open_.wait()
            writer.write(data)
            await writer.drain()
        await open_.wait()  # the end of a connection does not pass a pulled cable either
