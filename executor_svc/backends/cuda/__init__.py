"""The GPU back end: torch's matrix products, the kernels of ``cuda/`` for the rest, and no waiting between steps.

``device.py`` is all that needs CUDA; tests put a stand-in in its place and run everything else without a GPU.
"""
