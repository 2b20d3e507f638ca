"""A model by its Hugging Face hub id, ``ORG/NAME[@REVISION]``: the files that are needed, of one commit."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

FILES: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "model.safetensors",
    "model.safetensors.index.json", "model-*.safetensors",
)  # fmt: skip
TIMEOUT: Final = 10.0  # seconds that the hub has for its first answer
_ID: Final = re.compile(r"(?P<repo>\w[\w.-]{0,95}/\w[\w.-]{0,95})(@(?P<revision>[\w./-]{1,255}))?", re.ASCII)


class HubError(Exception):
    """The model cannot be fetched; the message is one line that says why."""


@dataclass(slots=True, frozen=True)
class HubModel:
    repo: str
    commit: str  # 40 hex digits
    path: Path  # a folder with the files of that commit


def is_hub_id(text: str) -> bool:
    """Whether the text has the form; a path that exists goes before."""
    return _ID.fullmatch(text) is not None and not text.endswith(".gguf")


def fetch(text: str) -> HubModel:
    """Resolve the revision to a commit and fetch what of it is not in the cache yet. Without a network the commit that
    the cache knows by this revision is used, if it does. Raises ``HubError``."""
    match = _ID.fullmatch(text)
    if match is None:
        raise HubError(f"{text}: not of the form ORG/NAME[@REVISION]")
    repo, revision = match["repo"], match["revision"] or "main"
    try:
        import huggingface_hub as hub
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise HubError(f"{text}: no such file or folder; a hub id needs: pip install 'stepwire[hub]'") from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        commit = hub.HfApi().model_info(repo, revision=revision, timeout=TIMEOUT).sha
        if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40}", commit):
            raise HubError(f"{text}: the hub names no commit for {revision}")
        log.info("fetching from the hub", extra={"repo": repo, "revision": revision, "commit": commit})
        path = hub.snapshot_download(repo, revision=commit, allow_patterns=list(FILES), etag_timeout=TIMEOUT)
    except HubError:
        raise
    except Exception as error:  # of several libraries: HTTP, files, values
        cached = None if _refused(error) else _cached(hub, repo, revision)
        if cached is None:
            raise HubError(f"{text}: no such file or folder, and not from the hub: {_line(error)}") from error
        log.warning("the hub cannot be reached; using the cache", extra={"repo": repo, "reason": _line(error)})
        path, commit = cached, Path(cached).name
    log.info("model of the hub", extra={"repo": repo, "commit": commit, "path": str(path)})
    return HubModel(repo, commit, Path(path))


def _refused(error: Exception) -> bool:
    """The hub answered, and the answer was no."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and 400 <= status < 500


def _cached(hub: Any, repo: str, revision: str) -> str | None:
    try:
        path: str = hub.snapshot_download(repo, revision=revision, allow_patterns=list(FILES), local_files_only=True)
    except Exception:
        return None
    return path


def _line(error: Exception) -> str:
    """The first line of what a library says, with its kind."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
