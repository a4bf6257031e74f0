"""The page of the documentation: method, figures of the last full run, and how to repeat it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.compare import plots
from benchmarks.compare.figures import (
    DIRECT_METRICS,
    METRICS,
    PACE_METRICS,
    PROFILED,
    SWEEPS,
    Samples,
    SweepKind,
    metric_table,
    scaling_table,
    shares_table,
    summary_table,
    temperature_table,
    time_table,
)
from benchmarks.compare.report import Files, Report
from benchmarks.reports import EMPTY, FIGURES, image_line, machine_lines, table_lines, write_page

NAME = "benchmarks.md"

METHOD = """\
# Benchmarks

Dispatch and combine through slots and directly, side by side with what one would use instead, on one machine
with a CPU. `python -m benchmarks.compare page` writes this page; nothing in it was typed in.

## What is compared

| Route | What it is |
| --- | --- |
| slots | `EPBuffer()`: rows into the peers' windows, flags, and a copy into expert order |
| direct and pull | `EPBuffer(comm_alg="direct")`: rows to where they stay, answers read where they are |
| gloo all-to-all-v | torch.distributed: sort, exchange of counts, all-to-all-v, reordering, and back |
| gloo all-gather, reduce-scatter | every row to every rank, every rank sums what its experts have |
| MPI all-to-all-v; all-gather, reduce-scatter | the same two over Open MPI, through shared memory |
| MPI all-to-all-v, our kernels | with our Triton kernels and buffers made once |
| slots without waiting | the plans of slots without the launches that wait for flags |
| memcpy | of the bytes that slots or direct have to move |

Local work (quantising, packing, reordering, weighted sum) is written in the usual torch way in the gloo and
MPI routes, but for the one that says otherwise. No token is dropped, experts answer at once, and all routes
get the same tokens, routing and answers. With *direct*, experts write their answers straight into the window,
which costs them nothing extra.

## How it is measured

- One process group has all routes: mpirun starts the ranks, and gloo meets at a file. MPI yields when idle,
  ranks are not pinned, torch has one thread per rank, and malloc keeps freed memory, so that no route pays
  for page faults.
- Before anything is timed, every route's rows, scales, counts and outputs are compared with those of gloo's
  all-to-all-v, bit for bit, and afterwards once more. The sums of reduce-scatter come in another order: their
  outputs may differ by one unit of bf16 (relative 2^-7, absolute 1e-5).
- In each iteration every route runs once, in random order, the same on all ranks. Ranks start together at
  counts in shared memory, after a barrier of gloo, whose threads would otherwise go on into what is timed. A
  time is the last rank out minus the first rank in. In every other iteration each route runs once more with
  such a start between dispatch and combine, which gives the times of the two apart.
- A ratio is taken inside an iteration, and the median over iterations is what counts; absolute times on a
  shared machine mean little. The best of MPI is, in each case, the one with the lower median.
- What is in the caches changes memcpy's time twofold where its bytes just fit. So slots, direct and memcpy
  run in every other iteration from warm memory too, right after two runs of the same, one for each zone; and
  from cold memory, with the caches of all ranks' cores emptied. Those ratios are of two runs of the same
  temperature, with the 95 % interval of their median.
- A figure in parentheses is none: ranks shared a core. They do where they are more than the cores, and where
  in most runs one waited for a core for more than a twentieth of the time.
- Time in the kernels is what the plans' launches took on the rank that spent most in them, waiting included.
- memcpy copies on every rank half of the bytes that the scheme has to read and write there, row by row in
  random order, between buffers that nothing else touches, and which together are as large as what the scheme
  reads and writes. A row that is read several times in a row counts once, scales and flags not at all
  (`benchmarks/compare/traffic.py`). In one piece, the processor sees far ahead, and libc may choose stores
  that bypass the caches: schemes are held against whichever of the two is faster in a case.

## How to repeat it

```
pip install -e '.[cpu,bench]'
python -m benchmarks.compare           # --help shows what can be chosen
python -m benchmarks.compare scaling
python -m benchmarks.compare page
```

Samples, one a row, and figures go to `build/compare`. Without Open MPI its routes are reported as absent. The
largest case, 8 ranks with 256 tokens each and all routes at once, takes about 21 GB of memory, of which the
windows of slots and direct are 12 GB.
"""

PACE = """\
### At the pace of memcpy

What the ratios would be if slots took as long as memcpy of the bytes that they have to move: their limit on
this machine, but for what our copies gain over memcpy by streaming past the caches, or by asking ahead for
the lines of both sides. The last column is how close slots come to it; above 1 they move their bytes faster
than memcpy does.
"""

TEMPERATURE = """\
### From warm and from cold memory

memcpy's time over that of slots and direct, as above, both right after the same or both with the caches
emptied.
"""

PROFILE = """\
## Where the time goes

Busy is what the ranks' threads took of the cores, of the call's time on all of them. A step's share is what
its launches took, summed over the ranks. It is known where each rank has a core to itself: elsewhere a step
goes on while its rank waits for its turn. The rest is what no step takes: waiting, and Python.
"""


def write(runs: Path, docs: Path) -> None:
    """Writes the page and its figures from the files of the last runs, as far as there are any."""
    write_page(docs, NAME, text(runs, docs / FIGURES))


def text(runs: Path, figures: Path) -> str:
    """The page's text. Plots are drawn into ``figures``, and the JSON files are copied there."""
    comparison = Files(runs)
    sweeps = {kind: Files(runs, f"scaling_{kind}") for kind in SWEEPS}
    if not comparison.exist():
        return METHOD + EMPTY
    parts = [METHOD, _comparison(comparison, figures)]
    if all(files.exist() for files in sweeps.values()):
        parts.append(_scaling(sweeps, figures))
    return "\n".join(parts)


def _comparison(files: Files, figures: Path) -> str:
    samples, report = files.load()
    measured = Samples(samples)
    plots.plot_comparison(measured, figures)
    if plots.GLANCE_CASE in measured.cases:
        plots.plot_glance(report.records, int(report.machine["cores"]), figures)
    report.save(figures / files.json.name)
    parts = [*machine_lines(report.machine, report.versions), _settings(report)]
    if report.absent:
        parts += ["## Absent\n", *(f"- {line}" for line in report.absent), ""]
    parts += ["## Ratios\n", image_line("Time of each peer against slots", plots.SPEEDUPS)]
    for metric in METRICS:
        parts += table_lines(f"### {metric.title}\n", metric_table(measured, metric))
    parts += table_lines("### The peers against direct\n", summary_table(measured, DIRECT_METRICS))
    parts += table_lines(PACE, summary_table(measured, PACE_METRICS))
    temperatures = temperature_table(measured)
    if temperatures.rows:  # earlier runs have none
        parts += table_lines(TEMPERATURE, temperatures)
    parts += [PROFILE]
    for route in PROFILED:
        table = shares_table(measured, route, int(report.machine["cores"]))
        parts += table_lines(f"{table.title[:1].upper()}{table.title[1:]}.\n", table)
    parts += [
        "## Times\n",
        image_line("Times against tokens per rank", plots.BY_TOKENS),
        image_line("Times against ranks", plots.BY_RANKS),
    ]
    for case in measured.cases:
        table = time_table(measured, case)
        parts += table_lines(f"### {table.title}\n", table)
    return "\n".join(parts)


def _scaling(sweeps: dict[SweepKind, Files], figures: Path) -> str:
    samples_by_kind: dict[SweepKind, Samples] = {}
    parts = ["## Scaling\n"]
    for kind, files in sweeps.items():
        samples, report = files.load()
        samples_by_kind[kind] = Samples(samples)
        report.save(figures / files.json.name)
        table = scaling_table(kind, samples_by_kind[kind])
        parts += table_lines(f"{table.title}.\n", table)
    plots.plot_scaling(samples_by_kind, figures)
    parts.insert(1, image_line("Time per byte against sizes", plots.SCALING))
    return "\n".join(parts)


def _settings(report: Report) -> str:
    shown: dict[str, Any] = {
        name: value for name, value in report.settings.items() if value not in (None, "")
    }
    return f"Settings: {', '.join(f'{name} {value}' for name, value in shown.items())}.\n"
