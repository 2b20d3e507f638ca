"""Reading a JSON object's settings with their types checked."""

from __future__ import annotations

from typing import Any

from executor_svc.weights.errors import CheckpointError

_LARGEST = 1e100  # of a number, so that a product of two is one


class Settings:
    """Every read names the setting and its value in a ``CheckpointError`` if the value is not of the type asked for.

    Null means what absence means: the default, where the caller gives one.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._of(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"config: {key} = {value!r} is not an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._of(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > _LARGEST:
            raise CheckpointError(f"config: {key} = {value!r} is not a number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._of(key, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"config: {key} = {value!r} is not true or false")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(
            type(item) in (int, float) and abs(item) < _LARGEST for item in value
        ):
            raise CheckpointError(f"config: {key} is not a list of numbers")
        return tuple(map(float, value))

    def _of(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None else value
