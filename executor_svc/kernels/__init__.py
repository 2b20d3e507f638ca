"""The Python side of the CUDA kernels: build, launch, and the glue that computes grids, plans and arguments.

Nothing here imports cupy or needs a device until ``CupyLauncher`` is made; NVRTC is loaded by the first build.
"""
