"""The console command ``stepwire``: ``generate`` streams an answer to the terminal, ``models`` lists what is served,
``tokenize`` and ``detokenize`` turn text to ids and back; the operators' commands are in admin.py.

The answer goes to stdout; the closing line (TTFT and tokens/s) and errors go to stderr. Exit status: 0 done, 1 the
request failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from stepwire import admin, credentials
from stepwire.channels import OPTIONS, split_addresses
from stepwire.client import Client, Stream
from stepwire.errors import RequestError
from stepwire.request import INT32, UINT32, UINT64, Prompt
from stepwire.types import Chunk, Completion

MOST_SECONDS = 10**9


def _within(fits: range) -> Callable[[str], int]:
    """An integer that its field can hold; what the server makes of it, it says itself."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value not in fits:
            raise argparse.ArgumentTypeError(f"{value}: must be {fits.start} to {fits.stop - 1}")
        return value

    return number


_uint32 = _within(UINT32)


def _token_ids(text: str) -> list[int]:
    return [_uint32(part) for part in text.split(",")]


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return _uint32(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, up to {MOST_SECONDS}")
    return value


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="stepwire", description="Talk to a Stepwire scheduler service.")
    commands = top.add_subparsers(dest="command", required=True)

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--address", help="HOST:PORT, or several separated by commas (127.0.0.1:50051; of the admin service: :50052)"
    )
    common.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the API key (or the admin key)")
    common.add_argument("--tls-ca", type=Path, metavar="FILE", help="use TLS; this PEM says who signed the server")
    common.add_argument("--tls-cert", type=Path, metavar="FILE", help="what this client shows (PEM)")
    common.add_argument("--tls-key", type=Path, metavar="FILE", help="... and its private key")
    common.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="for the whole request")
    common.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    generate = commands.add_parser("generate", parents=[common], help="generate text from a prompt")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    prompt.add_argument("--token-ids", type=_token_ids, metavar="1,2,3", help="the prompt as token ids")
    generate.add_argument(
        "--chat", action="store_true", help="use the model's chat template: the prompt is a user turn"
    )
    generate.add_argument("--system", metavar="TEXT", help="a system message before it (implies --chat)")
    generate.add_argument("--model", default="", help="a name from `stepwire models`; not needed where one is served")
    generate.add_argument(
        "--retry-for",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="without a word from a server, then the request is given up (%(default)g)",
    )
    generate.add_argument("--max-tokens", type=_uint32, metavar="N", help="output tokens a choice")
    generate.add_argument("--temperature", type=float)
    generate.add_argument("--top-k", type=_uint32)
    generate.add_argument("--top-p", type=float)
    generate.add_argument("--min-p", type=float)
    generate.add_argument("--seed", type=_within(UINT64))
    generate.add_argument("-n", type=_uint32, help="choices")
    generate.add_argument("--repetition-penalty", type=float)
    generate.add_argument("--frequency-penalty", type=float)
    generate.add_argument("--presence-penalty", type=float)
    generate.add_argument("--logit-bias", type=_bias, action="append", default=[], metavar="ID=BIAS")
    generate.add_argument("--allowed-token-ids", type=_token_ids, default=[], metavar="1,2,3")
    generate.add_argument("--min-tokens", type=_uint32, metavar="N")
    generate.add_argument("--include-stop", action="store_true", help="the text keeps what ended it")
    generate.add_argument("--logprobs", type=_uint32, metavar="K", help="with --json: of each token and K alternatives")
    generate.add_argument("--prompt-logprobs", type=_uint32, metavar="K", help="with --json: the same of the prompt")
    generate.add_argument("--prompt-token-ids", action="store_true", help="with --json: show the prompt's ids")
    generate.add_argument("--show-special-tokens", action="store_true")
    generate.add_argument("--tenant", default="", help="whose request it is, where no API key says so")
    generate.add_argument("--bypass-prefix-cache", action="store_true")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    generate.add_argument(
        "--stop-token-id", action="append", default=[], type=_uint32, metavar="ID", dest="stop_token_ids"
    )
    generate.add_argument("--ignore-eos", action="store_true", help="go on past the model's end of text")
    generate.add_argument("--priority", type=_within(INT32), default=0, help="lower goes first, -100 to 100 (0)")
    generate.add_argument("--request-id", default="")

    commands.add_parser("models", parents=[common], help="list the models that are served")
    tokenize = commands.add_parser("tokenize", parents=[common], help="the ids of a text")
    tokenize.add_argument("text", help="- reads it from standard input")
    tokenize.add_argument("--model", default="")
    tokenize.add_argument("--no-bos", action="store_true", help="without the token that begins a text")
    detokenize = commands.add_parser("detokenize", parents=[common], help="the text of ids")
    detokenize.add_argument("ids", type=_token_ids, metavar="1,2,3")
    detokenize.add_argument("--model", default="")
    detokenize.add_argument("--show-special-tokens", action="store_true")
    admin.add_parsers(commands, common)
    commands.add_parser("replay", add_help=False, help="run a recorded scheduler core again (--help for its options)")
    return top


_PARAMETERS = (
    "model", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop", "stop_token_ids",
    "ignore_eos", "priority", "request_id", "timeout", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "allowed_token_ids", "min_tokens", "include_stop", "logprobs", "prompt_logprobs", "prompt_token_ids", "tenant",
    "bypass_prefix_cache",
)  # fmt: skip


def _prompt(args: argparse.Namespace) -> Prompt:
    if args.token_ids is not None:
        if args.chat or args.system is not None:
            raise SystemExit("stepwire: --token-ids is the whole prompt: it goes with neither --chat nor --system")
        return args.token_ids
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not args.chat and args.system is None:
        return text
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


class Timing:
    """When tokens came: TTFT is from the call to the first token, tokens/s from the first token to the last."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._first: float | None = None
        self._first_tokens = 0
        self._last = self._start
        self.tokens = 0

    def saw(self, chunk: Chunk) -> None:
        if not chunk.token_ids:
            return
        self._last = self._clock()
        self.tokens += len(chunk.token_ids)
        if self._first is None:
            self._first = self._last
            self._first_tokens = len(chunk.token_ids)

    @property
    def ttft(self) -> float | None:
        """Seconds; None before the first token."""
        return None if self._first is None else self._first - self._start

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first message; None where nothing followed it."""
        if self._first is None or self._last <= self._first:
            return None
        return (self.tokens - self._first_tokens) / (self._last - self._first)

    def line(self, continuations: int) -> str:
        parts = [
            "TTFT " + ("none" if self.ttft is None else f"{self.ttft * 1000:.0f} ms"),
            f"{self.tokens} token{'' if self.tokens == 1 else 's'}",
            "no rate" if self.rate is None else f"{self.rate:.1f} tokens/s",
        ]
        if continuations:
            parts.append(f"continued {continuations} time{'' if continuations == 1 else 's'}")
        return "[" + ", ".join(parts) + "]"


def _show(stream: Stream, timing: Timing) -> None:
    """Print choice 0 as it comes; further choices, which would interleave with it, each as a whole at its end."""
    held: dict[int, list[str]] = {}
    blocks: list[str] = []
    for chunk in stream:
        timing.saw(chunk)
        if chunk.index == 0:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            continue
        held.setdefault(chunk.index, []).append(chunk.text)
        if chunk.finish is not None:
            blocks.append(f"\n--- choice {chunk.index}\n{''.join(held.pop(chunk.index))}\n")
    sys.stdout.write("\n" + "".join(blocks))
    sys.stdout.flush()


def _as_json(completion: Completion, timing: Timing, continuations: int) -> dict[str, Any]:
    return {
        **dataclasses.asdict(completion),
        "continuations": continuations,
        "ttft_seconds": timing.ttft,
        "tokens_per_second": timing.rate,
    }


def _generate(client: Client, args: argparse.Namespace) -> None:
    parameters = {name: getattr(args, name) for name in _PARAMETERS}
    parameters["logit_bias"] = dict(args.logit_bias)
    parameters["skip_special_tokens"] = False if args.show_special_tokens else None
    prompt = _prompt(args)
    timing = Timing()
    with client.stream(prompt, **parameters) as stream:
        if args.json:
            for chunk in stream:
                timing.saw(chunk)
            print(json.dumps(_as_json(stream.result(), timing, stream.continuations), ensure_ascii=False))
        else:
            _show(stream, timing)
        print(timing.line(stream.continuations), file=sys.stderr)


def _models(client: Client, args: argparse.Namespace) -> None:
    models = client.models(timeout=args.timeout or 30.0)
    if args.json:
        print(json.dumps([dataclasses.asdict(model) for model in models], ensure_ascii=False))
        return
    if not models:
        print("no model has been seen yet", file=sys.stderr)
    for model in models:
        accepts = [kind for kind, yes in (("text", model.accepts_text), ("chat", model.accepts_chat)) if yes]
        expected = f", {model.executors_expected} expected" if model.executors_expected else ""
        print(
            f"{model.name}  {model.architecture}  context {model.context_length}"
            f"  executors {model.executors_ready} ready{expected}  accepts {', '.join([*accepts, 'ids'])}"
        )


def _tokenize(client: Client, args: argparse.Namespace) -> None:
    text = sys.stdin.read() if args.text == "-" else args.text
    ids = client.tokenize(text, model=args.model, bos=not args.no_bos, timeout=args.timeout or 30.0)
    print(json.dumps(ids) if args.json else ",".join(map(str, ids)))


def _detokenize(client: Client, args: argparse.Namespace) -> None:
    skip = False if args.show_special_tokens else None
    text = client.detokenize(args.ids, model=args.model, skip_special_tokens=skip, timeout=args.timeout or 30.0)
    print(json.dumps(text, ensure_ascii=False) if args.json else text)


_COMMANDS = {"generate": _generate, "models": _models, "tokenize": _tokenize, "detokenize": _detokenize}


def _run(args: argparse.Namespace) -> None:
    api_key = args.api_key_file.read_text().strip() if args.api_key_file else ""
    wants_tls = args.tls_ca or args.tls_cert or args.tls_key
    secure = credentials.tls(args.tls_ca, args.tls_cert, args.tls_key) if wants_tls else None
    if args.command in admin.COMMANDS:
        (target,) = split_addresses(args.address or args.default_address)[:1]
        channel = (
            grpc.insecure_channel(target, OPTIONS) if secure is None else grpc.secure_channel(target, secure, OPTIONS)
        )
        with channel:
            admin.run(channel, args, api_key)
        return
    address = args.address or "127.0.0.1:50051"
    retry_for = getattr(args, "retry_for", 60.0)

    def on_break(error: RequestError) -> None:
        print(f"stepwire: {address}: {error}; trying again for up to {retry_for:g} s", file=sys.stderr, flush=True)

    with Client(address, credentials=secure, api_key=api_key, retry_for=retry_for, on_break=on_break) as client:
        _COMMANDS[args.command](client, args)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["replay"]:  # the scheduler's own, where it is installed: this package does not import it
        return subprocess.call([sys.executable, "-m", "scheduler_svc.replay", *given[1:]])
    args = parser().parse_args(given)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character shows a ? for it
        sys.stdout.reconfigure(errors="replace")
    try:
        _run(args)
        return 0
    except (RequestError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader left (`| head`): nothing is wrong, but Python would complain again while flushing at exit.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"stepwire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
