"""Parts of bench/chaos.py: streams of all kinds, a seeded schedule of faults, and what became of the streams."""
