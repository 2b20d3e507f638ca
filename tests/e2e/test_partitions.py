"""Hosts apart, in network namespaces: a cable is pulled and put back, for less and for more than the time-outs, in both
directions and in one. Needs root and ``ip netns``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.faults.streams import Outcome, run_all
from protos.stepwire.v1 import inference_pb2 as pb
from stepwire import AsyncClient
from tests.e2e.harness import EXECUTOR_ENV, EXECUTOR_FLAGS, Cluster
from tests.e2e.process import Process
from tests.e2e.streams import GREEDY, SEEDED, generate, random_prompt, request
from tests.e2e.verify import settled
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OUTPUT = 1500
NOWHERE = "02:00:00:00:00:01"  # a link address that nobody has
SHORT, LONG = 1.0, 9.0  # seconds: less and more than any time-out


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


class Host:
    """A namespace with one cable to this one: 10.79.N.1 here, 10.79.N.2 there."""

    def __init__(self, number: int) -> None:
        tag = f"{os.getpid() % 10000}{number}"
        self.space, self.here, self.there = f"sw{tag}", f"swa{tag}", f"swb{tag}"
        self.near, self.far = f"10.79.{number}.1", f"10.79.{number}.2"
        ip("netns", "add", self.space)
        ip("link", "add", self.here, "type", "veth", "peer", "name", self.there, "netns", self.space)
        ip("addr", "add", f"{self.near}/24", "dev", self.here)
        ip("-n", self.space, "addr", "add", f"{self.far}/24", "dev", self.there)
        ip("link", "set", self.here, "up")
        ip("-n", self.space, "link", "set", self.there, "up")
        ip("-n", self.space, "link", "set", "lo", "up")

    def pull(self, way: str) -> None:
        if way == "both":
            ip("-n", self.space, "link", "set", self.there, "down")
        elif way == "up":  # what the executor sends reaches nobody
            ip(
                "-n",
                self.space,
                "neigh",
                "replace",
                self.near,
                "lladdr",
                NOWHERE,
                "dev",
                self.there,
                "nud",
                "permanent",
            )
        else:
            ip("neigh", "replace", self.far, "lladdr", NOWHERE, "dev", self.here, "nud", "permanent")

    def put_back(self, way: str) -> None:
        if way == "both":
            ip("-n", self.space, "link", "set", self.there, "up")
        elif way == "up":
            ip("-n", self.space, "neigh", "del", self.near, "dev", self.there)
        else:
            ip("neigh", "del", self.far, "dev", self.here)

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.space], check=False, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip")
    made: list[Host] = []
    try:
        try:
            made += [Host(1)]
            made += [Host(2)]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield made
    finally:
        for host in made:
            host.close()


@pytest.fixture(scope="module")
def apart(hosts: list[Host], tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("apart")
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    port = free_port()
    with Cluster(folder) as cluster:
        cluster.link = f"tcp://0.0.0.0:{port}"
        cluster.start_scheduler("--link-secret-file", str(secret))
        for name, host in zip("ab", hosts, strict=True):
            args = ["-m", "executor_svc", "--model", str(tiny), "--executor-name", name, *EXECUTOR_FLAGS]
            args += ["--scheduler", f"tcp://{host.near}:{port}", "--link-secret-file", str(secret)]
            prefix = ["ip", "netns", "exec", host.space]
            cluster.executors[name] = Process(name, args, folder / f"executor-{name}.log", EXECUTOR_ENV, prefix)
        cluster.wait_ready(2)
        yield cluster


def messages() -> list[pb.GenerateRequest]:
    out = [request(random_prompt(20 + i, seed=i), OUTPUT, **GREEDY) for i in range(4)]
    return out + [request(random_prompt(20 + i, seed=i), OUTPUT, **(SEEDED | {"seed": i})) for i in range(4)]


@pytest.fixture(scope="module")
def expected(apart: Cluster) -> list[list[int]]:
    return [answer.ids for answer in generate(apart.address, messages())]


def sessions(cluster: Cluster) -> dict[str, Any]:
    return {executor["name"]: executor["session"] for executor in cluster.status()["executors"]}


@pytest.mark.parametrize("way", ["both", "up", "down"])
@pytest.mark.parametrize("seconds", [SHORT, LONG])
def test_cable(apart: Cluster, hosts: list[Host], expected: list[list[int]], way: str, seconds: float) -> None:
    before = sessions(apart)
    done = threading.Event()

    def cut() -> None:
        hosts[0].pull(way)
        time.sleep(seconds)  # that is the fault
        hosts[0].put_back(way)
        done.set()

    thread = threading.Thread(target=cut)
    outcomes = asyncio.run(disturbed(apart, thread))
    thread.join()
    assert done.is_set()
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    assert [outcome.ids[0] for outcome in outcomes] == expected
    assert not any(outcome.continuations for outcome in outcomes), "no client notices"
    apart.wait_ready(2)
    after = sessions(apart)
    assert after["b"] == before["b"], "the other one has nothing to do with it"
    assert (after["a"] == before["a"]) == (seconds == SHORT), "busy, or a short while away, is not dead"
    assert len({tuple(executor["epoch"]) for executor in settled(apart)["executors"]}) == 2


async def disturbed(cluster: Cluster, thread: threading.Thread) -> list[Outcome]:
    seen = 0

    def on_tokens(count: int) -> None:
        nonlocal seen
        before, seen = seen, seen + count
        if before < 200 <= seen:
            thread.start()

    async with AsyncClient(cluster.address) as client:
        requests = messages()
        return await run_all([client], requests, len(requests), 1, on_tokens)
