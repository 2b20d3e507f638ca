"""The body of a front.Status: plain values for the admin service, metrics and tests.

::

    incarnation, uptime, config{...}
    executors[]: name, session, model, status, epoch, unanswered, steps, round_us, oldest_step_age, token_budget,
                 slots{used,total}, blocks{total,free,cached,owned}, prefix{hits,lookups}, settling
    models[]:    name, fingerprint, executors_ready, executors_expected, running, waiting, live_streams
    workers[]:   name, streams, sent, credited, window
    counters:    tokens, finished, failed, preemptions, prefix_hits (blocks), dropped_rows, bad_assets; those that are
                 not 0 of epochs_lost, stale_results, malformed, unexpected, strangers, refused, rejected, hung,
                 disconnects
    problems[]:  broken invariants (only when asked for)
    request:     state, waits_for, outputs, preemptions, deaths of each choice (only when asked for)
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.sequence import State

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
        "workers": [
            {
                "name": worker.name,
                "streams": len(worker.streams),
                "sent": worker.sent,
                "credited": worker.credited,
                "window": worker.window,
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
        result["request"] = _request(core, request_id)
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


def _request(core: Core, request_id: str) -> dict[str, object]:
    stream = core.streams.by_request.get(request_id)
    if stream is None:
        return {"state": "unknown"}
    return {
        "choices": [
            {
                "index": index,
                "state": sequence.state.name,
                "waits_for": core.routing.why_it_waits(sequence) if sequence.state is State.WAITING else "",
                "outputs": sequence.num_outputs,
                "preemptions": sequence.preemptions,
                "deaths": sequence.deaths,
            }
            for index, sequence in stream.sequences.items()
        ]
    }
