"""A core that ends at once at every start: no spinning, true health, a clear log; and when it can start again, every
stream goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from scheduler_svc.child import Backoff
from tests.e2e.harness import Cluster, HealthWatch
from tests.e2e.planted_scheduler import CRASH, LATER, SPIN
from tests.e2e.process import TIMEOUT, bounded, gone
from tests.e2e.streams import GREEDY, Answer, generate, one, random_prompt, request
from tests.e2e.verify import settled

OUTPUT = 600  # a second or so: they are not done before the core is killed
ENDED = re.compile(r'event="child ended, starting it again" child=core status=(\S+) uptime=(\S+) delay=(\S+)')


def check_pauses(ends: list[tuple[str, str, str]]) -> None:
    """No spinning: 0, 0.1, 0.2, 0.4 seconds, where none of them ran for long."""
    backoff = Backoff()
    assert [float(delay) for *_, delay in ends] == [backoff.after(float(uptime)) for _, uptime, _ in ends]


def test_its_port_is_taken(restartable: Cluster) -> None:
    restartable.restart_scheduler("--core-down-limit", "300")
    restartable.wait_ready()
    messages = [request(random_prompt(10 + i, seed=i), OUTPUT, **GREEDY) for i in range(4)]
    expected = [answer.ids for answer in generate(restartable.address, messages)]
    began = threading.Event()

    def watch(index: int, answer: Answer) -> None:
        if len(answer.ids) > 5:
            began.set()

    assert restartable.scheduler is not None
    with ThreadPoolExecutor(1) as pool, HealthWatch(restartable.address) as health:
        running = pool.submit(generate, restartable.address, messages, watch)
        assert began.wait(TIMEOUT)
        with taken_port(restartable):
            health.wait_for("NOT_SERVING")
            for _ in bounded(TIMEOUT, "the core is not started again"):
                ends = ENDED.findall(restartable.scheduler.text())
                if len(ends) >= 4:
                    break
            check_pauses(ends)
            assert {status for status, *_ in ends[1:]} == {"2"}
            assert "Address already in use" in restartable.scheduler.text()
            assert not running.done(), "open streams wait"
        health.wait_for("SERVING")
        assert [answer.ids for answer in running.result()] == expected
    settled(restartable)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of sixteen files at most."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=16", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root mounts")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_its_folder_takes_nothing(restartable: Cluster, small_disk: Path, how: str) -> None:
    """The socket between core and API workers cannot be made: no spinning, the reason in the log, and all goes on."""
    restartable.forget_status()
    usual, restartable.run_dir = restartable.run_dir, small_disk / "run"
    try:
        restartable.restart_scheduler("--core-down-limit", "300")
        restartable.wait_ready()
        messages = [request(random_prompt(10 + i, seed=i), OUTPUT, **GREEDY) for i in range(4)]
        expected = [answer.ids for answer in generate(restartable.address, messages)]
        began = threading.Event()
        scheduler = restartable.scheduler
        assert scheduler is not None
        with ThreadPoolExecutor(1) as pool, HealthWatch(restartable.address) as health:
            running = pool.submit(generate, restartable.address, messages, lambda i, answer: began.set())
            assert began.wait(TIMEOUT)
            with unwritable(restartable, small_disk, how):
                health.wait_for("NOT_SERVING")
                for _ in bounded(TIMEOUT, "the core is not started again"):
                    ends = ENDED.findall(scheduler.text())
                    if len(ends) >= 4:
                        break
                check_pauses(ends)
                assert re.search(r"scheduler core: .*(No space left|Read-only|in use)", scheduler.text())
                assert not running.done(), "open streams wait"
            health.wait_for("SERVING")
            assert [answer.ids for answer in running.result()] == expected
        settled(restartable)
    finally:
        restartable.forget_status()
        restartable.run_dir = usual


@contextlib.contextmanager
def unwritable(cluster: Cluster, disk: Path, how: str) -> Iterator[None]:
    """Kills the core when its folder takes no new file; at the end it does again."""
    assert cluster.scheduler is not None
    if how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        cluster.kill("core")
        yield
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        return
    os.kill(cluster.scheduler.pid, signal.SIGSTOP)
    core = cluster.kill("core")
    for _ in bounded(TIMEOUT, "the core does not end"):
        if gone(core):
            break
    (disk / "run" / "front.sock").unlink()
    fillers = [disk / str(i) for i in range(32)]
    with contextlib.suppress(OSError):
        for filler in fillers:
            filler.touch()
    os.kill(cluster.scheduler.pid, signal.SIGCONT)
    yield
    for filler in fillers:
        filler.unlink(missing_ok=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("token", "mates"),
    [
        (CRASH, 12),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((CRASH, 0), (LATER, 0), (LATER, 12), (SPIN, 2))),
    ],
)
def test_a_request_that_crashes_every_core(tiny: Path, tmp_path: Path, token: int, mates: int) -> None:
    """It alone ends, whichever of two API workers submits it; what runs beside it goes on."""
    prompts = [random_prompt(10 + i, seed=i) for i in range(mates)]
    good = [request(prompt, OUTPUT, **GREEDY) for prompt in prompts]
    bad = request([token, 5, 6], 40, **GREEDY)
    with Cluster(tmp_path) as cluster, ThreadPoolExecutor(2) as pool:
        cluster.start_executor("e", tiny)
        cluster.start_scheduler("--core-down-limit", "300", api_workers=2, module="tests.e2e.planted_scheduler")
        cluster.wait_ready()
        expected = [answer.ids for answer in generate(cluster.address, good)]
        began = threading.Event()
        running = pool.submit(generate, cluster.address, good, lambda i, answer: began.set())
        assert not mates or began.wait(TIMEOUT)
        with pytest.raises(ExceptionGroup) as failure:
            one(cluster.address, bad)
        error = failure.value.exceptions[0]
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "died 2 times when it ran this request alone" in (error.details() or "")
        assert [answer.ids for answer in running.result()] == expected
        assert cluster.scheduler is not None
        ends = ENDED.findall(cluster.scheduler.text())
        assert 4 <= len(ends) <= 8, ends  # three of all together, one of its group, two alone
        settled(cluster)


class taken_port:
    """Kills the core and takes its port before the supervisor, stopped meanwhile, can start another."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._socket = socket.socket()

    def __enter__(self) -> None:
        cluster = self._cluster
        assert cluster.scheduler is not None
        os.kill(cluster.scheduler.pid, signal.SIGSTOP)
        try:
            core = cluster.kill("core")
            host, port = cluster.link.removeprefix("tcp://").rsplit(":", 1)
            for _ in bounded(TIMEOUT, "the core does not end"):
                if gone(core):
                    break
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, int(port)))
            self._socket.listen()
        finally:
            os.kill(cluster.scheduler.pid, signal.SIGCONT)

    def __exit__(self, *error: object) -> None:
        self._socket.close()
