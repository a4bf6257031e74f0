"""Side by side: our routes, gloo's, Open MPI's and memcpy, interleaved at random in one process group.

``python -m benchmarks.compare`` measures, ``python -m benchmarks.compare scaling`` varies sizes, and
``python -m benchmarks.compare page`` writes docs/benchmarks.md from the last run of each.

Shape symbols: W ranks, T tokens of a rank, H hidden, K experts per token, M experts of the group, E experts
of a rank, N rows that a rank receives.
"""
