"""What API workers say: attach, submit, stop, cancel, credit."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protos import front
from protos.wire import WireError, unpack_int32
from scheduler_svc.core import operations, status
from scheduler_svc.core.commit import end_reason
from scheduler_svc.core.door import Refusal, check_queue, token_limit
from scheduler_svc.core.models import ModelEntry
from scheduler_svc.core.sequence import Sequence, State, Stream
from scheduler_svc.core.workers import WorkerState

if TYPE_CHECKING:
    from scheduler_svc.core.core import Core

log = logging.getLogger(__name__)

_NO_IDS: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _Early:
    """A Submit for a model that may still come: after a start, or because it continues."""

    worker: WorkerState
    submit: front.Submit
    until: float


class FrontDesk:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.early: dict[tuple[bytes, int], _Early] = {}

    def handle(self, peer: bytes, message: front.ToCore, now: float) -> None:
        core = self._core
        if isinstance(message, front.Submit):
            worker = core.workers.by_peer.get(peer)
            if worker is not None:
                self._submit(worker, message, now)
                return
        if isinstance(message, front.Attach):
            self._attach(peer, message)
            return
        if isinstance(message, front.Detach):
            worker = core.workers.find(message.worker)
            if worker is not None and worker.incarnation == message.incarnation:
                self.worker_gone(worker)
            return
        if isinstance(message, front.Control):
            core.outbox.to_worker(peer, front.Status(message.ticket, operations.perform(core, message)))
            return
        if isinstance(message, front.GetStatus):  # anyone on the ipc socket may ask
            body = status.body(core, now, message.request_id, message.check_invariants)
            core.outbox.to_worker(peer, front.Status(message.ticket, body))
            return
        worker = core.workers.by_peer.get(peer)
        if worker is None:
            core.outbox.to_worker(peer, front.Reattach())
            return
        match message:
            case front.Credit():
                worker.credit(message, now)
            case front.Seen():
                self._seen(worker, message)
            case front.Stop():
                self._stop(worker, message)
            case front.Cancel():
                self._cancel(worker, message.stream)
            case front.FetchAsset():
                core.assets.serve(peer, message)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _attach(self, peer: bytes, attach: front.Attach) -> None:
        core = self._core
        if attach.version != front.FRONT_VERSION:
            log.error("API worker of another version", extra={"worker": attach.worker, "version": attach.version})
            core.counters["malformed"] += 1
            return
        known = core.workers.by_peer.get(peer)
        # Messages to an earlier connection may be lost, so nothing of it is kept: a worker that attaches anew submits
        # its open streams again.
        if known is None or known.incarnation != attach.incarnation:
            for old in (known, core.workers.find(attach.worker)):
                if old is not None and old.peer in core.workers.by_peer:
                    self.worker_gone(old)
            if core.workers.full:
                log.error("too many API workers", extra={"worker": attach.worker})
                core.counters["refused"] += 1
                return
            core.workers.add(peer, attach)
        core.outbox.to_worker(peer, front.Attached(core.incarnation))
        core.outbox.to_worker(peer, core.fleet.describe())

    def worker_gone(self, worker: WorkerState) -> None:
        """Its streams are dropped: nobody is left to tell."""
        core = self._core
        for stream in list(worker.streams.values()):
            core.streams.drop(stream)
        for key in [key for key, early in self.early.items() if early.worker is worker]:
            del self.early[key]
        core.assets.worker_gone(worker.peer)
        core.workers.remove(worker)

    # -- submit ------------------------------------------------------------------------------------------------------

    def _submit(self, worker: WorkerState, submit: front.Submit, now: float) -> None:
        core = self._core
        old = worker.streams.get(submit.stream)
        if (worker.peer, submit.stream) in self.early or (old is not None and not submit.continuation):
            core.counters["malformed"] += 1  # the number is taken: an answer could not be told from the other's
            return
        entry = core.fleet.models.get(submit.model)
        try:
            if entry is None:
                self._wait_for_model(worker, submit, now)
                return
            self._start(worker, submit, entry, old, now)
        except Refusal as refusal:
            core.counters["rejected"] += 1
            core.outbox.to_worker(worker.peer, refusal.rejected(submit.stream))

    def _wait_for_model(self, worker: WorkerState, submit: front.Submit, now: float) -> None:
        config = self._core.config
        until = self._core.started + config.startup_grace
        if submit.continuation:
            until = max(until, now + config.wait_for_executor)
        if now >= until:
            raise Refusal(front.NOT_FOUND, f"model {submit.model!r} was never seen here", "model", submit.model)
        if len(self.early) >= config.max_waiting and not submit.continuation:
            raise Refusal(
                front.RESOURCE_EXHAUSTED, "too many requests wait for models", "queue", len(self.early),
                config.max_waiting, config.queue_retry_after,
            )  # fmt: skip
        if submit.deadline > 0.0:
            until = min(until, submit.deadline)
        self.early[(worker.peer, submit.stream)] = _Early(worker, submit, until)

    def model_came(self, name: str, now: float) -> None:
        for key, early in list(self.early.items()):
            if early.submit.model == name:
                del self.early[key]
                self._submit(early.worker, early.submit, now)

    def expire_early(self, now: float) -> None:
        for key, early in list(self.early.items()):
            if early.until > now:
                continue
            del self.early[key]
            submit = early.submit
            if 0.0 < submit.deadline <= now:
                refusal = Refusal(front.DEADLINE_EXCEEDED, "the deadline passed", "deadline", submit.deadline, now)
            elif submit.continuation:
                refusal = Refusal(front.UNAVAILABLE, f"no executor of {submit.model!r} came", retry_after=1.0)
            else:
                message = f"model {submit.model!r} was never seen here"
                refusal = Refusal(front.NOT_FOUND, message, "model", submit.model)
            self._core.outbox.to_worker(early.worker.peer, refusal.rejected(submit.stream))

    def next_early(self) -> float | None:
        return min([early.until for early in self.early.values()]) if self.early else None

    def _start(
        self, worker: WorkerState, submit: front.Submit, entry: ModelEntry, same_number: Stream | None, now: float
    ) -> None:
        core = self._core
        limit = token_limit(submit, entry, core.config, now)
        check_queue(submit, entry, core.config)
        same_id = core.streams.by_request.get((submit.tenant, submit.request_id))  # another tenant's ids are not ours
        replaced = [old for old in (same_number, same_id) if old is not None] if same_number or same_id else []
        if replaced and not submit.continuation:
            raise Refusal(
                front.ALREADY_EXISTS, f"request {submit.request_id!r} is live", "request_id", submit.request_id
            )
        if not core.tenants.unlimited:
            queues = [model.queue for model in core.fleet.models.values()]
            core.tenants.check(submit, sum([queue.tokens.get(submit.tenant, 0) for queue in queues]), replaced, now)
        for old in replaced:
            if not old.live:
                continue  # it was both
            if old is same_number:
                core.streams.drop(old)  # under the same number, an end of the old would look like one of the new
            else:
                core.streams.fail(old, front.ABORTED, "a continuation of this request replaced it")
        stream = Stream(worker, submit.stream, submit.request_id, entry, submit.deadline, now, submit.tenant)
        stop_ids = frozenset(unpack_int32(submit.stop_ids).tolist()) if submit.stop_ids else _NO_IDS
        hashes = b"" if submit.bypass_cache else submit.block_hashes
        for choice in submit.choices:
            core.submitted += 1
            stream.sequences[choice.index] = Sequence(
                stream, choice.index, submit.prompt, choice.outputs, submit.sampling,
                limit=limit, stop_ids=stop_ids, ignore_eos=submit.ignore_eos, stops_on_text=submit.stops_on_text,
                salt=submit.tenant, priority=submit.priority, arrival=submit.arrival, hashes=hashes,
                continued=submit.continuation, order=core.submitted, now=now,
            )  # fmt: skip
        stream.live = len(stream.sequences)
        core.streams.add(stream)
        core.tenants.opened(stream, len(submit.prompt) // 4, now)
        core.outbox.to_worker(worker.peer, front.Accepted(submit.stream))
        for sequence in list(stream.sequences.values()):
            entry.queue.push(sequence, now)
            if sequence.outputs or sequence.prompt_len >= limit:
                self._finish_if_over(sequence)

    def _finish_if_over(self, sequence: Sequence) -> None:
        """A continuation may come with all its tokens already."""
        last = int(sequence.output_ids()[-1]) if sequence.outputs else -1
        is_eos = last >= 0 and bool(sequence.stream.model.is_eos[last])
        reason = end_reason(sequence, last, sequence.known, is_eos)
        if reason:
            token = last if reason != front.LENGTH else -1
            self._core.streams.finish(sequence, reason, sequence.num_outputs, token)

    # -- running streams ---------------------------------------------------------------------------------------------

    def _find(self, worker: WorkerState, stream: int, choice: int) -> Sequence | None:
        """A choice that has not ended; None is normal: it may have ended while the message was on its way."""
        found = worker.streams.get(stream)
        sequence = found.sequences.get(choice) if found is not None else None
        return sequence if sequence is not None and sequence.state is not State.ENDED else None

    def _seen(self, worker: WorkerState, message: front.Seen) -> None:
        try:
            columns = [unpack_int32(data) for data in (message.streams, message.choices, message.outputs)]
            if len({len(column) for column in columns}) != 1:
                raise WireError("columns of different lengths")
        except WireError:
            self._core.counters["malformed"] += 1
            return
        run_ahead = self._core.config.text_run_ahead
        for stream, choice, outputs in zip(*(column.tolist() for column in columns), strict=True):
            sequence = self._find(worker, stream, choice)
            if sequence is None:
                continue
            sequence.seen = max(sequence.seen, min(outputs, sequence.num_outputs))
            if sequence.state is State.RUNNING and sequence.executor is not None:
                sequence.executor.table.set_bound(sequence.slot, run_ahead)

    def _stop(self, worker: WorkerState, message: front.Stop) -> None:
        sequence = self._find(worker, message.stream, message.choice)
        if sequence is not None:
            outputs = min(message.outputs, sequence.num_outputs)
            self._core.streams.finish(sequence, front.STOP_TEXT, outputs)

    def _cancel(self, worker: WorkerState, number: int) -> None:
        core = self._core
        early = self.early.pop((worker.peer, number), None)
        if early is not None:
            refusal = Refusal(front.ABORTED, "cancelled")
            core.outbox.to_worker(worker.peer, refusal.rejected(number))
            return
        stream = worker.streams.get(number)
        if stream is None:
            return
        for sequence in list(stream.sequences.values()):
            if sequence.state is not State.ENDED:
                core.streams.finish(sequence, front.CANCELLED, sequence.num_outputs)
