"""Keys, tenants' limits and the admin service through real processes."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from protos.stepwire.v1 import admin_pb2, admin_pb2_grpc
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from stepwire import Client, RequestError
from tests.e2e.harness import Cluster, HealthWatch
from tests.e2e.process import TIMEOUT, bounded
from tests.e2e.streams import GREEDY, request
from tests.ports import free_port

KEY, OTHER, ADMIN = "key-of-acme-012345", "key-of-other-012345", "key-of-operators-012345"


def test_keys_limits_and_operators(restartable: Cluster, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"acme {KEY}\nother {OTHER}\n")
    (tmp_path / "limits").write_text(json.dumps({"tenants": {"acme": {"max_requests": 1}}}))
    (tmp_path / "admin").write_text(ADMIN)
    admin = f"127.0.0.1:{free_port()}"
    restartable.restart_scheduler(
        "--api-keys", str(tmp_path / "keys"), "--tenant-limits", str(tmp_path / "limits"),
        "--admin", admin, "--admin-key-file", str(tmp_path / "admin"),
    )  # fmt: skip
    with HealthWatch(restartable.address) as health:
        health.wait_for("SERVING")  # the only API worker has the core, and the core the executor
    key = {"metadata": (("authorization", f"Bearer {ADMIN}"),), "timeout": 20}
    acme = {"metadata": (("authorization", f"Bearer {KEY}"),), "timeout": 60}
    with grpc.insecure_channel(admin) as admin_channel, grpc.insecure_channel(restartable.address) as channel:
        operators, stub = admin_pb2_grpc.AdminStub(admin_channel), pb_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as failure:
            stub.Generate(request([5, 6], 1), timeout=20)
        assert failure.value.code() == grpc.StatusCode.UNAUTHENTICATED

        long = stub.GenerateStream(request(list(range(3, 80)), 4000, request_id="long", **GREEDY), **acme)
        next(long)
        with pytest.raises(grpc.RpcError) as failure:
            stub.Generate(request([5, 6], 1), **acme)
        assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "its limit is 1" in failure.value.details()
        with Client(restartable.address, api_key=OTHER) as other:
            assert len(other.generate([5, 6], max_tokens=3, ignore_eos=True, logprobs=1).choices[0].logprobs) == 3

        why = operators.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id="long"), **key)
        assert (why.tenant, why.reason, why.choices[0].executor) == ("acme", "it runs", "only")
        load = operators.GetLoad(admin_pb2.GetLoadRequest(), **key)
        assert [(tenant.name, tenant.requests, tenant.max_requests) for tenant in load.tenants] == [("acme", 1, 1)]
        long.cancel()
        for _ in bounded(TIMEOUT, "the request stays"):
            if not operators.GetLoad(admin_pb2.GetLoadRequest(), **key).models[0].live_requests:
                break
        (executor,) = operators.ListExecutors(admin_pb2.ListExecutorsRequest(), **key).executors
        assert executor.blocks_cached > 0
        assert operators.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(), **key).blocks > 0
        (executor,) = operators.ListExecutors(admin_pb2.ListExecutorsRequest(), **key).executors
        assert (executor.blocks_cached, executor.blocks_owned) == (0, 0)
        with Client(restartable.address, api_key="nobody's key") as nobody, pytest.raises(RequestError) as refused:
            nobody.models()
        assert refused.value.code == grpc.StatusCode.UNAUTHENTICATED
