"""Python arguments -> GenerateRequest. Absent arguments stay absent on the wire: the model's own defaults apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protos.stepwire.v1 import inference_pb2 as pb

# Text, token ids, or chat messages ({"role": ..., "content": ...}).
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


UINT32, UINT64, INT32 = range(2**32), range(2**64), range(-(2**31), 2**31)


def check_number(name: str, value: object, fits: range) -> None:
    """Raises ValueError for an integer that its field cannot hold; the server never sees it."""
    if isinstance(value, int) and value not in fits:
        raise ValueError(f"{name} is {value}: must be {fits.start} to {fits.stop - 1}")


def build(
    prompt: Prompt,
    *,
    model: str = "",
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    n: int | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] = (),
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    min_tokens: int | None = None,
    include_stop: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    prompt_token_ids: bool = False,
    skip_special_tokens: bool | None = None,
    priority: int = 0,
    request_id: str = "",
    tenant: str = "",
    bypass_prefix_cache: bool = False,
) -> pb.GenerateRequest:
    """Ranges and defaults: protos/stepwire/v1/inference.proto. The server checks them; here ValueError names a number
    that does not fit into its field."""
    for name, value in (
        ("max_tokens", max_tokens), ("min_tokens", min_tokens), ("top_k", top_k), ("n", n), ("logprobs", logprobs),
        ("prompt_logprobs", prompt_logprobs),
    ):  # fmt: skip
        check_number(name, value, UINT32)
    check_number("seed", seed, UINT64)
    check_number("priority", priority, INT32)
    for name, ids in (
        ("stop_token_ids", stop_token_ids), ("allowed_token_ids", allowed_token_ids), ("logit_bias", logit_bias or ()),
    ):  # fmt: skip
        for token in ids:
            check_number(name, token, UINT32)
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        priority=priority,
        tenant=tenant,
        bypass_prefix_cache=bypass_prefix_cache,
        sampling=pb.Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            n=n,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            logit_bias=logit_bias,
            allowed_token_ids=allowed_token_ids,
        ),
        stopping=pb.Stopping(
            max_tokens=max_tokens,
            stop=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            include_stop=include_stop,
        ),
    )
    output = pb.Output(
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_token_ids=prompt_token_ids,
    )
    if skip_special_tokens is not None:
        output.skip_special_tokens = skip_special_tokens
    if output.ByteSize():
        request.output.CopyFrom(output)
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        for message in prompt:
            assert isinstance(message, Mapping)
            unknown = set(message) - {"role", "content"}
            if unknown or len(message) != 2:
                raise ValueError(f"a chat message has a role and a content, not {', '.join(sorted(message))}")
            request.chat.messages.add(role=message["role"], content=message["content"])
    else:
        request.token_ids.SetInParent()
        for number in prompt:
            check_number("prompt", number, UINT32)
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    return request


def tokenize_request(prompt: str | Sequence[Mapping[str, str]], model: str, bos: bool) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt, no_bos=not bos)
    return pb.TokenizeRequest(model=model, chat=build(prompt).chat, no_bos=not bos)


def detokenize_request(ids: Sequence[int], model: str, skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    for token in ids:
        check_number("ids", token, UINT32)
    request = pb.DetokenizeRequest(model=model, ids=ids)
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    return request
