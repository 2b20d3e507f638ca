"""The console command ``stepwire``: ``generate`` streams an answer to the terminal, ``models`` lists what is served.

The answer goes to stdout; the closing line (TTFT and tokens/s) and errors go to stderr. Exit status: 0 done, 1 the
request failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from stepwire.client import Client, Stream
from stepwire.errors import RequestError
from stepwire.request import Prompt
from stepwire.types import Chunk, Completion


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ids like 1,2,3") from None


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="stepwire", description="Talk to a Stepwire scheduler service.")
    commands = top.add_subparsers(dest="command", required=True)

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--address", default="127.0.0.1:50051", help="HOST:PORT, or several separated by commas (127.0.0.1:50051)"
    )
    common.add_argument("--timeout", type=float, help="seconds for the whole request")
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
    generate.add_argument("--max-tokens", type=int, metavar="N", help="output tokens a choice")
    generate.add_argument("--temperature", type=float)
    generate.add_argument("--top-k", type=int)
    generate.add_argument("--top-p", type=float)
    generate.add_argument("--min-p", type=float)
    generate.add_argument("--seed", type=int)
    generate.add_argument("-n", type=int, help="choices")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    generate.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID", dest="stop_token_ids")
    generate.add_argument("--ignore-eos", action="store_true", help="go on past the model's end of text")
    generate.add_argument("--priority", type=int, default=0, help="lower goes first, -100 to 100 (0)")
    generate.add_argument("--request-id", default="")

    commands.add_parser("models", parents=[common], help="list the models that are served")
    return top


_PARAMETERS = (
    "model", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop", "stop_token_ids",
    "ignore_eos", "priority", "request_id", "timeout",
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


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        with Client(args.address) as client:
            {"generate": _generate, "models": _models}[args.command](client, args)
        return 0
    except (RequestError, ValueError) as error:
        print(f"stepwire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left (`| head`): nothing is wrong, but Python would complain again while flushing at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
