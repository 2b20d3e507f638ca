"""The load generator's parts that need no service of ours: prompts, figures, the driver for HTTP servers."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from bench.compare_peers import render, summarise
from bench.load.figures import figures, table
from bench.load.http_driver import HttpDriver
from bench.load.machine import MachineWatch
from bench.load.pacing import closed_loop, open_loop
from bench.load.prompts import fresh, poisson_times, random_prompts, shared_prefix_prompts, workload_prompts
from bench.load.record import Record, Request


def test_prompts_are_pure_functions_of_the_seed() -> None:
    assert random_prompts(3, 8, 1000, seed=1) == random_prompts(3, 8, 1000, seed=1)
    assert random_prompts(3, 8, 1000, seed=1) != random_prompts(3, 8, 1000, seed=2)
    prompts = shared_prefix_prompts(4, 10, 6, num_prefixes=2, vocab_size=1000, seed=3)
    assert prompts[0][:6] == prompts[2][:6] != prompts[1][:6]
    assert len({tuple(prompt) for prompt in prompts}) == 4
    with pytest.raises(ValueError, match="prefix of 10"):
        shared_prefix_prompts(1, 10, 10, 1, 1000, 0)


def test_workload_repeats_never_start_alike(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"batch": [[1, 2, 3], [4, 5, 6]], "prefixes": [[7, 8], [9, 10]], "suffix": [[1], [2]]}))
    assert workload_prompts(path, "batch", 2) == [[1, 2, 3], [4, 5, 6]]
    assert workload_prompts(path, "batch", 3, repeat=1) == [[2, 3, 1], [5, 6, 4], [3, 1, 2]]
    assert workload_prompts(path, "prefix", 2, repeat=1) == [[9, 10, 1], [9, 10, 2]]
    assert workload_prompts(path, "prefix", 1, repeat=2) == [[8, 7, 1]]
    assert sorted(fresh([3, 1, 2], 5)) == [1, 2, 3]


def test_poisson_rate() -> None:
    times = poisson_times(4000, rate=50.0, seed=0)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.1)


def test_figures_of_known_records() -> None:
    record = Record(0, due=10.0, sent=10.0, prompt_tokens=5)
    record.saw_tokens(1, 10.5)
    record.saw_tokens(1, 10.6)
    record.saw_tokens(2, 10.8)  # two tokens in one message
    failed = Record(1, due=10.0, sent=10.0, status="UNAVAILABLE", detail="nobody")
    out = figures([record, failed])
    assert (out["completed"], out["requests"], out["failures"]) == (1, 2, {"UNAVAILABLE": 1})
    assert out["ttft_ms"]["mean"] == pytest.approx(500)
    assert out["tpot_ms"]["mean"] == pytest.approx(100)
    assert out["itl_ms"] == pytest.approx({"mean": 150, "median": 150, "p99": 199})
    assert out["e2el_ms"]["mean"] == pytest.approx(800)
    assert out["output_throughput"] == pytest.approx(4 / 0.8)
    assert out["total_throughput"] == pytest.approx(9 / 0.8)
    assert out["tokens_per_message"] == pytest.approx(4 / 3)
    assert "UNAVAILABLE" in table(out)
    assert figures([failed])["output_throughput"] == 0.0


class FakeDriver:
    """Answers after 10 ms; remembers how many were in flight."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def run(self, request: Request, due: float) -> Record:
        record = Record(request.index, due=due, sent=time.perf_counter())
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return record

    async def close(self) -> None:
        return None


def test_pacing() -> None:
    requests = [Request(i, [1], 1, send_at=0.005 * i) for i in range(9)]
    driver = FakeDriver()
    records = asyncio.run(closed_loop(driver, requests, 3))
    assert driver.most == 3
    assert [record.index for record in records] == list(range(9))
    start = time.perf_counter()
    records = asyncio.run(open_loop(FakeDriver(), requests, start))
    assert [record.due - start for record in records] == pytest.approx([request.send_at for request in requests])
    assert all(record.sent >= record.due - 1e-3 for record in records)


def sse(*events: object) -> bytes:
    """A chunked HTTP body of server-sent events."""
    lines = [
        b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n" for event in events
    ]
    return b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines) + b"0\r\n\r\n"


def run_http(response: bytes) -> tuple[Record, dict[str, object]]:
    """One request against a server that answers with ``response``; the record and the body that was sent."""
    seen: dict[str, object] = {}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = 0
        while (line := (await reader.readline()).strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        seen.update(json.loads(await reader.readexactly(length)))
        writer.write(response)
        await writer.drain()
        writer.close()

    async def main() -> Record:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            driver = HttpDriver("127.0.0.1", server.sockets[0].getsockname()[1], "m", timeout=10)
            return await driver.run(Request(0, [1, 2, 3], 5), time.perf_counter())

    return asyncio.run(main()), seen


def test_http_driver_counts_tokens_by_usage() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    usage = [{"completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 2}} for n in (1, 3, 5)]
    events = [{"choices": [{"text": "x"}], "usage": u} for u in usage] + [{"choices": [], "usage": usage[-1]}]
    record, body = run_http(head + sse(*events, b"[DONE]"))
    assert (record.status, record.output_tokens, record.messages, record.cached_tokens) == ("OK", 5, 3, 2)
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ([1, 2, 3], 5, True, True)


def test_http_driver_reports_failures() -> None:
    record, _ = run_http(b"HTTP/1.1 400 Bad Request\r\n\r\nno such model")
    assert (record.status, record.detail) == ("HTTP 400", "no such model")
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    record, _ = run_http(head + sse({"error": {"message": "out of memory"}}))
    assert record.status == "ValueError"
    assert "out of memory" in record.detail
    assert not record.ok


def test_machine_watch_counts_own_work_as_own() -> None:
    with MachineWatch([]) as watch:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
    assert 0.0 <= watch.others <= 1.0
    assert 0.0 <= watch.steal <= 1.0


def run(rate: float, others: float = 0.0, failures: dict[str, int] | None = None) -> dict[str, object]:
    times = {"tpot_ms": {"mean": 1000 / rate}, "ttft_ms": {"mean": 50.0}}
    return times | {"output_throughput": rate, "duration_s": 1.0, "others": others, "failures": failures or {}}


def test_comparison_leaves_out_disturbed_and_failed_runs() -> None:
    runs = {
        "stepwire-float16": [run(30), run(50, others=0.5), run(32)],
        "stepwire-int8": [run(62)],
        "vllm": [run(20), run(1, failures={"HTTP 500": 1})],
        "openvino": [run(10, failures={"TimeoutError": 1})],
    }
    report = summarise({"b8": runs}, limit=0.06)["b8"]
    float16 = report["stepwire-float16"]
    assert float16["output_throughput"] == 31
    assert (float16["quiet"], float16["runs"]) == (2, 3)
    assert report["vllm"]["ratios"]["float16"] == pytest.approx({"output_throughput": 31 / 20, "decode_rate": 31 / 20})
    assert report["vllm"]["ratios"]["int8"]["output_throughput"] == pytest.approx(62 / 20)
    assert "ratios" not in report["openvino"]
    text = render({"b8": report})
    assert "no complete run of 1" in text
    assert "1.55" in text
    assert "3.10" in text
