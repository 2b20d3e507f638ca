"""``python -m scheduler_svc.replay FILE``: run a recorded core again, and see that it says the same, bit for bit.

With ``--executor tcp://HOST:PORT`` the record plays the core instead: an executor that connects there is given the
plans of a recorded session, and its tokens are compared with those on record.

Exit status: 0 the same, 1 a difference (the first one is shown), 2 no record, or nobody to play with.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protos import front, step
from scheduler_svc.core import record_file
from scheduler_svc.core.core import Core
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.outbox import EXECUTOR
from scheduler_svc.core.record_file import Entry, Header, RecordError
from scheduler_svc.core.tenant_limits import LimitsFile

_to_core_front = msgspec.msgpack.Decoder(front.ToCore).decode
_limits = msgspec.msgpack.Decoder(LimitsFile).decode
_to_core_step = msgspec.msgpack.Decoder(step.ToCore).decode
_to_worker = msgspec.msgpack.Decoder(front.ToWorker).decode
_to_executor = msgspec.msgpack.Decoder(step.ToExecutor).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class Difference:
    at: int  # number of the entry, from 1
    expected: str
    got: str


def replay(
    header: Header, entries: Iterator[Entry], check_every: int = 0
) -> tuple[Core, Counter[str], Difference | None]:
    """Run the core of a record. ``check_every``: all invariants after every so many calls (0: never). Returns the core
    as it is at the end, how many entries of each kind there were, and the first difference."""
    core = Core(header.config, header.started, header.incarnation, header.limits)
    counts: Counter[str] = Counter()
    for number, entry in enumerate(entries, 1):
        counts[entry.kind] += 1
        if entry.kind == record_file.OUT:
            items = core.take_outbox()
            said = iter(
                (record_file.TO_EXECUTOR if to.kind == EXECUTOR else record_file.TO_WORKER, to.peer, _encode(message))
                for to, message in items
            )
            if len(items) != int(entry.peer):
                return core, counts, Difference(number, f"{int(entry.peer)} messages", f"{len(items)} messages")
        elif entry.kind in (record_file.TO_EXECUTOR, record_file.TO_WORKER):
            kind, peer, data = next(said)
            if (kind, peer, data) != (entry.kind, entry.peer, entry.data):
                return core, counts, Difference(number, _shown(entry.kind, entry.data), _shown(kind, data))
        else:
            _call(core, entry)
            if check_every and number % check_every == 0 and (problems := check_all(core)):
                return core, counts, Difference(number, "all invariants hold", "; ".join(problems))
    return core, counts, None


def _call(core: Core, entry: Entry) -> None:
    match entry.kind:
        case record_file.FROM_WORKER:
            core.on_front(entry.peer, _to_core_front(entry.data), entry.now)
        case record_file.FROM_EXECUTOR:
            core.on_executor(entry.peer, _to_core_step(entry.data), entry.now)
        case record_file.SESSION_GONE:
            core.on_session_gone(entry.peer, entry.now)
        case record_file.WORKER_GONE:
            core.on_worker_gone(entry.peer, entry.now)
        case record_file.DISCONNECT:
            core.on_disconnect(entry.peer.decode(), entry.now)
        case record_file.STALL:
            core.on_stall(entry.now)
        case record_file.LIMITS:
            core.on_limits(_limits(entry.data))
        case record_file.MALFORMED:
            core.on_malformed()
        case record_file.TICK:
            core.on_tick(entry.now)
        case record_file.ADVANCE:
            core.advance(entry.now)
        case _:
            raise RecordError(f"an entry of unknown kind {entry.kind!r}")


def _shown(kind: str, data: bytes) -> str:
    try:
        message = _to_executor(data) if kind == record_file.TO_EXECUTOR else _to_worker(data)
    except msgspec.DecodeError:
        return f"{len(data)} bytes that are no message"
    text = repr(message)
    return text if len(text) <= 600 else f"{text[:600]}... ({len(text)} characters)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler_svc.replay", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--check-every", type=int, default=0, metavar="N", help="all invariants after every N calls")
    parser.add_argument("--executor", metavar="tcp://HOST:PORT", help="listen there, and compare an executor's tokens")
    parser.add_argument("--session", default="", metavar="HEX", help="which recorded session (default: most plans)")
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="for the executor, and each answer")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    try:
        header, entries = record_file.read(options.file)
        if options.executor:
            from scheduler_svc.replay_executor import rerun

            return rerun(entries, options.executor, options.session, options.wait)
        _, counts, difference = replay(header, entries, options.check_every)
    except (RecordError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    if difference is not None:
        print(f"entry {difference.at} differs\n  recorded: {difference.expected}\n  now:      {difference.got}")
        return 1
    told = sum(counts[kind] for kind in (record_file.FROM_WORKER, record_file.FROM_EXECUTOR))
    said = counts[record_file.TO_WORKER] + counts[record_file.TO_EXECUTOR]
    print(f"the same: {told} messages to the core, {said} from it, {counts[record_file.ADVANCE]} turns")
    return 0


if __name__ == "__main__":
    sys.exit(main())
