"""What may come in: every check of a request that needs neither the core nor the text, in one place.

Each refusal names the field, its value and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from protos.wire import LE_INT32, Int32
from scheduler_svc.api.refusal import Refusal, invalid

if TYPE_CHECKING:
    from scheduler_svc.api.models import Model

MAX_REQUEST_ID = 128
MAX_MODEL_NAME = 256
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_TENANT = 128
MAX_BIASES = 4096  # ids of logit_bias
MAX_ALTERNATIVES = 20  # of logprobs, a token
MAX_PROMPT_LOGPROBS = 4_000_000  # tokens of a prompt, times one and the alternatives: what one answer may hold
MAX_MESSAGES = 4096
REPETITION_PENALTY = 0.001, 1000.0  # beyond, a logit divided or multiplied by it may leave float32
GREEDY_BELOW = 1e-5  # below this temperature the most likely token is taken


def check_form(request: pb.GenerateRequest) -> None:
    """What can be said without knowing the model. Raises Refusal."""
    if len(request.request_id) > MAX_REQUEST_ID:
        raise invalid("request_id", f"{len(request.request_id)} characters", f"at most {MAX_REQUEST_ID} characters")
    if len(request.model) > MAX_MODEL_NAME:
        raise invalid("model", f"{len(request.model)} characters", f"at most {MAX_MODEL_NAME} characters")
    if not -100 <= request.priority <= 100:
        raise invalid("priority", request.priority, "-100 to 100")
    if len(request.tenant) > MAX_TENANT:
        raise invalid("tenant", f"{len(request.tenant)} characters", f"at most {MAX_TENANT} characters")
    _check_prompt_form(request)
    _check_sampling(request.sampling)
    _check_stopping(request.stopping)
    _check_output(request.output)
    _check_continuation(request)


def check_against(request: pb.GenerateRequest, model: Model) -> None:
    """What depends on the model, and takes no longer for a large request: lists of ids are counted here, and looked at
    in `request.checked_ids`. Raises Refusal."""
    kind = request.WhichOneof("prompt")
    vocab = model.state.vocab_size
    if kind == "token_ids":
        # Counted before they are looked at: a message has room for many millions, and the others wait meanwhile.
        if len(request.token_ids.ids) >= model.state.context_length:
            raise _too_long(len(request.token_ids.ids), model)
    else:
        check_text(kind, model)
    if request.stopping.stop:
        _require_tokenizer("stopping.stop", model)
    if request.stopping.include_stop:
        _require_tokenizer("stopping.include_stop", model)
    if request.output.HasField("skip_special_tokens"):
        _require_tokenizer("output.skip_special_tokens", model)
    check_ids("stopping.stop_token_ids", request.stopping.stop_token_ids, vocab)
    for token in request.sampling.logit_bias:
        if token >= vocab:
            raise invalid(f"sampling.logit_bias[{token}]", token, f"below {vocab}, the model's vocabulary")
    if len(request.sampling.allowed_token_ids) > vocab:
        ids = f"{len(request.sampling.allowed_token_ids)} ids"
        raise invalid("sampling.allowed_token_ids", ids, f"at most {vocab}, the model's vocabulary, no id twice")
    for i, choice in enumerate(request.continue_from):
        if len(choice.token_ids) > model.state.context_length:
            context = f"at most {model.state.context_length}, the model's context"
            raise invalid(f"continue_from[{i}].token_ids", f"{len(choice.token_ids)} ids", context)


def check_text(kind: str, model: Model) -> None:
    """That ``model`` takes text, or a chat. Raises Refusal."""
    if model.tokenizer is None:
        raise invalid(kind, "text", f"token_ids: model {model.name!r} has no usable tokenizer ({model.text_fault})")
    if kind == "chat" and model.template is None:
        raise invalid("chat", "given", f"text or token_ids: model {model.name!r} has no chat template")


def _require_tokenizer(field: str, model: Model) -> None:
    if model.tokenizer is None:
        raise invalid(field, "given", f"absent: model {model.name!r} has no usable tokenizer ({model.text_fault})")


def ending_ids(request: pb.GenerateRequest, model: Model) -> set[int]:
    """The ids that end a choice: they cannot be drawn before min_tokens."""
    ending = set(request.stopping.stop_token_ids)
    if not request.stopping.ignore_eos:
        ending.update(model.state.eos_token_ids)
    return ending


def check_drawable(request: pb.GenerateRequest, model: Model, allowed: Int32) -> None:
    """That at least one id can be drawn, at every position; ``allowed``: the ids of allowed_token_ids, in order."""
    if (allowed[1:] == allowed[:-1]).any():
        raise invalid("sampling.allowed_token_ids", "an id twice", "different ids")
    banned = {token for token, bias in request.sampling.logit_bias.items() if math.isinf(bias)}

    def left_without(ids: set[int]) -> int:
        if not len(allowed):
            return model.state.vocab_size - len(ids)
        return len(allowed) - int(np.isin(np.fromiter(ids, LE_INT32, len(ids)), allowed).sum())

    if left_without(banned) <= 0:
        raise invalid("sampling.logit_bias", f"{len(banned)} ids banned", "so that an id is left to draw")
    if request.stopping.min_tokens and left_without(banned | ending_ids(request, model)) <= 0:
        raise invalid(
            "stopping.min_tokens",
            request.stopping.min_tokens,
            "0 where only ids that end the choice may be drawn",
        )


def check_length(request: pb.GenerateRequest, model: Model, prompt_tokens: int) -> None:
    """That the prompt, of so many tokens, leaves room for at least one more. Raises Refusal."""
    state = model.state
    if prompt_tokens == 0:
        raise invalid("prompt", "empty", "at least one token")
    if prompt_tokens >= state.context_length:
        raise _too_long(prompt_tokens, model)
    if 0 < state.max_sequence_tokens <= prompt_tokens:
        raise invalid(
            "prompt",
            f"{prompt_tokens} tokens",
            f"fewer than {state.max_sequence_tokens}, the most that any known executor of {model.name!r} can hold",
        )
    room = state.context_length - prompt_tokens
    if request.stopping.min_tokens > room:
        raise invalid(
            "stopping.min_tokens", request.stopping.min_tokens, f"at most {room}, what the prompt leaves of the context"
        )
    if request.output.HasField("prompt_logprobs"):
        values = prompt_tokens * (1 + request.output.prompt_logprobs)
        if values > MAX_PROMPT_LOGPROBS:
            raise invalid(
                "output.prompt_logprobs",
                f"{values} values over the prompt",
                f"at most {MAX_PROMPT_LOGPROBS} values: fewer alternatives, or a shorter prompt",
            )


def _too_long(prompt_tokens: int, model: Model) -> Refusal:
    return invalid(
        "prompt",
        f"{prompt_tokens} tokens",
        f"fewer than the context's {model.state.context_length}, which hold prompt and output together",
    )


def _check_prompt_form(request: pb.GenerateRequest | pb.TokenizeRequest) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        kinds = "text, token_ids and chat" if isinstance(request, pb.GenerateRequest) else "text and chat"
        raise invalid("prompt", "absent", f"one of {kinds}")
    if kind == "token_ids" and isinstance(request, pb.GenerateRequest) and not request.token_ids.ids:
        raise invalid("token_ids", "empty", "at least one id")
    if kind == "chat" and not 1 <= len(request.chat.messages) <= MAX_MESSAGES:
        raise invalid("chat.messages", f"{len(request.chat.messages)} messages", f"1 to {MAX_MESSAGES} messages")
    if kind == "chat":
        for i, message in enumerate(request.chat.messages):
            if not message.role:
                raise invalid(f"chat.messages[{i}].role", "empty", "a role that the model's template knows")


def _check_sampling(sampling: pb.Sampling) -> None:
    _check_range("sampling.temperature", sampling, "temperature", 0.0, 100.0)
    _check_range("sampling.min_p", sampling, "min_p", 0.0, 1.0)
    _check_range("sampling.top_p", sampling, "top_p", 0.0, 1.0)
    if sampling.HasField("top_p") and sampling.top_p <= 0.0:
        raise invalid("sampling.top_p", sampling.top_p, "above 0, up to 1")
    _check_range("sampling.repetition_penalty", sampling, "repetition_penalty", *REPETITION_PENALTY)
    _check_range("sampling.frequency_penalty", sampling, "frequency_penalty", -100.0, 100.0)
    _check_range("sampling.presence_penalty", sampling, "presence_penalty", -100.0, 100.0)
    if len(sampling.logit_bias) > MAX_BIASES:
        raise invalid("sampling.logit_bias", f"{len(sampling.logit_bias)} ids", f"at most {MAX_BIASES} ids")
    for token, bias in sampling.logit_bias.items():
        if not (-100.0 <= bias <= 100.0 or bias == -math.inf):
            raise invalid(f"sampling.logit_bias[{token}]", bias, "-100 to 100, or -infinity")
    if sampling.HasField("n") and not 1 <= sampling.n <= MAX_CHOICES:
        raise invalid("sampling.n", sampling.n, f"1 to {MAX_CHOICES}")


def _check_range(field: str, message: pb.Sampling, name: str, low: float, high: float) -> None:
    if not message.HasField(name):
        return
    value = getattr(message, name)
    if math.isnan(value) or not low <= value <= high:
        raise invalid(field, value, f"{low:g} to {high:g}")


def _check_stopping(stopping: pb.Stopping) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise invalid("stopping.max_tokens", stopping.max_tokens, "1 and up, or absent")
    if len(stopping.stop) > MAX_STOPS:
        raise invalid("stopping.stop", f"{len(stopping.stop)} strings", f"at most {MAX_STOPS} strings")
    for i, stop in enumerate(stopping.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid(f"stopping.stop[{i}]", f"{len(stop)} characters", f"1 to {MAX_STOP_CHARS} characters")
    if len(stopping.stop_token_ids) > MAX_STOP_IDS:
        raise invalid("stopping.stop_token_ids", f"{len(stopping.stop_token_ids)} ids", f"at most {MAX_STOP_IDS} ids")

    if stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
        raise invalid("stopping.min_tokens", stopping.min_tokens, f"at most max_tokens, {stopping.max_tokens}")


def _check_output(output: pb.Output) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(output, name) > MAX_ALTERNATIVES:
            raise invalid(f"output.{name}", getattr(output, name), f"0 to {MAX_ALTERNATIVES}")


def _check_continuation(request: pb.GenerateRequest) -> None:
    choices = request.sampling.n if request.sampling.HasField("n") else 1
    seen = set()
    for i, choice in enumerate(request.continue_from):
        field = f"continue_from[{i}].index"
        if choice.index >= choices:
            raise invalid(field, choice.index, f"below the number of choices, {choices}")
        if choice.index in seen:
            raise invalid(field, choice.index, "named once")
        seen.add(choice.index)


def check_seed(request: pb.GenerateRequest, temperature: float) -> None:
    """A continuation that draws must draw as the first call did. Raises Refusal."""
    if request.continue_from and not request.sampling.HasField("seed") and temperature >= GREEDY_BELOW:
        raise invalid("sampling.seed", "absent", "that of `started`, where continue_from is given")


def check_continued(index: int, given: int, taken: int) -> None:
    """That a choice's ids do not go past the end that they themselves brought. Raises Refusal."""
    if taken < given:
        raise invalid(
            f"continue_from[index={index}].token_ids",
            f"{given} ids",
            f"at most {taken}: the choice ended there",
        )


def check_tokenize(request: pb.TokenizeRequest) -> None:
    """What can be said without knowing the model. Raises Refusal."""
    _check_prompt_form(request)
    if request.no_bos and request.WhichOneof("prompt") == "chat":
        raise invalid("no_bos", "true", "false for a chat: its template writes what begins it")


def check_detokenize(request: pb.DetokenizeRequest, model: Model) -> None:
    """Raises Refusal."""
    _require_tokenizer("ids", model)
    if len(request.ids) > model.state.context_length:
        raise invalid("ids", f"{len(request.ids)} ids", f"at most {model.state.context_length}, the model's context")


def check_ids(field: str, ids: Sequence[int], vocab_size: int, first: int = 0) -> None:
    """That ``ids``, those of ``field`` from position ``first`` on, are the vocabulary's. Raises Refusal."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        position = first + list(ids).index(highest)
        raise invalid(f"{field}[{position}]", highest, f"below the vocabulary's {vocab_size}")


def unknown_model(name: str, known: list[str]) -> Refusal:
    listed = ", ".join(sorted(known)) or "none"
    shown = name if len(name) <= 64 else f"{name[:64]}..."
    return Refusal(front.NOT_FOUND, f"model {shown!r} is not known here (known: {listed})", field="model", value=shown)
