"""Raw log probabilities of one row: before any bias, mask, penalty or temperature."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protos.step import RowLogprobs
from protos.wire import LE_FLOAT32, LE_INT32


def row_logprobs(row: npt.NDArray[np.float32], chosen: int, top: int, position: int) -> RowLogprobs:
    """``row`` [V] raw logits without NaN or +inf; ``chosen`` an id; ``top`` how many of the likeliest ids to name.

    Ranks and the order of the top ids: by logit descending, ties by id. ``position`` indexes the whole sequence.
    """
    wide = row.astype(np.float64)
    highest = wide.max()
    log_sum = highest + np.log(np.exp(wide - highest).sum())
    value = row[chosen]
    rank = 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:chosen] == value))
    ids = _top_ids(row, min(top, len(row)))
    return RowLogprobs(
        position=position,
        chosen=float(wide[chosen] - log_sum),
        rank=rank,
        top_ids=ids.astype(LE_INT32).tobytes(),
        top_values=(wide[ids] - log_sum).astype(LE_FLOAT32).tobytes(),
    )


def _top_ids(row: npt.NDArray[np.float32], top: int) -> npt.NDArray[np.int64]:
    if top <= 0:
        return np.empty(0, dtype=np.int64)
    border = np.partition(row, len(row) - top)[len(row) - top]
    candidates = np.flatnonzero(row >= border)  # ties at the border included; ascending ids
    order = np.argsort(-row[candidates], kind="stable")[:top]
    return candidates[order]
