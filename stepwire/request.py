"""Python arguments -> GenerateRequest. Absent arguments stay absent on the wire: the model's own defaults apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protos.stepwire.v1 import inference_pb2 as pb

# Text, token ids, or chat messages ({"role": ..., "content": ...}).
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


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
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    priority: int = 0,
    request_id: str = "",
) -> pb.GenerateRequest:
    """Ranges and defaults: protos/stepwire/v1/inference.proto. The server checks them; only types are checked here."""
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        priority=priority,
        sampling=pb.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, n=n),
        stopping=pb.Stopping(
            max_tokens=max_tokens,
            stop=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        ),
    )
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
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    return request
