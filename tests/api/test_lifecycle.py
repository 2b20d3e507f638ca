"""Ends that are nobody's plan: cancel, deadline, a client that does not read, a core that dies; health; shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec
import pytest
import zmq.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from protos.wire import pack_int32, unpack_int32
from scheduler_svc.api.service import ServiceConfig
from tests.api.fake_core import FakeCore, model_state
from tests.api.rig import ANSWER_IDS, answer_token, decoded, rig, run_async, text_request
from tests.api.vocabularies import LONG, byte_level

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def eventually(condition: Callable[[], object]) -> None:
    """What has no event of its own, looked at once every turn of the loop; rig's bound holds."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def until_error(call: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    """The messages of a call that was read from before, whatever its end."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message


@pytest.mark.parametrize("unary", [False, True])
@run_async
async def test_cancel_reaches_the_core(unary: bool) -> None:
    async with rig() as r:
        r.core.auto = False
        call = (r.stub.Generate if unary else r.stub.GenerateStream)(text_request())
        waiting = asyncio.ensure_future(call if unary else call.read())
        await r.core.until(lambda: r.core.runs)
        await r.core.step()
        call.cancel()
        await r.core.until(lambda: r.core.got(front.Cancel))
        assert not r.core.runs
        await asyncio.gather(waiting, return_exceptions=True)


@run_async
async def test_deadline_is_told_and_kept() -> None:
    async with rig() as r:
        r.core.auto = False
        for seconds in (0.3, 3.0, 30.0):  # longer, where the machine is so busy that the core hears of none before
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await r.stream(text_request(), timeout=seconds)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if r.core.got(front.Submit):
                break
        await r.core.until(lambda: r.core.got(front.Cancel))
        submit = r.core.got(front.Submit)[0]
        assert 0.0 < submit.deadline - submit.arrival < seconds + 0.05
        no_deadline = r.stub.GenerateStream(text_request())
        await no_deadline.read()
        assert r.core.got(front.Submit)[-1].deadline == 0.0
        no_deadline.cancel()
        await r.core.until(lambda: len(r.core.got(front.Cancel)) == len(r.core.got(front.Submit)))


@run_async
async def test_client_that_does_not_read_is_given_up() -> None:
    """Its window full, a write waits; other streams go on, and after the bound the stream ends."""
    service = ServiceConfig(slow_seconds=0.4, slow_tokens=20)
    async with rig(service=service) as r:
        await r.announce(model_state(context_length=2**20, max_sequence_tokens=2**20))
        r.core.auto = False
        other = grpc.aio.insecure_channel(f"127.0.0.1:{r.server.port}")
        slow = pb_grpc.InferenceStub(other).GenerateStream(text_request(stopping=pb.Stopping()))
        await slow.read()
        number = next(iter(r.core.runs))[0]
        (stream,) = r.server.link.open
        # Long pieces of text, so that flow control stops the stream after some megabytes.
        ids = [byte_level().token_to_id(LONG)] * 100
        while stream in r.server.link.open:
            if stream.unread < 1000:
                await r.core.send(front.Tokens(pack_int32([number] * len(ids)), pack_int32(ids)))
            await asyncio.sleep(0.002)
        await r.core.until(lambda: r.core.got(front.Cancel))
        assert not r.core.runs
        # Whoever reads after all gets what was written, and then the reason.
        assert len([message async for message in until_error(slow)]) > 1
        assert await slow.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        r.core.auto = True
        assert (await r.stream(text_request())).ids[0] == ANSWER_IDS[:12]
        await other.close()


@pytest.mark.parametrize("stops", [False, True])
@run_async
async def test_core_restart_loses_and_repeats_nothing(stops: bool) -> None:
    stopping = pb.Stopping(max_tokens=30, stop=["never there"] if stops else [])
    async with rig() as r:
        r.core.auto = False
        request = text_request(sampling=pb.Sampling(temperature=1.0, n=2), stopping=stopping, request_id="same")
        stream = asyncio.create_task(r.stream(request))
        whole = asyncio.ensure_future(r.stub.Generate(text_request(stopping=stopping)))
        await r.core.until(lambda: len(r.core.runs) == 3)
        seed = next(s.sampling.seed for s in r.core.got(front.Submit) if s.request_id == "same")
        for count in (1, 4, 2):
            await r.core.step(per_row=count)
            old = {run.submit.request_id: list(run.outputs) for run in r.core.runs.values() if run.choice == 0}
            await eventually(lambda: r.server.link._flow.received == r.core.sent_tokens)
            await r.restart_core()
            r.core.auto = False
            await r.core.until(lambda: len(r.core.runs) == 3)
            submits = {submit.request_id: submit for submit in r.core.got(front.Submit)}
            assert all(submit.continuation for submit in submits.values())
            assert submits["same"].sampling.seed == seed
            assert unpack_int32(submits["same"].choices[0].outputs).tolist() == old["same"]
        r.core.auto = True
        answer = await stream
        assert answer.ids == {0: ANSWER_IDS[:30], 1: ANSWER_IDS[1:31]}
        assert answer.text == {c: decoded(answer.ids[c]) for c in (0, 1)}
        assert answer.usage.completion_tokens == 60
        assert list((await whole).choices[0].token_ids) == ANSWER_IDS[:30]


@run_async
async def test_core_that_forgot_this_worker() -> None:
    async with rig() as r:
        r.core.auto = False
        stream = asyncio.create_task(r.stream(text_request()))
        await r.core.until(lambda: r.core.runs)
        await r.core.step(per_row=5)
        await eventually(lambda: r.server.link._flow.received == 5)
        r.core.runs.clear()
        r.core.known = False  # the next Attach is answered with Reattach too
        await r.core.send(front.Reattach())
        await r.core.until(lambda: r.core.runs)
        r.core.auto = True
        assert (await stream).ids[0] == ANSWER_IDS[:12]
        assert len(r.core.got(front.Attach)) == 3


@run_async
async def test_silent_core_counts_as_gone() -> None:
    async with rig(link={"silence": 0.6}) as r:
        r.core.auto = False
        stream = asyncio.create_task(r.stream(text_request()))
        await r.core.until(lambda: r.core.runs)
        r.core.silent = True
        before = len(r.core.got(front.Attach))
        await r.core.until(lambda: len(r.core.got(front.Attach)) > before)
        r.core.runs.clear()
        r.core.silent = False
        r.core.auto = True
        assert (await stream).ids[0] == ANSWER_IDS[:12]


@run_async
async def test_core_away_for_too_long() -> None:
    async with rig(link={"down_limit": 0.3}) as r:
        r.core.auto = False
        call = r.stub.GenerateStream(text_request())
        await call.read()
        await r.core.die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "core" in caught.value.details()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.stream(text_request())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not r.server.health.serving


@run_async
async def test_model_back_with_other_weights_ends_its_streams() -> None:
    async with rig() as r:
        r.core.auto = False
        call = r.stub.GenerateStream(text_request())
        await call.read()
        await r.core.announce(model_state(fingerprint="e" * 64))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.ABORTED
        await r.core.until(lambda: not r.core.runs)
        r.core.auto = True
        assert (await r.stream(text_request())).ids[0] == ANSWER_IDS[:12]


@run_async
async def test_streams_wait_for_their_model_after_a_restart() -> None:
    async with rig() as r:
        r.core.auto = False
        stream = asyncio.create_task(r.stream(text_request()))
        await r.core.until(lambda: r.core.runs)
        models = r.core.models
        r.core.models = ()
        await r.restart_core()
        await r.core.until(lambda: r.core.got(front.Attach))
        new = asyncio.create_task(r.stream(text_request("a new one")))
        await eventually(lambda: len(r.server.link.open) == 2)
        assert not r.core.got(front.Submit)
        r.core.auto = True
        await r.core.announce(*models)
        assert (await stream).ids[0] == ANSWER_IDS[:12]
        assert (await new).ids[0] == ANSWER_IDS[:12]


@run_async
async def test_a_new_core_knows_nothing_of_the_former_ones_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for the moment between Attached and its first Models is health SERVING on the former core's word."""
    async with rig() as r:
        said: list[bool] = []
        tell = r.server.health.set

        def listen(serving: bool) -> None:
            said.append(serving)
            tell(serving)

        monkeypatch.setattr(r.server.health, "set", listen)
        models = r.core.models
        r.core.models = ()
        await r.restart_core()
        await r.core.until(lambda: r.core.got(front.Attach))
        await eventually(lambda: r.server.link.talks)
        assert True not in said
        await r.core.announce(*models)
        await eventually(lambda: r.server.health.serving)


@run_async
async def test_stop_found_while_the_core_dies_still_ends() -> None:
    async with rig() as r:
        r.core.auto = False
        stream = asyncio.create_task(r.stream(text_request(stopping=pb.Stopping(max_tokens=99, stop=["caf"]))))
        await r.core.until(lambda: r.core.runs)
        core = r.core
        handle = core._handle

        async def deaf(peer: bytes, message: front.ToCore) -> None:
            if not isinstance(message, front.Stop):
                await handle(peer, message)
            core.received.append(message)

        core._handle = deaf  # type: ignore[method-assign]
        await core.step(per_row=20)
        await core.until(lambda: core.got(front.Stop))
        await r.restart_core()
        answer = await stream
        assert answer.finish[0].stop == "caf"
        assert answer.usage.completion_tokens == len(answer.ids[0])


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff\x00garbage"],
        [b"a", b"b"],
        [front.Tokens(b"\1\0\0\0", b"\1\0\0")],
        [front.Tokens(b"\1\0\0\0", b"\1\0\0\0" * 2)],
        [front.Tokens(b"\1\0\0\0", b"\xff\xff\xff\xff")],
        [front.Tokens(b"\1\0\0\0", b"\1\0\0\0", b"\0", b"\2")],
        [front.Tokens(b"\1\0\0\0", b"\1\0\0\0", b"\0\0")],
    ],
)
@run_async
async def test_damaged_frame_costs_a_session_and_no_token(frames: list) -> None:
    async with rig() as r:
        r.core.auto = False
        stream = asyncio.create_task(r.stream(text_request()))
        await r.core.until(lambda: r.core.runs)
        await r.core.step(per_row=3)
        await eventually(lambda: r.server.link._flow.received == 3)
        r.core.runs.clear()
        encoded = [frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame) for frame in frames]
        await r.core._socket.send_multipart([r.core._peer, *encoded])
        await r.core.until(lambda: r.core.runs)
        r.core.auto = True
        assert (await stream).ids[0] == ANSWER_IDS[:12]
        assert r.server.link.damaged_frames == 1


@run_async
async def test_messages_about_unknown_streams_are_nothing() -> None:
    async with rig() as r:
        r.core.auto = False
        stream = asyncio.create_task(r.stream(text_request()))
        await r.core.until(lambda: r.core.runs)
        await r.core.send(front.Finished(999, 0, front.LENGTH, 1, 0))
        await r.core.send(front.Failed(999, front.INTERNAL, "x"))
        await r.core.send(front.Accepted(999))
        await r.core.send(front.Tokens(pack_int32([999]), pack_int32([1])))
        await r.core.send(front.Tokens(pack_int32([next(iter(r.core.runs))[0]]), pack_int32([1]), b"\7"))
        r.core.auto = True
        assert (await stream).ids[0] == ANSWER_IDS[:12]


@run_async
async def test_a_failing_stream_fails_alone() -> None:
    async with rig() as r:
        r.core.auto = False
        bad = asyncio.create_task(r.stream(text_request(request_id="bad")))
        good = asyncio.create_task(r.stream(text_request(request_id="good")))
        await r.core.until(lambda: len(r.core.runs) == 2)
        victim = next(stream for stream in r.server.link.open if stream.request.request_id == "bad")

        def broken(index: int, tokens: list[int]) -> None:
            raise ZeroDivisionError

        victim.on_tokens = broken  # type: ignore[method-assign, assignment]
        r.core.auto = True
        assert (await good).ids[0] == ANSWER_IDS[:12]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bad
        assert caught.value.code() == grpc.StatusCode.INTERNAL


@run_async
async def test_health_follows_the_fleet() -> None:
    async with rig() as r:
        health = health_pb2_grpc.HealthStub(r.channel)
        request = health_pb2.HealthCheckRequest(service="stepwire.v1.Inference")
        watches = [health.Watch(request) for _ in range(2)]
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="other"))
        assert (await unknown.read()).status == UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        for watch in watches:
            assert (await watch.read()).status == SERVING
        watches.pop(0).cancel()  # one watcher's leaving is not another's concern
        await r.core.announce(model_state(executors_ready=0))
        assert (await watches[0].read()).status == NOT_SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        await r.core.announce(model_state())
        assert (await watches[0].read()).status == SERVING
        await r.core.die()
        assert (await watches[0].read()).status == NOT_SERVING
        unknown.cancel()


@run_async
async def test_request_before_any_model_waits_bounded() -> None:
    async with rig(ready=False, service=ServiceConfig(model_patience=0.2)) as r:
        r.core.models = ()
        r.core.known = False
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.stream(text_request())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "grpc-retry-pushback-ms" in dict(tuple(caught.value.trailing_metadata()))


@run_async
async def test_corrupt_files_are_fetched_again() -> None:
    async with rig(ready=False) as r:
        good = dict(r.core.files)
        r.core.files["tokenizer.json"] = good["tokenizer.json"][:-1] + b"?"
        waiting = asyncio.create_task(r.stream(text_request()))
        await r.core.until(lambda: len(r.core.got(front.FetchAsset)) >= 2)
        r.core.files = good
        assert (await waiting).ids[0] == ANSWER_IDS[:12]


@run_async
async def test_process_serves_and_drains_on_sigterm() -> None:
    """The real process: ready, streams, refuses nothing in its grace, ends the open stream, detaches, exits 0."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        context = zmq.asyncio.Context()
        core = FakeCore(context, f"ipc://{folder}/front", answer_token)
        core.auto = False
        target = f"unix:{folder}/api"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scheduler_svc.api", "--front", f"ipc://{folder}/front", "--listen", target),
            *("--worker-name", "w7", "--leave-grace", "2", "--log-format", "json"),
            stderr=asyncio.subprocess.PIPE,
        )
        channel = grpc.aio.insecure_channel(target)
        try:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            while (await watch.read()).status != SERVING:
                pass
            stub = pb_grpc.InferenceStub(channel)
            call = stub.GenerateStream(text_request())
            assert (await call.read()).HasField("started")
            await core.step()
            os.kill(process.pid, signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            late = stub.GenerateStream(text_request())
            assert (await late.read()).HasField("started")
            assert await watch.read() is grpc.aio.EOF  # the grace is over
            core.auto = True
            await core.step()
            ids = {}
            for name, stream in (("first", call), ("late", late)):
                async for message in until_error(stream):
                    ids.setdefault(name, []).extend(i for delta in message.choices for i in delta.token_ids)
            assert ids == {"first": ANSWER_IDS[:12], "late": ANSWER_IDS[:12]}
            assert await process.wait() == 0
            await core.until(lambda: core.got(front.Detach))
            assert core.got(front.Detach)[0].worker == "w7"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await channel.close()
            await core.die()
            context.term()


@run_async
async def test_stopping_while_files_are_under_way() -> None:
    async with rig(ready=False) as r:
        r.core.files["tokenizer.json"] = b""
        await r.core.until(lambda: r.core.got(front.FetchAsset))
        r.core.silent = True


@run_async
async def test_an_address_in_use_is_an_error() -> None:
    async with rig(ready=False) as r:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scheduler_svc.api", "--front", "ipc:///nonexistent/front"),
            *("--listen", f"127.0.0.1:{r.server.port}"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        assert process.returncode == 1
        assert b"cannot listen" in errors


@pytest.mark.parametrize("on", [True, False])
@run_async
async def test_reflection_can_be_switched(on: bool) -> None:
    async with rig(ready=False, reflection=on) as r:
        stub = reflection_pb2_grpc.ServerReflectionStub(r.channel)
        call = stub.ServerReflectionInfo()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        if not on:
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
            return
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"stepwire.v1.Inference", "grpc.health.v1.Health"} <= names
        await call.done_writing()


@run_async
async def test_a_new_stream_is_not_starved_by_busy_ones() -> None:
    """With others that always have tokens, the first message of a new one comes while they run."""
    async with rig() as r:
        r.core.per_row, r.core.context_length = 2, 2**20
        await r.announce(model_state(context_length=2**20, max_sequence_tokens=2**20))
        busy = [asyncio.create_task(r.stream(text_request(stopping=pb.Stopping(max_tokens=2**19)))) for _ in range(30)]
        await r.core.until(lambda: len(r.core.runs) == 30)
        call = r.stub.GenerateStream(text_request())
        assert (await call.read()).HasField("started")
        assert not any(task.done() for task in busy)
        call.cancel()
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
