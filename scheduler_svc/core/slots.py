"""The slot table of one executor: what a step touches, as numpy columns indexed by slot.

Two counters are kept apart on purpose. *Committed* ones move when a result arrives, *planned* ones when a
plan is made, which may be ``depth`` steps earlier::

    length          committed: tokens whose ids are known here (prompt + outputs)
    planned_length  optimistic: length + tokens that unanswered plans will sample        planned_length >= length
    computed        planned: tokens whose KV is written once all sent plans ran (prefill; decode: planned_length - 1)
    done            committed: tokens whose KV is written for certain      (prefill; decode: length - 1)

``bound`` is 0 unless the slot decodes; then a row may be planned while ``planned_length < bound``. So the steady step
finds its rows with one comparison.

The newest outputs lie in ``recent``, a row for each of the last TAIL answered steps and a column for each slot (-1: it
had no token). They move to the Sequence when someone needs them, and of each slot once in TAIL steps.
"""

from __future__ import annotations

import heapq

import numpy as np

from protos.wire import LE_INT32, Int32
from scheduler_svc.core.pipeline import Rows
from scheduler_svc.core.sequence import Sequence

TAIL = 256
_GROUP = 16  # neighbours in `recent`: their columns share cache lines

# phase
FREE = 0
PREFILL = 1
DECODE = 2


class SlotTable:
    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.generation = _column(max_slots)
        self.num_blocks = _column(max_slots)
        self.last_block = np.full(max_slots, -1, dtype=np.int32)
        self.capacity = _column(max_slots)  # tokens
        self.length = _column(max_slots)
        self.admitted_length = [0] * max_slots  # `length` at admission
        self.planned_length = _column(max_slots)
        self.computed = [0] * max_slots  # lists where only single slots are looked at: a third of the price
        self.done = [0] * max_slots
        self.limit = _column(max_slots)
        self.bound = _column(max_slots)
        self.phase = np.zeros(max_slots, dtype=np.uint8)
        self.live_generation = np.full(max_slots, -1, dtype=np.int32)  # -1: free. What results are matched against
        self.stream = _column(max_slots)
        self.choice = np.zeros(max_slots, dtype=np.uint8)
        self.worker = _column(max_slots)  # WorkerState.index
        self.ignore_eos = np.zeros(max_slots, dtype=bool)
        self.has_stop_ids = np.zeros(max_slots, dtype=bool)
        self.num_with_stop_ids = 0
        self.num_ignore_eos = 0
        self.num_choices = 0  # slots whose choice is not 0
        # A row is cleared when its step comes. Not a power of two wide: a column would fall into one set of the cache.
        self.recent = np.zeros((TAIL, max_slots // 32 * 32 + 48), dtype=LE_INT32)
        self.clock = 0  # steps in `recent`, ever
        self.moved = [0] * max_slots  # the clock, when the slot's tokens were last moved to its sequence
        self.sequences: list[Sequence | None] = [None] * max_slots
        self.blocks: list[list[int]] = [[] for _ in range(max_slots)]
        self.used = 0
        self.limit_total = 0  # of the occupied slots
        self.high = 0  # slots from here on were never used: vector operations stop here
        self._free: list[int] = []  # heap: low slots first, so that `high` stays low

    @property
    def free(self) -> int:
        return self.max_slots - self.used

    def take(self, sequence: Sequence, blocks: list[int], computed: int, block_size: int) -> int:
        """Put a sequence into a free slot, with its generation one higher."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self.high
            self.high += 1
        self.used += 1
        generation = self.generation.item(slot) + 1
        self.generation[slot] = generation
        self.live_generation[slot] = generation
        known = sequence.known
        self.num_blocks[slot] = len(blocks)
        self.last_block[slot] = blocks[-1]
        self.capacity[slot] = len(blocks) * block_size
        self.length[slot] = known
        self.admitted_length[slot] = known
        self.planned_length[slot] = known
        self.computed[slot] = computed
        self.done[slot] = computed
        self.limit[slot] = sequence.limit
        self.limit_total += sequence.limit
        self.phase[slot] = PREFILL
        stream = sequence.stream
        self.stream[slot] = stream.number
        self.worker[slot] = stream.worker.index
        if sequence.choice:
            self.choice[slot] = sequence.choice
            self.num_choices += 1
        if sequence.ignore_eos:
            self.ignore_eos[slot] = True
            self.num_ignore_eos += 1
        if sequence.stop_ids:
            self.has_stop_ids[slot] = True
            self.num_with_stop_ids += 1
        self.sequences[slot] = sequence
        self.moved[slot] = self.clock
        self.blocks[slot] = blocks
        sequence.slot = slot
        sequence.generation = generation
        return slot

    def start_decoding(self, slot: int, text_run_ahead: int) -> None:
        """The plan being made samples this slot's first token."""
        self.phase[slot] = DECODE
        self.planned_length[slot] = self.length.item(slot) + 1
        sequence = self.sequences[slot]
        assert sequence is not None
        self.bound[slot] = _bound(sequence, text_run_ahead)

    def set_bound(self, slot: int, text_run_ahead: int) -> None:
        """Recompute how far a decoding slot may run."""
        sequence = self.sequences[slot]
        if sequence is None or self.phase[slot] != DECODE:
            return
        self.bound[slot] = _bound(sequence, text_run_ahead)

    def append(self, slots: Rows, tokens: Int32) -> Int32:
        """An answered step: one token more for each of these slots. Returns their lengths."""
        clock = self.clock
        row = self.recent[clock % TAIL, : self.high]
        row.fill(-1)
        row[slots] = tokens
        self.clock = clock = clock + 1
        length = self.length.take(slots)
        length += 1
        self.length[slots] = length
        if clock % _GROUP == 0:  # those whose turn it is, before `recent` wraps over what they have there
            for start in range(clock % TAIL, self.high, TAIL):
                for slot in range(start, min(start + _GROUP, self.high)):
                    if self.sequences[slot] is not None:
                        self.flush(slot)
        return length

    def flush(self, slot: int) -> None:
        """Move the slot's recent tokens into its sequence."""
        sequence = self.sequences[slot]
        assert sequence is not None
        start, end = self.moved[slot], self.clock
        self.moved[slot] = end
        count = self.length.item(slot) - sequence.known
        if count == 0:
            return
        first, last = start % TAIL, end % TAIL
        if first < last:
            column = self.recent[first:last, slot].tobytes()
        else:
            column = self.recent[first:, slot].tobytes() + self.recent[:last, slot].tobytes()
        newest = column[-4 * count :]
        if b"\xff" in newest[3::4]:  # -1: steps without a token of this slot, between those with one
            tokens = np.frombuffer(column, dtype=LE_INT32)
            newest = tokens[tokens >= 0].tobytes()
        if len(newest) != 4 * count:
            raise RuntimeError(f"slot {slot} had {count} tokens, {len(newest) // 4} are kept")
        sequence.outputs += newest
        sequence.known += count

    def drop(self, slot: int) -> list[int]:
        """Empty a slot (flushed before by who still needs its tokens). Returns the blocks that it held."""
        sequence = self.sequences[slot]
        assert sequence is not None
        blocks = self.blocks[slot]
        self.blocks[slot] = []
        self.sequences[slot] = None
        if sequence.choice:
            self.choice[slot] = 0
            self.num_choices -= 1
        if sequence.ignore_eos:
            self.ignore_eos[slot] = False
            self.num_ignore_eos -= 1
        if sequence.stop_ids:
            self.has_stop_ids[slot] = False
            self.num_with_stop_ids -= 1
        self.phase[slot] = FREE
        self.live_generation[slot] = -1
        self.bound[slot] = 0
        self.planned_length[slot] = 0
        self.num_blocks[slot] = 0
        self.last_block[slot] = -1
        self.used -= 1
        self.limit_total -= sequence.limit
        heapq.heappush(self._free, slot)
        sequence.slot = -1
        return blocks

    def committed_kv(self, slot: int) -> int:
        """Tokens whose KV is certainly written: answered plans wrote them."""
        length = self.length.item(slot)
        if length > self.admitted_length[slot]:  # it sampled: everything before the newest token has KV
            return length - 1
        return self.done[slot]


def _column(max_slots: int) -> Int32:
    return np.zeros(max_slots, dtype=np.int32)


def _bound(sequence: Sequence, text_run_ahead: int) -> int:
    if sequence.stops_on_text:
        return min(sequence.limit, sequence.prompt_len + sequence.seen + text_run_ahead)
    return sequence.limit
