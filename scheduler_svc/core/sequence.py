"""A stream (one request of one API worker) and its sequences (one a choice).

``prompt + outputs`` is all that a sequence is: wherever it runs next, it starts from these. While it is in
a slot, the newest outputs still lie in the slot table (`recent` of slots.py).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from protos.step import SamplingParams
from protos.wire import Int32
from scheduler_svc.core.prefix_cache import Prefix, PrefixCache
from scheduler_svc.core.prefix_run import Place
from scheduler_svc.prefix_hash import HASH_BYTES, extend_hashes, split_hashes

if TYPE_CHECKING:
    from scheduler_svc.core.executor import ExecutorState
    from scheduler_svc.core.models import ModelEntry
    from scheduler_svc.core.workers import WorkerState


class State(IntEnum):
    """Where a sequence is. WAITING -> RUNNING -> (SETTLING ->) WAITING ... -> ENDED."""

    WAITING = 1  # in its model's queue
    RUNNING = 2  # in a slot of an executor
    SETTLING = 3  # preempted; rows of it are unanswered and will still count
    ENDED = 4


class Stream:
    """One request: its choices share everything but their outputs."""

    __slots__ = (
        "charged", "deadline", "live", "model", "name", "number", "request_id", "sequences", "submitted", "tenant",
        "worker",
    )  # fmt: skip

    def __init__(
        self,
        worker: WorkerState,
        number: int,
        request_id: str,
        model: ModelEntry,
        deadline: float,
        now: float,
        tenant: str = "",
    ) -> None:
        self.tenant = tenant
        self.charged = 0  # outputs that its tenant's rate was charged for (tenants.py)
        self.worker = worker
        self.number = number
        self.request_id = request_id
        self.model = model
        self.deadline = deadline  # 0: none
        self.sequences: dict[int, Sequence] = {}  # by choice index; ended ones stay until the stream ends
        self.live = 0  # choices that have not ended; 0: the stream is over
        self.submitted = now
        self.name = (tenant, request_id)


class Sequence:
    __slots__ = (
        "_hashes",
        "_prompt_hashes",
        "alone_deaths",
        "arrival",
        "cache_count",
        "cache_tip",
        "cached_tokens",
        "choice",
        "continued",
        "deaths",
        "enqueued",
        "executor",
        "fills",
        "first_hash",
        "found",
        "generation",
        "ignore_eos",
        "known",
        "left_for",
        "left_since",
        "left_until",
        "limit",
        "mark_at_death",
        "mark_at_preemption",
        "num_hashes",
        "numerics",
        "order",
        "outputs",
        "pending_rows",
        "preemptions",
        "prefix_wait_until",
        "priority",
        "prompt",
        "prompt_len",
        "prompt_scored",
        "queued_tokens",
        "salt",
        "sampling",
        "seen",
        "slot",
        "state",
        "stop_ids",
        "stops_on_text",
        "stream",
        "ticket",
        "unroutable_since",
        "wait_key",
        "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        stream: Stream,
        choice: int,
        prompt: bytes,
        outputs: bytes,
        sampling: SamplingParams,
        *,
        limit: int,
        stop_ids: frozenset[int],
        ignore_eos: bool,
        stops_on_text: bool,
        salt: str,
        priority: int,
        arrival: float,
        hashes: bytes,
        continued: bool,
        order: int,
        now: float,
    ) -> None:
        self.stream = stream
        self.choice = choice
        self.prompt = prompt  # raw int32
        self.prompt_len = len(prompt) // 4
        self.outputs = bytearray(outputs)  # raw int32; without what still lies in the slot table
        self.known = self.prompt_len + len(outputs) // 4  # tokens of prompt and `outputs`
        self.sampling = sampling
        # Prompt tokens before this position have had their logprobs delivered, or none are wanted of them. The first
        # choice of a stream answers for all.
        self.prompt_scored = 1 if sampling.prompt_logprobs >= 0 and not stream.sequences else self.prompt_len
        self.limit = limit  # most tokens, prompt and outputs together
        self.stop_ids = stop_ids
        self.ignore_eos = ignore_eos
        self.stops_on_text = stops_on_text
        self.seen = len(outputs) // 4  # outputs in which the worker found no stop string
        self.salt = salt
        self.priority = priority
        self.arrival = arrival
        self.continued = continued
        self.order = order  # of submission: breaks ties for ever the same way
        self.wait_key: tuple[int, float, int] = (0, 0.0, 0)
        self.enqueued = now
        self.queued_tokens = 0  # counted for its tenant while it waits
        self.ticket = 0  # of its newest entry into the queue
        self.unroutable_since = 0.0
        self.prefix_wait_until = 0.0
        self.left_since = 0.0  # when it was first left for a better placed executor; 0: not since it was queued
        self.left_for: ExecutorState | None = None  # that one; meaningful while `left_since` is not 0
        self.left_until = 0.0  # no other looks whether that is still so before this
        self.waits_for = ""

        # Of full blocks: the prompt's, then as far as outputs were hashed. Most need the first one only.
        self._prompt_hashes = hashes
        self._hashes: list[bytes] | None = None
        self.first_hash = hashes[:HASH_BYTES]
        self.num_hashes = len(hashes) // HASH_BYTES  # 0: it uses no prefix cache
        self.found: dict[PrefixCache, tuple[Prefix, int]] = {}  # while it waits, by Residency.lookup
        self.cache_tip: Place | None = None  # behind the last registered block on the present executor
        self.cache_count = 0  # blocks registered (or hit) on the present executor
        self.fills = b""  # under this hash it stands in the executor's `filling`
        self.cached_tokens = -1  # prompt tokens found at first admission; -1: never admitted

        self.state = State.WAITING
        self.executor: ExecutorState | None = None
        self.slot = -1
        self.generation = 0
        self.pending_rows = 0  # SETTLING: sampling rows still unanswered
        self.numerics = ""  # of the executor that made its outputs; empty: any
        self.preemptions = 0
        self.mark_at_preemption = -1  # outputs then: no second preemption without progress
        self.deaths = 0
        self.alone_deaths = 0
        self.mark_at_death = 0  # outputs then: progress clears suspicion

    @property
    def hashes(self) -> list[bytes]:
        """All of them. Not to be changed: `add_hashes`."""
        if self._hashes is None:
            self._hashes = split_hashes(self._prompt_hashes)
        return self._hashes

    def hash_at(self, block: int) -> bytes:
        return self.first_hash if block == 0 else self.hashes[block]

    def add_hashes(self, tokens: bytes, block_size: int) -> None:
        """Of the full blocks in ``tokens``, which follow the last block that has one."""
        extend_hashes(self.hashes, tokens, block_size)
        self.num_hashes = len(self.hashes)

    @property
    def owes_prompt_logprobs(self) -> bool:
        return self.prompt_scored < self.prompt_len

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Another choice has yet to deliver those of the prompt, which come before any output."""
        if self.sampling.prompt_logprobs < 0:
            return False
        first = next(iter(self.stream.sequences.values()))
        return first is not self and first.owes_prompt_logprobs and first.state is not State.ENDED

    def cut(self, outputs: int) -> None:
        """Keep so many outputs."""
        del self.outputs[4 * outputs :]
        self.known = self.prompt_len + len(self.outputs) // 4

    @property
    def num_outputs(self) -> int:
        """Committed outputs, those in the slot table included."""
        if self.state is State.RUNNING and self.executor is not None:
            return self.executor.table.length.item(self.slot) - self.prompt_len
        return len(self.outputs) // 4

    def tokens(self) -> bytes:
        """Raw int32 of prompt and outputs (without what lies in the slot table)."""
        return self.prompt + bytes(self.outputs) if self.outputs else self.prompt

    def tokens_between(self, start: int, end: int) -> bytes:
        """Raw int32 of tokens start to end (without what lies in the slot table)."""
        prompt, split = self.prompt, len(self.prompt)
        start, end = 4 * start, 4 * end
        if end <= split:
            return prompt[start:end]
        if start >= split:
            return bytes(self.outputs[start - split : end - split])
        return prompt[start:] + self.outputs[: end - split]

    def output_ids(self) -> Int32:
        return np.frombuffer(bytes(self.outputs), dtype="<i4")
