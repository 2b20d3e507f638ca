"""One request to an OpenAI-style ``/v1/completions`` server: HTTP/1.1 and server-sent events on plain asyncio."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from bench.load.record import Record, Request

LINE_LIMIT = 8 << 20


class HttpDriver:
    """A server at host:port. One connection a request, as its clients do; token-id prompts; streamed."""

    def __init__(self, host: str, port: int, model: str, timeout: float) -> None:
        self._host, self._port, self._model, self._timeout = host, port, model, timeout

    async def run(self, request: Request, due: float) -> Record:
        record = Record(request.index, due=due, sent=time.perf_counter(), prompt_tokens=len(request.prompt))
        try:
            await asyncio.wait_for(self._stream(request, record), self._timeout)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            record.status, record.detail = type(error).__name__, str(error)[:500]
        record.end = time.perf_counter()
        return record

    async def close(self) -> None:
        return None

    async def _stream(self, request: Request, record: Record) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=LINE_LIMIT)
        try:
            writer.write(self._encode(request))
            await writer.drain()
            code = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass  # headers
            if code != 200:
                record.status, record.detail = f"HTTP {code}", (await reader.read(2000)).decode(errors="replace")
                return
            # Chunked framing puts its size lines between events; an event's own line always starts with "data:".
            counted = 0
            while line := await reader.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    break
                counted = self._event(json.loads(data), counted, record)
        finally:
            writer.close()

    def _event(self, event: dict[str, Any], counted: int, record: Record) -> int:
        """Usage rides on every event (``continuous_usage_stats``), so the tokens of each are known exactly."""
        now = time.perf_counter()
        usage = event.get("usage") or {}
        total = usage.get("completion_tokens")
        if total is None:
            total = counted + (1 if event.get("choices") else 0)
        if total > counted:
            record.saw_tokens(total - counted, now)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        record.cached_tokens = cached or record.cached_tokens
        if "error" in event:
            raise ValueError(str(event["error"]))
        return max(counted, total)

    def _encode(self, request: Request) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": request.prompt,
                "max_tokens": request.output_tokens,
                "temperature": request.temperature,
                "seed": request.seed,
                "ignore_eos": request.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
