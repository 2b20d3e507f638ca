"""The console command, as a process."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from tests.client.fake_server import Break, FakeServer, dead_address, expected_ids, expected_text


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepwire", *arguments], input=stdin, capture_output=True, text=True, timeout=60
    )


def test_generate_streams_text_and_ends_with_ttft_and_rate() -> None:
    with FakeServer(script=[Break(2)]) as server:
        done = run("generate", "hello", "--address", server.address, "--max-tokens", "5", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected_text(3, 0, 5) + "\n"
    assert re.fullmatch(r"\[TTFT \d+ ms, 5 tokens, [\d.]+ tokens/s, continued 1 time\]\n", done.stderr)


def test_generate_chat_from_standard_input_with_a_system_message() -> None:
    with FakeServer() as server:
        done = run("generate", "-", "--system", "be brief", "--address", server.address, "--max-tokens=1", stdin="why?")
        chat = server.requests[0].chat
    assert done.returncode == 0, done.stderr
    assert [(message.role, message.content) for message in chat.messages] == [("system", "be brief"), ("user", "why?")]


def test_every_flag_reaches_the_request() -> None:
    with FakeServer() as server:
        done = run(
            "generate", "--token-ids", "4,5", "--address", server.address, "--max-tokens", "2", "--model", "fake",
            "--temperature", "0.5", "--top-k", "9", "--top-p", "0.75", "--min-p", "0.25", "--seed", "0", "-n", "2",
            "--stop", "a", "--stop", "b", "--stop-token-id", "7", "--ignore-eos", "--priority", "-3",
            "--request-id", "r1", "--timeout", "50", "--repetition-penalty", "1.5", "--frequency-penalty", "-0.5",
            "--presence-penalty", "2", "--logit-bias", "5=-inf", "--logit-bias", "6=1.5", "--allowed-token-ids", "6,7",
            "--min-tokens", "1", "--include-stop", "--logprobs", "3", "--prompt-logprobs", "0", "--prompt-token-ids",
            "--show-special-tokens", "--tenant", "acme", "--bypass-prefix-cache",
        )  # fmt: skip
        request = server.requests[0]
        assert 0 < server.deadlines[0] <= 50.1  # on the wire it is rounded up, to three digits
    assert done.returncode == 0, done.stderr
    assert list(request.token_ids.ids) == [4, 5]
    sampling, stopping = request.sampling, request.stopping
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 9, 0.75, 0.25)
    assert sampling.HasField("seed")
    assert sampling.n == 2
    assert (list(stopping.stop), list(stopping.stop_token_ids), stopping.ignore_eos) == (["a", "b"], [7], True)
    assert (request.model, request.priority, request.request_id) == ("fake", -3, "r1")
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -0.5, 2.0)
    assert dict(sampling.logit_bias) == {5: float("-inf"), 6: 1.5}
    assert list(sampling.allowed_token_ids) == [6, 7]
    assert (stopping.min_tokens, stopping.include_stop) == (1, True)
    output = request.output
    assert (output.logprobs, output.prompt_logprobs, output.prompt_token_ids) == (3, 0, True)
    assert output.HasField("prompt_logprobs")
    assert output.HasField("skip_special_tokens")
    assert not output.skip_special_tokens
    assert (request.tenant, request.bypass_prefix_cache) == ("acme", True)
    assert "--- choice 1\n" + expected_text(0, 1, 1) in done.stdout


def test_generate_json() -> None:
    with FakeServer() as server:
        done = run("generate", "hi", "--json", "--address", server.address, "--max-tokens", "3", "--seed", "2")
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["token_ids"] == list(expected_ids(2, 0, 3))
    assert answer["choices"][0]["finish"] == {"reason": "length", "matched": None}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2}
    assert answer["ttft_seconds"] > 0


def test_a_refusal_is_one_line_and_status_1() -> None:
    with FakeServer(script=[Break(0, grpc.StatusCode.NOT_FOUND)]) as server:
        done = run("generate", "hi", "--address", server.address)
    assert done.returncode == 1
    assert done.stderr == "stepwire: NOT_FOUND: as the script says\n"


def test_usage_errors_are_status_2() -> None:
    assert run("generate").returncode == 2
    assert run("generate", "--token-ids", "1,x").returncode == 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--top-k", "-1"), "--top-k: -1: must be 0 to 4294967295"),
        (("--max-tokens", "4294967296"), "--max-tokens: 4294967296: must be 0 to 4294967295"),
        (("--seed", "18446744073709551616"), "--seed: 18446744073709551616: must be 0 to 18446744073709551615"),
        (("--priority", "2147483648"), "--priority: 2147483648: must be -2147483648 to 2147483647"),
        (("--logit-bias", "-1=2"), "--logit-bias: -1: must be 0 to 4294967295"),
        (("--allowed-token-ids", "1,4294967296"), "--allowed-token-ids: 4294967296: must be"),
        (("--timeout", "nan"), "--timeout: nan: must be above 0"),
        (("--retry-for", "-2"), "--retry-for: -2: must be above 0"),
    ],
)
def test_a_number_that_no_field_can_hold_is_refused_by_name(flags: tuple[str, ...], named: str) -> None:
    option, value = flags
    done = run("generate", "hi", "--address", "127.0.0.1:1", f"{option}={value}")
    assert done.returncode == 2
    assert f"argument {named}" in done.stderr


def test_no_server_is_said_at_once_and_the_wait_ends() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "stepwire", "generate", "hi", "--address", address, "--retry-for", "1.5"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        first = process.stderr.readline()
        assert process.poll() is None, "it waits"
        assert first.startswith(f"stepwire: {address}: UNAVAILABLE: ")
        assert first.endswith("; trying again for up to 1.5 s\n")
        rest = process.stderr.read()
        process.stderr.close()
        assert process.wait(30) == 1
    assert rest.startswith("stepwire: UNAVAILABLE: ")
    assert rest.endswith("(given up after 1.5 s)\n")
    assert rest.count("\n") == 1


def test_a_closed_pipe_is_quiet() -> None:
    with FakeServer() as server:
        command = f"{sys.executable} -m stepwire generate hi --address {server.address} --max-tokens 400 | head -c 1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_an_encoding_that_lacks_a_character_ends_nothing() -> None:
    with FakeServer() as server:
        done = subprocess.run(
            [sys.executable, "-m", "stepwire", "detokenize", "7,233", "--address", server.address],
            capture_output=True,
            timeout=60,
            env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        )
    assert (done.returncode, done.stdout) == (0, b"<7><?>\n"), done.stderr


def test_models() -> None:
    with FakeServer() as server:
        text = run("models", "--address", server.address)
        as_json = run("models", "--json", "--address", server.address)
    assert text.stdout == "fake  llama  context 128  executors 1 ready, 2 expected  accepts text, chat, ids\n"
    assert json.loads(as_json.stdout)[0]["name"] == "fake"


def test_tokenize_and_detokenize() -> None:
    with FakeServer() as server:
        at = ("--address", server.address)
        assert run("tokenize", "ab", *at).stdout == "1,97,98\n"
        assert run("tokenize", "-", "--no-bos", "--json", *at, stdin="a").stdout == "[97]\n"
        assert run("detokenize", "7,8", *at).stdout == "<7><8>\n"
        assert run("detokenize", "7", "--show-special-tokens", "--json", *at).stdout == '"<7><s>"\n'


def test_a_key_file_becomes_the_bearer(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-123\n")
    with FakeServer() as server:
        done = run(
            "generate", "x", "--max-tokens=1", "--address", server.address, "--api-key-file", str(tmp_path / "key")
        )
        assert server.metadata[0]["authorization"] == "Bearer sk-123"
    assert done.returncode == 0, done.stderr
    assert run("models", "--api-key-file", str(tmp_path / "absent")).returncode == 1


def test_probe_without_a_server_is_status_1() -> None:
    dead = dead_address()
    done = subprocess.run([sys.executable, "-m", "stepwire.probe", dead], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "UNAVAILABLE\n")
