"""Each Triton kernel on one core, against torch on one thread and a copy of the same bytes.

Run as ``python -m benchmarks.kernels [--json FILE] [--hidden 7168] [--tokens 64] [--only NAME]``. The three
routes take turns, and ratios are medians over the rounds. Kernel and copy are timed twice: from warm memory,
where the same call has just run, and from cold memory, where all caches were emptied. Before anything is
timed, kernel and model have to give the same bits.

Torch is what one would write without the kernel (`benchmarks.kernels.eager`) where that is known. Otherwise
it is the kernel's model, as the specification reads: where that goes row by row, its time says little, and
the table puts the ratio in parentheses.

Two bounds: at least 4 times torch where a kernel computes, and at most 2.5 times memcpy from cold memory.
Where it only moves rows, the second bound alone counts; where what it moves is not known, the first.
"""
