"""The operators' commands of the console: load, executors, drain, flush, and why a request waits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from protos.stepwire.v1 import admin_pb2 as pb
from protos.stepwire.v1 import admin_pb2_grpc as pb_grpc
from stepwire.credentials import bearer
from stepwire.errors import RequestError


def why(stub: pb_grpc.AdminStub, args: argparse.Namespace, **call: Any) -> Any:
    return stub.ExplainRequest(pb.ExplainRequestRequest(request_id=args.request_id), **call)


def load(stub: pb_grpc.AdminStub, args: argparse.Namespace, **call: Any) -> Any:
    return stub.GetLoad(pb.GetLoadRequest(), **call)


def executors(stub: pb_grpc.AdminStub, args: argparse.Namespace, **call: Any) -> Any:
    return stub.ListExecutors(pb.ListExecutorsRequest(model=args.model), **call)


def drain(stub: pb_grpc.AdminStub, args: argparse.Namespace, **call: Any) -> Any:
    return stub.DrainExecutor(pb.DrainExecutorRequest(executor=args.executor), **call)


def flush(stub: pb_grpc.AdminStub, args: argparse.Namespace, **call: Any) -> Any:
    return stub.FlushPrefixCache(pb.FlushPrefixCacheRequest(executor=args.executor), **call)


COMMANDS: dict[str, Callable[..., Any]] = {
    "why": why, "load": load, "executors": executors, "drain": drain, "flush": flush,
}  # fmt: skip


def add_parsers(commands: Any, common: argparse.ArgumentParser) -> None:
    """The parsers of these commands; their ``--address`` is that of the admin service."""

    def add(name: str, help: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(name, parents=[common], help=f"{help} (admin service)")
        parser.set_defaults(default_address="127.0.0.1:50052")
        return parser

    add("why", "why a request waits, or where it runs").add_argument("request_id")
    add("load", "models, tenants and counters")
    add("executors", "list the executors").add_argument("--model", default="", help="of this model only")
    add("drain", "let an executor finish, then leave").add_argument("executor", help="its name, or its session")
    add("flush", "forget cached prefixes").add_argument("executor", nargs="?", default="", help="default: of all")


def run(channel: grpc.Channel, args: argparse.Namespace, api_key: str) -> None:
    """One command; its answer goes to stdout. Raises RequestError."""
    try:
        answer = COMMANDS[args.command](
            pb_grpc.AdminStub(channel),
            args,
            timeout=args.timeout or 30.0,
            metadata=bearer(api_key) if api_key else None,
        )
    except grpc.RpcError as error:
        raise RequestError.of(error) from None
    if args.json:
        print(json.dumps(MessageToDict(answer, preserving_proto_field_name=True), ensure_ascii=False))
    elif args.command == "why":
        print(_why_lines(answer))
    else:
        print(_lines(answer))


def _why_lines(answer: pb.ExplainRequestResponse) -> str:
    lines = [f"{answer.request_id}: {answer.reason}"]
    details = [f"model {answer.model}", f"priority {answer.priority}", f"{answer.age:.1f} s old"]
    if answer.tenant:
        details.insert(1, f"tenant {answer.tenant}")
    lines.append("  " + ", ".join(details))
    for choice in answer.choices:
        parts = [f"  choice {choice.index}: {choice.state}", f"{choice.outputs} tokens"]
        if choice.executor:
            parts.append(f"on {choice.executor}")
        if choice.state == "WAITING":
            parts.append(f"for {choice.waiting_seconds:.1f} s, {choice.ahead} ahead, waits for {choice.waits_for}")
        if choice.preemptions or choice.deaths:
            parts.append(f"{choice.preemptions} preemptions, {choice.deaths} deaths")
        lines.append(", ".join(parts))
        for other in choice.passed_by:
            lines.append(f"    passed by {other.request_id} {other.seconds_ago:.1f} s ago: {other.rule}")
    return "\n".join(lines)


def _lines(answer: Any) -> str:
    """Any answer, one line an entry of its lists."""
    lines = []
    for field, value in answer.ListFields():
        if hasattr(value, "items"):
            lines += [f"{field.name} {key}  {entry}" for key, entry in sorted(value.items())]
        elif field.message_type is None:
            lines.append(f"{field.name}  {value}")
        else:
            lines += [f"{field.name}  " + "  ".join(f"{f.name}={v}" for f, v in entry.ListFields()) for entry in value]
    return "\n".join(lines)
