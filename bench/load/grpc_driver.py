"""One request over gRPC (``stepwire.v1.Inference/GenerateStream``)."""

from __future__ import annotations

import time

import grpc
import grpc.aio

from bench.load.record import Record, Request
from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc

CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]


def to_proto(request: Request, model: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=model,
        token_ids=pb.TokenIds(ids=request.prompt),
        sampling=pb.Sampling(temperature=request.temperature, seed=request.seed),
        stopping=pb.Stopping(max_tokens=request.output_tokens, ignore_eos=request.ignore_eos),
    )


class GrpcDriver:
    """A channel to one address. ``run`` never raises for a failed call: the record says how it ended."""

    def __init__(self, address: str, model: str, timeout: float) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._model, self._timeout = model, timeout

    async def run(self, request: Request, due: float) -> Record:
        record = Record(request.index, due=due, sent=time.perf_counter(), prompt_tokens=len(request.prompt))
        try:
            async for message in self._stub.GenerateStream(to_proto(request, self._model), timeout=self._timeout):
                now = time.perf_counter()
                count = sum(len(delta.token_ids) for delta in message.choices)
                if count:
                    record.saw_tokens(count, now)
                if message.HasField("usage"):
                    record.cached_tokens = message.usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            record.status, record.detail = error.code().name, error.details() or ""
        record.end = time.perf_counter()
        return record

    async def close(self) -> None:
        await self._channel.close()


def find_model(address: str, name: str, timeout: float) -> pb.Model:
    """The model called ``name`` (the only one where it is empty). Raises LookupError with what is there."""
    with grpc.insecure_channel(address) as channel:
        models = pb_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=timeout).models
    found = [model for model in models if not name or model.name == name]
    if len(found) != 1:
        raise LookupError(f"--model {name!r}: {address} serves {sorted(m.name for m in models)}")
    return found[0]
