"""A core that ends at once at every start: no spinning, true health, a clear log; and when it can start again, every
stream goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.harness import Cluster, HealthWatch
from tests.e2e.process import TIMEOUT, bounded, gone
from tests.e2e.streams import GREEDY, Answer, generate, random_prompt, request
from tests.e2e.verify import settled

OUTPUT = 400
ENDED = re.compile(r'event="child ended, starting it again" child=core status=(\S+) uptime=\S+ delay=(\S+)')


def test_its_port_is_taken(restartable: Cluster) -> None:
    restartable.restart_scheduler("--core-down-limit", "60")
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
            assert [float(delay) for _, delay in ends[:4]] == [0.0, 0.1, 0.2, 0.4]
            assert {status for status, _ in ends[1:]} == {"2"}
            assert "Address already in use" in restartable.scheduler.text()
            assert not running.done(), "open streams wait"
        health.wait_for("SERVING")
        assert [answer.ids for answer in running.result()] == expected
    settled(restartable)


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
            # The last of its threads may hold the port for a moment longer than the process is seen.
            for _ in bounded(TIMEOUT, "the core's port does not come free"):
                with contextlib.suppress(OSError):
                    self._socket.bind((host, int(port)))
                    break
            self._socket.listen()
        finally:
            os.kill(cluster.scheduler.pid, signal.SIGCONT)

    def __exit__(self, *error: object) -> None:
        self._socket.close()
