"""A model executor in Python: it believes nothing that the core says, and its tokens depend on everything that it read.

It keeps what plans wrote into each block. Before a row yields a token it reads the row's whole context back through
the block table and compares it with the sequence's own tokens; a block that enters a slot unshared is poisoned first.
So a block reused too early, shared too early, written while shared or left out is found at once, and any schedule that
passes must give the tokens of `reference`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from protos import step
from protos.digest import epoch_digest, plan_digest
from protos.wire import Epoch, Int32, pack_int32, unpack_int32

VOCAB = 512
EOS = 0
POISON = VOCAB - 1  # never drawn: only a prompt can hold it


def next_token(tokens: Int32, seed: int, choice: int, vocab: int = VOCAB) -> int:
    """The token that follows ``tokens``: a pure function of them, the seed and the choice; EOS about once in 80."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes() + seed.to_bytes(8, "little") + bytes([choice])
    drawn = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return EOS if drawn % 80 == 0 else 1 + drawn % (vocab - 2)


def reference(
    prompt: list[int],
    max_outputs: int,
    *,
    seed: int = 0,
    choice: int = 0,
    ignore_eos: bool = False,
    stop_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """The outputs of a request that runs alone."""
    tokens = list(prompt)
    outputs: list[int] = []
    while len(outputs) < max_outputs:
        token = next_token(np.array(tokens, dtype=np.int32), seed, choice)
        tokens.append(token)
        outputs.append(token)
        if (token == EOS and not ignore_eos) or token in stop_ids:
            break
    return outputs


def model_card(name: str = "m", weights: str = "a", numerics: str = "b", context: int = 4096) -> step.ModelCard:
    return step.ModelCard(name, "sim", weights * 64, numerics * 64, VOCAB, context, (EOS,), ())


@dataclass
class SimSlot:
    admission: step.Admission
    tokens: list[int]
    blocks: list[int]
    computed: int


@dataclass
class _Queued:
    plan: step.StepPlan
    answered: int  # results that the core had seen when it made the plan


class PlanError(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@dataclass
class SimExecutor:
    """``receive`` takes a message of the core, ``run`` executes the oldest plan and returns the answer.

    ``strict``: a plan that contradicts the mirror fails the test; else it is answered with EpochLost, as by a real
    executor. ``answered`` must be kept by who carries results to the core: the newest seq that it has seen.
    """

    name: str = "e0"
    instance: int = 1
    card: step.ModelCard = field(default_factory=model_card)
    limits: step.Limits = field(default_factory=lambda: step.Limits(64, 4, 16, 64))
    strict: bool = True
    kill_on: frozenset[int] = frozenset()  # tokens whose row kills the executor: `run` raises Killed
    fault_on: frozenset[int] = frozenset()  # tokens whose row reports a fault
    assets: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue: deque[_Queued] = deque()
        self.epoch: Epoch | None = None
        self.lost = False  # the epoch is over here; plans are skipped until the next Welcome
        self.answered = 0
        self.received: list[step.ToExecutor] = []  # everything but plans
        self.plans: list[step.StepPlan] = []  # executed, all epochs
        self.results: list[step.StepResult] = []
        self.prefill_tokens = 0
        self.rows = 0

    def hello(self) -> step.Hello:
        return step.Hello(step.PROTOCOL_VERSIONS, self.name, self.instance, self.card, self.limits)

    def receive(self, message: step.ToExecutor) -> list[step.ToCore]:
        if isinstance(message, step.StepPlan):
            self.queue.append(_Queued(message, self.answered))
            return []
        self.received.append(message)
        if isinstance(message, step.Welcome):
            self._clear(message.epoch)
        elif isinstance(message, step.FetchAsset):
            data = self.assets.get(message.sha256, b"")
            part = data[message.offset : message.offset + message.length]
            return [step.AssetChunk(message.sha256, message.offset, part)]
        return []

    def run(self) -> step.ToCore | None:
        """Execute the oldest plan. None: there was none, or it is of an older epoch or came after a loss."""
        if not self.queue:
            return None
        queued = self.queue.popleft()
        plan = queued.plan
        if self.epoch is None or plan.epoch != self.epoch or self.lost:
            return None
        try:
            return self._execute(plan, queued.answered)
        except PlanError as error:
            if self.strict:
                raise AssertionError(f"plan {plan.seq}: {error}") from error
            self.lost = True
            return step.EpochLost(plan.epoch, plan.seq, error.code, str(error))

    # -- the mirror --------------------------------------------------------------------------------------------------

    def _clear(self, epoch: Epoch) -> None:
        limits = self.limits
        self.epoch = epoch
        self.lost = False
        self.seq = 0
        self.answered = 0
        self.digest = epoch_digest(epoch)
        self.slots: dict[int, SimSlot] = {}
        self.queue.clear()
        self.generation = np.zeros(limits.max_slots, dtype=np.int32)
        self.num_blocks = np.zeros(limits.max_slots, dtype=np.int32)
        self.last_block = np.full(limits.max_slots, -1, dtype=np.int32)
        self.memory = np.full((limits.num_blocks, limits.block_size), -1, dtype=np.int64)
        self.written_by = np.zeros(limits.num_blocks, dtype=np.int64)  # seq of the last plan that wrote the block
        self.behind = [0] * self.limits.num_blocks  # hash of the tokens before each block's first

    def _execute(self, plan: step.StepPlan, answered: int) -> step.StepResult:
        _need(plan.seq == self.seq + 1, step.BAD_SEQUENCE, f"plan {plan.seq} after {self.seq}")
        released = unpack_int32(plan.released)
        decode = unpack_int32(plan.decode)
        appended = unpack_int32(plan.appended).reshape(-1, 2)
        prefill = unpack_int32(plan.prefill).reshape(-1, 2)
        for slot in released.tolist():
            _need(slot in self.slots, step.BAD_PLAN, f"slot {slot} released, it is empty")
            del self.slots[slot]
            self.num_blocks[slot], self.last_block[slot] = 0, -1
        for admission in plan.admitted:
            self._admit(admission, answered)
        for slot, block in appended.tolist():
            _need(slot in self.slots, step.BAD_PLAN, f"block appended to empty slot {slot}")
            self._give(self.slots[slot], block)
            self._mirror(slot)
        touched = np.concatenate(
            [
                np.array([a.slot for a in plan.admitted], dtype=np.int32),
                appended[:, 0],
                decode,
                prefill[:, 0],
            ]
        ).astype(np.int32)
        self.digest = plan_digest(
            self.digest, plan.seq, released, touched, self.generation, self.num_blocks, self.last_block
        )
        _need(self.digest == plan.digest, step.DIGEST_MISMATCH, "digest mismatch")
        self.seq = plan.seq
        return self._run_rows(plan, decode, prefill)

    def _admit(self, admission: step.Admission, answered: int) -> None:
        slot, size = admission.slot, self.limits.block_size
        _need(slot < self.limits.max_slots and slot not in self.slots, step.BAD_PLAN, f"slot {slot} is not free")
        _need(admission.generation == self.generation[slot] + 1, step.BAD_PLAN, "generation")
        prompt, outputs = unpack_int32(admission.prompt).tolist(), unpack_int32(admission.outputs).tolist()
        blocks = unpack_int32(admission.blocks).tolist()
        tokens = prompt + outputs
        _need(len(prompt) > 0 and admission.computed < len(tokens), step.BAD_PLAN, "nothing to compute")
        _need(admission.computed % size == 0, step.BAD_PLAN, "computed is not a number of blocks")
        _need(len(tokens) <= self.card.context_length, step.BAD_PLAN, "longer than the context")
        state = SimSlot(admission, tokens, [], admission.computed)
        shared = admission.computed // size
        for i, block in enumerate(blocks[:shared]):
            _need(0 <= block < self.limits.num_blocks, step.BAD_PLAN, "block out of range")
            content = self.memory[block].tolist()
            _need(content == tokens[i * size : (i + 1) * size], step.BAD_PLAN, f"shared block {block} holds {content}")
            same = self.behind[block] == hash(tuple(tokens[: i * size]))  # KV depends on all that comes before it
            _need(same, step.BAD_PLAN, f"shared block {block} holds KV of another context")
            _need(self.written_by[block] <= answered, step.BAD_PLAN, f"block {block} was findable before its answer")
            state.blocks.append(block)
        for block in blocks[shared:]:
            self._give(state, block)
        self.slots[slot] = state
        self.generation[slot] = admission.generation
        self._mirror(slot)

    def _give(self, state: SimSlot, block: int) -> None:
        """A block that is the slot's alone."""
        _need(0 <= block < self.limits.num_blocks, step.BAD_PLAN, "block out of range")
        _need(all(block not in other.blocks for other in self.slots.values()), step.BAD_PLAN, f"block {block} is held")
        self.memory[block] = -1
        state.blocks.append(block)

    def _mirror(self, slot: int) -> None:
        blocks = self.slots[slot].blocks
        self.num_blocks[slot], self.last_block[slot] = len(blocks), blocks[-1]

    # -- rows --------------------------------------------------------------------------------------------------------

    def _run_rows(self, plan: step.StepPlan, decode: Int32, prefill: Int32) -> step.StepResult:
        rows = [(slot, 1, True) for slot in decode.tolist()] + [(s, c, False) for s, c in prefill.tolist()]
        _need(len({slot for slot, _, _ in rows}) == len(rows), step.BAD_PLAN, "a slot has two rows")
        total = sum(count for _, count, _ in rows)
        _need(total <= self.limits.max_batch_tokens, step.BAD_PLAN, f"{total} tokens in one step")
        slots, generations, tokens, faults = [], [], [], []
        for slot, count, is_decode in rows:
            _need(slot in self.slots, step.BAD_PLAN, f"a row of empty slot {slot}")
            state = self.slots[slot]
            left = len(state.tokens) - state.computed
            _need(1 <= count <= left and (left == 1 or not is_decode), step.BAD_PLAN, f"{count} rows of {left} tokens")
            self._write(slot, state, count, plan.seq)
            fresh = set(state.tokens[state.computed - count : state.computed])
            if fresh & self.kill_on:
                raise Killed(self)
            if fresh & self.fault_on:
                faults.append(step.RowFault(slot, state.admission.generation, step.NON_FINITE, "planned"))
                if state.computed == len(state.tokens):
                    state.tokens.append(1)  # later rows of this slot still have an input
                continue
            if state.computed < len(state.tokens):
                continue
            context = self._read(state)
            admission = state.admission
            token = next_token(context, admission.sampling.seed, admission.choice)
            state.tokens.append(token)
            slots.append(slot)
            generations.append(admission.generation & 0xFFFF)
            tokens.append(token)
        self.rows += len(rows)
        self.prefill_tokens += sum(count for _, count, is_decode in rows if not is_decode)
        self.plans.append(plan)
        result = step.StepResult(
            plan.epoch,
            plan.seq,
            plan.digest,
            slots=pack_int32(slots),
            generations=np.array(generations, dtype="<u2").tobytes(),
            tokens=pack_int32(tokens),
            faults=tuple(faults),
        )
        self.results.append(result)
        return result

    def _write(self, slot: int, state: SimSlot, count: int, seq: int) -> None:
        size = self.limits.block_size
        for position in range(state.computed, state.computed + count):
            _need(position // size < len(state.blocks), step.BAD_PLAN, f"slot {slot}: no block for {position}")
            block = state.blocks[position // size]
            _need(position >= state.admission.computed, step.BAD_PLAN, "a shared block is written")
            holders = sum(block in other.blocks for other in self.slots.values())
            tenants = [s for s, other in self.slots.items() if block in other.blocks]
            _need(
                holders == 1 or (self.memory[block, position % size] == -1 and tenants == [slot]),
                step.BAD_PLAN,
                f"block {block} is written while {tenants} hold it",
            )
            self.memory[block, position % size] = state.tokens[position]
            self.written_by[block] = seq
            if position % size == 0:
                self.behind[block] = hash(tuple(state.tokens[:position]))
        state.computed += count

    def _read(self, state: SimSlot) -> Int32:
        """The row's whole context as the device holds it."""
        content = self.memory[state.blocks].reshape(-1)[: state.computed]
        own = np.array(state.tokens[: state.computed])
        _need(bool((content == own).all()), step.BAD_PLAN, "a row would read what is not its own")
        return content.astype(np.int32)


class Killed(Exception):
    """The process died while it ran a plan."""

    def __init__(self, executor: SimExecutor) -> None:
        super().__init__(executor.name)


def _need(condition: bool, code: int, detail: str) -> None:
    if not condition:
        raise PlanError(code, detail)
