"""The whole forward pass as compiled code: numba for control, LLVM vectors for arithmetic, torch's own threads.

Every output element is one chain of fused multiply-adds in a fixed order, whatever the batch, the thread or the vector
width of the CPU. Batch invariance is a property of the code here, not of a measurement, and nothing is padded.
"""
