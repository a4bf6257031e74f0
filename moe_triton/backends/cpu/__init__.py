"""Ranks as processes, windows as shared memory, kernels as native code."""
