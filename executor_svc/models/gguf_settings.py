"""Reading an architecture's settings of a GGUF file with their types checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from executor_svc.weights.errors import CheckpointError


class GGUFSettings:
    """Keys without the architecture's name. Every read names the whole key and its value in a ``CheckpointError`` if
    the value is not of the type asked for."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._prefix = f"{architecture}."
        self._own = {
            key.removeprefix(self._prefix): value for key, value in fields.items() if key.startswith(self._prefix)
        }

    def own_keys(self) -> Iterable[str]:
        return self._own.keys()

    def name(self, key: str) -> str:
        return self._prefix + key

    def get(self, key: str) -> Any:
        return self._own.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._own.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"gguf: {self.name(key)} = {value!r} is not an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._own.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"gguf: {self.name(key)} = {value!r} is not a number")
        return float(value)
