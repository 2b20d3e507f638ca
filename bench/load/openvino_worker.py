# mypy: ignore-errors
"""OpenVINO GenAI's continuous batching, in process: a script for that peer's own Python, which has nothing of ours.

    PYTHON openvino_worker.py MODEL_DIR CACHE_GB

Answers one JSON line on standard output for each JSON line ``{"prompts": [[id, ...], ...], "output_tokens": n}`` on
standard input: ``{"requests": [[first, last, tokens, messages], ...]}``, seconds since the requests were added.
"""

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai


def generate(pipeline, prompts, output_tokens, first_id):
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample, config.eos_token_id = output_tokens, True, False, 2
    begin = time.perf_counter()
    handles = []
    for offset, prompt in enumerate(prompts):
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handles.append(pipeline.add_request(first_id + offset, ids, config))
    seen = [[0.0, 0.0, 0, 0] for _ in prompts]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter() - begin
        for handle, request in zip(handles, seen):  # noqa: B905 - the peer's Python may be older
            while handle.can_read():
                count = sum(len(output.generated_ids) for output in handle.read().values())
                request[0] = request[0] or now
                request[1:] = [now, request[2] + count, request[3] + 1]
    return seen


def main():
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = int(sys.argv[2])
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1024, 64
    scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
    # Where the CPU has bfloat16, OpenVINO would compute in it by default.
    precision = {"INFERENCE_PRECISION_HINT": "f32"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", precision)
    print(json.dumps({"ready": openvino_genai.__version__}), flush=True)
    next_id = 0
    for line in sys.stdin:
        order = json.loads(line)
        seen = generate(pipeline, order["prompts"], order["output_tokens"], next_id)
        next_id += len(seen)
        print(json.dumps({"requests": seen}), flush=True)


if __name__ == "__main__":
    main()
