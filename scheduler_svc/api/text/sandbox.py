"""Where chat templates run: jinja's sandbox, in bounded time and memory.

A template comes with the model and the messages from anyone, so nothing here is trusted. Attributes are sandboxed and
nothing can be changed. All loops and calls of one rendering together have a bounded number of turns, looked at the
clock now and then; and no operation makes a text, or a list as a text, of more than MAX_TEXT characters, for one that
does cannot be interrupted.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

MAX_TURNS = 1_000_000  # of all loops and calls of one rendering
MAX_SECONDS = 5.0
MAX_NUMBER = 1_000_000  # of items, columns or digits that one operation may be asked for
MAX_TEXT = 1 << 25  # characters of one value: four times what a request has room for
AN_ITEM = 32  # characters that each item of a list counts for, beside its own

METER = "_stepwire_meter"  # the rendering's Meter, in its context
_TICKS = "_stepwire_ticks"  # the filter that counts a loop's turns

# Filters: those that make no text, those that make as much as a number says, those that repeat an argument.
_NO_TEXT = {
    "abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last",
    "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round", "select", "selectattr",
    "slice", "sort", "sum", "unique",
}  # fmt: skip
_BY_NUMBER = {"batch", "center", "format", "indent", "round", "slice", "tojson", "truncate", "wordwrap"}
_REPEATING = {"indent", "tojson", "urlize", "wordwrap"}


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
            raise jinja2.TemplateError(f"more than {MAX_TURNS} turns of loops and calls")
        if self._turns % 256 == 0 and time.monotonic() > self._until:
            raise jinja2.TemplateError(f"took longer than {MAX_SECONDS:g} s")

    def wrote(self, text: str) -> None:
        self._chars += len(text)
        if self._chars > self._max_chars:
            raise jinja2.TemplateError(f"rendered to more than {self._max_chars} characters")
        self.turn()


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise jinja2.TemplateError(f"a value of more than {MAX_TEXT} characters")


def _check_numbers(*values: object) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            raise jinja2.TemplateError(f"{value} is more than {MAX_NUMBER}")


def _weigh(value: Any, before: int = 0) -> int:
    """``before`` and about the characters that ``value`` would be as a text. Raises for too many."""
    total = before + AN_ITEM + (len(value) if isinstance(value, str | bytes) else 0)
    _check_size(total)
    if isinstance(value, list | tuple | dict):
        for item in value.items() if isinstance(value, dict) else value:
            total = _weigh(item, total)
    return total


def _joined(parts: Iterable[str]) -> str:
    parts = list(parts)
    _check_size(sum(map(len, parts)))
    return "".join(parts)


def _check_method(name: str, subject: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Before ``subject.name(*arguments)`` of a built-in value, or the filter of that name; returns the arguments."""
    if name == "join":
        items = list(arguments[0]) if arguments else []
        _check_size(_weigh(items) + len(items) * len(str(subject)))
        return (items, *arguments[1:])
    if name == "replace" and len(arguments) > 1:
        text, old, new = str(subject), str(arguments[0]), str(arguments[1])
        _check_size(len(text) + text.count(old) * len(new))
    elif name == "translate":
        raise jinja2.TemplateError("translate is not available in chat templates")
    elif name in ("format", "format_map"):
        if re.search(r"\d{7}", str(subject)):
            raise jinja2.TemplateError(f"{name} with a width of more than {MAX_NUMBER}")
        _check_size(len(str(subject)) + (str(subject).count("{") + str(subject).count("%")) * _weigh(arguments))
    return arguments


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes nothing too large."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # where the value stands

    @wraps(function)
    def filtered(*args: Any, **named: Any) -> Any:
        value, others = args[first], args[first + 1 :]
        if name in _BY_NUMBER:
            _check_numbers(*others, *named.values())
        if name not in _NO_TEXT:
            weight = sum(map(_weigh, (value, *others, *named.values())))
            if name in _REPEATING:
                lengths = [len(one) if isinstance(one, str) else one for one in (*others, *named.values())]
                _check_size(weight * max((one for one in lengths if isinstance(one, int)), default=1))
        if name == "join":
            if isinstance(value, Iterable) and "attribute" not in named and len(others) < 2:
                (value,) = _check_method("join", named.get("d", others[0] if others else ""), (value,))
        elif name == "sum":
            _check_sum(named.get("start", others[1] if len(others) > 1 else 0))
        elif name in ("replace", "format"):
            _check_method(name, value, (*others, *named.values()))
        result = function(*args[:first], value, *others, **named)
        if isinstance(result, str):
            _check_size(len(result))
        return result

    return filtered


def _check_sum(start: object) -> None:
    if not isinstance(start, int | float):
        raise jinja2.TemplateError("sum is of numbers in chat templates")


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class's own shape

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.text_of((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_joined)  # what a macro, a filter block or a block's ``set`` has written

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        # Every loop's iterable goes through the tick filter.
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _TICKS, [], [], None, None, lineno=loop.lineno)
            loop.iter.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    def text_of(self, parts: tuple[Any, ...]) -> str:
        """``a ~ b``"""
        _weigh(parts)
        return _joined(map(str, parts))

    def call(
        __self,  # as in the base class: a template may name its arguments as it likes
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        __context.resolve(METER).turn()
        of = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        subject, name = getattr(of, "__self__", None), getattr(of, "__name__", "")
        if isinstance(subject, str | bytes | int | float):
            _check_numbers(*args, *kwargs.values())
            args = _check_method(name, subject, (*args, *kwargs.values()))[: len(args)]
        return SandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateError("** is not available in chat templates")
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateError("% formatting is not available in chat templates")
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size((len(left) + len(right)) * (1 if isinstance(left, str) else AN_ITEM))
        if operator == "*":
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if hasattr(sized, "__len__") and isinstance(times, int):
                _check_numbers(len(sized) * times)
                _check_size(_weigh(sized) * times)
        return SandboxedEnvironment.call_binop(self, context, operator, left, right)


@jinja2.pass_context
def _ticks(context: jinja2.runtime.Context, iterable: Iterable[Any]) -> Iterator[Any]:
    meter = context.resolve(METER)
    for item in iterable:
        meter.turn()
        yield item


def _finalized(value: Any) -> Any:
    """What an expression that is written out gives."""
    _weigh(value)
    return value


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


def environment() -> jinja2.Environment:
    """For one template."""
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[loopcontrols, _GenerationBlock],
        finalize=_finalized,
    )
    made.filters["tojson"] = _tojson
    made.filters = {name: _bounded(name, function) for name, function in made.filters.items()}
    made.filters[_TICKS] = _ticks
    del made.globals["lipsum"]  # as many words as it is asked for
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made
