"""The faults: what each does to the real processes, and how the operator or the fault itself sets it right again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.faults.relay import Relay
from tests.e2e.harness import Cluster
from tests.e2e.process import bounded, gone

LONG_FREEZE = 9.0  # seconds, well beyond what it takes to be given up
BLINK = 1.0  # seconds, well within it
WAIT = 180.0  # for a process to end or to be replaced, on a loaded machine

# Kind -> whose death it makes (what a log may say then), or "" for one that must pass unnoticed.
KINDS = {
    "executor kill": "executor",
    "executor freeze": "executor",
    "executor blink": "",
    "executor drain": "executor",
    "executor hurry": "executor",
    "executor partition": "executor",
    "executor one-way partition": "executor",
    "executor short partition": "",
    "core kill": "core",
    "core freeze": "core",
    "core blink": "",
    "core term": "core",
    "api kill": "api",
    "api freeze": "api",
    "api blink": "",
    "api drain": "api",
    "scheduler kill": "scheduler",
    "scheduler drain": "scheduler",
}
# Those that nobody announces: the time to detect them is measured.
SILENT = {kind for kind in KINDS if kind.endswith((" kill", " freeze", "partition")) and KINDS[kind]}


@dataclass(slots=True)
class Fault:
    kind: str
    at_tokens: int  # fired once so many tokens have come
    target: str = ""
    when: float = 0.0  # Unix seconds
    monotonic: float = 0.0
    over: float = 0.0  # Unix seconds: everything it takes is there again
    error: str = ""
    detected_after: float | None = None
    gaps: list[float] = field(default_factory=list)
    recomputed: int = 0  # tokens: prompts and outputs of the streams that ran then


def schedule(kills: int, tokens: int, kinds: list[str], rng: random.Random) -> list[Fault]:
    """Every kind as often as any other, in a random order, spread over the tokens of the run."""
    order: list[str] = []
    while len(order) < kills:
        batch = list(kinds)
        rng.shuffle(batch)
        order += batch
    first, last = 0.05 * tokens, 0.85 * tokens
    step = (last - first) / max(1, kills)
    return [Fault(kind, int(first + step * (i + rng.random()))) for i, kind in enumerate(order[:kills])]


class Acts:
    """``relays``: by executor name, used from the loop's thread only, through ``in_loop``."""

    def __init__(
        self,
        cluster: Cluster,
        model: Path,
        relays: dict[str, Relay],
        flags: list[str],
        in_loop: Callable[[Callable[[], None]], object],
        restart: Callable[[], None],
        seed: int,
    ) -> None:
        self._cluster = cluster
        self._model = model
        self._relays = relays
        self._flags = flags
        self._in_loop = in_loop
        self._restart_scheduler = restart
        self._rng = random.Random(seed)
        self._busy: set[str] = set()  # targets that a fault holds now
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.pids: set[int] = set()  # of every process that was ever seen

    def run(self, fault: Fault) -> None:
        """From the fault to its end; on a thread of its own."""
        who, _, what = fault.kind.partition(" ")
        target = self._claim(who)
        if not target:
            return  # no stream is left to disturb
        fault.target = target
        try:
            getattr(self, f"_{who}")(fault, target, what)
        except Exception as error:
            fault.error = f"{type(error).__name__}: {error}"
        finally:
            fault.over = time.time()
            with self._lock:
                self._busy.discard(target)
                if who == "scheduler":
                    self._busy.discard("core")
                    self._busy -= {name for name in self._busy if name.startswith("api")}

    def _claim(self, who: str) -> str:
        """A target that no other fault holds; waits for one, and returns "" once `stop` was called. The scheduler as a
        whole is the core and the workers."""
        for _ in bounded(WAIT, f"no {who} is free"):
            if self._stopped.is_set():
                return ""
            with self._lock:
                names = {
                    "executor": sorted(self._cluster.executors),
                    "core": ["core"],
                    "api": ["api"],
                    "scheduler": ["scheduler"],
                }[who]
                free = [name for name in names if name not in self._busy]
                if who in ("core", "api") and "scheduler" in self._busy:
                    continue
                if who == "scheduler" and {"core", "api"} & self._busy:
                    continue
                if free:
                    target = self._rng.choice(free)
                    self._busy.add(target)
                    return target
        raise AssertionError

    def stop(self) -> None:
        """Faults that wait for their target are not begun any more."""
        self._stopped.set()

    def _begin(self, fault: Fault) -> None:
        fault.when, fault.monotonic = time.time(), time.monotonic()

    # -- executors -------------------------------------------------------------------------------------------------

    def start_executor(self, name: str) -> None:
        link = f"tcp://127.0.0.1:{self._relays[name].port}"
        self.pids.add(self._cluster.start_executor(name, self._model, *self._flags, links=[link]).pid)

    def _executor(self, fault: Fault, name: str, what: str) -> None:
        process = self._cluster.executors[name]
        if "partition" in what:
            relay = self._relays[name]
            self._begin(fault)
            one_way = self._rng.random() < 0.5
            pull = {"up": True, "down": True} if "one-way" not in what else {"up": one_way, "down": not one_way}
            self._in_loop(lambda: relay.pull(**pull))
            time.sleep(BLINK if "short" in what else LONG_FREEZE)
            self._in_loop(relay.heal)
            return
        self._begin(fault)
        if what in ("freeze", "blink"):
            self._pause(process.pid, LONG_FREEZE if what == "freeze" else BLINK)
            return
        if what == "kill":
            process.popen.kill()
        else:
            process.popen.terminate()
            if what == "hurry":
                time.sleep(0.3)
                with contextlib.suppress(ProcessLookupError):
                    process.popen.terminate()
        status = process.wait(WAIT)
        if what in ("drain", "hurry") and status != 0:
            fault.error = f"the executor ended with {status}"
        self.start_executor(name)
        self._cluster.executors[name].wait_log("event=welcomed", WAIT)

    # -- the scheduler's processes -----------------------------------------------------------------------------------

    def _core(self, fault: Fault, name: str, what: str) -> None:
        self._module(fault, "core", what)

    def _api(self, fault: Fault, name: str, what: str) -> None:
        self._module(fault, "api", what)

    def _module(self, fault: Fault, module: str, what: str) -> None:
        for _ in bounded(WAIT, f"no {module} runs"):
            if pids := self._cluster.pids(module):
                break
        self.pids.update(pids)
        pid = self._rng.choice(pids)
        self._begin(fault)
        if what == "blink":
            self._pause(pid, BLINK)
            return
        os.kill(pid, {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}.get(what, signal.SIGTERM))
        for _ in bounded(WAIT, f"{fault.kind}: {module} {pid} was not replaced"):
            if gone(pid) and len(new := self._cluster.pids(module)) >= len(pids):
                self.pids.update(new)
                return

    def _scheduler(self, fault: Fault, name: str, what: str) -> None:
        process = self._cluster.scheduler
        assert process is not None
        for module in ("core", "api"):
            self.pids.update(self._cluster.pids(module))
        self._begin(fault)
        process.popen.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
        status = process.wait(WAIT)
        if what == "drain" and status != 0:
            fault.error = f"the scheduler ended with {status}"
        self._restart_scheduler()

    def _pause(self, pid: int, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
