"""What a weight type costs in quality: the real forward against float32's, on a fixed text and fixed prompts.

::

    python -m bench.quality --model models/SmolLM2-135M-Instruct.Q4_1.gguf --json quality.json

Teacher-forced on bench/data/quality.txt, in windows of 1,024 tokens: perplexity, how often the likeliest next token is
float32's, and the mean Kullback-Leibler divergence from float32's distribution. Greedy: 20 chat prompts, up to 64
tokens or float32's end of text: answers equal to float32's to the end, mean number of tokens before the first
difference, and share of equal tokens. Results do not depend on the machine's load, threads or instruction set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.load.bare import BareLoop
from executor_svc.backends.cpu.linear import WEIGHTS
from executor_svc.metadata import StepMetadata
from executor_svc.models.base import Model
from executor_svc.models.load import LoadedModel, load_model

DATA = Path(__file__).with_name("data")
BLOCK = 16
CHUNK = 256  # tokens of one forward
TOKENS = 64  # of a greedy answer


@dataclass(slots=True)
class Quality:
    """``top1``, ``kl`` (nats a token) and what follows are against float32."""

    perplexity: float = 0.0
    top1: float = 1.0
    kl: float = 0.0
    equal_answers: float = 1.0
    tokens_to_difference: float = 0.0
    equal_tokens: float = 1.0


def forced_logits(model: Model, window: list[int]) -> Iterator[torch.Tensor]:
    """The logits after every token of a window, in chunks: float32 [<= CHUNK, vocab]."""
    tables = np.arange(-(-len(window) // BLOCK), dtype=np.int32)[None]
    for start in range(0, len(window), CHUNK):
        ids = np.array(window[start : start + CHUNK], np.int64)
        positions = np.arange(start, start + len(ids), dtype=np.int64)
        metadata = StepMetadata(
            input_ids=ids,
            positions=positions,
            slots=np.zeros(1, np.int32),
            seq_lens=np.array([start], np.int32),
            query_lens=np.array([len(ids)], np.int32),
            query_starts=np.array([0, len(ids)], np.int32),
            block_tables=tables,
            kv_slots=positions,
            logit_indices=np.arange(len(ids), dtype=np.int64),
            logit_rows=np.zeros(len(ids), np.int32),
            num_decode_rows=0,
        )
        yield model.forward(torch.from_numpy(ids), metadata)


def teacher_forced(models: dict[str, Model], ids: list[int], window: int, results: dict[str, Quality]) -> None:
    """All models step through the text together, so that no distribution needs to be kept."""
    loss, same, divergence = (dict.fromkeys(models, 0.0) for _ in range(3))
    count = 0
    for model in models.values():
        model.allocate_kv_cache(-(-window // BLOCK), BLOCK)
    for first in range(0, len(ids), window):
        piece = ids[first : first + window]
        streams = zip(*(forced_logits(model, piece) for model in models.values()), strict=True)
        for start, chunk in zip(range(0, len(piece), CHUNK), streams, strict=True):
            targets = torch.tensor(piece[start + 1 : start + CHUNK + 1])  # the window's last token predicts nothing
            logs = {n: torch.log_softmax(y[: len(targets)], -1) for n, y in zip(models, chunk, strict=True)}
            exact = logs["float32"]
            for name, log in logs.items():
                loss[name] -= float(log.gather(1, targets[:, None]).sum(dtype=torch.float64))
                same[name] += float((log.argmax(-1) == exact.argmax(-1)).sum())
                divergence[name] += float((exact.exp() * (exact - log)).sum(dtype=torch.float64))
            count += len(targets)
    for name, result in results.items():
        result.perplexity = math.exp(loss[name] / count)
        result.top1, result.kl = same[name] / count, divergence[name] / count


def greedy(
    models: dict[str, Model], prompts: list[list[int]], stop: tuple[int, ...], results: dict[str, Quality]
) -> None:
    longest = max(len(prompt) for prompt in prompts)
    answers = {}
    for name, model in models.items():
        loop = BareLoop(model, len(prompts), longest + TOKENS, BLOCK, step_tokens=512)
        answers[name] = loop.run(prompts, TOKENS).tokens
    for name, result in results.items():
        until, equal, lengths = [], [], []
        for exact, got in zip(answers["float32"], answers[name], strict=True):
            length = next((i + 1 for i, token in enumerate(exact) if token in stop), TOKENS)
            pairs = [a == b for a, b in zip(exact[:length], got[:length], strict=True)]
            until.append(pairs.index(False) if False in pairs else length)
            equal.append(sum(pairs))
            lengths.append(length)
        result.equal_answers = sum(u == n for u, n in zip(until, lengths, strict=True)) / len(prompts)
        result.tokens_to_difference = sum(until) / len(prompts)
        result.equal_tokens = sum(equal) / sum(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or Hugging Face folder")
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--attention", choices=("numba", "torch"))
    parser.add_argument(
        "--kv-type", choices=("float16", "float32"), help="of all but float32 weights (default: as served)"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--window", type=int, default=1024, help="tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = sorted({"float32", *args.weights.split(",")}, key=("float32", "float16", "int8").index)
    loaded: dict[str, LoadedModel] = {
        name: load_model(
            args.model,
            weights=name,
            attention=args.attention,
            threads=args.threads,
            kv_type=None if name == "float32" else args.kv_type,
        )
        for name in chosen
    }
    models = {name: one.model for name, one in loaded.items()}
    tokenizer = Tokenizer.from_str(loaded["float32"].assets["tokenizer.json"].decode())
    text = (DATA / "quality.txt").read_text()
    prompts = (DATA / "quality_prompts.txt").read_text().splitlines()
    chats = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in prompts]
    ids = tokenizer.encode(text).ids
    results = {name: Quality() for name in chosen}
    teacher_forced(models, ids, args.window, results)
    greedy(models, [tokenizer.encode(c).ids for c in chats], models["float32"].facts.eos_token_ids, results)
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(f"{len(ids)} tokens of text (SHA-256 {digest[:16]}), {len(prompts)} prompts, {models['float32'].facts.name}")
    print("weights  perplexity  top-1 equal   KL, nats  answers equal  tokens to difference  tokens equal")
    for name, r in results.items():
        print(
            f"{name:8} {r.perplexity:10.4f} {r.top1:12.2%} {r.kl:10.6f} {r.equal_answers:14.0%} "
            f"{r.tokens_to_difference:21.1f} {r.equal_tokens:13.1%}"
        )
    if args.json:
        facts = {"model": models["float32"].facts.fingerprint, "text_sha256": digest, "tokens": len(ids)}
        args.json.write_text(json.dumps(facts | {"results": {n: asdict(r) for n, r in results.items()}}, indent=1))


if __name__ == "__main__":
    main()
