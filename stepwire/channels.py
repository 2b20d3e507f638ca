"""Addresses and channel options, the same for the blocking and the asyncio client."""

from __future__ import annotations

from collections.abc import Sequence

Options = Sequence[tuple[str, int | str]]

OPTIONS: tuple[tuple[str, int | str], ...] = (
    # A name that stands for several servers: calls go to each in turn, not all to the first.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    # A server that vanished without a word is found in 15 s; its successor is tried again within 1 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.enable_retries", 0),  # a retry here is a continuation, never the same call again
)


def split_addresses(address: str | Sequence[str]) -> list[str]:
    """``"a:1,b:2"`` or ``["a:1", "b:2"]`` -> the list. Raises ValueError on an empty one."""
    parts = address.split(",") if isinstance(address, str) else list(address)
    addresses = [part.strip() for part in parts if part.strip()]
    if not addresses:
        raise ValueError("at least one address is needed")
    return addresses


def channel_options(more: Options) -> list[tuple[str, int | str]]:
    """OPTIONS, with ``more`` (gRPC channel arguments) added or in their place."""
    return list((dict(OPTIONS) | dict(more)).items())
