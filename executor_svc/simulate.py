"""``python -m executor_svc --simulate STEP[,ROW[,TOKEN]]``: the real link, protocol and mirror, and no model.

Every plan is applied to the executor's own mirror and its digest is checked. Then the step takes the time that the
model says (milliseconds a step, a row, a prompt token; ``--jitter``), on a device that runs one step after the other::

    plan n+1 received and applied   |---|
    device        |---- step n ----||---- step n+1 ----|
    result n                        ^ sent
                                   gap: the device waited for plan n+1

The gaps are what a scheduler costs a device. ``--report FILE`` keeps them as JSON when the executor leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import secrets
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np

from executor_svc import logs
from executor_svc.assets import AssetStore
from executor_svc.errors import PlanError
from executor_svc.link import Link
from executor_svc.link_security import link_keys
from executor_svc.simulate_model import StepTimes, StepTimesError, key, next_tokens, parse_step_times
from executor_svc.slots import AppliedPlan, SlotLimits, Slots
from protos.link_address import check_link_address
from protos.link_keys import LinkKeys
from protos.step import (
    BAD_PARAMETER,
    PROTOCOL_VERSIONS,
    EpochLost,
    Hello,
    Limits,
    Load,
    ModelCard,
    RowFault,
    StepPlan,
    StepResult,
)
from protos.wire import LE_INT32, LE_UINT16, Epoch

log = logging.getLogger("executor_svc.simulate")

EOS = 0
_IDLE_WAIT = 1.0  # seconds between looks at whether to leave
_POLL_SLACK = 0.0015  # seconds: the link's waits end on whole milliseconds; the rest is slept
_NO_LOAD = 1.0  # a gap longer than this was no gap: there was nothing to run


@dataclass(slots=True)
class Running:
    """A step on the simulated device."""

    result: StepResult
    ends: float  # time.monotonic()


@dataclass(slots=True, frozen=True)
class Simulated:
    """The model that there is not."""

    name: str = "simulated"
    vocab: int = 32000
    context: int = 8192
    eos_every: int = 0

    def card(self) -> ModelCard:
        facts = f"simulated {self.vocab} {self.context} {self.eos_every}"
        digest = hashlib.sha256(facts.encode()).hexdigest()
        return ModelCard(self.name, "simulated", digest, digest, self.vocab, self.context, (EOS,), ())


class SimulatedExecutor:
    """``run`` serves until drained, or stopped twice."""

    def __init__(
        self,
        model: Simulated,
        limits: Limits,
        times: StepTimes,
        scheduler: str | tuple[str, ...],
        executor_name: str,
        keys: LinkKeys | None = None,
    ) -> None:
        self.model = model
        self.times = times
        self.slots = Slots(
            SlotLimits(
                limits.num_blocks,
                limits.block_size,
                limits.max_slots,
                limits.max_batch_tokens,
                model.vocab,
                model.context,
            )
        )
        self._keys = np.zeros(limits.max_slots, dtype=np.uint64)  # by slot: what its tokens follow from
        self._wants_logprobs = np.zeros(limits.max_slots, dtype=bool)  # by slot
        self._running: deque[Running] = deque()
        self._free_at = 0.0  # when the device has run all that it was given
        self._lost = True
        self.steps = 0
        self.rows = 0
        self.busy = 0.0  # seconds
        self.gaps: list[float] = []  # seconds that the device waited before each step
        self._stops = 0
        self._announced = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        hello = Hello(
            PROTOCOL_VERSIONS, executor_name, secrets.randbits(64), model.card(), limits, "no device: simulated steps"
        )
        self.link = Link(
            scheduler, hello, AssetStore({}), self._begin_epoch, self._load, keys=keys, wake=self._wake_read.fileno()
        )

    def stop(self) -> None:
        """Ask to drain (from any thread); a second call: leave now."""
        self._stops += 1
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def stop_on_signals(self) -> None:
        def handler(number: int, frame: FrameType | None) -> None:
            self.stop()

        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    def run(self) -> None:
        reason = "stopped"
        try:
            while not (reason := self._should_leave()):
                self._turn()
        finally:
            self.link.close(reason)
            self._wake_read.close()
            self._wake_write.close()

    # ----------------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Send what is done, else take a plan, else wait for whichever comes first."""
        left = self._running[0].ends - time.monotonic() if self._running else _IDLE_WAIT
        if self._running and left <= 0.0:
            self.link.send(self._running.popleft().result)
            return
        plan = self.link.next_plan(max(0.0, left - _POLL_SLACK) if self._running else left)
        if plan is not None:
            self._start(plan)
        elif self._running:
            time.sleep(max(0.0, min(self._running[0].ends - time.monotonic(), _POLL_SLACK)))
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(64):
                pass

    def _start(self, plan: StepPlan) -> None:
        if self._lost:
            return
        try:
            applied = self.slots.apply(plan)
        except PlanError as error:
            self._finish_all()
            self._lost = True
            log.warning("epoch lost", extra={"seq": plan.seq, "code": error.code, "detail": error.detail})
            self.link.send(EpochLost(plan.epoch, plan.seq, error.code, error.detail[:4096]))
            return
        for admission in plan.admitted:
            sampling = admission.sampling
            self._keys[admission.slot] = key(sampling.seed, admission.choice)
            self._wants_logprobs[admission.slot] = max(sampling.logprobs, sampling.prompt_logprobs) >= 0
        rows = len(applied.slots)
        seconds = self.times.draw(rows, int(applied.query_lens[applied.num_decode_rows :].sum())) if rows else 0.0
        result = self._result(applied, seconds)
        now = time.monotonic()
        start = max(now, self._free_at)
        gap = start - self._free_at
        if rows and gap < _NO_LOAD:
            self.gaps.append(gap)
            self.busy += seconds
        self._free_at = start + seconds
        self._running.append(Running(result, self._free_at))
        self.steps += 1
        self.rows += rows

    def _result(self, applied: AppliedPlan, seconds: float) -> StepResult:
        slots = applied.slots[applied.samples]
        faults: list[RowFault] = []
        if self._wants_logprobs[applied.slots].any():
            refused = applied.slots[self._wants_logprobs[applied.slots]]
            slots = slots[~self._wants_logprobs[slots]]
            detail = "a simulated executor has no logprobs"
            faults += [RowFault(s, int(self.slots.generation[s]), BAD_PARAMETER, detail) for s in refused.tolist()]
        # `length` counts the token that this plan samples already.
        positions = self.slots.length[slots] - self.slots.prompt_len[slots] - 1
        tokens = next_tokens(self._keys[slots], positions, self.model.vocab, EOS, self.model.eos_every)
        return StepResult(
            epoch=applied.key.epoch,
            seq=applied.key.seq,
            digest=applied.key.digest,
            slots=slots.astype(LE_INT32).tobytes(),
            generations=self.slots.generation[slots].astype(LE_UINT16).tobytes(),
            tokens=tokens.astype(LE_INT32).tobytes(),
            faults=tuple(faults),
            round_us=int(1e6 * seconds),
        )

    def _finish_all(self) -> None:
        while self._running:
            time.sleep(max(0.0, self._running[0].ends - time.monotonic()))
            self.link.send(self._running.popleft().result)

    # ----------------------------------------------------------------------------------------------------------------

    def _begin_epoch(self, epoch: Epoch) -> None:
        self._running.clear()
        self.slots.clear(epoch)
        self._lost = False

    def _load(self) -> Load:
        return Load(self.slots.slots_used, self.slots.blocks_used, 0, self.steps)

    def _should_leave(self) -> str:
        """Why to leave now, or an empty text."""
        if self.link.drained and not self._running:
            return "drained"
        if self._stops > 1 or (self._stops and not self.link.connected):
            return "stopped"
        if self._stops and not self._announced:
            self._announced = True
            self.link.announce_draining()
        return ""

    def report(self) -> dict[str, float | int]:
        """Gaps in microseconds; ``idle`` is their share of the time under load."""
        gaps = np.array(self.gaps or [0.0])
        under_load = float(gaps.sum()) + self.busy
        return {
            "steps": self.steps,
            "rows": self.rows,
            "busy_seconds": round(self.busy, 3),
            "gap_seconds": round(float(gaps.sum()), 4),
            "idle": round(float(gaps.sum()) / under_load, 5) if under_load else 0.0,
            "steps_with_a_gap": int(np.count_nonzero(gaps)),
            "gap_us_p50": round(1e6 * float(np.quantile(gaps, 0.5)), 1),
            "gap_us_p99": round(1e6 * float(np.quantile(gaps, 0.99)), 1),
            "gap_us_max": round(1e6 * float(gaps.max()), 1),
        }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m executor_svc --simulate", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--simulate", required=True, metavar="STEP[,ROW[,TOKEN]]", help="milliseconds a step, a row, a prompt token")
    add("--jitter", type=float, default=0.0, help="spread of the log-normal factor of a step's time (%(default)s)")
    add("--seed", type=int, default=0, help="of the jitter")
    add("--scheduler", required=True, action="append", metavar="tcp://HOST:PORT")
    add("--name", default="simulated", help="the name clients ask for (%(default)s)")
    add("--executor-name", default=f"{socket.gethostname()}-simulated")
    add("--vocab", type=int, default=32000)
    add("--context", type=int, default=8192, metavar="TOKENS")
    add("--eos-every", type=int, default=0, metavar="N", help="one token in N ends a sequence (0: none)")
    add("--kv-blocks", type=int, default=65536)
    add("--block-size", type=int, default=16)
    add("--max-slots", type=int, default=512)
    add("--max-batch-tokens", type=int, default=8192)
    add("--report", type=Path, metavar="FILE", help="the gaps between steps, as JSON, at the end")
    add("--link-secret-file", metavar="FILE")
    add("--log-format", choices=logs.FORMATS, default="logfmt")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    options = parser.parse_args(arguments)
    for name, least, most in (
        ("vocab", 3, 2**24), ("context", 2, 2**24), ("eos_every", 0, 2**28), ("kv_blocks", 1, 2**26),
        ("block_size", 1, 1024), ("max_slots", 1, 65536), ("max_batch_tokens", 1, 2**20),
    ):  # fmt: skip
        if not least <= getattr(options, name) <= most:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: {least} to {most}")
    try:
        options.times = parse_step_times(options.simulate, options.jitter, options.seed)
        options.keys = None
        for scheduler in options.scheduler:
            check_link_address("--scheduler", scheduler)
            options.keys = link_keys(scheduler, options.link_secret_file)
    except StepTimesError as error:
        parser.error(f"--simulate {error}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    logs.configure(options.log_format, options.log_level)
    executor = SimulatedExecutor(
        Simulated(options.name, options.vocab, options.context, options.eos_every),
        Limits(options.kv_blocks, options.block_size, options.max_slots, options.max_batch_tokens),
        options.times,
        tuple(options.scheduler),
        options.executor_name,
        options.keys,
    )
    executor.stop_on_signals()
    log.info("simulated executor ready", extra={"model": options.name, "scheduler": options.scheduler[0]})
    executor.run()
    report = executor.report()
    if options.report is not None:
        options.report.write_text(json.dumps(report) + "\n")
    log.info("simulated executor left", extra=report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
