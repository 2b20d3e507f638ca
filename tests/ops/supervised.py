"""A supervisor of fake children, as a process of its own: ``python -m tests.ops.supervised FOLDER [WORKERS] [CORE]``.

Each child appends ``name pid`` to FOLDER/events when it is up and ``name stopped`` when it ends on SIGTERM. CORE is the
Python source of the core: by default it waits for SIGTERM like the workers.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from scheduler_svc import logs, pulse
from scheduler_svc.child import Backoff, Child, Watch
from scheduler_svc.supervisor import Patience, Supervisor

POLITE = """
import os, signal, sys
def note(text):
    with open(sys.argv[1], "a") as file:
        file.write(f"{sys.argv[2]} {text}\\n")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
note(os.getpid())
signal.sigwait([signal.SIGTERM])
note("stopped")
"""

PULSED = POLITE.replace(
    "note(os.getpid())",
    """
import threading, time
def beat():
    while True:
        os.write(int(sys.argv[sys.argv.index("--pulse-fd") + 1]), b".")
        time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
note(os.getpid())
""",
)

# Holds the interpreter's lock from the first beat on; says so when it is done. CPU time, whoever else uses the machine.
BUSY = PULSED.replace(
    "threading.Thread(target=beat, daemon=True).start()",
    """
sys.setswitchinterval(1000.0)
threading.Thread(target=beat, daemon=True).start()
time.sleep(0.2)
until = time.process_time() + 1.5
while time.process_time() < until:
    pass
""",
)

# Stands still before its first beat, at the first start only.
STOPPED = PULSED.replace(
    "import threading, time",
    """
import threading, time
if not os.path.exists(sys.argv[1] + "." + sys.argv[2]):
    open(sys.argv[1] + "." + sys.argv[2], "w").close()
    note(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
""",
)

# Takes long until its first beat.
SLOW = PULSED.replace(
    "import threading, time",
    """
import threading, time
while time.process_time() < 1.5:
    pass
""",
)

STUBBORN = POLITE.replace('note("stopped")', "signal.pause()")


STANDBY = POLITE.replace(
    "note(os.getpid())",
    """
if "--standby-fd" in sys.argv:
    with open(sys.argv[1], "a") as file:
        file.write(f"standby {os.getpid()}\\n")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if not os.read(int(sys.argv[sys.argv.index("--standby-fd") + 1]), 1):
        sys.exit()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
note(os.getpid())
""",
)


def main() -> int:
    folder = Path(sys.argv[1])
    workers = int(sys.argv[2])
    sources = {"polite": POLITE, "stubborn": STUBBORN, "pulsed": PULSED, "busy": BUSY, "standby": STANDBY}
    sources |= {"stopped": STOPPED, "slow": SLOW}
    watch = Watch(startup=30.0, silence=0.5) if "--pulse-fd" in sources.get(sys.argv[3], "") else None
    pulse.START_IDLE = 0.75
    worker_source = sources.get(sys.argv[3], sys.argv[3])
    core_source = sources.get(sys.argv[4], sys.argv[4])
    front = f"ipc://{folder}/front"
    logs.configure("supervisor")

    def child(name: str, source: str, watch: Watch | None = None) -> Child:
        command = [sys.executable, "-c", source, str(folder / "events"), name, front]
        standby_after = 0.0 if source == STANDBY else None
        return Child(name, command, Backoff(first=0.05, most=0.2), watch, standby_after=standby_after)

    supervisor = Supervisor(
        child("core", core_source),
        [child(f"w{i}", worker_source, watch) for i in range(workers)],
        front if "zmq" in core_source else "",
        Patience(drain=30.0, core_stop=30.0, hurry=0.2, core_startup=30.0, core_silence=0.5),
    )
    return asyncio.run(supervisor.run())


if __name__ == "__main__":
    sys.exit(main())
