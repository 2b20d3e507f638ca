"""``python -m deploy.compile_core build/compiled``: the scheduler's core compiled to C by mypyc (needs a C compiler).

The sources are copied, and the modules that a step runs through compiled beside their copies, so nothing in the working
tree can go stale. It decides the same, bit for bit (tests/core/test_compiled.py), for half to three quarters of the
processor time. The scheduler's image has it. To run it from here, put the folder before the sources::

    PYTHONSAFEPATH=1 PYTHONPATH=build/compiled:. python -m scheduler_svc ...
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("protos", "scheduler_svc")
# What runs for every step, request or sequence. msgspec's structures are not for mypyc: their modules stay as they are.
COMPILED = (
    "blocks", "commit", "core", "door", "executor", "fairness", "fleet", "front_desk", "models", "outbox", "pace",
    "passing", "pipeline", "planner", "policy", "prefix_cache", "prefix_homes", "queue", "recording", "residency",
    "routing", "sequence", "sessions", "slots", "step_age", "streams", "suspects", "tenants", "unanswered", "workers",
)  # fmt: skip
# Types are checked elsewhere. But what mypy takes for unreachable is not compiled, as a look at ``self.x`` after
# ``self.x = None`` and a call that sets it. So there must be none.
_MYPY = "[mypy]\nignore_missing_imports = true\nwarn_unreachable = true\n"


def has_compiler() -> bool:
    return any(map(shutil.which, ("cc", "gcc", "clang")))


def compile_core(target: Path) -> None:
    """Nothing to do where ``target`` was made of these sources. Raises CalledProcessError if mypyc or the C compiler
    fails; what they said is on stderr."""
    stamp = target / "made-of"
    if stamp.exists() and stamp.read_text() == _sources():
        return
    new = target.with_name(target.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name in COPIED:
        shutil.copytree(ROOT / name, new / name, ignore=shutil.ignore_patterns("__pycache__"))
    (new / "mypy.ini").write_text(_MYPY)
    modules = [f"scheduler_svc/core/{name}.py" for name in COMPILED]
    order = [sys.executable, "-c", "from mypyc.__main__ import main; main()", *modules]
    headers = {"C_INCLUDE_PATH": sysconfig.get_path("include")}  # wherever this Python was moved to
    subprocess.run(order, cwd=new, env={**os.environ, **headers}, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(new / "build")
    shutil.rmtree(new / ".mypy_cache", ignore_errors=True)
    (new / stamp.name).write_text(_sources())
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)


def environment(folder: Path) -> dict[str, str]:
    """In which a Python process finds the compiled core in ``folder``, and what is not there in the working tree."""
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": f"{folder}:{ROOT}"}


def _sources() -> str:
    """What the compiled core depends on, as a hash."""
    files = [Path(__file__), *(file for name in COPIED for file in (ROOT / name).rglob("*.py"))]
    state = hashlib.sha256(f"{sys.version} {version('mypy')}".encode())
    for file in sorted(files):
        state.update(hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m deploy.compile_core FOLDER", file=sys.stderr)
        return 2
    if not has_compiler():
        print("error: a C compiler is needed (cc, gcc or clang), and Python's headers", file=sys.stderr)
        return 1
    try:
        compile_core(Path(sys.argv[1]).absolute())
    except subprocess.CalledProcessError as error:
        print(f"error: mypyc ended with status {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
