"""The scheduler core: slots, blocks, policy, pipeline, fleet. A state machine (core.py) and a thin shell (loop.py)."""
