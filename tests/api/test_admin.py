"""Keys, TLS and the admin service, over real sockets; the core behind the admin service is the real state machine."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from protos import front
from protos.stepwire.v1 import admin_pb2, admin_pb2_grpc
from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from scheduler_svc.api.__main__ import config_of, parser
from scheduler_svc.api.security import TlsFiles, is_local
from scheduler_svc.api.service import ServiceConfig
from scheduler_svc.api.tenancy import Tenancy, bearer, digest, load_keys, parse_keys
from scheduler_svc.reloaded import Reloaded
from stepwire.health import check
from tests.api.rig import ANSWER_IDS, Rig, rig, run_async, text_request, until
from tests.api.test_door import details_of, refusal_of

KEY, OTHER = "sk-acme-0123456789", "sk-other-0123456789"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def shown(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def key_file(folder: Path, text: str) -> Reloaded[dict[str, str]]:
    (folder / "keys").write_text(text)
    return Reloaded(folder / "keys", load_keys)


def test_key_files(tmp_path: Path) -> None:
    keys = f"# keys\n\nacme {KEY}\nother sha256:{digest(OTHER)}\nacme {OTHER}2\n"
    tenancy = Tenancy(key_file(tmp_path, keys))
    assert tenancy.of(shown(KEY)) == "acme"
    assert tenancy.of(shown(OTHER)) == "other"
    assert tenancy.of(shown(OTHER + "2"), "acme") == "acme"
    assert Tenancy().of((), "named") == "named"
    for text, word in (
        ("", "no key"),
        ("acme", "line 1"),
        ("acme short", "line 1"),
        (f"acme {KEY}\nb {KEY}", "line 2"),
        ("acme sha256:12", "line 1"),
        (f"{'t' * 129} {KEY}", "line 1"),
    ):
        with pytest.raises(ValueError, match=word) as caught:
            parse_keys(text, "keys")
        assert KEY not in str(caught.value)
    assert bearer((("authorization", "basic x"), ("authorization", "BEARER y"))) == "y"
    assert bearer(None) is None


@run_async
async def test_a_key_names_the_tenant(tmp_path: Path) -> None:
    async with rig(api_keys=key_file(tmp_path, f"acme {KEY}\nother {OTHER}\n")) as r:
        for metadata in ((), shown("wrong"), (("authorization", f"Basic {KEY}"),)):
            error = await refusal_of(r.stub, text_request(), metadata=metadata)
            assert error.code() == UNAUTHENTICATED
            assert "acme" not in error.details()
            for call in (
                r.stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
                r.stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata),
                r.stub.Detokenize(pb.DetokenizeRequest(ids=[1]), metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() == UNAUTHENTICATED
        error = await refusal_of(r.stub, text_request(tenant="other"), metadata=shown(KEY))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        (info,) = details_of(error, error_details_pb2.ErrorInfo)
        assert dict(info.metadata)["field"] == "tenant"
        assert not r.core.got(front.Submit)
        await r.stream(text_request(), metadata=shown(KEY))
        await r.stream(text_request(tenant="other"), metadata=shown(OTHER))
        assert [submit.tenant for submit in r.core.got(front.Submit)] == ["acme", "other"]


def certificates(folder: Path) -> TlsFiles:
    """A self-signed certificate for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the test's certificate, is not here")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return TlsFiles(folder / "cert.pem", folder / "key.pem")


def test_tls(tmp_path: Path) -> None:
    files = certificates(tmp_path)

    async def run() -> None:
        mutual = TlsFiles(files.certificate, files.key, files.certificate)
        async with rig(ready=False, tls=files) as r, rig(ready=False, tls=mutual) as m:
            for one in (r, m):
                while not one.server.health.serving:
                    await one.server.health._news.wait()
            roots, key = files.certificate.read_bytes(), files.key.read_bytes()
            anonymous = grpc.ssl_channel_credentials(roots)
            known = grpc.ssl_channel_credentials(roots, key, roots)
            for one, credentials, good in ((r, anonymous, True), (m, known, True), (m, anonymous, False)):
                async with grpc.aio.secure_channel(f"localhost:{one.server.port}", credentials) as channel:
                    call = pb_grpc.InferenceStub(channel).Generate(text_request(), timeout=10)
                    if good:
                        assert list((await call).choices[0].token_ids) == ANSWER_IDS[:12]
                        continue
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            probe = (f"localhost:{r.server.port}", "", 10.0, anonymous)
            assert await asyncio.to_thread(check, *probe) == "SERVING"
            # Plain text is not understood.
            with pytest.raises(grpc.aio.AioRpcError):
                await r.stub.ListModels(pb.ListModelsRequest(), timeout=5)

    run_async(run)()
    with pytest.raises(ValueError, match="no private key"):
        TlsFiles(files.certificate, files.certificate).credentials()
    with pytest.raises(ValueError, match="No such file"):
        TlsFiles(tmp_path / "absent", files.key).credentials()


STATUS: dict[str, Any] = {
    "uptime": 12.5,
    "models": [
        {"name": "m", "executors_ready": 1, "executors_expected": 0, "running": 2, "waiting": 1, "live_streams": 3}
    ],
    "tenants": [{"name": "acme", "requests": 3, "queued_tokens": 40, "max_requests": 8}],
    "counters": {"tokens": 77},
    "executors": [
        {
            "name": "e1", "session": "ab", "model": "m", "status": "READY", "device": "cpu", "steps": 5,
            "round_us": 900, "oldest_step_age": 0.5, "unanswered": 1, "slots": {"used": 2, "total": 8},
            "blocks": {"total": 10, "free": 5, "cached": 2, "owned": 3}, "prefix": {"hits": 1, "lookups": 4},
        }
    ],
}  # fmt: skip
WHY: dict[str, Any] = {
    "model": "m", "tenant": "acme", "priority": -3, "age": 4.0, "reason": "it waits for a slot",
    "choices": [
        {
            "index": 0, "state": "WAITING", "waits_for": "a slot", "outputs": 0, "preemptions": 0, "deaths": 0,
            "executor": "", "ahead": 7, "waiting_seconds": 4.0,
        }
    ],
}  # fmt: skip


def script(r: Rig) -> None:
    """The core's answers to what operators ask."""
    handle = r.core._handle

    async def answering(peer: bytes, message: front.ToCore) -> None:
        await handle(peer, message)
        if isinstance(message, front.GetStatus):
            request = WHY if message.request_id == "mine" else {"state": "unknown"}
            await r.core.send(front.Status(message.ticket, STATUS | {"request": dict(request)}))
        elif isinstance(message, front.Control):
            known = message.executor in ("", "e1")
            body = {"error": "" if known else "no such executor", "status": "DRAINING", "blocks": 9}
            await r.core.send(front.Status(message.ticket, body))

    r.core._handle = answering  # type: ignore[method-assign]


@run_async
async def test_admin() -> None:
    async with rig(admin_listen="127.0.0.1:0", admin_key="operator-0123456789") as r:
        script(r)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{r.server.admin_port}") as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            key = {"metadata": shown("operator-0123456789")}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetLoad(admin_pb2.GetLoadRequest())
            assert caught.value.code() == UNAUTHENTICATED
            load = await stub.GetLoad(admin_pb2.GetLoadRequest(), **key)
            assert (load.models[0].waiting, load.tenants[0].name, load.counters["tokens"]) == (1, "acme", 77)
            assert not load.tenants[0].HasField("tokens_per_second")
            (executor,) = (await stub.ListExecutors(admin_pb2.ListExecutorsRequest(model="m"), **key)).executors
            assert (executor.name, executor.blocks_owned, executor.prefix_lookups) == ("e1", 3, 4)
            drained = await stub.DrainExecutor(admin_pb2.DrainExecutorRequest(executor="e1"), **key)
            assert drained.status == "DRAINING"
            assert (await stub.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(), **key)).blocks == 9
            why = await stub.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id="mine"), **key)
            assert (why.reason, why.priority, why.choices[0].ahead) == ("it waits for a slot", -3, 7)
            for call, code in (
                (stub.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id="x"), **key), "NOT_FOUND"),
                (stub.ExplainRequest(admin_pb2.ExplainRequestRequest(), **key), "INVALID_ARGUMENT"),
                (stub.ListExecutors(admin_pb2.ListExecutorsRequest(model="q"), **key), "NOT_FOUND"),
                (stub.DrainExecutor(admin_pb2.DrainExecutorRequest(executor="e2"), **key), "NOT_FOUND"),
                (stub.DrainExecutor(admin_pb2.DrainExecutorRequest(), **key), "INVALID_ARGUMENT"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code().name == code
            # The public port knows nothing of it.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin_pb2_grpc.AdminStub(r.channel).GetLoad(admin_pb2.GetLoadRequest(), **key)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
            assert not r.server.link._tickets


@run_async
async def test_admin_without_a_core() -> None:
    async with (
        rig(admin_listen="127.0.0.1:0", link={"status_timeout": 0.2}) as r,
        grpc.aio.insecure_channel(f"127.0.0.1:{r.server.admin_port}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # this core answers no status
            await admin_pb2_grpc.AdminStub(channel).GetLoad(admin_pb2.GetLoadRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_why_on_the_console(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("operator-0123456789\n")

    async def run() -> None:
        async with rig(admin_listen="127.0.0.1:0", admin_key="operator-0123456789") as r:
            script(r)
            address = f"127.0.0.1:{r.server.admin_port}"

            async def console(*args: str) -> tuple[int, str, str]:
                command = [sys.executable, "-m", "stepwire", *args, "--address", address]
                command += ["--api-key-file", str(tmp_path / "key")]
                process = await asyncio.create_subprocess_exec(
                    *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
                )
                out, err = await process.communicate()
                return process.returncode or 0, out.decode(), err.decode()

            code, out, err = await console("why", "mine")
            assert (code, err) == (0, "")
            assert out.startswith("mine: it waits for a slot\n  model m, tenant acme, priority -3, 4.0 s old\n")
            assert "7 ahead" in out
            assert (await console("executors"))[1].startswith("executors  name=e1")
            code, _, err = await console("drain", "nobody")
            assert (code, err) == (1, "stepwire: NOT_FOUND: executor 'nobody' is not known here\n")

    run_async(run)()


@run_async
async def test_a_key_file_that_changes_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the worker runs; one that cannot be taken changes nothing, and is named once."""

    async def until_answered(key: str, code: grpc.StatusCode) -> None:
        while True:
            try:
                await r.stub.ListModels(pb.ListModelsRequest(), metadata=shown(key))
                found = grpc.StatusCode.OK
            except grpc.aio.AioRpcError as error:
                found = error.code()
            if found == code:
                return
            await asyncio.sleep(0.02)

    def refusals() -> int:
        return sum("file not taken" in record.message for record in caplog.records)

    keys = tmp_path / "keys"
    service = ServiceConfig(slow_seconds=0.1)  # it looks several times a second
    async with rig(api_keys=key_file(tmp_path, f"acme {KEY}\n"), service=service) as r:
        await until_answered(OTHER, UNAUTHENTICATED)
        (tmp_path / "new").write_text(f"other {OTHER}\n")
        (tmp_path / "new").rename(keys)
        await until_answered(OTHER, grpc.StatusCode.OK)
        await until_answered(KEY, UNAUTHENTICATED)
        (tmp_path / "bad").write_text("no such line\n")
        (tmp_path / "bad").rename(keys)
        await until(lambda: refusals() == 1)
        keys.unlink()
        await until(lambda: refusals() == 2)
        await until_answered(OTHER, grpc.StatusCode.OK)
        assert KEY not in caplog.text
        assert OTHER not in caplog.text


def arguments(*more: str) -> Any:
    return parser().parse_args(["--front", "ipc:///x", *more])


def test_what_is_not_secure_is_refused(tmp_path: Path) -> None:
    keys, short = tmp_path / "keys", tmp_path / "short"
    keys.write_text(f"acme {KEY}\n")
    short.write_text("x")
    config = config_of(arguments("--api-keys", str(keys)))
    assert config.api_keys is not None
    assert config.api_keys.settings == {digest(KEY): "acme"}
    for more, word in (
        (("--tls-cert", str(keys)), "go together"),
        (("--tls-client-ca", str(keys)), "needs"),
        (("--tls-cert", str(keys), "--tls-key", str(keys)), "PEM"),
        (("--listen", "0.0.0.0:50051", "--api-keys", str(keys)), "plain text"),
        (("--admin", "0.0.0.0:50052"), "other machines"),
        (("--admin", "nonsense"), "HOST:PORT"),
        (("--admin-key-file", str(short)), "16 characters"),
        (("--admin-key-file", str(tmp_path / "absent")), "cannot be read"),
        (("--api-keys", str(tmp_path / "absent")), "No such file"),
    ):
        with pytest.raises(ValueError, match=word):
            config_of(arguments(*more))
    assert is_local("unix:/x")
    assert is_local("localhost:1")
    assert is_local("[::1]:1")
    assert not is_local("host:1")
