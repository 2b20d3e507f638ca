"""A request that ends early (cancel, deadline, death of its client) gives everything back within one step."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest

from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from tests.e2e.harness import Cluster
from tests.e2e.process import ROOT, TIMEOUT
from tests.e2e.streams import GREEDY, generate, random_prompt, request
from tests.e2e.verify import ends_within_a_step, settled

LONG = 4000  # output tokens: still running when it is ended
OTHERS = 4  # streams that keep the steps coming


@pytest.fixture
def busy(shared: Cluster) -> threading.Thread:
    """A load of other streams; all of them end as they should."""
    load = [request(random_prompt(24, seed=800 + i), 300, **GREEDY) for i in range(OTHERS)]
    thread = threading.Thread(target=generate, args=(shared.address, load))
    thread.start()
    yield thread
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    settled(shared)


def started_call(cluster: Cluster, channel: grpc.Channel, request_id: str, **call: float) -> grpc.Call:
    message = request(random_prompt(20, seed=77), LONG, request_id=request_id, **GREEDY)
    stream = pb_grpc.InferenceStub(channel).GenerateStream(message, **call)
    for part in stream:
        if any(delta.token_ids for delta in part.choices):
            return stream
    raise AssertionError("no token")


def test_cancel(shared: Cluster, busy: threading.Thread) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        call = started_call(shared, channel, "to-be-cancelled")
        with ends_within_a_step(shared, "to-be-cancelled", OTHERS):
            call.cancel()


def test_deadline(shared: Cluster, busy: threading.Thread) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        for seconds in (1.5, 6.0, 24.0):  # longer, where the machine is so busy that the first token takes so long
            name, began = f"slower than {seconds} s", time.monotonic()
            with contextlib.suppress(grpc.RpcError):
                call = started_call(shared, channel, name, timeout=seconds)
                if time.monotonic() < began + seconds / 2:
                    break
                call.cancel()
        with ends_within_a_step(shared, name, OTHERS), pytest.raises(grpc.RpcError) as failure:
            for _ in call:
                pass
        assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_client_killed(shared: Cluster, busy: threading.Thread) -> None:
    script = (
        "from stepwire import Client\n"
        f"stream = Client({shared.address!r}).stream({random_prompt(20, seed=78)}, max_tokens={LONG}, ignore_eos=True,"
        " request_id='orphan', temperature=0.0)\n"
        "for chunk in stream: print(chunk.index, flush=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        assert client.stdout.readline(), "the client saw no token"
        with ends_within_a_step(shared, "orphan", OTHERS):
            client.send_signal(signal.SIGKILL)
            client.wait(TIMEOUT)
    finally:
        client.kill()
        client.wait(TIMEOUT)
        client.stdout.close()
