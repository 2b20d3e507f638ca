"""An executor that does to certain prompts what a defect would: ``python -m tests.e2e.planted_executor FLAGS``.

The first token of a prompt decides: EXIT ends the process, HANG stops its loop, NAN makes that row's logits NaN.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from executor_svc import __main__ as executor
from executor_svc.metadata import StepMetadata
from executor_svc.model_runner import MainOutput, ModelRunner

EXIT, HANG, NAN = 377, 378, 379

_execute = ModelRunner.execute_main_model


@torch.inference_mode()
def planted(self: ModelRunner, metadata: StepMetadata) -> MainOutput | None:
    begins = metadata.positions == 0  # [T] first tokens of prompts
    first = set(metadata.input_ids[begins].tolist())
    if EXIT in first:
        os._exit(3)
    if HANG in first:
        time.sleep(3600)
    output = _execute(self, metadata)
    if NAN in first and output is not None:
        starts = metadata.query_starts[metadata.logit_rows]  # [S]
        output.logits[torch.as_tensor(begins[starts] & (metadata.input_ids[starts] == NAN))] = float("nan")
    return output


if __name__ == "__main__":
    ModelRunner.execute_main_model = planted  # type: ignore[method-assign]
    sys.exit(executor.main())
