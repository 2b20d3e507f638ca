"""A model's chat template, rendered in a sandbox.

The template comes with the model and the messages from anyone, so nothing here is trusted: attributes are sandboxed and
nothing can be changed, a rendering makes a bounded number of loop turns, runs for a bounded time and yields a bounded
number of characters, and string multiplication cannot make a giant. What goes wrong is a TemplateFault.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

MAX_TURNS = 1_000_000  # of all loops of one rendering
MAX_SECONDS = 5.0
MAX_REPEATED = 1_000_000  # items or characters that one `*` may make

_TICKS = "_stepwire_ticks"  # the filter that counts a loop's turns
_METER = "_stepwire_meter"  # the rendering's Meter, in its context


class TemplateFault(ValueError):
    """The template refused these messages (``raise_exception``), failed on them, or went over a bound."""


class Meter:
    """What one rendering has used."""

    def __init__(self, max_chars: int) -> None:
        self._turns = 0
        self._chars = 0
        self._max_chars = max_chars
        self._until = time.monotonic() + MAX_SECONDS

    def turn(self) -> None:
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise jinja2.TemplateError(f"more than {MAX_TURNS} loop turns")
        if self._turns % 256 == 0 and time.monotonic() > self._until:
            raise jinja2.TemplateError(f"took longer than {MAX_SECONDS:g} s")

    def wrote(self, text: str) -> None:
        self._chars += len(text)
        if self._chars > self._max_chars:
            raise jinja2.TemplateError(f"rendered to more than {self._max_chars} characters")
        self.turn()


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class's own shape

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        # Every loop's iterable goes through the tick filter.
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _TICKS, [], [], None, None, lineno=loop.lineno)
            loop.iter.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateError("** is not available in chat templates")
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateError("% formatting is not available in chat templates")
        if operator == "*":
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if hasattr(sized, "__len__") and isinstance(times, int) and len(sized) * times > MAX_REPEATED:
                raise jinja2.TemplateError(f"* would make more than {MAX_REPEATED} items")
        return SandboxedEnvironment.call_binop(self, context, operator, left, right)


@jinja2.pass_context
def _ticks(context: jinja2.runtime.Context, iterable: Iterable[Any]) -> Iterator[Any]:
    meter = context.resolve(_METER)
    for item in iterable:
        meter.turn()
        yield item


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja's own, which escapes <, > and & for HTML: the model was trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.filters[_TICKS] = _ticks
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """Compiled once for each model; rendering may run in any thread."""

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        """Raises TemplateFault where the source does not compile."""
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # foreign code: whatever goes wrong is the template's fault
            raise TemplateFault(f"the template does not compile: {error}") from error
        self._special_texts = dict(special_texts)

    def render(self, messages: list[dict[str, str]], max_chars: int) -> str:
        """The prompt for ``messages`` ({"role", "content"}), the assistant's turn opened. Raises TemplateFault."""
        meter = Meter(max_chars)
        parts = []
        try:
            variables = {**self._special_texts, _METER: meter}
            for part in self._template.generate(
                **variables, messages=messages, add_generation_prompt=True, tools=None, documents=None
            ):
                meter.wrote(part)
                parts.append(part)
        except jinja2.TemplateError as error:
            raise TemplateFault(str(error.message or type(error).__name__)) from error
        except RecursionError as error:
            raise TemplateFault("nested too deeply") from error
        except (MemoryError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateFault(f"{type(error).__name__}: {error}") from error
        return "".join(parts)
