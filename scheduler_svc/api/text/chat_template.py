"""A model's chat template, compiled and rendered. What goes wrong is a TemplateFault: see sandbox.py for what may."""

from __future__ import annotations

from collections.abc import Mapping

import jinja2

from scheduler_svc.api.text.sandbox import METER, Meter, environment


class TemplateFault(ValueError):
    """The template refused these messages (``raise_exception``), failed on them, or went over a bound."""


class ChatTemplate:
    """Compiled once for each model; rendering may run in any thread."""

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        """Raises TemplateFault where the source does not compile."""
        try:
            self._template = environment().from_string(source)
        except Exception as error:  # foreign code: whatever goes wrong is the template's fault
            raise TemplateFault(f"the template does not compile: {error}") from error
        self._special_texts = dict(special_texts)

    def render(self, messages: list[dict[str, str]], max_chars: int) -> str:
        """The prompt for ``messages`` ({"role", "content"}), the assistant's turn opened. Raises TemplateFault."""
        meter = Meter(max_chars)
        parts = []
        try:
            variables = {**self._special_texts, METER: meter}
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
