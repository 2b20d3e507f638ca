"""The models that the core announces, each with what its files say: tokenizer, chat template, generation defaults.

Files are fetched through the core by SHA-256, verified, and kept by hash, so a model that comes back costs nothing.
A file that cannot be used takes away only what it was for: without a tokenizer a model still takes and gives token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from protos.front import Models, ModelState
from protos.step import Asset
from scheduler_svc.api import door
from scheduler_svc.api.refusal import invalid, unavailable
from scheduler_svc.api.text.chat_template import ChatTemplate, TemplateFault
from scheduler_svc.api.text.tokenizer import BadTokenizer, Tokenizer, special_texts

log = logging.getLogger(__name__)

Fetch = Callable[[Asset], Awaitable[bytes]]

MAX_REMEMBERED = 64  # models
MAX_CACHED_BYTES = 512 * 1024 * 1024  # of files
RETRY_SECONDS = 1.0  # between two tries to fetch a model's files


class AssetFault(Exception):
    """A file could not be fetched, or is not the one its hash names."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Of generation_config.json; what it leaves out is off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(slots=True)
class Model:
    """``state`` changes with the fleet; the rest belongs to the model's files. Not usable before ``loaded``."""

    state: ModelState
    announced: bool = True  # in the core's latest Models; else only remembered
    loaded: bool = False
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    defaults: Defaults = field(default_factory=Defaults)
    text_fault: str = ""  # why there is no tokenizer

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def ready(self) -> bool:
        return self.announced and self.loaded and self.state.executors_ready > 0


class ModelRegistry:
    """``changed`` is called after every change; ``fetch`` gets one file."""

    def __init__(self, fetch: Fetch, changed: Callable[[], None], grace: float = 0.0) -> None:
        """``grace``: seconds from now in which a name that is not known may still come."""
        self._young_until = time.monotonic() + grace
        self._fetch = fetch
        self._changed = changed
        self._models: dict[str, Model] = {}
        self._files: dict[str, bytes] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()  # replaced at every change, so that any number can wait for the next one

    def announced(self) -> list[Model]:
        """What ListModels shows: the models of the core's latest word whose files are here."""
        return [model for _, model in sorted(self._models.items()) if model.announced and model.loaded]

    @property
    def any_ready(self) -> bool:
        return any(model.ready for model in self._models.values())

    def update(self, message: Models) -> None:
        """Takes the core's word. Models it leaves out are remembered: after a restart it knows none until executors
        return, and requests for them wait there."""
        for model in self._models.values():
            model.announced = False
        for state in message.models:
            known = self._models.pop(state.name, None)
            same = known is not None and _files_of(known.state) == _files_of(state)
            model = known if known is not None and same else Model(state)
            self._models[state.name] = model
            if not same:
                self._load(model)
            model.state = state
            model.announced = True
        forgotten = [name for name, model in self._models.items() if not model.announced]
        for name in forgotten[: max(0, len(self._models) - MAX_REMEMBERED)]:
            del self._models[name]
        self._notify()

    async def resolve(self, name: str, patience: float) -> Model:
        """The model of this name ("": the only one), its files loaded, waiting up to ``patience`` seconds for that.
        Raises Refusal."""
        try:
            async with asyncio.timeout(patience):
                while True:
                    model = self._find(name)
                    if model is not None and model.loaded:
                        return model
                    await self._wait_for_news()
        except TimeoutError:
            if self._find(name) is None:
                raise unavailable("no executor has announced a model yet") from None
            raise unavailable(f"the files of model {name!r} have not arrived yet") from None

    async def _wait_for_news(self) -> None:
        """For a change, or for the end of the grace."""
        young = self._young_until - time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(young if young > 0.0 else None):
                await self._news.wait()

    def _find(self, name: str) -> Model | None:
        """None: wait. A name that is not among the models known is refused at once; with none known, or soon after the
        start (executors return one by one), it may come."""
        if not self._models:
            return None
        if name:
            model = self._models.get(name)
            if model is None and time.monotonic() < self._young_until:
                return None
            if model is None:
                raise door.unknown_model(name, list(self._models))
            return model
        current = [model for model in self._models.values() if model.announced] or list(self._models.values())
        if len(current) > 1:
            raise invalid("model", "empty", f"one of {', '.join(sorted(model.name for model in current))}")
        return current[0]

    def _notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._changed()

    def _load(self, model: Model) -> None:
        name = model.name
        former = self._loads.pop(name, None)
        if former is not None:
            former.cancel()
        task = self._loads[name] = asyncio.create_task(self._load_files(model), name=f"load {name}")
        task.add_done_callback(lambda done: self._loads.pop(name, None) if self._loads.get(name) is done else None)

    async def _load_files(self, model: Model) -> None:
        while self._models.get(model.name) is model:
            try:
                files = {asset.kind: await self._file(asset) for asset in model.state.assets}
            except AssetFault as fault:
                log.warning("model files not fetched", extra={"model": model.name, "reason": str(fault)})
                await asyncio.sleep(RETRY_SECONDS)
                continue
            # Compiling a large tokenizer takes a second.
            try:
                await asyncio.to_thread(prepare, model, files)
            except Exception as error:  # a file that breaks its library must not leave the model loading for ever
                log.exception("model files unusable", extra={"model": model.name})
                model.tokenizer = model.template = None
                model.text_fault = f"{type(error).__name__} in its files"
            model.loaded = True
            log.info(
                "model known",
                extra={
                    "model": model.name,
                    "text": model.tokenizer is not None,
                    "chat": model.template is not None,
                    "fault": model.text_fault or None,
                },
            )
            self._notify()
            return

    async def _file(self, asset: Asset) -> bytes:
        data = self._files.get(asset.sha256)
        if data is None:
            data = await self._fetch(asset)
            if len(data) != asset.size or hashlib.sha256(data).hexdigest() != asset.sha256:
                raise AssetFault(f"{asset.kind}: {len(data)} bytes that are not those of {asset.sha256[:12]}")
            while self._files and sum(map(len, self._files.values())) + len(data) > MAX_CACHED_BYTES:
                del self._files[next(iter(self._files))]
            self._files[asset.sha256] = data
        return data

    async def close(self) -> None:
        self._models.clear()
        tasks = list(self._loads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _files_of(state: ModelState) -> tuple[str, tuple[Asset, ...]]:
    return state.fingerprint, state.assets


def prepare(model: Model, files: dict[str, bytes]) -> None:
    """Fills in what ``files`` (by kind) say about ``model``; never raises for what they hold."""
    config = _json_object(model, files, "tokenizer_config.json")
    model.defaults = defaults_of(model.name, _json_object(model, files, "generation_config.json"))
    if "tokenizer.json" not in files:
        model.text_fault = "it came without a tokenizer.json"
        return
    try:
        model.tokenizer = Tokenizer(files["tokenizer.json"], config)
    except BadTokenizer as fault:
        model.text_fault = str(fault)
        return
    source = _template_source(files, config)
    if source:
        try:
            model.template = ChatTemplate(source, special_texts(config))
        except TemplateFault as fault:
            log.warning("chat template unusable", extra={"model": model.name, "reason": str(fault)})


def defaults_of(name: str, config: dict[str, Any]) -> Defaults:
    """Sampling defaults of a generation_config.json. A value that the API would refuse is left out, with a warning."""
    allowed: dict[str, Callable[[float], bool]] = {
        "temperature": lambda v: 0.0 <= v <= 100.0,
        "top_k": lambda v: 0 <= v < 2**31 and v == int(v),
        "top_p": lambda v: 0.0 < v <= 1.0,
        "min_p": lambda v: 0.0 <= v <= 1.0,
        "repetition_penalty": lambda v: door.REPETITION_PENALTY[0] <= v <= door.REPETITION_PENALTY[1],
    }
    found: dict[str, float] = {}
    for key, fits in allowed.items():
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and fits(value):
            found[key] = value
        else:
            log.warning("generation default left out", extra={"model": name, "key": key, "value": repr(value)[:64]})
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return Defaults(
        temperature=float(found.get("temperature", 1.0)),
        top_k=int(found.get("top_k", 0)),
        top_p=float(found.get("top_p", 1.0)),
        min_p=float(found.get("min_p", 0.0)),
        repetition_penalty=float(found.get("repetition_penalty", 1.0)),
    )


def _json_object(model: Model, files: dict[str, bytes], kind: str) -> dict[str, Any]:
    if kind not in files:
        return {}
    try:
        value = json.loads(files[kind])
    except (ValueError, RecursionError) as error:
        log.warning("model file unusable", extra={"model": model.name, "file": kind, "reason": str(error)})
        return {}
    return value if isinstance(value, dict) else {}


def _template_source(files: dict[str, bytes], config: dict[str, Any]) -> str:
    """The template file, else the one (or the one named default) in tokenizer_config.json."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode(errors="replace")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else ""
