"""Chat templates that would take all memory, or for ever, are stopped."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.api.text import sandbox
from scheduler_svc.api.text.chat_template import ChatTemplate, TemplateFault

# N: a number; A, B: long texts; MANY: a long list.
GIANTS = [
    "'a'.center(N)", "'a'.ljust(N)", "'a'.zfill(N)", "'\t'.expandtabs(tabsize=N)", "(1).to_bytes(N, 'big')",
    "'{:>N}'.format('a')", "'{:{}}'.format('a', N)", "'%Nd' | format(1)", "'a' | center(N)", "'a\nb' | indent(N)",
    "[1] | batch(N, 0) | list", "[1] | slice(N) | list", "1.5 | round(N, 'ceil')", "'a' * N", "[0] * N",
    "messages | tojson(indent=N)", "MANY | tojson(indent=99999)", "('a b ' * 9999) | wordwrap(1, true, A)",
    "A.replace('a', A)", "A | replace('a', A)", "A.join(B)", "MANY | join(A)", "range(9999) | map('string') | join(A)",
    "'{0}{0}'.format([A] * 99999)", "('{0}' * 99999).format(A)", "[A] * 99999", "([[A * 9] * 9] * 99) | string",
    "A.translate({97: B})", "[[[1]] * 99999] | sum(start=[])", "lipsum(n=N)",
]  # fmt: skip
GROWING = {
    "a sum": ("'a'", "{% set n.x = n.x + n.x %}"),
    "a list": ("[0]", "{% set n.x = n.x + n.x %}"),
    "a joined text": ("'a'", "{% set n.x = n.x ~ n.x %}"),
    "a block": ("'a'", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
    "a macro's text": ("'a'", "{% macro f() %}{{ n.x }}{{ n.x }}{% endmacro %}{% set n.x = f() %}"),
    "escapes": ("'\"'", "{% set n.x = n.x | tojson %}"),
    "nested lists": ("[]", "{% set n.x = [n.x, n.x] %}{% set y = n.x | string %}"),
}


@pytest.mark.parametrize("number", [10**7, 2**63 - 1])
@pytest.mark.parametrize("expression", GIANTS)
def test_no_operation_makes_a_giant(expression: str, number: int) -> None:
    """Such an operation could not be interrupted: it is refused before."""
    for name, value in (("MANY", "(['b'] * 9999)"), ("A", "('a' * 99999)"), ("B", "('b' * 99999)"), ("N", str(number))):
        expression = expression.replace(name, value)
    with pytest.raises(TemplateFault):
        ChatTemplate("{{ " + expression + " }}", {}).render([{"role": "user", "content": "x"}], 1 << 40)


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_in_a_loop_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_TEXT", 1 << 16)
    start, step = GROWING[name]
    source = "{% set n = namespace(x=" + start + ") %}{% for i in range(99) %}" + step + "{% endfor %}"
    with pytest.raises(TemplateFault, match="a value of more than 65536 characters"):
        ChatTemplate(source, {}).render([], 1 << 40)


def test_calls_count_as_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_TURNS", 1000)
    source = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    for before in ("", "{% set _stepwire_meter = none %}"):
        with pytest.raises(TemplateFault):
            ChatTemplate(before + source, {}).render([], 1 << 40)


def test_what_templates_do_in_every_turn_looks_at_no_message() -> None:
    source = "{% for m in messages %}{{ (messages | length) - loop.index0 + (messages | last).n }}{% endfor %}"
    looked = []

    class Noting(dict[str, Any]):
        def items(self) -> Any:
            looked.append("")
            return super().items()

    messages: list[Any] = [Noting(role="user", content="x", n=0) for _ in range(100)]
    assert ChatTemplate(source, {}).render(messages, 1000) == "".join(map(str, range(100, 0, -1)))
    assert not looked
