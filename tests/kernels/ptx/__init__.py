"""A SIMT interpreter of PTX, for tests: it executes what NVRTC emitted, one numpy lane for each CUDA thread.

The whole grid runs at once. Of all threads, those at the lowest instruction run next, so paths that split meet again by
themselves. Where the hardware has a freedom, the worst case is taken: asynchronous copies land at the wait, no earlier,
and what they overwrite is gone from the moment they are issued.

Checked: bounds, alignment, writes through const pointers, uninitialised and in-flight shared memory, data races in
shared and global memory (whatever the schedule: by what orders two accesses, not by when they happened), barriers and
warp operations that not all threads reach. Not modelled: caches, timing, partial warps, the rounding order inside
tensor cores, the last bits of approximate functions.
"""
