"""Text on its way in (tokens of a prompt, chat templates) and out (incremental decoding, stop strings)."""
