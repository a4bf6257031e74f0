"""Each Triton kernel on one core, against its model in torch on one thread and a copy of the same bytes.

Run as ``python -m benchmarks.kernels [--json FILE] [--hidden 7168] [--tokens 64] [--only NAME] [--cold]``.
The three routes take turns, and ratios are medians over the rounds. Before anything is timed, kernel and
model have to give the same bits. The model is torch as the specification reads, not as fast as torch can be:
where it goes row by row, its time says little.

Two bounds: at least 4 times torch where a kernel computes, and at most 2.5 times memcpy. Where it only moves
rows, the second bound alone counts; where what it moves is not known, the first.
"""
