"""Every number of a request at its extremes, against real services: it is served, or refused by name at the door."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from tests.e2e.harness import Cluster
from tests.e2e.verify import settled

VOCAB, CONTEXT = 384, 4096
LARGEST = 3.4028234663852886e38  # of float32
DENORMAL = 1.401298464324817e-45  # the least float32 above 0
FLOATS = (
    *(0.0, -0.0, DENORMAL, -DENORMAL, 1e-40, 1.1754943508222875e-38, 1e-9, 9.9e-6, 1e-5, 1e-3, 9.99e-4, 0.5),
    *(0.99999994, 1.0, 1.0000001, -1.0, 100.0, -100.0, 100.00001, 1000.0, 1000.0001, 1e30, LARGEST, -LARGEST),
    *(math.inf, -math.inf, math.nan),
)
INTEGERS = (0, 1, 2, 16, 17, 20, 21, 383, 384, 4095, 4096, 2**31 - 1, 2**31, 2**32 - 1)
LONGS = (0, 1, 2**63 - 1, 2**63, 2**64 - 1)


def within(low: float, high: float) -> Callable[[float], bool]:
    return lambda value: low <= value <= high  # false for NaN


# What the manual says is served, by the path of the field. A numeric field that is not here fails the test below.
SERVED: dict[str, Callable[[Any], bool]] = {
    "sampling.temperature": within(0, 100),
    "sampling.top_k": within(0, 2**32),
    "sampling.top_p": lambda value: 0 < value <= 1,
    "sampling.min_p": within(0, 1),
    "sampling.seed": within(0, 2**64),
    "sampling.n": within(1, 16),
    "sampling.repetition_penalty": within(0.001, 1000),
    "sampling.frequency_penalty": within(-100, 100),
    "sampling.presence_penalty": within(-100, 100),
    "sampling.logit_bias": lambda value: -100 <= value <= 100 or value == -math.inf,
    "sampling.allowed_token_ids": within(0, VOCAB - 1),
    "stopping.max_tokens": within(1, 2**32),
    "stopping.stop_token_ids": within(0, VOCAB - 1),
    "stopping.min_tokens": within(0, 4),
    "output.logprobs": within(0, 20),
    "output.prompt_logprobs": within(0, 20),
    "priority": within(-100, 100),
    "token_ids.ids": within(0, VOCAB - 1),
    "continue_from.index": within(0, 0),
    "continue_from.token_ids": within(0, VOCAB - 1),
}
_NUMBERS = {
    FieldDescriptor.CPPTYPE_FLOAT: FLOATS,
    FieldDescriptor.CPPTYPE_UINT32: INTEGERS,
    FieldDescriptor.CPPTYPE_INT32: (*INTEGERS[:12], -1, -100, -101, -(2**31)),
    FieldDescriptor.CPPTYPE_UINT64: LONGS,
}


def numeric_fields(descriptor: Any = pb.GenerateRequest.DESCRIPTOR, path: str = "") -> Iterator[tuple[str, int]]:
    """(path, type) of every number in a message, those of the messages in it included; of a map, its values."""
    for field in descriptor.fields:
        at = f"{path}.{field.name}" if path else field.name
        if field.message_type is None:
            if field.cpp_type in _NUMBERS:
                yield at, field.cpp_type
        elif field.message_type.GetOptions().map_entry:
            yield at, field.message_type.fields_by_name["value"].cpp_type
        else:
            yield from numeric_fields(field.message_type, at)


FIELDS = dict(numeric_fields())


def request_with(path: str, value: Any) -> pb.GenerateRequest:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]))
    message.stopping.max_tokens = 4
    message.sampling.seed = 1
    *parents, name = path.split(".")
    if parents == ["continue_from"]:
        message.continue_from.add(**{name: [value] if name == "token_ids" else value})
        return message
    target: Any = message
    for parent in parents:
        target = getattr(target, parent)
    if name == "logit_bias":
        target.logit_bias[7] = value
    elif target.DESCRIPTOR.fields_by_name[name].is_repeated:
        getattr(target, name)[:] = [value]
    else:
        setattr(target, name, value)
    if path == "stopping.max_tokens" and value > 4:
        message.stopping.stop_token_ids[:] = range(60)  # or it runs for thousands of tokens
        message.sampling.allowed_token_ids[:] = range(60)
    return message


def named_field(error: grpc.RpcError) -> str:
    status = rpc_status.from_call(error)
    for detail in status.details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            found = error_details_pb2.BadRequest()
            detail.Unpack(found)
            return str(found.field_violations[0].field)
    return ""


def refused_field(stub: pb_grpc.InferenceStub, message: pb.GenerateRequest) -> str | None:
    """None: it was served."""
    try:
        answer = stub.Generate(message, timeout=30)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return named_field(error)
    assert all(choice.finish.reason for choice in answer.choices)
    return None


def test_every_number_is_known_to_this_test() -> None:
    assert FIELDS.keys() == SERVED.keys()


@pytest.mark.parametrize("path", SERVED)
def test_extremes(shared: Cluster, path: str) -> None:
    with shared.channel() as channel:
        stub = pb_grpc.InferenceStub(channel)
        for value in _NUMBERS[FIELDS[path]]:
            message = request_with(path, value)
            field = refused_field(stub, message)
            if field is not None:
                assert path.split(".")[0] in field, (value, field)
                assert path.split(".")[-1] in field or path == "token_ids.ids", (value, field)
            served = field is None
            number = pb.Sampling(temperature=value).temperature if isinstance(value, float) else value
            assert served == SERVED[path](number), (value, served)
    settled(shared)


@pytest.mark.parametrize("value", INTEGERS)
def test_ids_to_turn_into_text(shared: Cluster, value: int) -> None:
    with shared.channel() as channel:
        call = pb_grpc.InferenceStub(channel).Detokenize
        if value < VOCAB:
            assert call(pb.DetokenizeRequest(ids=[value]), timeout=20).model == "tiny"
            return
        with pytest.raises(grpc.RpcError) as failure:
            call(pb.DetokenizeRequest(ids=[value]), timeout=20)
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert named_field(failure.value) == "ids[0]"
