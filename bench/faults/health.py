"""Watches the core and the public health through a run: broken invariants, and a SERVING that is not true."""

from __future__ import annotations

import threading
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.status import StatusClient

INTERVAL = 0.5  # seconds between two looks
TRUE_WITHIN = 2.0  # seconds
_OWN = [("grpc.use_local_subchannel_pool", 1)]


class Watchman:
    """``run`` on a thread of its own, until ``stop`` is set."""

    def __init__(self, address: str, front: str) -> None:
        self.problems: list[str] = []  # broken invariants, as the core finds them itself
        self.lies: list[str] = []
        self._address = address
        self._front = front
        self._false_since = 0.0  # SERVING, and nobody can be served; 0: it is true

    def run(self, stop: threading.Event) -> None:
        client = StatusClient(self._front)
        try:
            while not stop.wait(INTERVAL):
                self._look(client)
        finally:
            client.close()

    def _look(self, client: StatusClient) -> None:
        asked = time.monotonic()
        try:
            status = client.get(timeout=INTERVAL, check_invariants=True)
        except TimeoutError:  # the core is away or frozen: what this run is about
            status = {"problems": [], "executors": []}
        self.problems += status["problems"]
        if any(executor["status"] == "READY" for executor in status["executors"]):
            self._false_since = 0.0
            return
        if not self._serving():
            self._false_since = 0.0
            return
        # Somebody may have been ready between two looks, so it counts from the first one that found it untrue.
        self._false_since = self._false_since or asked
        if time.monotonic() - self._false_since > TRUE_WITHIN:
            self._confirm(client, time.monotonic() - self._false_since)

    def _confirm(self, client: StatusClient, false_for: float) -> None:
        """It may have come up in this very moment: only what the core still denies is a lie."""
        try:
            status = client.get(timeout=INTERVAL)
        except TimeoutError:
            status = {"executors": []}
        if not any(executor["status"] == "READY" for executor in status["executors"]):
            self.lies.append(f"SERVING, for {false_for:.1f} s in which nobody could be served")

    def _serving(self) -> bool:
        """As any one of the API workers says; one that says nothing is believed to serve nobody."""
        with grpc.insecure_channel(self._address, _OWN) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=INTERVAL)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
