"""Chat templates render as ``transformers`` renders them: templates of the families' constructs, many conversations."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from scheduler_svc.api.text.chat_template import ChatTemplate, TemplateFault
from tests.api import vocabularies

BOS, EOS = "<s>", "</s>"

# Short templates of our own, each with the constructs that its family's templates are made of.
TEMPLATES = {
    "headers, a date, a trimmed system turn (Llama 3)": """{{- bos_token }}
{%- set today = today if today is defined else strftime_now("%d %b %Y") %}
{%- set head = messages[0]['content'] | trim if messages and messages[0]['role'] == 'system' else '' %}
{%- if head %}{%- set messages = messages[1:] %}{%- endif %}
{{- "<h>system</h>\\n\\n" + today + "\\n" + head + "<eot>" }}
{%- if tools is not none %}{{- "tools" }}{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['tool', 'ipython'] and 'tool_calls' not in message %}
        {{- '<h>' + message['role'] + '</h>\\n\\n' + message['content'] | trim + '<eot>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<h>assistant</h>\\n\\n' }}
{%- endif %}
""",
    "strict turns in one line (Llama 2)": (
        "{% set rest = messages %}{% set first = '' %}{% if messages[0]['role'] == 'system' %}"
        "{% set first = 'SYS ' + messages[0]['content'] + ' /SYS' %}{% set rest = messages[1:] %}{% endif %}"
        "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{% if loop.index0 == 0 and first != '' %}"
        "{% set text = first + m['content'] %}{% else %}{% set text = m['content'] %}{% endif %}"
        "{% if m['role'] == 'user' %}{{ bos_token + '[I] ' + text.strip() + ' [/I]' }}{% else %}"
        "{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "a namespace that counts, selected messages (Mistral)": """{{- bos_token }}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{%- set count = namespace(turns=0) %}
{%- for message in messages if message["role"] != "system" %}
    {%- if (message["role"] == "user") == (count.turns % 2 == 1) %}
        {{- raise_exception("a turn of the wrong side: " ~ count.turns) }}
    {%- endif %}
    {%- set count.turns = count.turns + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and messages[0]["role"] == "system" %}
            {%- set before = messages[0]["content"] + "\\n\\n" %}
        {%- endif %}
        {{- "[I]" + (before if before is defined else "") + message["content"] + "[/I]" }}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
{{- users | length }}""",
    "messages from the back, text taken apart (Qwen)": """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- set seen = namespace(user=false, last=-1) %}
{%- for message in messages[::-1] %}
    {%- if not seen.user and message.role == 'user' and not (message.content.startswith('<tool>')) %}
        {%- set seen.user = true %}
        {%- set seen.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > seen.last %}{{- '(' ~ thought ~ ')' }}{%- endif %}
    {%- endif %}
    {{- '<s>' + message.role + '\\n' + content + '<e>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<s>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- 'no' }}{%- endif %}
{%- endif %}""",
    "renamed roles, real line breaks in strings (Gemma)": """{{ bos_token }}
{%- set prefix = messages[0]['content'] + '

' if messages[0]['role'] == 'system' else '' -%}
{%- for message in (messages[1:] if prefix else messages) -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set who = "model" -%}
    {%- else -%}
        {%- set who = message['role'] -%}
    {%- endif -%}
    {{ '<t>' + who + '
' + (prefix if loop.first else "") }}
    {%- if message['content'] is iterable and message['content'] is not string -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '</t>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<t>model
'}}
{%- endif -%}
""",
    "generation blocks (Phi-3)": """{% for m in messages %}{% if m['role'] != 'assistant' %}{{'<|' + m['role'] + '|>
' + m['content'] + '<e>
'}}{% else %}{% generation %}{{m['content'] + '<e>
'}}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}""",
    "blocks, loops and filters": """
{% macro turn(role, text='none') -%}
    [{{ role | upper }}|{{ text | length }}]
{%- endmacro %}
   {% for m in messages %}
   {% if m.role == 'system' %}
       {% continue %}
   {% elif loop.index > 4 %}
       {% break %}
   {% endif %}
   {{ turn(m.role, m.content) }} {{ loop.revindex }} {{ loop.cycle('a', 'b') }} {{ loop.previtem.role }}
   {% else %}
   nothing
   {% endfor %}
{# a comment #}
    {%+ if true %}kept indent{% endif +%}
{{ messages | tojson }}
{{ messages | map(attribute='role') | unique | sort | join(',') }} {{ {'b': 1, 'a': '<é&>'} | tojson(indent=2) }}
{{ messages | rejectattr('role', 'in', ['system']) | list | last | string | replace("'", '"') | e }}
{% set ns = namespace(n=0, texts=[]) %}{% for m in messages if m.content %}{% set ns.n = ns.n + m.content|length %}\
{% endfor %}{{ ns.n }}{{ (1, 2)[1] ** 0 if false else 7 // 2 }}{{ undefined_thing }}
{% filter trim %}   x   {% endfilter %}{{ dict(a=1) | tojson }}{{ "a\\nb" | indent(2) }}{{ [1, 2, 3][:2] }}
""",
}

_TEXTS = [
    "hi",
    "  spaces \n",
    "",
    "<b>&\"'é 東京 🙂</b>",
    "<think>\nbecause\n</think>\n\nso",
    "a\n\n b",
    "<tool>x</tool>",
]


def conversations() -> list[list[dict[str, str]]]:
    """With and without a system turn, of one to five turns; some of an order that templates refuse."""
    texts = itertools.cycle(_TEXTS)
    found = []
    for roles in (
        ["user"], ["user", "assistant"], ["user", "assistant", "user"], ["user", "assistant"] * 2 + ["user"],
        ["assistant"], ["user", "user"], ["assistant", "user"],
    ):  # fmt: skip
        for system in ([], ["system"]):
            for _ in range(len(_TEXTS)):
                found.append([{"role": role, "content": next(texts)} for role in system + roles])
                next(texts)
    return found


def transformers_rendering(template: str, messages: list[dict[str, str]]) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabularies.byte_level(), bos_token=BOS, eos_token=EOS)
    rendered: Any = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return str(rendered)


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers_renders_it(name: str) -> None:
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": BOS, "eos_token": EOS})
    outcomes = {"rendered": 0, "refused": 0}
    for messages in conversations():
        before = json.dumps(messages)
        try:
            expected = transformers_rendering(TEMPLATES[name], messages)
        except (jinja2.TemplateError, IndexError):
            outcomes["refused"] += 1
            with pytest.raises(TemplateFault):
                ours.render(messages, 100_000)
        else:
            outcomes["rendered"] += 1
            assert ours.render(messages, 100_000) == expected, messages
        assert json.dumps(messages) == before
    assert outcomes["rendered"] > 30, outcomes
