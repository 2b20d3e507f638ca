"""The services as they will be one protocol version later.

    python -m tests.e2e.next_version MODULE FLAGS

``scheduler_svc``, ``scheduler_svc.core`` and ``executor_svc`` then offer version N + 1 besides those of today; with
``only`` before MODULE they speak no other.
"""

from __future__ import annotations

import importlib
import sys

from protos import step

TODAY = step.PROTOCOL_VERSIONS
NEXT = TODAY[0] + 1


def core_command(plain: list[str]) -> list[str]:
    at = plain.index("scheduler_svc.core")
    return [*plain[:at], "tests.e2e.next_version", "scheduler_svc.core", *plain[at + 1 :]]


def main(arguments: list[str]) -> int:
    only = arguments[0] == "only"
    name, *flags = arguments[1:] if only else arguments
    step.PROTOCOL_VERSIONS = (NEXT,) if only else (NEXT, *TODAY)  # before anything takes it from there
    module = importlib.import_module(f"{name}.__main__")
    if name == "scheduler_svc":
        plain = module.core_command
        module.core_command = lambda *args: core_command(plain(*args))
    sys.argv[1:] = flags
    status: int = module.main()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
