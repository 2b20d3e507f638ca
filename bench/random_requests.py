"""``python -m bench.random_requests --requests 10000 --seed 1 --json FILE``: random requests against real services.

A scheduler service and one executor of a tiny random model run as processes of their own. Requests, valid and not,
with every parameter mixed, come from several tenants (one of them over its limits now and then), are cancelled at
random moments or have deadlines too short, and some are no requests at all but random bytes. Checked:

* each call has exactly one end: a status; a stream that ends well began with `started`, ended each choice once, and
  closed with the usage that its ids add up to;
* what is not valid is INVALID_ARGUMENT, and what is valid never is; nothing ends INTERNAL or UNKNOWN;
* the ids keep to allowed ids, bans and min_tokens; log probabilities are one an id;
* at every pause nothing is held by anybody and all invariants of the core hold;
* memory is flat: from the first third on, no process grows by more than ``--growth`` MiB.

The exit status is 1 where anything of this failed; the record says what.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from bench.load.random_request import Case, draw
from protos.stepwire.v1 import inference_pb2 as pb

CALL_TIMEOUT = 120.0
_METHODS: dict[str, tuple[Any, bool]] = {
    "Generate": (pb.GenerateResponse, False),
    "GenerateStream": (pb.GenerateStreamResponse, True),
    "Tokenize": (pb.TokenizeResponse, False),
    "Detokenize": (pb.DetokenizeResponse, False),
}
LIMITS = {"tenants": {"small": {"max_requests": 3}, "metered": {"tokens_per_second": 2000, "burst": 4000}}}


class Campaign:
    def __init__(self, address: str, seed: int) -> None:
        self.seed = seed
        self.ends: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.faults: list[str] = []
        self.tokens = 0
        self._channel = grpc.aio.insecure_channel(address)

    async def one(self, number: int) -> None:
        """Request ``number``, to its one end."""
        rng = random.Random(f"{self.seed}/{number}")
        case = draw(rng)
        self.kinds[case.kind] += 1
        try:
            status = await self._run(case)
        except AssertionError as problem:
            self._fault(number, case, str(problem))
            return
        self.ends[status] += 1
        if status not in case.expected:
            self._fault(number, case, f"ended {status}, expected {sorted(case.expected)}")

    def _fault(self, number: int, case: Case, what: str) -> None:
        self.faults.append(f"request {number} ({case.kind}): {what[:500]}")
        print(self.faults[-1], file=sys.stderr, flush=True)

    async def _run(self, case: Case) -> str:
        answer, streaming = _METHODS[case.method]
        make = self._channel.unary_stream if streaming else self._channel.unary_unary
        method = make(f"/stepwire.v1.Inference/{case.method}", lambda data: data, answer.FromString)
        call = method(case.data, timeout=case.deadline or CALL_TIMEOUT)
        cancelling = None
        if case.cancel_after is not None:
            cancelling = asyncio.get_running_loop().call_later(case.cancel_after, call.cancel)
        messages: list[Any] = []
        try:
            if streaming:
                async for message in call:
                    messages.append(message)
                    if case.cancel_at_message == len(messages):
                        call.cancel()
            else:
                messages.append(await call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return "CANCELLED"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        finally:
            if cancelling is not None:
                cancelling.cancel()
        if case.request is not None:
            self.tokens += check_answer(case, messages)
        return "OK"

    async def close(self) -> None:
        await self._channel.close()


def check_answer(case: Case, messages: list[Any]) -> int:
    """That a good answer is whole, and what was asked for. Returns its tokens; raises AssertionError."""
    request = case.request
    if not isinstance(request, pb.GenerateRequest):
        return 0
    n = request.sampling.n if request.sampling.HasField("n") else 1
    ids: dict[int, list[int]] = {i: [] for i in range(n)}
    logprobs: Counter[int] = Counter()
    ends: Counter[int] = Counter()
    prompt_logprobs = 0
    assert messages, "no message"
    assert messages[0].HasField("started"), "the first message does not carry `started`"
    assert messages[-1].HasField("usage"), "the last message does not carry the usage"
    assert sum(m.HasField("started") for m in messages) == sum(m.HasField("usage") for m in messages) == 1
    for message in messages:
        prompt_logprobs += len(message.prompt_logprobs)
        for choice in message.choices:
            assert not ends[choice.index], f"choice {choice.index} goes on after its end"
            ids[choice.index] += choice.token_ids
            logprobs[choice.index] += len(choice.logprobs)
            ends[choice.index] += choice.HasField("finish")
    assert all(ends[i] == 1 for i in range(n)), f"ends: {dict(ends)}"
    usage, started = messages[-1].usage, messages[0].started
    assert usage.completion_tokens == sum(map(len, ids.values())), "the usage is not the ids"
    allowed, banned = set(request.sampling.allowed_token_ids), case.banned
    for i, tokens in ids.items():
        assert not request.stopping.HasField("max_tokens") or len(tokens) <= request.stopping.max_tokens
        assert len(tokens) >= request.stopping.min_tokens, f"{len(tokens)} of min_tokens {request.stopping.min_tokens}"
        assert not allowed or allowed.issuperset(tokens), "an id that is not allowed"
        assert not banned.intersection(tokens), "a banned id"
        assert logprobs[i] == (len(tokens) if request.output.HasField("logprobs") else 0), "logprobs are not one an id"
    wanted = started.prompt_tokens - 1 if request.output.HasField("prompt_logprobs") else 0
    assert prompt_logprobs == wanted, f"{prompt_logprobs} prompt logprobs of {wanted}"
    assert bool(started.prompt_token_ids) == request.output.prompt_token_ids
    return usage.completion_tokens


def resident(pids: dict[str, int]) -> dict[str, float]:
    """MiB by process."""
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page / 2**20
        for name, pid in sorted(pids.items())
    }


async def run(args: argparse.Namespace, cluster: Any, settled: Any) -> dict[str, Any]:
    campaign = Campaign(cluster.address, args.seed)
    pids = {
        "core": cluster.pids("core")[0],
        "api": cluster.pids("api")[0],
        "executor": cluster.executors[args.executor].pid,
    }
    memory: list[dict[str, float]] = []
    began = time.monotonic()
    numbers = iter(range(args.requests))
    done = 0
    status: dict[str, Any] = {}
    while done < args.requests and time.monotonic() - began < args.seconds:
        batch = min(args.pause_every, args.requests - done)
        part = iter([next(numbers) for _ in range(batch)])

        async def worker(part: Any = part) -> None:
            for number in part:
                await campaign.one(number)

        await asyncio.gather(*(worker() for _ in range(args.concurrency)))
        done += batch
        try:
            status = await asyncio.to_thread(settled, cluster)
        except AssertionError as problem:
            campaign.faults.append(f"after {done} requests: {problem}")
            break
        memory.append({"requests": done} | resident(pids))
        print(f"{done} requests, {len(campaign.faults)} faults, {memory[-1]}", file=sys.stderr, flush=True)
    await campaign.close()
    first = memory[len(memory) // 3] if memory else {}
    growth = {name: memory[-1][name] - first[name] for name in pids} if memory else {}
    for name, grown in growth.items():
        if grown > args.growth:
            campaign.faults.append(f"{name} grew by {grown:.1f} MiB")
    return {
        "requests": done,
        "seed": args.seed,
        "concurrency": args.concurrency,
        "seconds": round(time.monotonic() - began, 1),
        "ends": dict(campaign.ends.most_common()),
        "kinds": dict(campaign.kinds.most_common()),
        "tokens_of_whole_answers": campaign.tokens,
        "counters": status.get("counters", {}),
        "memory_mib": memory,
        "growth_mib": {name: round(value, 2) for name, value in growth.items()},
        "faults": campaign.faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.random_requests", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop at the next pause after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--pause-every", type=int, default=500, metavar="REQUESTS", help="look at everything")
    parser.add_argument("--kv-blocks", type=int, default=48, help="of 16 tokens: few, so that requests are preempted")
    parser.add_argument("--growth", type=float, default=24.0, metavar="MIB", help="what counts as flat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.set_defaults(executor="only")
    args = parser.parse_args()
    # The processes' harness and the tiny model are those of the tests.
    from tests.e2e.harness import Cluster
    from tests.e2e.verify import settled
    from tests.executor.model.tiny import make_tiny_llama

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "limits.json").write_text(json.dumps(LIMITS))
        with Cluster(folder / "services") as cluster:
            model = make_tiny_llama(folder / "tiny", max_position_embeddings=1024)
            cluster.start_executor("only", model)
            cluster.start_scheduler(
                "--tenant-limits", str(folder / "limits.json"), "--kv-blocks-limit", str(args.kv_blocks)
            )
            cluster.wait_ready()
            record = asyncio.run(run(args, cluster, settled))
    text = json.dumps(record, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print(text if not args.json else json.dumps({k: v for k, v in record.items() if k != "memory_mib"}, indent=1))
    return 1 if record["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
