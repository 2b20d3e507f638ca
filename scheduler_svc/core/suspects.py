"""Which request kills executors?

Suspects are the sequences with rows in unanswered plans at a death. One death proves nothing (the executor may have
been killed); a sequence that then makes progress is cleared. One that meets ``isolate_after`` deaths without it runs
alone, with no mates in its plans; one that meets ``fail_after_alone`` deaths while alone fails, with a clear error.

So a request that kills costs ``isolate_after + fail_after_alone`` deaths of executors (four), however many rows n ran
beside it. Halving the suspects instead would cost a death for every halving, 1 + log2(n) and one more alone: more from
n = 8 on, and deaths are what is dear: a start, the weights, every other sequence's prefill. What running alone costs is
time: at worst a prefill and ``suspicion_clears`` steps for each innocent, on as many executors at once as there are.
"""

from __future__ import annotations

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.sequence import Sequence


class Suspects:
    def __init__(self, config: CoreConfig) -> None:
        self._clears = config.suspicion_clears
        self._isolate_after = config.isolate_after
        self._fail_after = config.fail_after_alone

    def on_death(self, executor: ExecutorState) -> dict[Sequence, None]:
        """Count a death against the suspects (call before the executor's state is dropped). Returns those to fail."""
        suspects = _with_rows_in_flight(executor)
        condemned: dict[Sequence, None] = {}
        for sequence in suspects:
            if self._is_cleared(sequence):
                sequence.deaths = sequence.alone_deaths = 0
            sequence.deaths += 1
            sequence.mark_at_death = sequence.num_outputs
            if len(suspects) == 1:
                sequence.alone_deaths += 1
                if sequence.alone_deaths >= self._fail_after:
                    condemned[sequence] = None
        return condemned

    def must_run_alone(self, sequence: Sequence) -> bool:
        return sequence.deaths >= self._isolate_after and not self._is_cleared(sequence)

    def _is_cleared(self, sequence: Sequence) -> bool:
        return sequence.num_outputs >= sequence.mark_at_death + self._clears


def _with_rows_in_flight(executor: ExecutorState) -> dict[Sequence, None]:
    table = executor.table
    found: dict[Sequence, None] = dict.fromkeys(executor.settling.values())  # in order: a replay must see the same
    for record in executor.inflight:
        rows = list(zip(record.slots.tolist(), record.generations.tolist(), strict=True))
        rows += [(slot, generation) for slot, generation, _ in record.prefill]
        for slot, generation in rows:
            sequence = table.sequences[slot]
            if sequence is not None and sequence.generation == generation:
                found[sequence] = None
    return found
