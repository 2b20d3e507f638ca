"""A family beside Llama through the whole of it: greedy text equals that of ``transformers``."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.harness import Cluster
from tests.e2e.streams import GREEDY, generate, random_prompt, request
from tests.e2e.verify import settled
from tests.executor.model.families import CASES, reference_logits

CONTEXT = 128  # tokens, of the model's 512


def test_greedy_text_equals_transformers(tmp_path: Path) -> None:
    """Gemma 3: windows that the prompts outgrow, two ropes, norms of every kind."""
    folder = CASES["gemma3"].make(tmp_path / "gemma3")
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start_executor("one", folder, "--attention", "torch", "--context-length", str(CONTEXT))
        cluster.start_scheduler()
        cluster.wait_ready()
        (model,) = cluster.models().values()
        assert (model.architecture, model.context_length) == ("Gemma3ForCausalLM", CONTEXT)
        prompts = [random_prompt(length, seed) for seed, length in enumerate((90, 7, 40))]
        answers = generate(cluster.address, [request(prompt, 24, **GREEDY) for prompt in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = reference_logits(folder, prompt + answer.ids, half=True)
            # Each id is the reference's choice after those before it: so all of them are its greedy text.
            assert answer.ids == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
            assert len(answer.ids) == 24
        settled(cluster)
