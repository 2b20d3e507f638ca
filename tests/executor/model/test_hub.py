"""Models by hub id: a small server that speaks the hub's protocol, no network, and no library."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from executor_svc.weights.hub import is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = """
import json, logging, sys
from executor_svc.weights.hub import HubError, fetch
from executor_svc.weights.checkpoint import open_checkpoint
logging.basicConfig(level=logging.INFO)
try:
    model = fetch(sys.argv[1])
except HubError as error:
    print(json.dumps({"error": str(error)}))
else:
    tensors = len(list(open_checkpoint(model.path).tensors()))
    files = sorted(path.name for path in model.path.iterdir())
    print(json.dumps({"repo": model.repo, "commit": model.commit, "tensors": tensors, "files": files}))
"""


class Hub(ThreadingHTTPServer):
    """Serves a folder as the repository ``tiny/llama``, whose branches main and v1 are ``COMMIT``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        parts = path.strip("/").split("/")
        headers: dict[str, str] = {}
        status, body = 404, b'{"error": "not found"}'
        if parts[:4] == ["api", "models", "tiny", "llama"] and parts[-1] in ("llama", "main", "v1", COMMIT):
            names = [file.name for file in self.server.folder.iterdir()] + ["pytorch_model.bin"]
            info: Any = {"id": "tiny/llama", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            if "tree" in parts:
                info = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                    for file in self.server.folder.iterdir()
                ]
            status, body = 200, json.dumps(info).encode()
        elif parts[:4] == ["tiny", "llama", "resolve", COMMIT] and (self.server.folder / parts[4]).is_file():
            status, body = 200, (self.server.folder / parts[4]).read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tiny: Path) -> Iterator[Hub]:
    server = Hub(tiny)
    yield server
    server.shutdown()
    server.server_close()


def environment(home: Path, endpoint: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    return kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}


def fetched(model: str, home: Path, endpoint: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-c", FETCH, model],
        env=environment(home, endpoint),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_what_looks_like_an_id() -> None:
    for text in ("org/name", "org/name@main", "Org-1/Na.me_2@refs/pr/1", "a/b@" + COMMIT):
        assert is_hub_id(text)
    for text in (
        "name",
        "/abs/path",
        "./a/b",
        "../a",
        "a/b/c",
        "org/name@",
        "org/name.gguf",
        "-x/y",
        "org/na me",
        "/",
        "",
    ):
        assert not is_hub_id(text)


def test_a_model_is_fetched_once_by_commit(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    result, log = fetched("tiny/llama@v1", tmp_path, endpoint)
    assert (result["repo"], result["commit"]) == ("tiny/llama", COMMIT), result
    assert result["tensors"] > 10
    assert "config.json" in result["files"]
    assert "pytorch_model.bin" not in result["files"]
    assert COMMIT not in " ".join(path for path in hub.asked if path.endswith("pytorch_model.bin"))
    assert "fetching from the hub" in log
    # Again, and without the hub: the revision is known to the cache by its commit.
    hub.asked.clear()
    assert fetched("tiny/llama@v1", tmp_path, endpoint)[0]["commit"] == COMMIT
    assert not [path for path in hub.asked if path.endswith(".safetensors")]
    result, log = fetched(f"tiny/llama@{COMMIT}", tmp_path, "http://127.0.0.1:9")
    assert result.get("commit") == COMMIT, result
    assert "using the cache" in log


def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    for model in ("tiny/other", "tiny/llama@nowhere"):
        error = fetched(model, tmp_path, endpoint)[0]["error"]
        assert error.startswith(f"{model}: no such file or folder, and not from the hub: ")
        assert "\n" not in error


def test_without_a_network_one_line_and_status_2(tmp_path: Path) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "executor_svc", "--model", "tiny/llama@v1", "--scheduler", "tcp://127.0.0.1:9"],
        env=environment(tmp_path, "http://127.0.0.1:9"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("executor: --model tiny/llama@v1: no such file or folder, and not from the hub: ")
    assert time.monotonic() - started < 60


def test_without_the_library_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError\n")
    done = subprocess.run(
        [sys.executable, "-m", "executor_svc", "--model", "tiny/llama", "--scheduler", "tcp://127.0.0.1:9"],
        env=environment(tmp_path, "http://127.0.0.1:9") | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == "executor: --model tiny/llama: no such file or folder; a hub id needs: pip install 'stepwire[hub]'"
