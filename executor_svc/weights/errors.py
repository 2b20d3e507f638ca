"""The one exception that a checkpoint which cannot be served correctly raises."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint is damaged, incomplete, or asks for something this engine does not do.

    The message names the file, tensor or setting. Nothing is guessed and nothing is skipped: a model that loads
    computes what its authors' reference implementation computes.
    """
