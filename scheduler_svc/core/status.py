"""The body of a front.Status: plain values for the admin service, metrics and tests.

::

    incarnation, uptime, config{...}
    executors[]: name, session, model, status, epoch, unanswered, steps, round_us, oldest_step_age, token_budget,
                 slots{used,total}, blocks{total,free,cached,owned}, prefix{hits,lookups}, settling
    models[]:    name, fingerprint, executors_ready, executors_expected, running, waiting, live_streams
    tenants[]:   name, requests, queued_tokens; where limited max_requests, max_queued_tokens, tokens_per_second,
                 token_credit
    workers[]:   name, streams, sent, credited, window, allowance
    counters:    tokens, finished, failed, preemptions, prefix_hits (blocks), dropped_rows, bad_assets; those that are
                 not 0 of epochs_lost, stale_results, malformed, unexpected, strangers, refused, rejected, hung,
                 stalls, disconnects
    problems[]:  broken invariants (only when asked for)
    request:     model, tenant, priority, age, reason, choices[]{index, state, waits_for, outputs, preemptions, deaths,
                 executor, ahead, waiting_seconds, passed, passed_by[]{request_id, tenant, seconds_ago, rule}};
                 or only state "unknown" (only when asked for)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.passing import Admitted
from scheduler_svc.core.sequence import Sequence, State, Stream

if TYPE_CHECKING:
    from scheduler_svc.core.core import Core


def body(core: Core, now: float, request_id: str, with_invariants: bool) -> dict[str, object]:
    result: dict[str, object] = {
        "incarnation": core.incarnation,
        "uptime": now - core.started,
        "config": asdict(core.config),
        "executors": [_executor(executor, now) for executor in core.fleet.sessions.values()],
        "models": [
            {
                "name": entry.name,
                "fingerprint": entry.fingerprint,
                "executors_ready": len(entry.ready),
                "executors_expected": len(entry.expected),
                "running": sum(e.table.used for e in entry.executors),
                "waiting": len(entry.queue),
                "live_streams": entry.live_streams,
            }
            for entry in core.fleet.models.values()
        ],
        "tenants": core.tenants.describe(_queued(core), now),
        "workers": [
            {
                "name": worker.name,
                "streams": len(worker.streams),
                "sent": worker.sent,
                "credited": worker.credited,
                "window": worker.window,
                "allowance": worker.allowance,
            }
            for worker in core.workers.by_peer.values()
        ],
        "counters": {
            "tokens": core.committer.tokens,
            "finished": core.streams.finished,
            "failed": core.streams.failed,
            "preemptions": core.residency.preemptions,
            "prefix_hits": core.residency.prefix_hits,
            "dropped_rows": core.committer.dropped_rows,
            "bad_assets": core.assets.bad,
            **core.counters,
        },
    }
    if with_invariants:
        result["problems"] = check_all(core)
    if request_id:
        result["request"] = explain(core, request_id, now)
    return result


def _executor(executor: ExecutorState, now: float) -> dict[str, object]:
    oldest = executor.inflight[0].sent_at if executor.inflight else None
    return {
        "name": executor.name,
        "session": executor.session.hex(),
        "device": executor.device,
        "model": executor.model.name,
        "status": executor.status.name,
        "epoch": [executor.epoch.incarnation, executor.epoch.counter],
        "unanswered": len(executor.inflight),
        "steps": executor.steps,
        "round_us": executor.round_us,
        "oldest_step_age": now - max(oldest, executor.last_answer) if oldest is not None else 0.0,
        "token_budget": executor.token_budget,
        "slots": {"used": executor.table.used, "total": executor.table.max_slots},
        "blocks": {
            "total": executor.pool.total,
            "free": executor.pool.free,
            "cached": executor.pool.cached,
            "owned": executor.pool.owned,
        },
        "prefix": {"hits": executor.cache.hits, "lookups": executor.cache.lookups},
        "settling": len(executor.settling),
    }


def _queued(core: Core) -> dict[str, int]:
    """Tokens that wait, by tenant."""
    total: Counter[str] = Counter()
    for entry in core.fleet.models.values():
        total.update(entry.queue.tokens)
    return total


def explain(core: Core, request_id: str, now: float) -> dict[str, object]:
    """Where a request is and why it waits."""
    # Two tenants may have chosen the same id: the older one is shown.
    found = [stream for (_, name), stream in core.streams.by_request.items() if name == request_id]
    stream = min(found, key=lambda stream: stream.submitted, default=None)
    if stream is None:
        return _early(core, request_id, now)
    choices = [_choice(core, index, sequence, now) for index, sequence in stream.sequences.items()]
    waiting = [str(choice["waits_for"]) for choice in choices if choice["state"] == State.WAITING.name]
    first = next(iter(stream.sequences.values()))
    return {
        "model": stream.model.name,
        "tenant": stream.tenant,
        "priority": first.priority,
        "age": max(0.0, now - first.arrival),
        "reason": f"it waits for {waiting[0]}" if waiting else _moving(stream),
        "choices": choices,
    }


def _moving(stream: Stream) -> str:
    states = {sequence.state for sequence in stream.sequences.values()}
    if State.SETTLING in states:
        return "it was preempted, and waits for the answer to its last step"
    worker = stream.worker
    if worker.room <= 0:
        return f"it is in a slot, but its API worker {worker.name!r} has not dealt with {worker.allowance} tokens yet"
    return "it runs"


def _choice(core: Core, index: int, sequence: Sequence, now: float) -> dict[str, object]:
    waits = sequence.state is State.WAITING
    passed = sequence.stream.model.admissions.passed(sequence) if waits else []
    return {
        "index": index,
        "state": sequence.state.name,
        "waits_for": core.routing.why_it_waits(sequence) if waits else "",
        "outputs": sequence.num_outputs,
        "preemptions": sequence.preemptions,
        "deaths": sequence.deaths,
        "executor": sequence.executor.name if sequence.executor is not None else "",
        "ahead": sequence.stream.model.queue.ahead_of(sequence) if waits else 0,
        "waiting_seconds": max(0.0, now - sequence.enqueued) if waits else 0.0,
        "passed_by": _passed_by(passed, now),
        "passed": len(passed),
    }


def _passed_by(passed: list[tuple[Admitted, str]], now: float) -> list[dict[str, object]]:
    """The newest of what went before it although it came later, and by what rule (of those remembered: passing.py)."""
    return [
        {"request_id": entry.request_id, "tenant": entry.tenant, "seconds_ago": max(0.0, now - entry.at), "rule": rule}
        for entry, rule in passed[:-9:-1]
    ]


def _early(core: Core, request_id: str, now: float) -> dict[str, object]:
    """A request whose model has not been seen (yet)."""
    for early in core.front_desk.early.values():
        submit = early.submit
        if submit.request_id == request_id:
            return {
                "model": submit.model,
                "tenant": submit.tenant,
                "priority": submit.priority,
                "age": max(0.0, now - submit.arrival),
                "reason": f"no executor of its model was seen; it waits {max(0.0, early.until - now):.1f} s more",
                "choices": [],
            }
    return {"state": "unknown"}
