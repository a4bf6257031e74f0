"""The page of the documentation: method, figures of the last full run, and how to repeat it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.balance import costs, plots
from benchmarks.balance.processes import Setting
from benchmarks.balance.report import (
    Report,
    day_table,
    goals,
    known_table,
    name_of,
    processes_table,
    speed_up_table,
    tokens_table,
)
from benchmarks.balance.routing import BURSTS, Day
from benchmarks.balance.simulation import ANY, NODE_LIMITED
from benchmarks.reports import EMPTY, FIGURES, image_line, machine_lines, table_lines, write_page
from moe_triton.tools.text_table import TextTable

NAME, RUN, RECORDS = "benchmarks-balance.md", "balance.json", "balance.json"
_DAY, _SETTING = Day(), Setting()


def _bursts() -> str:
    said = [
        f"{len(b.experts)} expert{'s' * (len(b.experts) > 1)} {b.factor:g} times as popular for {b.steps:,} "
        f"steps from step {b.begin:,} on"
        for b in BURSTS
    ]
    return "; ".join(said)


METHOD = f"""\
# Benchmarks of balance

What [placements of replicas](balance.md) bring while routing drifts: a day, simulated, with steps priced by
[the model](model.md) of an A3, and the same calls by processes on one machine with a CPU.
`python -m benchmarks.balance page` writes this page; nothing in it was typed in.

## The day

- {_DAY.steps:,} steps of one layer, {_DAY.experts} experts, K {_DAY.topk}. The n-th expert has popularity
  n ** -exponent (Zipf's law). Experts stand on a ring in random order, and the head of the law moves along it
  by {_DAY.travel:g} places in the day: {_DAY.travel * 100 / _DAY.steps:.2f} in 100 steps,
  {_DAY.travel * 10_000 / _DAY.steps:.0f} in 10,000. How long a step takes does not matter, only that.
- Bursts beside that: {_bursts()}.
- The exponent is sought by which the busiest of 16 ranks gets twice the mean without replicas, averaged over
  the day. More ranks have the same popularity, and so more skew.
- *Node-limited*: a token's experts lie in 4 of 8 groups of neighbours, those whose two best scores are best,
  as DeepSeek-V3 has it; with the same exponent.
- Some steps at random, one in each equal part of the day, are drawn in full: ids of every token of every
  rank. Counts of a window are drawn from what tokens want at 16 points of it.

## Policies

| Policy | What it is |
| --- | --- |
| none | {_DAY.experts} experts, none of them twice |
| initial | all experts, and then 0, 1, ... again, as vLLM and sglang begin |
| rebalance, n | `rebalance_experts` every n steps, of what was counted in the n steps before |
| refine, n | `refine_placement` every n steps, from where it is, by at most as many copies as ranks |
| known loads | `rebalance_experts` of the very step's counts; by rank `refine_placement` after it |
| MoonEP, its slots | own experts and as many slots more; each step deals rows anew and pushes weights first |
| MoonEP, perfect | every rank gets the mean: no placement is better |

All but none have a quarter more slots than experts, or the next multiple of the ranks. MoonEP's plan is
ours: the busiest rank gives rows of its largest expert to the least busy rank with a slot, again and again.

Rows are counted *as dispatched*: each id is mapped as `dispatch(eplb_table=, eplb_mode=)` maps it, by token
(`(t + rank + e) % count`) or by rank (`rank // ceil(W / count)`), and rows of each rank are added up.

## A step's time by the model

- Dispatch (int8) and combine (bf16) are priced on the slowest rank by the model, with the ids of the step
  that has the policy's median skew; MoonEP's with rows that are dealt evenly.
- Experts are those of the busiest rank: reading the weights of all its slots,
  {costs.EXPERT_BYTES / 1e6:.0f} MB each, at the memory's published rate, and so much for each row.
  What a row takes is what a published step leaves when the rest is taken off: {costs.PUBLISHED}.
  Its rows are taken to be dealt evenly.
- A policy with replicas has one launch more, which maps ids.
- Moves are what the rank that receives most takes for its copies over its link (published rate,
  `remote_write_gb_per_s`), spread over the steps of a period. Nothing is hidden behind steps, and nothing
  else uses the link.

## Processes

`EPBuffer` with {_SETTING.experts} experts, T {_SETTING.tokens}, K {_SETTING.topk}, H {_SETTING.hidden}.
Experts are three products and SwiGLU in fp32 with I {_SETTING.intermediate},
{_SETTING.flops_per_row / 1e6:.1f} Mflop a row. Ids are skewed so that the first rank gets
{_SETTING.skew} times the mean. *replicas* has a quarter more slots and `eplb_table` of `rebalance_experts`;
*even rows* has as many rows, dealt evenly, without replicas. The three run in every round in random order,
each rank pinned to a core; outputs with replicas are compared with those without. A time is the last rank out
minus the first rank in; ratios are taken inside a round, and shown are their medians with 95 % intervals. The
last two columns are of the core time alone that experts take on the rank where they take most: what others do
with the cores hardly moves it.

With two cores for four ranks, a rank that has little to do leaves its core to one that has much: W 4 hides
what balance brings. What it would bring on cores of their own is in the core time of experts.

## How to repeat it

```
pip install -e '.[cpu,bench]'
python -m benchmarks.balance           # --help shows what can be chosen
python -m benchmarks.balance page
```

Every step's figures go to `build/balance`. The simulation gives the same figures on every run.
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
    ranks = report.eps[0]
    parts = [METHOD, *machine_lines(report.machine, report.versions), _settings(report)]
    parts += ["## What was asked\n", *(f"- {line}" for line in goals(report)), ""]
    parts += ["## Loads that are known\n", *_table(known_table(report))]
    parts += [f"## A day at EP {ranks}\n", image_line("Most rows over mean, by policy", plots.DAY)]
    parts += _table(day_table(report, ANY, ranks))
    if limited := report.of(NODE_LIMITED):
        parts += ["### Node-limited\n", *_table(day_table(report, NODE_LIMITED, limited[0].ranks))]
    parts += ["## By EP\n", image_line("Gains by period and EP", plots.GAINS)]
    parts += _table(speed_up_table(report))
    if report.of_other_tokens():
        parts += ["## By tokens\n", *_table(tokens_table(report))]
    if report.measured:
        parts += ["## By processes\n", *_table(processes_table(report))]
        shares = ", ".join(f"{m.share_of_experts:.0%} (W {m.setting.ranks})" for m in report.measured)
        parts += [f"Experts' share of a step on the busiest rank, without replicas: {shares}.\n"]
    return "\n".join(parts)


def _table(table: TextTable) -> list[str]:
    return table_lines(f"{table.title}.\n", table)


def _settings(report: Report) -> str:
    of: dict[str, Any] = report.settings
    return (
        f"Settings: EP {name_of(of['ep'])}; periods {name_of(of['periods'])}; T {of['tokens']}; "
        f"skew {of['skew']:g}, exponent {of['day']['exponent']:.3f}; {of['steps']} steps at EP "
        f"{of['ep'][0]}, fewer elsewhere; "
        f"a row takes {costs.row_us():.3f} us, an expert's weights {costs.weights_us():.1f} us to read and "
        f"{costs.moves_us(1):.0f} us to move.\n"
    )
