"""Stepwire's Python client: typed chunks from a stream that survives the death of the server behind it.

::

    from stepwire import Client

    with Client("127.0.0.1:50051") as client:
        for chunk in client.stream([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=64):
            print(chunk.text, end="", flush=True)

``AsyncClient`` is the same over asyncio.
"""

from stepwire.aio import AsyncClient, AsyncStream
from stepwire.client import Client, Stream
from stepwire.errors import RequestError
from stepwire.types import Choice, Chunk, Completion, Finish, Model, Started, TokenLogprob, Usage

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "Finish",
    "Model",
    "RequestError",
    "Started",
    "Stream",
    "TokenLogprob",
    "Usage",
]
