"""Sessions over real ZeroMQ, between the executor service in a thread and a scripted core."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from executor_svc import link
from executor_svc.assets import AssetStore
from executor_svc.models.null import NullModel
from executor_svc.service import ExecutorService
from protos.link_keys import LinkKeys, derive
from protos.step import (
    BAD_PLAN,
    BAD_SEQUENCE,
    DIGEST_MISMATCH,
    AssetChunk,
    Drain,
    Draining,
    EpochLost,
    Failed,
    FetchAsset,
    Forget,
    Goodbye,
    Hello,
    Limits,
    Load,
    Ping,
    Prepare,
    Refused,
    Rehello,
    StepResult,
    Welcome,
)
from protos.wire import Epoch, unpack_int32
from tests.executor.scripted import Planner, ScriptedCore

VOCAB = 97
ASSETS = {"tokenizer.json": b"{}" * 700_000, "chat_template.jinja": b"hello"}


class Running:
    """The service in a thread; leaves with the test."""

    def __init__(self, address: str, overlap: bool = False, keys: LinkKeys | None = None) -> None:
        self.service = ExecutorService(
            NullModel(VOCAB),
            ASSETS,
            Limits(num_blocks=64, block_size=4, max_slots=8, max_batch_tokens=64),
            address,
            "executor-1",
            overlap=overlap,
            keys=keys,
        )
        self.thread = threading.Thread(target=self.service.run)
        self.thread.start()

    def leave(self) -> None:
        if self.thread.is_alive():
            self.service.stop()
            if self.thread.is_alive():
                self.service.stop()
        self.thread.join(90)
        assert not self.thread.is_alive()


@pytest.fixture(autouse=True)
def _quick_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(link, "LAST_BACKOFF", 0.05)


@pytest.fixture
def core() -> Iterator[ScriptedCore]:
    with ScriptedCore() as scripted:
        yield scripted


@pytest.fixture
def executor(core: ScriptedCore) -> Iterator[Running]:
    running = Running(core.address)
    yield running
    running.leave()


def start(core: ScriptedCore, planner: Planner, slot: int = 0) -> StepResult:
    """Admit a prompt of two and sample once."""
    admission = planner.admission(slot, [5, 6], [2 * slot, 2 * slot + 1])
    core.send(planner.plan(admitted=[admission], prefill=[(slot, 2)]))
    return core.expect(StepResult)


def test_hello_states_the_model_and_the_limits(core: ScriptedCore, executor: Running) -> None:
    hello = core.expect(Hello)
    assert (hello.executor, hello.versions) == ("executor-1", (1,))
    assert (hello.model.name, hello.model.vocab_size, hello.model.eos_token_ids) == ("null", VOCAB, (0,))
    assert hello.limits == Limits(64, 4, 8, 64)
    assert [(a.kind, a.size) for a in hello.model.assets] == [
        ("tokenizer.json", 1_400_000),
        ("chat_template.jinja", 5),
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_plans_are_answered_in_order(core: ScriptedCore, overlap: bool) -> None:
    running = Running(core.address, overlap)
    try:
        planner = core.welcome()
        start(core, planner)
        core.send(*(planner.plan(decode=[0]) for _ in range(3)))
        results = [core.expect(StepResult) for _ in range(3)]
        assert [r.seq for r in results] == [2, 3, 4]
        assert results[-1].digest == planner.digest
        # A single plan is answered although no next one comes.
        core.send(planner.plan(decode=[0]))
        assert core.expect(StepResult).seq == 5
    finally:
        running.leave()


def test_load_tells_what_is_used(core: ScriptedCore, executor: Running) -> None:
    planner = core.welcome()
    assert core.expect(Load).slots_used == 0
    start(core, planner)
    load = core.expect(Load)
    assert (load.slots_used, load.blocks_used, load.steps) == (1, 2, 1)
    assert load.memory_bytes > 0


def test_assets_come_in_chunks_between_steps(core: ScriptedCore, executor: Running) -> None:
    planner = core.welcome()
    whole = ASSETS["tokenizer.json"]
    digest = hashlib.sha256(whole).hexdigest()
    core.send(FetchAsset(digest, 0, 2**20), FetchAsset(digest, 2**20, 2**20), FetchAsset("0" * 64, 0, 10))
    core.send(planner.plan())
    chunks = [core.expect(AssetChunk) for _ in range(3)]
    assert chunks[0].data + chunks[1].data == whole
    assert chunks[1].offset == 2**20
    assert (chunks[2].sha256, chunks[2].data) == ("0" * 64, b"")
    assert core.expect(StepResult).seq == 1


def test_an_asset_store_ends_where_the_file_ends() -> None:
    store = AssetStore({"tokenizer.json": b"abcdef"})
    sha = store.listed[0].sha256
    assert store.chunk(FetchAsset(sha, 4, 100)).data == b"ef"
    assert store.chunk(FetchAsset(sha, 6, 100)).data == b""


def test_grammars_are_refused(core: ScriptedCore, executor: Running) -> None:
    core.welcome()
    core.send(Prepare("g1", "regex", "a+"), Forget("g1"))
    failed = core.expect(Failed)
    assert failed.grammar == "g1"
    assert "not supported" in failed.detail


def test_refused_and_rehello_start_new_sessions(core: ScriptedCore, executor: Running) -> None:
    first = core.expect(Hello)
    peers = [core.peer]
    core.send(Refused("quarantined", 0.02))
    core.expect(Hello)
    peers.append(core.peer)
    core.send(Rehello())
    assert core.expect(Hello) == first  # the process, and what it loaded, is the same
    peers.append(core.peer)
    assert len(set(peers)) == 3
    core.send(Welcome(Epoch(7, 1), 1, 2))
    start(core, Planner())


def test_an_unknown_version_ends_the_session(core: ScriptedCore, executor: Running) -> None:
    core.expect(Hello)
    core.send(Welcome(Epoch(7, 1), 2, 2))
    core.welcome()


def test_garbage_is_counted_and_dropped(core: ScriptedCore, executor: Running) -> None:
    planner = core.welcome()
    start(core, planner)
    for frames in ([b""], [b"\xc1" * 9], [b"a", b"b"], [b"\x93" + b"\xa1P" * 3], [b"\x91" * 5000], [b"\x91\xa1z"]):
        core.send_raw(*frames)
    core.send(planner.plan(decode=[0]))
    assert core.expect(StepResult).seq == 2
    assert executor.service.link.counts["malformed"] == 6


def test_an_oversized_frame_ends_the_session_and_nothing_else(core: ScriptedCore, executor: Running) -> None:
    core.welcome()
    core.send_raw(bytes(64 * 1024 * 1024 + 1))
    planner = core.welcome(Epoch(7, 2))
    start(core, planner)


def test_a_new_core_gets_a_new_session_and_none_of_the_old_ones_results(core: ScriptedCore, executor: Running) -> None:
    planner = core.welcome()
    start(core, planner)
    old = core.peer
    core.send(*(planner.plan(decode=[0]) for _ in range(2)))
    core.unbind()
    core.bind()
    core.expect(Hello)  # had a result of the old session come first, decoding it as a Hello would have failed here
    assert core.peer != old
    core.send(Welcome(Epoch(8, 1), 1, 2))
    core.send(planner.plan(decode=[0]))  # of the dead epoch: ignored
    planner = Planner(Epoch(8, 1))
    assert start(core, planner).epoch == Epoch(8, 1)
    assert executor.service.link.counts["ignored_plans"] == 1


def test_the_executor_may_start_first(core: ScriptedCore, monkeypatch: pytest.MonkeyPatch) -> None:
    core.unbind()
    tried = threading.Semaphore(0)

    class Counted(link.Session):
        def close(self, goodbye: bool = False) -> None:
            tried.release()
            super().close(goodbye)

    monkeypatch.setattr(link, "Session", Counted)
    running = Running(core.address)
    try:
        for _ in range(3):
            assert tried.acquire(timeout=90), "a session that cannot connect did not end"
        core.bind()
        start(core, core.welcome())
    finally:
        running.leave()


def test_a_silent_core_is_left(core: ScriptedCore, executor: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    core.welcome()
    old = core.peer
    monkeypatch.setattr(link, "SILENCE_LIMIT", 0.2)
    core.send(Ping())  # the next wait is counted with the new limit
    core.expect(Hello)
    assert core.peer != old


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("harm", "code"),
    [
        ("lost", BAD_SEQUENCE),
        ("repeated", BAD_SEQUENCE),
        ("reordered", BAD_SEQUENCE),
        ("slot", BAD_PLAN),
        ("other slot", DIGEST_MISMATCH),
        ("block", DIGEST_MISMATCH),
        ("digest", DIGEST_MISMATCH),
    ],
)
def test_a_harmed_plan_is_found_on_that_step(core: ScriptedCore, overlap: bool, harm: str, code: int) -> None:
    running = Running(core.address, overlap)
    try:
        planner = core.welcome()
        start(core, planner, slot=0)
        start(core, planner, slot=1)
        core.send(planner.plan(decode=[0, 1]))
        good = core.expect(StepResult)
        third = planner.plan(decode=[0])
        fourth = planner.plan(decode=[0])
        fifth = planner.plan(appended=[(1, 20)], decode=[0, 1])
        at = {
            "lost": (fourth,),
            "repeated": (third, third),
            "reordered": (fourth, third),
            "slot": (replace(third, decode=np.array([7], "<i4").tobytes()),),
            "other slot": (replace(third, decode=np.array([1], "<i4").tobytes()),),
            "block": (third, fourth, replace(fifth, appended=np.array([1, 21], "<i4").tobytes())),
            "digest": (replace(third, digest=third.digest ^ 1),),
        }[harm]
        core.send(*at)
        lost = core.expect(EpochLost)
        assert (lost.epoch, lost.seq, lost.code) == (planner.epoch, at[-1 if harm != "reordered" else 0].seq, code)
        core.send(fifth)  # still of the lost epoch: nothing of it runs
        core.send(Welcome(Epoch(7, 2), 1, 2))
        planner = Planner(Epoch(7, 2))
        # The sequence continues with what was delivered, and draws what would have come.
        token = int(unpack_int32(good.tokens)[0])
        model = NullModel(VOCAB)
        outputs = [model.next_token(6, 1), token]
        admission = planner.admission(0, [5, 6], [0, 1], outputs=outputs)
        core.send(planner.plan(admitted=[admission], prefill=[(0, 4)]))
        result = core.expect(StepResult)
        assert (result.epoch, result.seq) == (Epoch(7, 2), 1)
        assert unpack_int32(result.tokens).tolist() == [model.next_token(token, 3)]
    finally:
        running.leave()


def test_draining_goes_on_until_the_core_says_drain(core: ScriptedCore, executor: Running) -> None:
    planner = core.welcome()
    start(core, planner)
    executor.service.stop()
    core.expect(Draining)
    core.send(planner.plan(decode=[0]), planner.plan(decode=[0]), planner.plan(released=[0]), Drain())
    assert [core.expect(StepResult).seq for _ in range(3)] == [2, 3, 4]
    assert core.expect(Goodbye).reason == "drained"
    executor.thread.join(90)
    assert not executor.thread.is_alive()


def test_a_drain_that_nobody_asked_for_is_obeyed(core: ScriptedCore, executor: Running) -> None:
    planner = core.welcome()
    core.send(planner.plan(), Drain())
    assert core.expect(StepResult).seq == 1
    assert core.expect(Goodbye).reason == "drained"


def test_a_second_stop_leaves_at_once(core: ScriptedCore, executor: Running) -> None:
    planner = core.welcome()
    start(core, planner)
    executor.service.stop()
    core.expect(Draining)
    executor.service.stop()
    assert core.expect(Goodbye).reason == "stopped"


def test_without_a_core_a_stop_leaves_at_once() -> None:
    running = Running("tcp://127.0.0.1:9")
    running.service.stop()
    running.thread.join(90)
    assert not running.thread.is_alive()


# ---------------------------------------------------------------------------------------------------------------------
# Security


def test_curve_with_the_same_secret_connects_and_with_another_does_not() -> None:
    keys, others = derive(b"the secret of this test"), derive(b"the secret of another")

    def server(socket: zmq.Socket[bytes]) -> None:
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret

    with ScriptedCore(server) as core:
        stranger = Running(core.address, keys=others)
        plain = Running(core.address)
        friend = Running(core.address, keys=keys)
        try:
            start(core, core.welcome())
            assert not stranger.service.link.connected
            assert not plain.service.link.connected
        finally:
            for running in (stranger, plain, friend):
                running.leave()
