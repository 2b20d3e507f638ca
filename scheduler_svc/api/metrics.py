"""What operators see of an API worker (Prometheus). Observed once a message, never once a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

if TYPE_CHECKING:
    from threading import Thread

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """A registry of its own, so that several workers may live in one process (tests)."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "stepwire_api_requests", "Calls ended, by method and gRPC status.", ["method", "status"], registry=registry
        )
        self.prompt_tokens = Counter(
            "stepwire_api_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry
        )
        self.cached_tokens = Counter(
            "stepwire_api_cached_tokens", "Prompt tokens of finished requests whose KV was found.", registry=registry
        )
        self.output_tokens = Counter(
            "stepwire_api_output_tokens", "Tokens given to clients, continued ones left out.", registry=registry
        )
        self.accepted_after = Histogram(
            "stepwire_api_accept_seconds",
            "From a call's arrival to its acceptance by the core.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "stepwire_api_time_to_first_token_seconds",
            "From a call's arrival to its first token, queueing included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "stepwire_api_inter_token_seconds",
            "Between two messages with tokens of one stream, a token: one observation a message.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.slow_readers = Counter(
            "stepwire_api_slow_readers", "Streams ended because the client did not read.", registry=registry
        )
        self._gauges: list[Gauge] = []

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A value read when asked for."""
        gauge = Gauge(name, help, registry=self.registry)
        gauge.set_function(value)
        self._gauges.append(gauge)

    def serve(self, host: str, port: int) -> tuple[WSGIServer, Thread]:
        """Answers GET /metrics in a thread. Raises OSError where the address is taken."""
        return start_http_server(port, host, registry=self.registry)
