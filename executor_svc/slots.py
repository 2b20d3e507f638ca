"""The mirror: what the executor knows of every slot, as a struct of numpy arrays that each plan's delta changes.

Invariants, after every applied plan, for each active slot:

- ``0 <= computed <= length <= context + 1``, and ``computed <= num_blocks * block_size``;
- ``block_table[slot, :num_blocks]`` are its blocks in order, -1 beyond; ``last_block`` is the last of them;
- a block that a sequence may write is held by no other sequence.

``length`` counts known tokens: as admitted, and one more for each row that sampled, whether or not its token has
reached the host. ``computed`` counts those whose KV is written once the plan has run. Both sides count alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from executor_svc.errors import PlanError, RowError
from executor_svc.sampling.rows import SlotParams
from executor_svc.sampling.rules import parse_rules
from executor_svc.sequence import Sequence
from protos.digest import epoch_digest, plan_digest
from protos.step import BAD_PARAMETER, BAD_PLAN, BAD_SEQUENCE, DIGEST_MISMATCH, Admission, StepPlan
from protos.wire import Epoch, Int32, WireError, unpack_int32

_FIRST_WIDTH = 64  # columns of the block table at first; it grows by doubling, up to what the context needs


@dataclass(slots=True, frozen=True)
class PlanKey:
    """Which plan a step belongs to: what its result carries back."""

    epoch: Epoch
    seq: int
    digest: int


@dataclass(slots=True, frozen=True)
class AppliedPlan:
    """A plan whose delta is in the mirror and whose rows were checked against it."""

    key: PlanKey
    slots: Int32  # [R] decode rows, then prefill rows
    query_lens: Int32  # [R] new tokens of each row
    samples: np.ndarray  # [R] bool: nothing known is left unrun after the row
    num_decode_rows: int


@dataclass(slots=True, frozen=True)
class SlotLimits:
    num_blocks: int
    block_size: int  # tokens
    max_slots: int
    max_batch_tokens: int
    vocab_size: int
    context_length: int  # tokens

    @property
    def max_blocks_per_sequence(self) -> int:
        return -(-self.context_length // self.block_size)


class Slots:
    """The mirror of one epoch. ``apply`` raises PlanError for a plan that contradicts it; then it is void until the
    next ``clear``."""

    def __init__(self, limits: SlotLimits) -> None:
        self.limits = limits
        n = limits.max_slots
        self.generation = np.full(n, -1, dtype=np.int32)  # -1: not admitted in this epoch yet
        self.active = np.zeros(n, dtype=bool)
        self.num_blocks = np.zeros(n, dtype=np.int32)
        self.last_block = np.full(n, -1, dtype=np.int32)
        self.computed = np.zeros(n, dtype=np.int32)
        self.length = np.zeros(n, dtype=np.int32)
        self.known = np.zeros(n, dtype=np.int32)  # tokens whose ids came with the admission
        self.prompt_len = np.zeros(n, dtype=np.int32)
        width = min(_FIRST_WIDTH, limits.max_blocks_per_sequence)
        self.block_table = np.full((n, width), -1, dtype=np.int32)
        self.params = SlotParams(n)
        self.sequences: list[Sequence | None] = [None] * n
        self.holders = np.zeros(limits.num_blocks, dtype=np.int32)  # sequences that hold each block
        self._stamp = np.zeros(n, dtype=np.int64)
        self.epoch = Epoch(0, 0)
        self.digest = 0
        self.seq = 0

    def clear(self, epoch: Epoch) -> None:
        """A new epoch: no slot, no block, the next plan is number 1."""
        self.epoch = epoch
        self.digest = epoch_digest(epoch)
        self.seq = 0
        self.generation.fill(-1)
        self.active.fill(False)
        self.num_blocks.fill(0)
        self.last_block.fill(-1)
        self.block_table.fill(-1)
        self.holders.fill(0)
        self.sequences = [None] * self.limits.max_slots

    @property
    def slots_used(self) -> int:
        return int(np.count_nonzero(self.active))

    @property
    def blocks_used(self) -> int:
        return int(np.count_nonzero(self.holders))

    def apply(self, plan: StepPlan) -> AppliedPlan:
        """Apply the delta in the contract's order, compare digests, and advance the rows. Raises PlanError."""
        if plan.seq != self.seq + 1:
            raise PlanError(BAD_SEQUENCE, f"plan {plan.seq} after {self.seq}")
        try:
            released = unpack_int32(plan.released)
            appended = unpack_int32(plan.appended)
            decode = unpack_int32(plan.decode)
            prefill = unpack_int32(plan.prefill)
        except WireError as error:
            raise PlanError(BAD_PLAN, str(error)) from None
        if len(appended) % 2 or len(prefill) % 2:
            raise PlanError(BAD_PLAN, "an odd number of values in pairs")
        if len(released):
            self._release(released)
        for admission in plan.admitted:
            self._admit(admission)
        if len(appended):
            self._append(appended[0::2], appended[1::2])
        slots, counts = self._rows(decode, prefill, plan.max_new)

        touched = slots
        if plan.admitted or len(appended):
            admitted = np.array([a.slot for a in plan.admitted], dtype=np.int32)
            touched = np.concatenate((admitted, appended[0::2], slots))
        digest = plan_digest(
            self.digest, plan.seq, released, touched, self.generation, self.num_blocks, self.last_block
        )
        if digest != plan.digest:
            raise PlanError(DIGEST_MISMATCH, f"plan {plan.seq}: {plan.digest:016x}, the mirror gives {digest:016x}")
        self.digest = digest
        self.seq = plan.seq
        samples = self._advance(slots, counts, len(decode))
        return AppliedPlan(PlanKey(plan.epoch, plan.seq, digest), slots, counts, samples, len(decode))

    # ----------------------------------------------------------------------------------------------------------------
    # The parts of a delta, in the order in which they apply.

    def _release(self, slots: Int32) -> None:
        self._check_slots(slots, "released")
        for slot in slots.tolist():
            size = int(self.num_blocks[slot])
            np.subtract.at(self.holders, self.block_table[slot, :size], 1)
            self.block_table[slot, :size] = -1
            self.sequences[slot] = None
        self.active[slots] = False
        self.num_blocks[slots] = 0
        self.last_block[slots] = -1

    def _admit(self, admission: Admission) -> None:
        slot, limits = admission.slot, self.limits
        if slot >= limits.max_slots:
            raise PlanError(BAD_PLAN, f"admitted slot {slot} of {limits.max_slots}")
        if self.active[slot]:
            raise PlanError(BAD_PLAN, f"slot {slot} admitted while in use")
        before = int(self.generation[slot])
        if admission.generation <= before:
            raise PlanError(BAD_PLAN, f"slot {slot}: generation {admission.generation} after {before}")
        try:
            prompt, outputs = unpack_int32(admission.prompt), unpack_int32(admission.outputs)
            blocks = unpack_int32(admission.blocks)
        except WireError as error:
            raise PlanError(BAD_PLAN, f"slot {slot}: {error}") from None
        if not len(prompt):
            raise PlanError(BAD_PLAN, f"slot {slot}: empty prompt")
        tokens = np.concatenate((prompt, outputs)) if len(outputs) else prompt
        if int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size:
            raise PlanError(BAD_PLAN, f"slot {slot}: a token id outside the vocabulary of {limits.vocab_size}")
        if len(tokens) > limits.context_length:
            raise PlanError(BAD_PLAN, f"slot {slot}: {len(tokens)} tokens, the context holds {limits.context_length}")
        computed = admission.computed
        if computed % limits.block_size or computed > len(blocks) * limits.block_size:
            raise PlanError(BAD_PLAN, f"slot {slot}: {computed} computed tokens in {len(blocks)} blocks")
        if computed >= len(tokens):
            raise PlanError(BAD_PLAN, f"slot {slot}: {computed} of {len(tokens)} tokens computed: nothing left to run")
        self._hold(slot, blocks, shared=computed // limits.block_size)
        self.active[slot] = True
        self.generation[slot] = admission.generation
        self.num_blocks[slot] = len(blocks)
        self.last_block[slot] = blocks[-1] if len(blocks) else -1
        self.computed[slot] = computed
        self.length[slot] = self.known[slot] = len(tokens)
        self.prompt_len[slot] = len(prompt)
        self.sequences[slot] = sequence = self._sequence(admission, prompt, outputs, tokens)
        self.params.admit(admission, sequence)

    def _hold(self, slot: int, blocks: Int32, shared: int) -> None:
        """Enter a new sequence's blocks; the first ``shared`` may be held by others, the rest by nobody."""
        limits = self.limits
        if len(blocks) > limits.max_blocks_per_sequence:
            raise PlanError(BAD_PLAN, f"slot {slot}: {len(blocks)} blocks are beyond the context")
        if not len(blocks):
            return
        if int(blocks.min()) < 0 or int(blocks.max()) >= limits.num_blocks:
            raise PlanError(BAD_PLAN, f"slot {slot}: a block id outside 0..{limits.num_blocks - 1}")
        if len(np.unique(blocks)) != len(blocks):
            raise PlanError(BAD_PLAN, f"slot {slot}: a block is given twice")
        own = blocks[shared:]
        if self.holders.take(own).any():
            taken = int(own[np.flatnonzero(self.holders.take(own))[0]])
            raise PlanError(BAD_PLAN, f"slot {slot}: block {taken} is to be written but is held by another sequence")
        self.holders[blocks] += 1
        self._grow(len(blocks))
        self.block_table[slot, : len(blocks)] = blocks

    def _sequence(self, admission: Admission, prompt: Int32, outputs: Int32, tokens: Int32) -> Sequence:
        rules, fault = None, None
        try:
            rules = parse_rules(admission.sampling, prompt, outputs, self.limits.vocab_size)
        except RowError as error:
            fault = error
        sequence = Sequence(
            admission.slot, admission.generation, admission.request_id, len(prompt), tokens, rules, fault
        )
        scored = max(admission.prompt_scored, 1)
        if fault is None and admission.sampling.prompt_logprobs >= 0 and scored < len(prompt):
            if admission.computed < scored:
                sequence.prompt_logprobs, sequence.prompt_scored = admission.sampling.prompt_logprobs, scored
            else:
                detail = f"prompt_logprobs: {admission.computed} tokens came computed, but {scored} is to be scored"
                sequence.fault = RowError(BAD_PARAMETER, detail)
        return sequence

    def _append(self, slots: Int32, blocks: Int32) -> None:
        limits = self.limits
        self._check_slots(slots, "appended to", repeats=True)
        if int(blocks.min()) < 0 or int(blocks.max()) >= limits.num_blocks:
            raise PlanError(BAD_PLAN, f"appended: a block id outside 0..{limits.num_blocks - 1}")
        if self.holders.take(blocks).any() or len(np.unique(blocks)) != len(blocks):
            raise PlanError(BAD_PLAN, "appended: a block that a sequence holds already")
        columns = self.num_blocks.take(slots)
        self._stamp[slots] = np.arange(len(slots))
        if (self._stamp.take(slots) != np.arange(len(slots))).any():  # a slot repeats: count its earlier appearances
            order = np.argsort(slots, kind="stable")
            ordered = slots[order]
            first = np.searchsorted(ordered, ordered, side="left")
            columns[order] += (np.arange(len(slots)) - first).astype(np.int32)
        most = int(columns.max()) + 1
        if most > limits.max_blocks_per_sequence:
            raise PlanError(BAD_PLAN, f"appended: {most} blocks of a sequence are beyond the context")
        self._grow(most)
        self.block_table[slots, columns] = blocks
        np.maximum.at(self.num_blocks, slots, columns + 1)
        self.last_block[slots] = blocks  # the last of repeated slots stays, which is the last in plan order
        self.holders[blocks] = 1

    def _rows(self, decode: Int32, prefill: Int32, max_new: bytes) -> tuple[Int32, Int32]:
        """Slots and counts of all rows, decode first."""
        if max_new and (len(max_new) != len(decode) or 0 in max_new):
            raise PlanError(BAD_PLAN, f"max_new: {len(max_new)} values, each at least 1, for {len(decode)} decode rows")
        slots, counts = decode.copy(), np.ones(len(decode), dtype=np.int32)
        if len(prefill):
            slots = np.concatenate((decode, prefill[0::2]))
            counts = np.concatenate((counts, prefill[1::2]))
        if len(slots):
            self._check_slots(slots, "run")
        return slots, counts

    def _advance(self, slots: Int32, counts: Int32, num_decode_rows: int) -> np.ndarray:
        """Check every row against the mirror and count what it runs; returns which rows sample."""
        if not len(slots):
            return np.zeros(0, dtype=bool)
        limits = self.limits
        computed = self.computed.take(slots)
        length = self.length.take(slots)
        left = length - computed
        # Compared before they are added: a count near 2**31 must not wrap.
        self._refuse((counts < 1) | (counts > left), slots, "more tokens than are known, or none")
        self._refuse(left[:num_decode_rows] != 1, slots, "a decode row needs exactly one token without KV")
        if int(counts.sum(dtype=np.int64)) > limits.max_batch_tokens:
            raise PlanError(BAD_PLAN, f"{counts.sum(dtype=np.int64)} tokens a step, at most {limits.max_batch_tokens}")
        end = computed + counts
        self._refuse(end > limits.context_length, slots, f"beyond the context of {limits.context_length}")
        self._refuse(end > self.num_blocks.take(slots) * limits.block_size, slots, "more tokens than its blocks hold")
        samples: np.ndarray = counts == left
        self.computed[slots] = end
        self.length[slots] = length + samples
        return samples

    # ----------------------------------------------------------------------------------------------------------------

    def _check_slots(self, slots: Int32, what: str, repeats: bool = False) -> None:
        """Every slot in range and in use, and named once unless it may repeat."""
        if int(slots.view(np.uint32).max() if slots.flags.c_contiguous else _unsigned_max(slots)) >= len(self.active):
            raise PlanError(BAD_PLAN, f"{what}: a slot outside 0..{len(self.active) - 1}")
        self._refuse(~self.active.take(slots), slots, f"{what}, but not in use")
        if not repeats:
            order = np.arange(len(slots))
            self._stamp[slots] = order
            self._refuse(self._stamp.take(slots) != order, slots, f"{what} twice")

    def _refuse(self, wrong: np.ndarray, slots: Int32, what: str) -> None:
        if wrong.any():
            raise PlanError(BAD_PLAN, f"slot {int(slots[int(np.argmax(wrong))])}: {what}")

    def _grow(self, columns: int) -> None:
        width = self.block_table.shape[1]
        if columns > width:
            wider = min(max(columns, 2 * width), self.limits.max_blocks_per_sequence)
            table = np.full((len(self.active), wider), -1, dtype=np.int32)
            table[:, :width] = self.block_table
            self.block_table = table


def _unsigned_max(values: Int32) -> int:
    return int(np.ascontiguousarray(values).view(np.uint32).max())
