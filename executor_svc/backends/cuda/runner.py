"""The device side of a step on a GPU: as ``ModelRunner``, but what it returns is on its way while the host goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor_svc.backends.cuda.decoder import CudaDecoder
from executor_svc.backends.cuda.prompt_scores import DevicePromptScores
from executor_svc.backends.cuda.sampler import DeviceSampler
from executor_svc.errors import PlanError
from executor_svc.metadata import StepMetadata
from executor_svc.model_runner import MainOutput, ModelRunner, step_failure
from executor_svc.pieces import split
from executor_svc.sampling.sampler import NOTHING_SAMPLED, Sampled


@dataclass(slots=True, frozen=True)
class DeviceOutput(MainOutput):
    scores: DevicePromptScores | None = None  # of a step with prompt logprobs


class CudaRunner(ModelRunner):
    """Nothing here waits for the device but ``PendingSample.output``, which the worker asks for a step later."""

    model: CudaDecoder

    def __init__(self, model: CudaDecoder, max_slots: int) -> None:
        super().__init__(model, max_slots, model.device.launcher.device)
        self._sampler = DeviceSampler(model.device, max_slots)

    def capture_graphs(self, max_rows: int) -> int:
        """See ``CudaDecoder``."""
        return self.model.capture_graphs(self.last_tokens, max_rows)

    def _forward(self, metadata: StepMetadata) -> torch.Tensor:
        return self.model.run(metadata, self.last_tokens)

    def _forward_in_pieces(self, metadata: StepMetadata) -> MainOutput:
        """With more pieces than pinned buffers, the host waits for the copies of earlier pieces."""
        scores = DevicePromptScores(self._sampler)
        vocab = self.model.facts.vocab_size
        sampling = torch.empty(len(metadata.logit_indices), vocab, dtype=torch.float32, device=self.device)
        for piece in split(metadata):
            logits = self._forward(piece.metadata)
            at = len(piece.sampling)
            self._sampler.put_rows(sampling, piece.sampling, logits[:at])
            for part in piece.parts:
                scores.add(logits[at : at + part.count], part)
                at += part.count
        return DeviceOutput(sampling, scores=scores)

    @torch.inference_mode()
    def execute_sample(self, main_output: MainOutput | None, metadata: StepMetadata) -> Sampled:
        """Starts the sampling and the copy of its results; ``output()`` gives them."""
        rows = metadata.sample_rows
        if main_output is None or rows is None:
            return NOTHING_SAMPLED
        try:
            if len(main_output.logits) != len(rows.slots):
                raise RuntimeError(f"{len(main_output.logits)} rows of logits for {len(rows.slots)} sampling rows")
            scores = main_output.scores if isinstance(main_output, DeviceOutput) else None
            return self._sampler.sample(main_output.logits, rows, self.last_tokens, scores, self._with_earlier_faults)
        except Exception as error:
            self._check_device(error)
            raise step_failure("sampling", error) from error

    def execute_main_model(self, metadata: StepMetadata) -> MainOutput | None:
        try:
            return super().execute_main_model(metadata)
        except PlanError as error:
            self._check_device(error)
            raise

    def _check_device(self, error: Exception) -> None:
        """A device that is lost makes every further step fail: the process leaves, and whoever watches starts it
        again. The core continues the sequences elsewhere meanwhile."""
        if not self.model.device.usable():
            raise SystemExit(f"executor: the device is lost: {error}") from error
