"""``python -m scheduler_svc.core``: the scheduler core as a process."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import zmq

from protos.link_keys import read_secret
from scheduler_svc import logs
from scheduler_svc.core import garbage, kind
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.crash_ledger import LedgerFile
from scheduler_svc.core.fault_injection import FaultInjector
from scheduler_svc.core.loop import Shell, make_ipc_directory, steady_clock
from scheduler_svc.core.recording import RecordingCore
from scheduler_svc.core.tenant_limits import NO_LIMITS, load_limits
from scheduler_svc.reloaded import Reloaded
from scheduler_svc.standby import wait_for_turn

# Option -> (field of CoreConfig, what it means).
_OPTIONS = {
    "--depth": ("depth", "plans unanswered per executor"),
    "--max-prefill-chunk": ("max_prefill_chunk", "tokens of a prompt in one step (0: what the budget allows)"),
    "--max-batch-tokens": ("max_batch_tokens", "new tokens a step (0: the executor's limit)"),
    "--kv-blocks-limit": ("kv_blocks_limit", "cap every executor's KV pool, in blocks (0: none)"),
    "--max-executors": ("max_executors", "executors connected at once, of all models"),
    "--max-waiting": ("max_waiting", "waiting sequences per model"),
    "--ageing": ("ageing", "seconds of waiting worth one priority class"),
    "--prefix-wait": ("prefix_wait", "seconds to wait for a prefix that is being computed"),
    "--placement-wait": ("placement_wait", "seconds to wait for a turn on a better placed executor"),
    "--fair-window": ("fair_window", "seconds by which a tenant ahead in service stands back at most (0: no shares)"),
    "--fair-tokens": ("fair_tokens", "tokens ahead at which it does"),
    "--kv-overcommit": ("kv_overcommit", "pools that the peak of KV of the running set may fill (0: no look)"),
    "--itl-target": ("itl_target", "seconds between tokens to keep to while prompts are computed (0: none)"),
    "--text-run-ahead": ("text_run_ahead", "tokens past the acknowledgement of a stream that stops on text"),
    "--wait-for-executor": ("wait_for_executor", "seconds that requests wait for an executor of their model"),
    "--startup-grace": ("startup_grace", "seconds after a start in which unknown models may still come"),
    "--step-timeout": ("step_timeout", "seconds of age at which an unanswered step means a hung executor"),
    "--step-slack": ("step_slack", "... plus so many times what a step of its size took at worst"),
    "--cold-step-timeout": ("cold_step_timeout", "the same for an executor whose steps were not measured yet"),
    "--step-timeout-per-token": ("step_timeout_per_token", "... plus so many seconds for each of its tokens"),
    "--quarantine": ("quarantine", "seconds that an executor is kept away after losing epochs in a row"),
}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m scheduler_svc.core", usage="%(prog)s [OPTION ...]", description=__doc__, allow_abbrev=False
    )
    result.add_argument("--listen", default="tcp://127.0.0.1:5600", help="where executors connect (%(default)s)")
    result.add_argument("--front", required=True, help="ipc:// endpoint for API workers")
    result.add_argument("--link-secret-file", type=Path, metavar="FILE", help="shared secret, needed off loopback")
    result.add_argument(
        "--tenant-limits",
        type=Path,
        metavar="FILE",
        help="JSON: limits by tenant (tenant_limits.py); read again when it changes",
    )
    result.add_argument("--no-prefix-cache", action="store_true", help="neither look up nor keep prefixes")
    result.add_argument(
        "--record", type=Path, metavar="FILE", help="keep every message with its time, prompts among them (replay.py)"
    )
    logs.add_arguments(result)
    result.add_argument("--ledger-fd", type=int, metavar="N", help="set by the supervisor: what cores leave each other")
    result.add_argument("--standby-fd", type=int, metavar="N", help="set by the supervisor: get ready and wait there")
    result.add_argument("--inject", default="", metavar="FAULTS", help="tests only: KIND@PLAN,... (fault_injection.py)")
    defaults = CoreConfig()
    for option, (field, meaning) in _OPTIONS.items():
        default = getattr(defaults, field)
        result.add_argument(option, dest=field, type=type(default), default=default, help=f"{meaning} ({default})")
    return result


log = logging.getLogger("scheduler_svc.core")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    logs.configure("core", level=options.log_level, format=options.log_format)
    if options.standby_fd is not None and not wait_for_turn(options.standby_fd, "core"):
        return 0
    try:
        fields = {field: getattr(options, field) for field, _ in _OPTIONS.values()}
        config = CoreConfig(prefix_cache=not options.no_prefix_cache, **fields)
        injector = FaultInjector(options.inject) if options.inject else None
        secret = read_secret(options.link_secret_file) if options.link_secret_file else None
        make_ipc_directory(options.front)
        clock = steady_clock()
        file = Reloaded(options.tenant_limits, load_limits) if options.tenant_limits else None
        limits = file.settings if file is not None else NO_LIMITS
        core: Core = (
            RecordingCore(config, clock(), options.record, limits=limits)
            if options.record
            else Core(config, clock(), limits=limits)
        )
        ledger = LedgerFile(options.ledger_fd) if options.ledger_fd is not None else None
        shell = Shell(core, options.listen, options.front, secret, injector, file, ledger)
    except (ValueError, OSError, zmq.ZMQError) as error:
        print(f"scheduler core: {error}", file=sys.stderr)
        return 2
    shell.stop_on_signals()
    garbage.take_over()
    log.info("core listens", extra={"executors": shell.listening, "front": options.front, "core": kind()})
    try:
        shell.run(clock)
    finally:
        shell.close()
        if isinstance(core, RecordingCore):
            core.close()
    log.info("core stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
