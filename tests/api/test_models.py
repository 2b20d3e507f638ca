"""What a model's files say: tokenizer, template, defaults; and what the worker's own process says of itself."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import processors

from protos.stepwire.v1 import inference_pb2 as pb
from scheduler_svc.api.__main__ import config_of, main, parser
from scheduler_svc.api.models import Defaults, Model, defaults_of, prepare
from scheduler_svc.api.text import sandbox
from scheduler_svc.api.text.chat_template import ChatTemplate, TemplateFault
from scheduler_svc.api.text.tokenizer import BadTokenizer, Tokenizer
from tests.api.fake_core import FILES, model_state
from tests.api.rig import rig, run_async, text_request
from tests.api.vocabularies import byte_level, sentencepiece

USER = [{"role": "user", "content": "hi <b>"}]


def render(source: str, messages: list[dict[str, str]] = USER, max_chars: int = 10_000, **special: str) -> str:
    return ChatTemplate(source, special).render(messages, max_chars)


def test_template_environment_is_what_templates_expect() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s>hi <b>"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi <b>"}]'
    assert render("{{ {'b': 1, 'a': 'é'} | tojson(indent=2) }}") == '{\n  "b": 1,\n  "a": "é"\n}'
    # Blocks leave no lines of their own.
    assert render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n") == "x\n"
    assert render("{% for m in messages %}{{ loop.last }}{{ loop.length }}{% break %}{% endfor %}") == "True1"
    assert render("{% set n = namespace(x=1) %}{% for m in messages %}{% set n.x = 5 %}{% endfor %}{{ n.x }}") == "5"
    assert render("{% generation %}{{ add_generation_prompt }}{% endgeneration %}") == "True"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% if tools is none %}none{% endif %}{{ undefined_name }}") == "none"
    assert render("{{ 7 % 4 }}{{ 'ab' * 2 }}") == "3abab"
    assert render("{% macro m(x) %}{% for i in x %}{{ i }}{% endfor %}{% endmacro %}{{ m([1, 2]) }}") == "12"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "turns of loops"),
        ("{% for i in range(9999) %}{{ 'x' * 99 }}{% endfor %}", "more than 10000 characters"),
        ("{{ 'x' * 99999999 }}", "more than 1000000"),
        ("{{ [1] * 99999999 }}", "more than 1000000"),
        ("{{ 9 ** 9999999 }}", "not available"),
        ("{{ '%999999999d' % 1 }}", "not available"),
        ("{{ messages.append(1) }}", ""),
        ("{{ ''.__class__.__mro__ }}", ""),
        ("{{ messages[0].content.nothing.more }}", ""),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0]['content'] + 1 }}", ""),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested"),
        ("{% include 'other' %}", ""),
    ],
)
def test_template_faults(source: str, words: str) -> None:
    with pytest.raises(TemplateFault) as caught:
        render(source)
    assert words in str(caught.value)


def test_template_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.0)
    with pytest.raises(TemplateFault, match="longer than"):
        render("{% for i in range(9999) %}{% endfor %}")


def test_template_that_does_not_compile() -> None:
    with pytest.raises(TemplateFault, match="does not compile"):
        ChatTemplate("{% for %}", {})


def with_bos() -> HfTokenizer:
    tokenizer = HfTokenizer.from_str(sentencepiece().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def test_bos() -> None:
    bare, framed = sentencepiece(), with_bos()
    text = bare.encode("the end", add_special_tokens=False).ids
    eos_bos = {"bos_token": {"content": "<s>"}}
    for tokenizer, config, expected in (
        (framed, {}, [1, *text]),  # the post-processor's EOS has no place after a prompt
        (framed, {"add_bos_token": False}, text),
        (framed, {"add_bos_token": True, **eos_bos}, [1, *text]),
        (bare, {}, text),
        (bare, {"add_bos_token": True, **eos_bos}, [1, *text]),
    ):
        made = Tokenizer(tokenizer.to_str().encode(), config)
        assert made.encode("the end", bos=True) == expected
        assert made.encode("the end", bos=False) == text
    with pytest.raises(BadTokenizer):
        Tokenizer(bare.to_str().encode(), {"add_bos_token": True})


def test_a_prompt_is_never_cut_or_padded() -> None:
    tokenizer = HfTokenizer.from_str(byte_level().to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    made = Tokenizer(tokenizer.to_str().encode(), {})
    text = "the quick brown fox"
    assert made.encode(text, bos=True) == byte_level().encode(text, add_special_tokens=False).ids


def test_others_run_while_a_long_text_is_encoded() -> None:
    """An API worker that encodes a prompt of some megabytes still serves, and shows its supervisor that it lives."""
    made = Tokenizer(byte_level().to_str().encode(), {})
    text = "the quick brown fox " * 25_000
    encoding = threading.Thread(target=made.encode, args=(text,), kwargs={"bos": True})
    turns = 0
    encoding.start()
    while encoding.is_alive():
        turns += 1
        encoding.join(0.001)
    assert turns > 20
    short = "the quick brown fox " * 200  # long enough for the other path
    assert made.encode(short, bos=True) == byte_level().encode(short, add_special_tokens=False).ids


def test_defaults() -> None:
    assert defaults_of("m", {}) == Defaults()
    assert defaults_of("m", {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}) == Defaults(
        0.6, 20, 0.95, 0.1
    )
    assert defaults_of("m", {"do_sample": False, "temperature": 0.6}).temperature == 0.0
    broken = {"temperature": "hot", "top_k": -1, "top_p": 0, "min_p": float("nan")}
    assert defaults_of("m", broken) == Defaults()
    assert defaults_of("m", {"temperature": True, "top_k": 1.5}) == Defaults()


def test_files_that_cannot_be_used_take_away_only_their_own() -> None:
    broken = Model(model_state())
    prepare(broken, {**FILES, "tokenizer.json": b"{", "generation_config.json": b"["})
    assert broken.tokenizer is None
    assert "tokenizer.json" in broken.text_fault
    assert broken.defaults == Defaults()
    no_template = Model(model_state())
    prepare(no_template, {**FILES, "chat_template.jinja": b"{% for %}"})
    assert no_template.tokenizer is not None
    assert no_template.template is None
    in_config = Model(model_state())
    files = {kind: data for kind, data in FILES.items() if kind != "chat_template.jinja"}
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    prepare(
        in_config, files | {"tokenizer_config.json": json.dumps({"chat_template": named, "eos_token": "E"}).encode()}
    )
    assert in_config.template is not None
    assert in_config.template.render(USER, 100) == "E"


def test_a_file_at_which_the_library_panics_is_unusable() -> None:
    """What it raises then is no Exception: the task that loads the model would end, and the model never be served."""
    spec = json.loads(FILES["tokenizer.json"])
    spec["model"]["continuing_subword_prefix"] = "longer than any piece"
    model = Model(model_state())
    prepare(model, {**FILES, "tokenizer.json": json.dumps(spec).encode()})
    assert model.tokenizer is None
    assert "out of range" in model.text_fault


@pytest.mark.parametrize("where", ["vocab", "added", "content"])
def test_tokens_that_would_take_all_memory(where: str) -> None:
    """The library makes a table with room for the highest id, and another for each character; it ends the process where
    there is no memory for one."""
    spec = json.loads(FILES["tokenizer.json"])
    if where == "vocab":
        spec["model"]["vocab"]["a"] = 2**31
    elif where == "added":
        spec["added_tokens"][0]["id"] = 2**31
    else:
        spec["added_tokens"][0]["content"] = "x" * 2**20
    model = Model(model_state())
    prepare(model, {**FILES, "tokenizer.json": json.dumps(spec).encode()})
    assert model.tokenizer is None
    limit = "must be at most 1048576" if where == "content" else "token id 2147483648, must be below 4194304"
    assert limit in model.text_fault


def test_command_line() -> None:
    args = parser().parse_args(["--front", "ipc:///tmp/x", "--worker-name", "w3", "--reuse-port", "--window", "9"])
    config = config_of(args)
    assert (config.link.address, config.link.worker, config.link.window) == ("ipc:///tmp/x", "w3", 9)
    assert config.reuse_port
    for bad in (
        ["--front", "tcp://127.0.0.1:1"],
        ["--front", "ipc:///x", "--listen", "50051"],
        ["--front", "ipc:///x", "--metrics", "nowhere"],
        ["--front", "ipc:///x", "--window", "0"],
        ["--front", "ipc:///x", "--slow-client", "nan"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(bad)
        assert caught.value.code == 2


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url) as page:
        return page.read()


@run_async
async def test_metrics() -> None:
    async with rig() as r:
        r.core.cached_tokens = 1
        await r.stream(text_request("hello fox"))
        await r.stub.Generate(text_request("hello fox", stopping=pb.Stopping(max_tokens=3)))
        value = r.server.metrics.registry.get_sample_value
        assert value("stepwire_api_output_tokens_total") == 15
        assert value("stepwire_api_cached_tokens_total") == 2
        assert value("stepwire_api_requests_total", {"method": "GenerateStream", "status": "OK"}) == 1
        assert value("stepwire_api_time_to_first_token_seconds_count") == 1
        assert value("stepwire_api_serving") == 1
        http, thread = r.server.metrics.serve("127.0.0.1", 0)
        try:
            page = await asyncio.to_thread(_get, f"http://127.0.0.1:{http.server_port}/metrics")
            assert b"stepwire_api_core_link_up 1.0" in page
        finally:
            http.shutdown()
            http.server_close()
            thread.join()
