"""Each Triton kernel on one core, against torch eager on one thread and a copy of the same bytes.

Run as ``python -m benchmarks.kernels [--json FILE] [--hidden 7168] [--tokens 64] [--only NAME] [--cold]``.
The three routes take turns, and ratios are medians over the rounds. torch does the same work the way one
would write it, and before anything is timed both have to give the same results.

Two bounds: at least 4 times torch where torch computes, and at most 2.5 times memcpy. Where torch only moves
rows it is a memcpy itself, and the second bound alone counts.
"""
