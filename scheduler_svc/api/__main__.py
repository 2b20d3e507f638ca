"""One API worker: ``python -m scheduler_svc.api --front ipc:///run/stepwire/front --listen 127.0.0.1:50051``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler_svc import logs
from scheduler_svc.api.core_link import LinkConfig
from scheduler_svc.api.security import TlsFiles, is_local
from scheduler_svc.api.server import MAX_REQUEST_BYTES, ApiServer, ServerConfig
from scheduler_svc.api.service import ServiceConfig
from scheduler_svc.api.tenancy import MIN_KEY_CHARS, load_keys
from scheduler_svc.host_port import host_port
from scheduler_svc.pulse import beat
from scheduler_svc.reloaded import Reloaded

log = logging.getLogger("scheduler_svc.api")


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        prog="python -m scheduler_svc.api", usage="%(prog)s [OPTION ...]", description=__doc__
    )
    parse.add_argument("--front", required=True, metavar="ipc://PATH", help="where the scheduler core listens")
    parse.add_argument("--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help="gRPC address (%(default)s)")
    parse.add_argument("--worker-name", default="api-0", metavar="NAME", help="unique among workers (%(default)s)")
    parse.add_argument("--reuse-port", action="store_true", help="share the port with other workers (SO_REUSEPORT)")
    parse.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics there (default: not)")
    parse.add_argument("--no-reflection", action="store_true", help="do not serve gRPC reflection")
    parse.add_argument("--window", type=_positive, default=65536, help="unacknowledged tokens (%(default)s)")
    parse.add_argument("--max-streams", type=_positive, default=8192, help="open streams (%(default)s)")
    parse.add_argument(
        "--core-down-limit", type=_seconds, default=15.0, help="core away: UNAVAILABLE after (%(default)s s)"
    )
    parse.add_argument("--model-patience", type=_seconds, default=15.0, help="wait for a first model (%(default)s s)")
    parse.add_argument(
        "--slow-client", type=_seconds, default=60.0, help="nothing read: given up after (%(default)s s)"
    )
    parse.add_argument("--slow-tokens", type=_positive, default=1024, help="... with so many waiting (%(default)s)")
    parse.add_argument("--leave-grace", type=_seconds, default=2.0, help="SIGTERM: still accepting for (%(default)s s)")
    parse.add_argument("--drain-limit", type=_seconds, default=60.0, help="... then streams may take (%(default)s s)")
    parse.add_argument(
        "--max-message-bytes",
        type=_positive,
        default=MAX_REQUEST_BYTES,
        help="largest request; the others wait while it is parsed, at worst 0.1 s a MiB (%(default)s)",
    )
    parse.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="ask for API keys: lines of TENANT KEY; read again when it changes",
    )
    parse.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve TLS with this certificate chain (PEM)")
    parse.add_argument("--tls-key", type=Path, metavar="FILE", help="... and its private key (PEM)")
    parse.add_argument("--tls-client-ca", type=Path, metavar="FILE", help="... to clients that this CA signed (PEM)")
    parse.add_argument("--admin", metavar="HOST:PORT", help="serve stepwire.v1.Admin there (default: not)")
    parse.add_argument("--admin-key-file", type=Path, metavar="FILE", help="what admins must show; off loopback a must")
    parse.add_argument("--pulse-fd", type=int, metavar="N", help="set by the supervisor: write there while alive")
    logs.add_arguments(parse)
    return parse


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds")
    return value


def config_of(args: argparse.Namespace) -> ServerConfig:
    """Raises ValueError for what cannot be served."""
    if not args.front.startswith("ipc://"):
        raise ValueError(f"--front {args.front!r}: must be an ipc:// address")
    if not args.listen.startswith("unix:"):
        host_port("--listen", args.listen)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together")
    if args.tls_client_ca is not None and args.tls_cert is None:
        raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
    tls = TlsFiles(args.tls_cert, args.tls_key, args.tls_client_ca) if args.tls_cert is not None else None
    if tls is not None:
        tls.credentials()
    if args.api_keys is not None and tls is None and not is_local(args.listen):
        raise ValueError(f"--api-keys on {args.listen}: keys would travel in plain text; --tls-cert is needed")
    admin_key = _admin_key(args.admin_key_file)
    if args.admin:
        host_port("--admin", args.admin)
        if not is_local(args.admin) and not (admin_key and tls is not None):
            raise ValueError(f"--admin {args.admin}: other machines can reach it; --admin-key-file and TLS are needed")
    return ServerConfig(
        api_keys=Reloaded(args.api_keys, load_keys) if args.api_keys is not None else None,
        tls=tls,
        admin_listen=args.admin or "",
        admin_key=admin_key,
        max_receive_bytes=args.max_message_bytes,
        link=LinkConfig(
            address=args.front,
            worker=args.worker_name,
            incarnation=secrets.randbits(64),
            window=args.window,
            down_limit=args.core_down_limit,
        ),
        listen=args.listen,
        reuse_port=args.reuse_port,
        reflection=not args.no_reflection,
        leave_grace=args.leave_grace,
        drain_limit=args.drain_limit,
        service=ServiceConfig(
            max_streams=args.max_streams,
            model_patience=args.model_patience,
            slow_seconds=args.slow_client,
            slow_tokens=args.slow_tokens,
        ),
    )


def _admin_key(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--admin-key-file {path}: cannot be read") from error
    if len(key) < MIN_KEY_CHARS:
        raise ValueError(f"--admin-key-file {path}: must hold at least {MIN_KEY_CHARS} characters")
    return key


async def serve(config: ServerConfig, metrics_address: str | None, pulse: int | None = None) -> int:
    """Runs until SIGTERM or SIGINT (drains; a second one ends at once). Returns the exit status."""
    loop = asyncio.get_running_loop()
    beating = asyncio.create_task(beat(pulse)) if pulse is not None else None
    try:
        return await _serve(config, metrics_address, loop)
    finally:
        if beating is not None:
            beating.cancel()


async def _serve(config: ServerConfig, metrics_address: str | None, loop: asyncio.AbstractEventLoop) -> int:
    asked = asyncio.Event()
    again = asyncio.Event()

    def on_signal() -> None:
        (again if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = ApiServer(config)
    try:
        await server.start()
        gc.collect()
        gc.freeze()  # what is there now stays: no collection has to look at it again
        if metrics_address:
            server.metrics.serve(*host_port("--metrics", metrics_address))
    except (RuntimeError, OSError) as error:
        log.error("cannot listen", extra={"address": config.listen, "metrics": metrics_address, "reason": str(error)})
        await server.stop()
        return 1
    failed = asyncio.create_task(server.wait_failed())
    first = asyncio.create_task(asked.wait())
    await asyncio.wait([failed, first], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        log.error("worker failed", exc_info=failed.exception())
        await server.stop()
        return 1
    failed.cancel()
    leaving = asyncio.create_task(server.leave())
    second = asyncio.create_task(again.wait())
    await asyncio.wait([leaving, second], return_when=asyncio.FIRST_COMPLETED)
    if not leaving.done():
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await server.stop()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parse = parser()
    args = parse.parse_args(argv)
    logs.configure(args.worker_name, level=args.log_level, format=args.log_format)
    try:
        if args.metrics:
            host_port("--metrics", args.metrics)
        config = config_of(args)
    except ValueError as error:
        parse.error(str(error))
    return asyncio.run(serve(config, args.metrics, args.pulse_fd))


if __name__ == "__main__":
    sys.exit(main())
