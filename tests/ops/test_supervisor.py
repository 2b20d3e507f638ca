"""The supervisor with fake children: restart, back-off, order of stopping, and no orphan."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler_svc.child import Backoff

LIMIT = 90.0  # seconds for anything to happen


class Supervised:
    """tests.ops.supervised as a process; `events` of its children come through a FIFO."""

    def __init__(self, folder: Path, *, workers: int = 2, worker: str = "polite", core: str = "polite") -> None:
        os.mkfifo(folder / "events")
        # Opened for writing too, so that the reader sees no end of file between two children.
        self._fifo = os.open(folder / "events", os.O_RDWR)
        self._buffer = b""
        self.pids: dict[str, int] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ops.supervised", str(folder), str(workers), worker, core],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._logged = threading.Condition()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._logged:
                self.log.append(line)
                self._logged.notify_all()

    def wait_for_log(self, found: Callable[[list[str]], bool]) -> None:
        with self._logged:
            assert self._logged.wait_for(lambda: found(self.log), LIMIT), "".join(self.log)

    def event(self) -> tuple[str, str]:
        """The next event of any child."""
        while b"\n" not in self._buffer:
            assert select.select([self._fifo], [], [], LIMIT)[0], "".join(self.log)
            self._buffer += os.read(self._fifo, 4096)
        line, self._buffer = self._buffer.split(b"\n", 1)
        name, what = line.decode().split()
        if what.isdigit():
            self.pids[name] = int(what)
        return name, what

    def all_up(self, count: int) -> None:
        while len(self.pids) < count:
            self.event()

    def exit_status(self) -> int:
        status = self.process.wait(LIMIT)
        self._reader.join(LIMIT)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(LIMIT)
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self._fifo)


Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Supervised] = []

    def begin(**options: object) -> Supervised:
        running.append(Supervised(tmp_path, **options))  # type: ignore[arg-type]
        return running[-1]

    yield begin
    for supervised in running:
        supervised.close()


def wait_until_dead(descriptor: int) -> None:
    """`descriptor`: a pidfd, opened while the process lived."""
    assert select.select([descriptor], [], [], LIMIT)[0], "still alive"
    os.close(descriptor)


def test_sigterm_stops_the_workers_first_then_the_core(start: Start) -> None:
    supervised = start()
    supervised.all_up(3)
    supervised.process.send_signal(signal.SIGTERM)
    events = [supervised.event() for _ in range(3)]
    assert {events[0][0], events[1][0]} == {"w0", "w1"}
    assert events[2] == ("core", "stopped")
    assert supervised.exit_status() == 0


def test_sigint_is_a_clean_stop_too(start: Start) -> None:
    supervised = start(workers=1)
    supervised.all_up(2)
    supervised.process.send_signal(signal.SIGINT)
    assert [supervised.event() for _ in range(2)] == [("w0", "stopped"), ("core", "stopped")]
    assert supervised.exit_status() == 0


@pytest.mark.parametrize("victim", ["core", "w0"])
def test_a_killed_child_is_started_again_and_the_others_stay(start: Start, victim: str) -> None:
    supervised = start()
    supervised.all_up(3)
    before = dict(supervised.pids)
    os.kill(before[victim], signal.SIGKILL)
    name, pid = supervised.event()
    assert name == victim
    assert int(pid) != before[victim]
    assert {name: pid for name, pid in supervised.pids.items() if name != victim} == {
        name: pid for name, pid in before.items() if name != victim
    }


def test_one_that_stands_by_takes_over_and_another_stands_by(start: Start) -> None:
    supervised = start(workers=1, core="standby")
    supervised.all_up(3)
    for _ in range(3):
        waiting = supervised.pids["standby"]
        os.kill(supervised.pids["core"], signal.SIGKILL)
        events = {supervised.event()[0] for _ in range(2)}
        assert events == {"core", "standby"}
        assert supervised.pids["core"] == waiting
        assert supervised.pids["standby"] != waiting
    descriptors = [os.pidfd_open(pid) for pid in supervised.pids.values()]
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.exit_status() == 0
    for descriptor in descriptors:
        wait_until_dead(descriptor)


def test_one_that_stands_by_is_replaced_when_it_dies(start: Start) -> None:
    supervised = start(workers=1, core="standby")
    supervised.all_up(3)
    before = dict(supervised.pids)
    os.kill(before["standby"], signal.SIGKILL)
    assert supervised.event()[0] == "standby"
    assert supervised.pids["standby"] != before["standby"]
    assert supervised.pids["core"] == before["core"]
    supervised.wait_for_log(lambda log: any('event="standby ended" child=core status=-9' in line for line in log))


def test_one_that_stands_by_dies_with_the_supervisor(start: Start) -> None:
    supervised = start(workers=1, core="standby")
    supervised.all_up(3)
    descriptor = os.pidfd_open(supervised.pids["standby"])
    supervised.process.kill()
    wait_until_dead(descriptor)


def test_a_child_killed_while_stopping_is_not_started_again(start: Start) -> None:
    supervised = start(workers=1, worker="stubborn")
    supervised.all_up(2)
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for_log(lambda log: any("event=stopping" in line for line in log))
    os.kill(supervised.pids["w0"], signal.SIGKILL)
    assert supervised.event() == ("core", "stopped")
    assert supervised.exit_status() == 1


def test_the_core_lives_on_while_the_workers_drain(start: Start) -> None:
    supervised = start(workers=1, worker="stubborn")
    supervised.all_up(2)
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for_log(lambda log: any("event=stopping" in line for line in log))
    os.kill(supervised.pids["core"], signal.SIGKILL)
    assert supervised.event()[0] == "core"  # started again: streams that drain need it
    assert supervised.process.poll() is None


def test_a_second_signal_hurries(start: Start) -> None:
    supervised = start(workers=2, worker="stubborn")
    supervised.all_up(3)
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for_log(lambda log: any("event=stopping" in line for line in log))
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.exit_status() == 1
    assert "child did not stop in time, killing it" in "".join(supervised.log)


def test_a_killed_supervisor_leaves_no_orphan(start: Start) -> None:
    supervised = start(worker="stubborn", core="stubborn")
    supervised.all_up(3)
    descriptors = [os.pidfd_open(pid) for pid in supervised.pids.values()]
    supervised.process.kill()
    for descriptor in descriptors:
        wait_until_dead(descriptor)


def test_a_crash_loop_backs_off_and_says_so(start: Start) -> None:
    supervised = start(workers=1, worker="raise SystemExit(1)")

    def delays(log: list[str]) -> list[float]:
        ends = [line for line in log if "child=w0" in line and "child ended" in line]
        return [float(line.split("delay=")[1].split()[0]) for line in ends]

    supervised.wait_for_log(lambda log: len(delays(log)) >= 5)
    assert delays(supervised.log)[:5] == [0.0, 0.05, 0.1, 0.2, 0.2]
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.exit_status() == 1  # the last thing w0 did was to fail


def test_a_child_that_refuses_its_flags_ends_the_service(start: Start) -> None:
    supervised = start(workers=1, worker="raise SystemExit(2)")
    assert supervised.exit_status() == 2
    assert "child refused its flags" in "".join(supervised.log)


FREEZES = """
import os, sys, zmq
with open(sys.argv[1], "a") as file:
    file.write(f"core {os.getpid()}\\n")
import msgspec
from protos import front
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[3])
peer, frame = socket.recv_multipart()
assert isinstance(msgspec.msgpack.decode(frame, type=front.ToCore), front.Attach)
socket.send_multipart([peer, msgspec.msgpack.encode(front.Reattach())])
peer, frame = socket.recv_multipart()
socket.send_multipart([peer, msgspec.msgpack.encode(front.Attached(1))])
socket.recv_multipart()  # nothing will come: frozen
"""


STOPS_AT_START = {
    "polite": "polite",
    "zmq": """
import os, signal, sys
with open(sys.argv[1], "a") as file:
    file.write(f"core {os.getpid()}\\n")
os.kill(os.getpid(), signal.SIGSTOP)  # it will never speak over zmq
""",
}


def test_a_frozen_core_is_killed_and_started_again(start: Start) -> None:
    supervised = start(workers=1, core=FREEZES)
    supervised.all_up(2)
    frozen = supervised.pids["core"]
    assert supervised.event()[0] == "core"
    assert supervised.pids["core"] != frozen
    supervised.wait_for_log(lambda log: "the core is frozen, killing it" in "".join(log))


def test_backoff_forgets_after_a_stable_run() -> None:
    backoff = Backoff(first=0.1, most=10.0, stable=10.0)
    assert [backoff.after(0.5) for _ in range(9)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    assert backoff.after(9.9) == 10.0
    assert backoff.after(10.0) == 0.0
    assert backoff.after(0.0) == 0.1


def test_a_worker_without_a_pulse_is_killed_and_started_again(start: Start) -> None:
    """Stopped, it is alive as far as the kernel is concerned."""
    supervised = start(workers=2, worker="pulsed")
    supervised.all_up(3)
    frozen, other = supervised.pids["w0"], supervised.pids["w1"]
    descriptor = os.pidfd_open(frozen)
    os.kill(frozen, signal.SIGSTOP)
    wait_until_dead(descriptor)
    name, pid = supervised.event()
    assert name == "w0"
    assert int(pid) != frozen
    assert supervised.pids["w1"] == other
    supervised.wait_for_log(lambda log: any('event="child is frozen, killing it" child=w0' in line for line in log))


@pytest.mark.parametrize("core", ["polite", "zmq"])
def test_one_that_stops_before_its_first_word_is_killed_soon(start: Start, core: str) -> None:
    """Not after the minutes that a slow start may take."""
    stopped = "worker" if core == "polite" else "core"
    supervised = start(workers=1, worker="stopped" if stopped == "worker" else "pulsed", core=STOPS_AT_START[core])
    supervised.all_up(2)
    name = "w0" if stopped == "worker" else "core"
    first = supervised.pids[name]
    while supervised.pids[name] == first:
        supervised.event()
    said = "child is frozen, killing it" if name == "w0" else "the core is frozen, killing it"
    supervised.wait_for_log(lambda log: any(said in line for line in log))


def test_a_slow_start_is_no_death(start: Start) -> None:
    supervised = start(workers=2, worker="slow")
    supervised.all_up(3)
    assert not any("frozen" in line for line in supervised.log), "".join(supervised.log)


def test_a_worker_that_computes_is_not_taken_for_frozen(start: Start) -> None:
    """It reads a large tokenizer, say, with the interpreter's lock held: killed, it would do so again and again."""
    supervised = start(workers=1, worker="busy")
    supervised.all_up(2)  # it says so when it has computed
    assert not any("frozen" in line for line in supervised.log), "".join(supervised.log)
