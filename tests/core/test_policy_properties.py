"""Each rule of policy by its property, over arbitrary values: hypothesis draws them, the sums are done another way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import front, step
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.fairness import FairShares
from scheduler_svc.core.kv_peak import peak_blocks
from scheduler_svc.core.models import ModelEntry
from scheduler_svc.core.outbox import Outbox
from scheduler_svc.core.pace import LEAST_CHUNK, Pace
from scheduler_svc.core.sequence import Sequence, Stream
from scheduler_svc.core.workers import Workers
from tests.core.sim import SimExecutor, model_card
from tests.core.test_same_tokens import assert_reference, submit_all
from tests.core.world import SimWorker, World, simple_world

cheap = settings(max_examples=40, deadline=None, derandomize=True)


def entry(**config: float) -> ModelEntry:
    return ModelEntry(model_card(), 4, CoreConfig(**config), 0.0)  # type: ignore[arg-type]


class Requests:
    """Waiting sequences of one model, made by hand."""

    def __init__(self, model: ModelEntry) -> None:
        self.model = model
        self.worker = Workers(Outbox(), 4).add(b"w", front.Attach(front.FRONT_VERSION, "w", 1))
        self.order = 0

    def push(self, arrival: float, priority: int = 0, tenant: str = "", deadline: float = 0.0) -> Sequence:
        self.order += 1
        stream = Stream(self.worker, self.order, f"r{self.order}", self.model, deadline, arrival, tenant)
        sequence = Sequence(
            stream, 0, b"\1\0\0\0" * 8, b"", step.SamplingParams(),
            limit=64, stop_ids=frozenset(), ignore_eos=False, stops_on_text=False, salt=tenant, priority=priority,
            arrival=arrival, hashes=b"", continued=False, order=self.order, now=arrival,
        )  # fmt: skip
        stream.sequences[0] = sequence
        self.model.queue.push(sequence, arrival)
        return sequence


def test_a_long_queue_is_gone_through_once_whoever_leaves_or_is_put_back_meanwhile() -> None:
    for tenants in (1, 3):
        requests = Requests(entry())
        queue = requests.model.queue
        waiting = [requests.push(float(i), tenant=str(i % tenants)) for i in range(1500)]
        met = []
        for i, sequence in enumerate(queue):
            met.append(sequence)
            if i % 2:
                queue.remove(sequence)
            if i % 100 == 1:
                sequence.continued = i % 200 == 1  # before all that are left, or where it was
                queue.push(sequence, 2000.0)
        assert met == waiting


# -- being passed over -----------------------------------------------------------------------------------------------

request = st.tuples(
    st.floats(0.0, 500.0),  # arrival
    st.integers(-100, 100),
    st.sampled_from("abc"),
    st.one_of(st.just(0.0), st.floats(0.01, 60.0)),  # deadline after arrival
)


@cheap
@given(
    wanted=st.lists(request, min_size=1, max_size=40),
    served=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**6)), max_size=20),
    ageing=st.sampled_from([0.0, 1.0, 10.0]),
    window=st.sampled_from([0.0, 30.0, 120.0]),
)
def test_being_passed_over_is_bounded(
    wanted: list[tuple[float, int, str, float]], served: list[tuple[str, int]], ageing: float, window: float
) -> None:
    model = entry(ageing=ageing, fair_window=window, fair_tokens=1000)
    requests = Requests(model)
    for arrival, priority, tenant, left in wanted:
        requests.push(arrival, priority, tenant, arrival + left if left else 0.0)
    for tenant, tokens in served:
        model.queue.shares.charge(tenant, tokens)
    order = list(model.queue)
    assert sorted(id(s) for s in order) == sorted(id(s) for s in model.queue.unordered())
    for place, sequence in enumerate(order):
        assert model.queue.ahead_of(sequence) == place
        bound = (sequence.priority + 101) * ageing + window
        for earlier in order[:place]:
            assert earlier.arrival <= sequence.arrival + bound + 1e-6


@cheap
@given(priorities=st.lists(st.integers(-100, 100), min_size=2, max_size=20), ageing=st.floats(0.1, 20.0))
def test_a_class_is_worth_so_many_seconds(priorities: list[int], ageing: float) -> None:
    model = entry(ageing=ageing)
    requests = Requests(model)
    made = [requests.push(100.0 + i, priority) for i, priority in enumerate(priorities)]
    expected = sorted(made, key=lambda s: (s.arrival + ageing * s.priority, s.order))
    assert list(model.queue) == expected


def test_a_near_deadline_is_worth_less_than_a_class() -> None:
    model = entry(ageing=10.0)
    requests = Requests(model)
    plain = requests.push(100.0)
    urgent = requests.push(108.0, deadline=109.0)  # 9 s of pull
    patient = requests.push(101.0, deadline=500.0)
    higher = requests.push(108.5, priority=-1)
    assert list(model.queue) == [higher, urgent, plain, patient]


# -- shares ----------------------------------------------------------------------------------------------------------


@cheap
@given(
    costs=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(1, 400)), min_size=8, max_size=60),
    allowed=st.sampled_from([500, 2000]),
)
def test_tenants_that_wait_are_served_alike(costs: list[tuple[int, int, int]], allowed: int) -> None:
    """All come at once, as many of each tenant as there are costs, the first tenant's before the others'."""
    model = entry(fair_window=100.0, fair_tokens=allowed)
    requests, cost = Requests(model), {}
    for tenant, name in enumerate("abc"):
        for amounts in costs:
            cost[requests.push(10.0 + tenant, tenant=name)] = amounts[tenant]
    served = dict.fromkeys("abc", 0)
    while len({s.salt for s in model.queue.unordered()}) == 3:
        first = next(iter(model.queue))
        model.queue.remove(first)
        served[first.salt] += cost[first]
        model.queue.shares.charge(first.salt, cost[first])
        # The heads lie 2 s apart: that much of the window is lost, the rest stands.
        assert max(served.values()) - min(served.values()) <= allowed * 0.02 + 2 * 400


def test_nothing_is_saved_up_by_staying_away() -> None:
    shares = FairShares(60.0, 1000)
    shares.waits("busy")
    shares.charge("busy", 50_000)
    shares.waits("new")
    assert shares.put_back("busy", shares.floor) == 0.0 or shares.served("new") >= 50_000
    shares.charge("new", 100)
    assert 0.0 <= shares.put_back("new", shares.floor) <= 60.0


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    world, worker = simple_world(limits=step.Limits(400, 4, 4, 64), fair_tokens=64)
    for i in range(60):
        worker.submit([i + 1] * 8, 8, seed=i, tenant="flood", ignore_eos=True)
    world.now += 5.0
    (session,) = world.executors
    for _ in range(40):
        world.run(session)
    late = [worker.submit([i + 1] * 8, 8, seed=i, tenant="late", ignore_eos=True) for i in range(4)]
    steps = 0
    while any((number, 0) not in worker.ends for number in late):
        world.run(session)
        steps += 1
    done = sum(1 for key in worker.ends if key[0] not in late)
    assert steps <= 40  # three turns of four slots at most, instead of all that waited before
    assert done < 40
    world.run_all()
    assert_reference(worker)


# -- KV --------------------------------------------------------------------------------------------------------------


@cheap
@given(
    running=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 200)), min_size=1, max_size=24),
    block_size=st.sampled_from([1, 2, 4, 16]),
)
def test_the_peak_is_that_of_the_run(running: list[tuple[int, int]], block_size: int) -> None:
    tokens, limits = [t for t, _ in running], [t + more for t, more in running]
    held = [
        sum(-(-(t + at) // block_size) for t, limit in zip(tokens, limits, strict=True) if t + at <= limit)
        for at in range(201)
    ]
    assert peak_blocks(np.array(tokens), np.array(limits), block_size) == max(held)


@pytest.mark.parametrize("seed", range(4))
def test_without_over_commit_nobody_is_preempted(seed: int) -> None:
    wanted = [([1 + (seed * 31 + i) % 400] * (1 + (7 * i + seed) % 20), 1 + (11 * i) % 40, i) for i in range(40)]
    preemptions = {}
    for overcommit in (1.0, 8.0):
        world, worker = simple_world(limits=step.Limits(24, 4, 16, 512), kv_overcommit=overcommit, prefix_cache=False)
        submit_all(world, worker, wanted)
        world.run_all()
        assert_reference(worker)
        preemptions[overcommit] = world.core.residency.preemptions
    assert preemptions[1.0] == 0 < preemptions[8.0]


# -- prefill and decode ----------------------------------------------------------------------------------------------


@cheap
@given(
    step_us=st.integers(100, 20_000),
    token_us=st.integers(1, 500),
    target=st.sampled_from([0.02, 0.05, 0.2]),
    budget=st.integers(65, 8192),
    noise=st.lists(st.floats(0.7, 1.0), min_size=30, max_size=30),
)
def test_chunks_keep_to_the_target_once_they_were_measured(
    step_us: int, token_us: int, target: float, budget: int, noise: list[float]
) -> None:
    pace = Pace(target)
    measured = False
    for factor in noise:
        pace.observe(8, 0, step_us)
        chunk = pace.prompt_tokens(budget, 8)
        assert min(budget, LEAST_CHUNK) <= chunk <= budget
        took = step_us + factor * token_us * chunk
        if measured and chunk > LEAST_CHUNK:
            assert took <= 1e6 * target / 0.7 + 1  # over it by no more than the spread of what was measured
        pace.observe(8, chunk, round(took))
        measured = True
    assert pace.prompt_tokens(budget, 0) == budget  # nobody decodes: nobody waits


def slow(executor: SimExecutor, world: World, session: bytes) -> float:
    """Run a plan that takes 1 ms and 1 ms a prompt token. Returns how long it took."""
    before = executor.prefill_tokens
    answer = executor.run()
    assert isinstance(answer, step.StepResult)
    seconds = 0.001 * (1 + executor.prefill_tokens - before)
    world.now += seconds
    fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
    world.from_executor(session, step.StepResult(**{**fields, "round_us": int(1e6 * seconds)}))
    return seconds


@pytest.mark.parametrize("target", [0.0, 0.1])
def test_decode_is_not_starved_by_a_long_prompt_nor_it_by_decode(target: float) -> None:
    world, worker = simple_world(limits=step.Limits(4000, 4, 16, 1024), itl_target=target)
    (session,) = world.executors
    executor = world.executors[session]
    streams = [worker.submit([i + 1], 200, seed=i, ignore_eos=True) for i in range(8)]
    for _ in range(10):
        slow(executor, world, session)
    long = worker.submit([1 + i % 400 for i in range(4000)], 1)
    took = []
    while (long, 0) not in worker.ends:
        before = len(worker.outputs[(streams[0], 0)])
        took.append(slow(executor, world, session))
        assert len(worker.outputs[(streams[0], 0)]) == before + 1  # decode has a row in every step
        assert len(took) < 200
    if target:
        assert sorted(took)[-3] <= target + 0.002  # but for the first chunks, when nothing was known
        assert len(took) <= 4000 // LEAST_CHUNK + 3
    else:
        assert max(took) > 0.9


# -- victims ---------------------------------------------------------------------------------------------------------


def test_the_cheapest_gives_way_and_not_always_the_same() -> None:
    world, worker = simple_world(limits=step.Limits(40, 4, 8, 512), kv_overcommit=0.0)
    world.batching = True
    long = worker.submit([7] * 90, 40, ignore_eos=True)
    for i in range(5):
        worker.submit([i + 1] * 8, 40, seed=i, ignore_eos=True)
    world.batching = False
    world.settle()
    preempted: dict[int, int] = {}
    while any(w.open for w in (worker,)):
        world.run_round()
        for executor in world.core.fleet.sessions.values():
            for sequence in [*executor.residents(), *executor.model.queue.unordered()]:
                preempted[sequence.stream.number] = sequence.preemptions
    assert_reference(worker)
    assert preempted[long] == 0
    assert max(preempted.values()) > 0


@cheap
@given(
    blocks=st.integers(13, 30),
    wanted=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 36)), min_size=2, max_size=8),
    depth=st.integers(1, 3),
)
def test_preemption_always_ends(blocks: int, wanted: list[tuple[int, int]], depth: int) -> None:
    """Every one ends, and no preemption comes without a token before it."""
    world, worker = simple_world(limits=step.Limits(blocks, 4, 8, 64), depth=depth, kv_overcommit=0.0)
    submit_all(world, worker, [([i + 1] * prompt, outputs, i) for i, (prompt, outputs) in enumerate(wanted)])
    world.run_all()
    assert_reference(worker)
    assert world.core.residency.preemptions <= sum(outputs for _, outputs in wanted) + len(wanted)


# -- placement and why -----------------------------------------------------------------------------------------------


def test_waiting_for_a_better_place_is_bounded() -> None:
    """An executor with the prefix and no tokens to spare does not keep a request for ever."""
    world = World(placement_wait=0.5, prefix_wait=0.5, itl_target=0.0)
    limits = step.Limits(4000, 4, 8, 8)
    sessions = [world.add_executor(SimExecutor(f"e{i}", i + 1, model_card(), limits))[0] for i in range(2)]
    worker: SimWorker = world.add_worker()
    prefix = list(range(1, 41))
    worker.submit(prefix, 1)
    world.run_all()
    holder = next(s for s in sessions if world.core.fleet.sessions[s].cache.blocks)
    # The holder is kept busy with a prompt that takes all its tokens, for long.
    other = world.core.fleet.sessions[next(s for s in sessions if s != holder)]
    worker.submit([500 - i % 400 for i in range(2000)], 1)
    wanted = worker.submit([*prefix, 7], 2)
    for _ in range(400):
        if worker.outputs[(wanted, 0)]:
            break
        world.run_round()
        world.now += 0.02
    assert worker.outputs[(wanted, 0)]
    assert other.status
    world.run_all(60000)


def test_why_a_request_waits_and_what_passed_it() -> None:
    world, worker = simple_world(limits=step.Limits(400, 4, 1, 64))
    worker.submit([1], 12, ignore_eos=True)
    waiting = worker.submit([2], 2, priority=2, request_id="patient")
    urgent = worker.submit([3], 2, priority=-1, request_id="urgent")
    (session,) = world.executors
    while not worker.outputs[(urgent, 0)]:
        world.run(session)
    blocker = worker.submit([4], 9, priority=-2, request_id="blocker", ignore_eos=True)
    while not worker.outputs[(blocker, 0)]:
        world.run(session)
    worker.send(front.GetStatus(1, "patient"))
    status = [m for m in worker.messages if isinstance(m, front.Status)][-1].body["request"]
    assert isinstance(status, dict)
    (choice,) = status["choices"]
    assert choice["waits_for"] == "a slot"
    passed = [(one["request_id"], one["rule"]) for one in choice["passed_by"]]
    assert ("urgent", "a higher class") in passed
    assert choice["passed"] == len(passed) >= 1
    assert (waiting, 0) not in worker.ends
    world.run_all()
