"""One request of a load: what to send, and what was seen. Times are ``time.perf_counter()`` seconds, one clock for
all processes of a machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Request:
    index: int
    prompt: list[int]  # token ids
    output_tokens: int
    send_at: float = 0.0  # seconds after the start of the load; 0 where the concurrency paces
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True


@dataclass(slots=True)
class Record:
    """What one request met with. ``status`` is ``OK``, a gRPC status name, or ``HTTP <code>``."""

    index: int
    due: float = 0.0  # when it should have been sent
    sent: float = 0.0
    first: float = 0.0  # first message that carried a token
    last: float = 0.0  # last message that carried a token
    end: float = 0.0  # end of the call
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    messages: int = 0  # messages that carried tokens
    gaps: list[float] = field(default_factory=list)  # seconds between consecutive messages that carried tokens
    status: str = "OK"
    detail: str = ""

    def saw_tokens(self, count: int, now: float) -> None:
        """A message with ``count`` new tokens arrived at ``now``."""
        if self.messages:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now
        self.messages += 1
        self.output_tokens += count

    @property
    def ok(self) -> bool:
        return self.status == "OK" and self.output_tokens > 0

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 where there is none."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def e2el(self) -> float:
        return self.last - self.sent

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
