"""The page of the documentation: method, figures of the last full run, and how to repeat it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.reports import EMPTY, FIGURES, image_line, machine_lines, table_lines, write_page
from benchmarks.serving import plots
from benchmarks.serving.report import Report, memory_table, peers_table, rounds_table
from benchmarks.serving.rounds import RATIOS
from benchmarks.serving.sizes import (
    HIDDEN,
    OF_MEMCPY,
    OVER_LINK,
    ROUND_TOKENS,
    TOKENS,
    VS_GLOO,
    VS_MPI,
    WITHOUT_LINK,
)
from benchmarks.sizes import EXPERTS, TOPK
from moe_triton.tools.text_table import TextTable

NAME, RUN, RECORDS = "benchmarks-serving.md", "serving.json", "serving.json"

METHOD = f"""\
# Benchmarks of a prefill

A batch that is larger than what a buffer takes in one round, T {TOKENS:,} where a round has {ROUND_TOKENS}
(H {HIDDEN}, K {TOPK}, {EXPERTS} experts, uniform routing), in one call of dispatch and one of combine; and
the memory of a larger one. `python -m benchmarks.serving page` writes this page; nothing in it was typed in.

## What is compared

- **Rounds by hand**: a dispatch for each round, then a combine for each of their handles. Nobody puts the
  rows of those dispatches together, which one call has done: its rows lie in the order of one large round.
  On the same buffer, and without a link, {WITHOUT_LINK} is asked.
- **The link** sleeps in senders, as in [overlapping parts](speed.md#whether-parts-overlap): so many times as
  long as the operator's other work takes by hand without a link. A sender is ahead of it by a small share of
  a call's bytes, or by two rounds.
- **Beside computing**: a buffer as it comes runs one launch after the other, so that nothing is hidden. With
  `num_blocks=2, Tuning(communication_blocks=1)` a block communicates while another one computes: by hand
  parts of a round overlap, in one call a round and the next one. Of such a call {OVER_LINK} is asked against
  rounds by hand on a buffer as it comes, where the link takes as long as arranging.
- **Peers** get the whole batch at once ([their page](benchmarks.md#what-is-compared)). Asked is {VS_GLOO} of
  gloo's all-to-all-v, {VS_MPI} of the best of Open MPI's routes, and {OF_MEMCPY} of memcpy of the bytes that
  slots move, counted as there: the faster of two ways to copy them. In one piece, of a hundred megabytes,
  the C library writes past the caches, in order and reading far ahead, as no scheme finds its rows. In rows
  of {HIDDEN} elements, in any order, it copies as schemes do.
- **Memory**: what construction of a buffer and one call with `num_recv_tokens="exact"` add to a fresh process
  at most, against outputs, window and rows of two rounds.

Answers of experts are there beforehand. Both ways give the same bits, and so do peers that sum in the same
order; this is checked before and after. Routes run in random order in each iteration; a time is the last
rank out minus the first rank in. Ratios are taken inside an iteration; shown are their medians with 95 %
intervals. In parentheses: cores were shared, so that the figure tells of the machine and not of the code.
Core time, of all ranks together, hardly changes by that.

## How to repeat it

```
pip install -e '.[cpu,bench]'
python -m benchmarks.serving           # --help shows what can be chosen
python -m benchmarks.serving page
```
"""


def write(run: Path, docs: Path) -> None:
    """Writes the page and its figures from the file of the last run, if there is one."""
    write_page(docs, NAME, text(run, docs / FIGURES))


def text(run: Path, figures: Path) -> str:
    """The page's text. Plots are drawn into ``figures``, and the records are copied there."""
    if not (run / RUN).exists():
        return METHOD + EMPTY
    report = Report.load(run / RUN)
    plots.plot(report, figures)
    report.save_records(figures / RECORDS)
    parts = [METHOD, *machine_lines(report.machine, report.versions)]
    parts += [image_line("One call against its rounds by hand, and against peers", plots.NAME)]
    if report.rounds:
        parts += ["## Rounds by hand\n"]
        for metric in RATIOS:
            parts += _table(rounds_table(report, metric))
    if report.samples:
        parts += ["## Peers\n", *_table(peers_table(report))]
        parts += [*(f"- {line}" for line in report.absences()), ""]
    if report.memory is not None:
        parts += ["## Memory\n", *_table(memory_table(report.memory))]
    return "\n".join(parts).rstrip() + "\n"


def _table(table: TextTable) -> list[str]:
    return table_lines(f"{table.title}.\n", table)
