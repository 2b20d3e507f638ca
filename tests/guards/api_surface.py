"""The public API as plain data, to be compared with what clients out there rely on (``api_baseline.json``).

``python -m tests.guards.api_surface`` adds what is new to the baseline. Nothing is ever taken out of it: a field that
is no longer wanted stays, unused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor

from protos.stepwire.v1 import admin_pb2, inference_pb2

BASELINE = Path(__file__).with_name("api_baseline.json")
FILES = (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)

_F = descriptor_pb2.FieldDescriptorProto
Surface = dict[str, Any]


def surface(files: tuple[FileDescriptor, ...] = FILES) -> Surface:
    """``{"message Name": {"1": "name: type"}, "enum Name": {"0": "NAME"}, "service Name": {"Rpc": "A -> B"}}``"""
    found: Surface = {}
    for file in files:
        for message in file.message_types_by_name.values():
            _message(message, found)
        for enum in file.enum_types_by_name.values():
            _enum(enum, found)
        for service in file.services_by_name.values():
            found[f"service {service.full_name}"] = {
                method.name: f"{'stream ' * method.client_streaming}{method.input_type.full_name} -> "
                f"{'stream ' * method.server_streaming}{method.output_type.full_name}"
                for method in service.methods
            }
    return found


def _message(message: Descriptor, found: Surface) -> None:
    proto = descriptor_pb2.DescriptorProto()
    message.CopyToProto(proto)
    found[f"message {message.full_name}"] = {str(field.number): _field(field, proto) for field in proto.field}
    for nested in message.nested_types:
        _message(nested, found)
    for enum in message.enum_types:
        _enum(enum, found)


def _field(field: Any, message: Any) -> str:
    kind = field.type_name.lstrip(".") or _F.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == _F.LABEL_REPEATED:
        kind = f"repeated {kind}"
    if field.proto3_optional:
        kind = f"optional {kind}"
    elif field.HasField("oneof_index"):
        kind = f"{kind} in {message.oneof_decl[field.oneof_index].name}"
    return f"{field.name}: {kind}"


def _enum(enum: EnumDescriptor, found: Surface) -> None:
    found[f"enum {enum.full_name}"] = {str(value.number): value.name for value in enum.values}


def broken(baseline: Surface, now: Surface) -> list[str]:
    """Every promise of the baseline that ``now`` does not keep."""
    problems = []
    for name, entries in baseline.items():
        if name not in now:
            problems.append(f"{name} is gone")
            continue
        for key, value in entries.items():
            if now[name].get(key) != value:
                problems.append(f"{name}, {key}: {value!r} became {now[name].get(key)!r}")
    return problems


def main() -> None:
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    now = surface()
    problems = broken(baseline, now)
    if problems:
        raise SystemExit("\n".join(problems))
    BASELINE.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    main()
