"""Apply a step result: what was planned becomes known.

A result must answer the oldest unanswered plan, with exactly the rows that it asked for; anything else is a
`Divergence`, and costs the executor its epoch. Rows whose (slot, generation) is gone are not errors: a preempted
sequence still takes its token, one that ended does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from protos import front
from protos.step import RowFault, SlotLogprobs, StepResult
from protos.wire import Int32, WireError, pack_int32, unpack_int32
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.outbox import Outbox
from scheduler_svc.core.pipeline import PlanRecord, Rows
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.streams import Streams
from scheduler_svc.core.workers import Workers

_FAULT_NAMES = {1: "non-finite logits", 2: "grammar fault", 3: "no token may be drawn", 4: "bad parameter"}


class Divergence(Exception):
    """The result is not the answer to what was asked."""


@dataclass(slots=True)
class _Delivery:
    """Tokens of one result on their way to the API workers."""

    workers: list[Int32] = field(default_factory=list)
    streams: list[Int32] = field(default_factory=list)
    choices: list[np.ndarray] = field(default_factory=list)
    tokens: list[Int32] = field(default_factory=list)
    logprobs: dict[int, list[tuple[int, int, bytes]]] = field(default_factory=dict)  # by worker index

    def add(self, workers: Int32, streams: Int32, choices: np.ndarray, tokens: Int32) -> None:
        """A row each; ``choices`` may be empty: all 0."""
        self.workers.append(workers)
        self.streams.append(streams)
        self.choices.append(choices)
        self.tokens.append(tokens)


class Committer:
    def __init__(self, residency: Residency, streams: Streams, workers: Workers, outbox: Outbox) -> None:
        self._residency = residency
        self._streams = streams
        self._workers = workers
        self._outbox = outbox
        self._encode = msgspec.msgpack.Encoder().encode
        self.tokens = 0  # delivered
        self.dropped_rows = 0  # of sequences that had ended

    def commit(self, executor: ExecutorState, result: StepResult, now: float) -> None:
        """Raises Divergence, with nothing applied, if the result does not match the oldest unanswered plan."""
        record, slots, generations, tokens, stopped = _matched(executor, result)
        # Whose they are is seen before the tokens are applied: a preempted sequence may then be on its way elsewhere.
        logprobs = _owned(executor, result) if result.logprobs else []
        executor.inflight.popleft()
        executor.steps += 1
        executor.step_age.answered(record, now - max(record.sent_at, executor.last_answer))
        executor.last_answer = now
        executor.round_us = result.round_us
        table = executor.table

        faulty = {(fault.slot, fault.generation) for fault in result.faults} if result.faults else None
        prefilled: list[Sequence] = []
        for slot, generation, count in record.prefill:
            sequence = table.sequences[slot]
            if sequence is not None and sequence.generation == generation:
                prefilled.append(sequence)
                if not (faulty and (slot, generation) in faulty):
                    table.done[slot] += count

        delivery = _Delivery()
        live = table.live_generation.take(slots) == generations
        if _all(live):
            ended = self._apply_live(executor, slots, tokens, stopped, delivery)
        else:
            ended = self._apply_live(executor, slots[live], tokens[live], stopped[live], delivery)
            gone = ~live
            ended += self._apply_gone(executor, slots[gone], generations[gone], tokens[gone], delivery, now)
        for sequence in prefilled:
            self._residency.register(executor, sequence)
        if logprobs:
            self._add_logprobs(logprobs, delivery)
        self._send(delivery)
        for sequence, reason, token in ended:
            self._streams.finish(sequence, reason, sequence.num_outputs, token)
        for fault in result.faults:
            self._fail_row(executor, fault, now)

    # -- rows --------------------------------------------------------------------------------------------------------

    def _apply_live(
        self, executor: ExecutorState, slots: Rows, tokens: Int32, stopped: np.ndarray, delivery: _Delivery
    ) -> list[tuple[Sequence, int, int]]:
        """Rows of sequences that still sit in their slots. Returns those that ended: (sequence, reason, token)."""
        if not len(slots):
            return []
        table = executor.table
        length = table.append(slots, tokens)
        choices = table.choice.take(slots) if table.num_choices else _NO_CHOICES
        delivery.add(table.worker.take(slots), table.stream.take(slots), choices, tokens)

        over = length >= table.limit.take(slots)
        if table.num_ignore_eos:
            stopped &= ~table.ignore_eos.take(slots)
        over |= stopped
        if table.num_with_stop_ids:
            over |= table.has_stop_ids.take(slots)
        ended: list[tuple[Sequence, int, int]] = []
        rows = over.nonzero()[0]
        if len(rows):
            columns = (slots[rows].tolist(), tokens[rows].tolist(), length[rows].tolist(), stopped[rows].tolist())
            for slot, token, known, is_eos in zip(*columns, strict=True):
                sequence = table.sequences[slot]
                assert sequence is not None
                reason = end_reason(sequence, token, known, is_eos)
                if reason:
                    ended.append((sequence, reason, token if reason != front.LENGTH else -1))
        return ended

    def _apply_gone(
        self,
        executor: ExecutorState,
        slots: Rows,
        generations: Int32,
        tokens: Int32,
        delivery: _Delivery,
        now: float,
    ) -> list[tuple[Sequence, int, int]]:
        """Rows whose slot was given up since: tokens of preempted sequences count, others are dropped."""
        ended: list[tuple[Sequence, int, int]] = []
        for slot, generation, token in zip(slots.tolist(), generations.tolist(), tokens.tolist(), strict=True):
            sequence = executor.settling.get((slot, generation))
            if sequence is None or any(sequence is other for other, _, _ in ended):
                self.dropped_rows += 1
                continue
            sequence.outputs += pack_int32([token])
            sequence.known += 1
            sequence.pending_rows -= 1
            row = np.array([[sequence.stream.worker.index], [sequence.stream.number], [token]], dtype=np.int32)
            delivery.add(row[0], row[1], np.array([sequence.choice], dtype=np.uint8), row[2])
            reason = end_reason(sequence, token, sequence.known, bool(executor.model.is_eos[token]))
            if reason:
                ended.append((sequence, reason, token if reason != front.LENGTH else -1))
            elif sequence.pending_rows == 0:
                del executor.settling[(slot, generation)]
                self._residency.requeue(sequence, now)
        return ended

    def _fail_row(self, executor: ExecutorState, fault: RowFault, now: float) -> None:
        """A fault of a row ends that row's request and nothing else."""
        sequence = executor.sequence_at(fault.slot, fault.generation)
        if sequence is None or sequence.state is State.ENDED:
            return
        name = _FAULT_NAMES.get(fault.status, f"status {fault.status}")
        self._streams.fail(sequence.stream, front.INTERNAL, f"{name}: {fault.detail}" if fault.detail else name)

    # -- delivery ----------------------------------------------------------------------------------------------------

    def _add_logprobs(self, owned: list[tuple[Sequence, SlotLogprobs]], delivery: _Delivery) -> None:
        for sequence, entry in owned:
            sequence.prompt_scored = min(max(sequence.prompt_scored, entry.rows[-1].position + 1), sequence.prompt_len)
            row = (sequence.stream.number, sequence.choice, self._encode(entry.rows))
            delivery.logprobs.setdefault(sequence.stream.worker.index, []).append(row)

    def _send(self, delivery: _Delivery) -> None:
        """One Tokens message for each worker that has some."""
        if not delivery.tokens:
            if not delivery.logprobs:
                return
            delivery.add(_NONE, _NONE, _NO_CHOICES, _NONE)  # prompt logprobs may come without a token
        workers, streams, tokens = (
            columns[0] if len(columns) == 1 else np.concatenate(columns)
            for columns in (delivery.workers, delivery.streams, delivery.tokens)
        )
        choices = _joined_choices(delivery) if len(delivery.choices) > 1 or len(delivery.choices[0]) else None
        self.tokens += len(tokens)
        if len(workers) and not delivery.logprobs and _all(workers == workers[0]):
            self._send_to(int(workers[0]), streams, choices, tokens, delivery)
            return
        for index in sorted({*workers.tolist(), *delivery.logprobs}):
            mine = workers == index
            self._send_to(index, streams[mine], choices[mine] if choices is not None else None, tokens[mine], delivery)

    def _send_to(
        self, index: int, streams: Int32, choices: np.ndarray | None, tokens: Int32, delivery: _Delivery
    ) -> None:
        worker = self._workers.by_index[index]
        assert worker is not None
        worker.sent += len(tokens)
        message = front.Tokens(
            streams=pack_int32(streams),
            tokens=pack_int32(tokens),
            choices=choices.tobytes() if choices is not None and choices.any() else b"",
            logprobs=tuple(delivery.logprobs.get(index, ())),
        )
        self._outbox.to_worker(worker.peer, message)


_NONE = np.empty(0, dtype=np.int32)
_NO_CHOICES = np.empty(0, dtype=np.uint8)


def _all(mask: np.ndarray) -> bool:
    """``mask.all()`` of a bool array; for some hundreds of rows numpy's own costs twice as much."""
    return b"\0" not in mask.tobytes()


def _joined_choices(delivery: _Delivery) -> np.ndarray | None:
    """The uint8 column of choices, or None when every row's is 0."""
    if all(not len(part) for part in delivery.choices):
        return None
    parts = [
        part if len(part) else np.zeros(len(tokens), dtype=np.uint8)
        for part, tokens in zip(delivery.choices, delivery.tokens, strict=True)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def end_reason(sequence: Sequence, token: int, length: int, is_eos: bool) -> int:
    """Does ``token``, as the last of ``length`` tokens, end this sequence? 0, or a finish reason of protos.front."""
    if is_eos and not sequence.ignore_eos:
        return front.STOP_EOS
    if token in sequence.stop_ids:
        return front.STOP_ID
    return front.LENGTH if length >= sequence.limit else 0


def _matched(executor: ExecutorState, result: StepResult) -> tuple[PlanRecord, Rows, Int32, Int32, np.ndarray]:
    """The record that this result answers, and (slots, generations, tokens, whether EOS) of its rows with tokens."""
    if not executor.inflight:
        raise Divergence(f"an answer to plan {result.seq}; none is unanswered")
    record = executor.inflight[0]
    if result.seq != record.seq:
        raise Divergence(f"an answer to plan {result.seq}; the oldest unanswered is {record.seq}")
    if result.digest != record.digest:
        raise Divergence(f"plan {record.seq} was answered with another digest")
    slots, generations = record.slots, record.generations
    slot_bytes, generation_bytes = record.slot_bytes, record.generation_bytes
    if result.faults:
        keep = _without_faults(record, result.faults)
        slots, generations = slots[keep], generations[keep]
        slot_bytes, generation_bytes = slots.astype("<i4").tobytes(), generations.astype("<u2").tobytes()
    if result.slots != slot_bytes or result.generations != generation_bytes:
        raise Divergence(f"plan {record.seq} was answered for rows that it did not ask for")
    if result.counts and result.counts != b"\x01" * len(slots):
        raise Divergence(f"plan {record.seq} was answered with more tokens a row than it allowed")
    try:
        tokens = unpack_int32(result.tokens)
    except WireError as error:
        raise Divergence(str(error)) from error
    if len(tokens) != len(slots):
        raise Divergence(f"plan {record.seq}: {len(tokens)} tokens for {len(slots)} rows")
    try:
        is_eos = executor.model.is_eos.take(tokens.view(np.uint32))  # unsigned: a negative id is out of bounds too
    except IndexError:
        raise Divergence(f"plan {record.seq}: a token id outside the vocabulary") from None
    return record, slots, generations, tokens, is_eos


def _owned(executor: ExecutorState, result: StepResult) -> list[tuple[Sequence, SlotLogprobs]]:
    """Logprobs of sequences that still go on here, each position exactly the next: prompt tokens from where they were
    scored up to, then the drawn token."""
    owned = []
    following: dict[Sequence, int] = {}
    for entry in result.logprobs:
        sequence = executor.sequence_at(entry.slot, entry.generation)
        if sequence is None or not entry.rows:
            continue
        for row in entry.rows:
            expected = following.get(sequence, sequence.prompt_scored)
            if expected >= sequence.prompt_len:
                expected = max(expected, sequence.prompt_len + sequence.num_outputs)
            if row.position != expected:
                raise Divergence(f"logprobs of position {row.position} of a sequence where {expected} comes next")
            following[sequence] = expected + 1
        owned.append((sequence, entry))
    return owned


def _without_faults(record: PlanRecord, faults: tuple[RowFault, ...]) -> np.ndarray:
    """[S] bool: the sampling rows that are not at fault. Every fault must be of a row of this plan."""
    at = {(s, g): i for i, (s, g) in enumerate(zip(record.slots.tolist(), record.generations.tolist(), strict=True))}
    others = {(slot, generation) for slot, generation, _ in record.prefill}
    keep = np.ones(len(record.slots), dtype=bool)
    for fault in faults:
        row = (fault.slot, fault.generation)
        if row in at:
            keep[at[row]] = False
        elif row not in others:
            raise Divergence(f"plan {record.seq}: a fault of a row that it did not run")
    return keep
