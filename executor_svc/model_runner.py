"""The device side of a step: the forward pass, and the sampling, as two calls.

Between them the worker post-processes the step before. Both run in plan order, which is the order of the device's
memory: ``last_tokens[slot]`` holds what the latest sampling of that slot wrote, and the next forward reads it there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.errors import PlanError
from executor_svc.metadata import StepMetadata
from executor_svc.models.base import Model
from executor_svc.pieces import split
from executor_svc.sampling.prompt_scores import PromptScores, with_prompt
from executor_svc.sampling.rows import SampleRows
from executor_svc.sampling.sampler import FAULT_TOKEN, NOTHING_SAMPLED, Sampled, SamplerOutput, sample
from protos.step import OUT_OF_MEMORY, STEP_FAILED, RowFault


@dataclass(slots=True, frozen=True)
class MainOutput:
    """What the forward leaves for the sampling."""

    logits: torch.Tensor  # float32 [S, vocab_size]: the head ran only over the rows of logit_indices
    prompt: PromptScores | None = None  # of a step with prompt logprobs


class ModelRunner:
    """Runs a model over the batches that ``prepare_inputs`` made.

    Raises PlanError(OUT_OF_MEMORY or STEP_FAILED) where a step failed as a whole; a fault of one row is in the result.
    """

    def __init__(self, model: Model, max_slots: int, device: str = "cpu") -> None:
        self.model = model
        self.device = torch.device(device)
        self.last_tokens = torch.zeros(max_slots, dtype=torch.int64, device=self.device)
        self._faulted = np.full(max_slots, -1, dtype=np.int64)  # the generation of a slot that faulted
        self._status = np.zeros(max_slots, dtype=np.int64)  # and how

    def clear(self) -> None:
        """A new epoch."""
        self.last_tokens.zero_()
        self._faulted.fill(-1)

    @torch.inference_mode()
    def execute_main_model(self, metadata: StepMetadata) -> MainOutput | None:
        """Forward only; never waits for the device. None for a plan without rows."""
        if not metadata.num_tokens:
            return None
        try:
            if metadata.scored_rows:
                return self._forward_in_pieces(metadata)
            return MainOutput(self._forward(metadata))
        except Exception as error:
            raise step_failure("forward", error) from error

    def _forward(self, metadata: StepMetadata) -> torch.Tensor:
        return self.model.forward(self._resolve(metadata), metadata)

    def _forward_in_pieces(self, metadata: StepMetadata) -> MainOutput:
        """As one forward, with prompt logprobs besides; at most ``MAX_SCORED`` rows of their logits exist at once."""
        scores = PromptScores()
        sampling = torch.empty(len(metadata.logit_indices), self.model.facts.vocab_size, device=self.device)
        for piece in split(metadata):
            logits = self._forward(piece.metadata)
            at = len(piece.sampling)
            sampling[torch.from_numpy(piece.sampling).to(self.device)] = logits[:at]
            for part in piece.parts:
                scores.add(_on_host(logits[at : at + part.count]), part)
                at += part.count
        return MainOutput(sampling, scores)

    @torch.inference_mode()
    def execute_sample(self, main_output: MainOutput | None, metadata: StepMetadata) -> Sampled:
        """Masks, penalties, drawing; writes ``last_tokens``. One token or one fault for each sampling row."""
        rows = metadata.sample_rows
        if main_output is None or rows is None:
            return NOTHING_SAMPLED
        try:
            output = NOTHING_SAMPLED
            if len(rows.slots):
                logits = _on_host(main_output.logits)
                if len(logits) != len(rows.slots):
                    raise RuntimeError(f"{len(logits)} rows of logits for {len(rows.slots)} sampling rows")
                output = sample(logits, rows)
            if main_output.prompt is not None:
                output = with_prompt(output, main_output.prompt, rows)
            output = self._with_earlier_faults(output, rows)
            slots = torch.from_numpy(rows.slots.astype(np.int64)).to(self.device)
            self.last_tokens[slots] = torch.from_numpy(output.tokens).to(self.device)
        except Exception as error:
            raise step_failure("sampling", error) from error
        return output

    def _resolve(self, metadata: StepMetadata) -> torch.Tensor:
        """Complete input ids [T] on the device: -1 becomes what the latest sampling wrote for the row's slot."""
        ids = torch.from_numpy(metadata.input_ids).to(self.device)
        unknown = np.flatnonzero(metadata.input_ids < 0)
        if not len(unknown):
            return ids
        rows = np.searchsorted(metadata.query_starts, unknown, side="right") - 1
        slots = torch.from_numpy(metadata.slots.take(rows).astype(np.int64)).to(self.device)
        values = self.last_tokens[slots]
        if len(unknown) == len(metadata.input_ids):
            return values
        ids = ids.clone()
        ids[torch.from_numpy(unknown).to(self.device)] = values
        return ids

    def _with_earlier_faults(self, output: SamplerOutput, rows: SampleRows) -> SamplerOutput:
        """A sequence that faulted stays faulted: rows planned before the core knew have no token to go on from."""
        faulted = self._faulted.take(rows.slots) == rows.generations
        repeated = np.flatnonzero(faulted & output.ok).tolist()
        for fault in output.faults:
            self._faulted[fault.slot] = fault.generation
            self._status[fault.slot] = fault.status
        if not repeated:
            return output
        again = tuple(
            RowFault(slot, generation, int(self._status[slot]), "the sequence faulted in an earlier step")
            for slot, generation in ((int(rows.slots[i]), int(rows.generations[i])) for i in repeated)
        )
        ok = output.ok & ~faulted
        logprobs = tuple(entry for entry in output.logprobs if self._faulted[entry.slot] != entry.generation)
        return SamplerOutput(np.where(ok, output.tokens, FAULT_TOKEN), ok, output.faults + again, logprobs)


def _on_host(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """float32, C order."""
    array: npt.NDArray[np.float32] = logits.to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return array


def step_failure(what: str, error: Exception) -> PlanError:
    """The PlanError of a step that failed as a whole."""
    text = f"{type(error).__name__}: {error}"
    lower = text.lower()
    no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in lower for sign in ("out of memory", "can't allocate memory", "cannot allocate memory")
    )
    return PlanError(OUT_OF_MEMORY if no_memory else STEP_FAILED, f"{what}: {text}"[:4096])
