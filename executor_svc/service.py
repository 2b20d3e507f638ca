"""The executor service: a loop that takes plans from the link and gives them to the worker, until told to go."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from executor_svc.assets import AssetStore
from executor_svc.homing import REHOME_AFTER
from executor_svc.link import Link
from executor_svc.model_runner import ModelRunner
from executor_svc.models.base import Model
from executor_svc.slots import SlotLimits, Slots
from executor_svc.worker import Worker
from protos.link_keys import LinkKeys
from protos.step import PROTOCOL_VERSIONS, Hello, Limits, Load, ModelCard
from protos.wire import Epoch

log = logging.getLogger(__name__)

IDLE_WAIT = 1.0  # seconds between looks at the drain state when nothing happens
DRAIN_PATIENCE = 2.0  # seconds without a slot in use before a draining executor leaves without the core's Drain


class ExecutorService:
    """Owns the worker and the link of one loaded model. ``run`` returns when the executor is to exit.

    ``runner``: of a model on another device than the CPU.
    """

    def __init__(
        self,
        model: Model,
        assets: dict[str, bytes],
        limits: Limits,
        scheduler: str | Sequence[str],
        executor_name: str,
        *,
        name: str | None = None,
        runner: ModelRunner | None = None,
        device_text: str = "",
        overlap: bool = False,
        keys: LinkKeys | None = None,
        rehome_after: float = REHOME_AFTER,
    ) -> None:
        facts = model.facts
        self.slots = Slots(
            SlotLimits(
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                max_slots=limits.max_slots,
                max_batch_tokens=limits.max_batch_tokens,
                vocab_size=facts.vocab_size,
                context_length=facts.context_length,
            )
        )
        store = AssetStore(assets)
        hello = Hello(
            versions=PROTOCOL_VERSIONS,
            executor=executor_name,
            instance=secrets.randbits(64),
            model=ModelCard(
                name=name or facts.name,
                architecture=facts.architecture,
                fingerprint=facts.fingerprint,
                numerics=facts.numerics,
                vocab_size=facts.vocab_size,
                context_length=facts.context_length,
                eos_token_ids=facts.eos_token_ids,
                assets=store.listed,
            ),
            limits=limits,
            device=device_text,
        )
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self.link = Link(
            scheduler,
            hello,
            store,
            self._begin_epoch,
            self._load,
            keys=keys,
            wake=self._wake_read.fileno(),
            rehome_after=rehome_after,
        )
        self.worker = Worker(self.slots, runner or ModelRunner(model, limits.max_slots), self.link.send, overlap)
        self._stops = 0  # how often it was told to go
        self._announced = False
        self._unused_since = 0.0

    def install_signal_handlers(self) -> None:
        """SIGTERM and SIGINT: drain; a second one: leave now."""
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def stop(self) -> None:
        """Ask to drain (from any thread); a second call: leave now."""
        self._stops += 1
        with contextlib.suppress(OSError):  # it has left already, or more wakes are queued than it needs
            self._wake_write.send(b"\0")

    def run(self) -> None:
        """Serve until drained or stopped twice; says goodbye and closes the link."""
        reason = "stopped"
        try:
            while not (reason := self._should_leave()):
                held = self.worker.previous is not None
                plan = self.link.next_plan(0.0 if held else IDLE_WAIT)
                if plan is not None:
                    self.worker.execute_plan(plan)
                elif held and self.worker.previous_ready:
                    self.worker.finish_previous()  # no next plan is queued: its tokens go out now
                # Else the device runs, and whatever comes first is next: waiting for it alone would keep a plan that
                # comes meanwhile until the device has nothing left to do.
                self._drain_wakes()
        finally:
            self.worker.finish_previous()
            self.link.close(reason)
            self._wake_read.close()
            self._wake_write.close()

    # ----------------------------------------------------------------------------------------------------------------

    def _should_leave(self) -> str:
        """Why to leave now, or an empty text."""
        if self.link.drained and self.worker.previous is None:
            return "drained"  # asked for or not: the core sends no further plan
        if not self._stops:
            return ""
        if self._stops > 1:
            return "stopped"
        if not self._announced:
            self._announced = True
            self._unused_since = time.monotonic()
            log.info("draining", extra={"slots": self.slots.slots_used})
            self.link.announce_draining()
        if self.worker.previous is not None:
            return ""
        if not self.link.connected:
            return "drained"
        now = time.monotonic()
        if self.slots.slots_used:
            self._unused_since = now
        return "drained" if now - self._unused_since > DRAIN_PATIENCE else ""

    def _begin_epoch(self, epoch: Epoch) -> None:
        self.worker.begin_epoch(epoch)

    def _load(self) -> Load:
        return Load(
            slots_used=self.slots.slots_used,
            blocks_used=self.slots.blocks_used,
            memory_bytes=resident_memory(),
            steps=self.worker.steps,
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1

    def _drain_wakes(self) -> None:
        try:
            while self._wake_read.recv(64):
                pass
        except BlockingIOError:
            pass


def resident_memory() -> int:
    """Bytes of memory that this process holds now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
