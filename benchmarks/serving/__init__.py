"""Batches as servers have them: a prefill of many tokens in one call, and the memory that a large call takes.

``python -m benchmarks.serving`` measures, ``python -m benchmarks.serving page`` writes
docs/benchmarks-serving.md from the last run. ``--only rounds`` measures one of its parts, and keeps what the
last run has of the others:

- ``rounds``: one call of dispatch and one of combine against the same rounds by hand, each a call of its own
  whose rows nobody puts together, without a link and over paced links.
- ``peers``: the same call against gloo, Open MPI and memcpy of its bytes, as in `benchmarks.compare`.
- ``memory``: what one large call adds to its process at most, against what has to be there.

Shape symbols: W ranks, T tokens of a rank, H hidden, K experts per token, M experts of the group, E experts
of a rank, N rows that a rank receives, B tokens of a round.
"""
