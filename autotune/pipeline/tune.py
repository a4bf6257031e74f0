"""`tune`: the schemes of some groups, and the settings of the best of them, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from autotune.pipeline import measured, modelled, results
from autotune.pipeline.candidate import Sizes
from autotune.pipeline.measured import WORTH, Effort, Measured, Report
from autotune.pipeline.modelled import Modelled
from autotune.pipeline.race import Result
from autotune.pipeline.results import Target
from moe_triton.core.errors import ArgumentError
from moe_triton.core.soc import SOC_OF_PRODUCT
from moe_triton.core.tables import Row
from moe_triton.tables import folder_of_user, machine_of, pipelines, schemes

CPU = "cpu"
PRODUCT = "A3"
RANKS, TOKENS = (2, 4, 8), (16, 64, 256)
"""Of the CPU, as `python -m benchmarks.compare` has them."""
NPU_RANKS, NPU_TOKENS = (8, 16, 64, 256), (1, 16, 64, 128, 256, 512)


def sizes_of(
    soc: str, ranks: Sequence[int], hidden: Sequence[int], topk: Sequence[int], tokens: Sequence[int]
) -> list[Sizes]:
    """The groups of every combination of these; where none are given, those that tables are shipped of."""
    on_cpu = soc == CPU
    ranks, tokens = ranks or (RANKS if on_cpu else NPU_RANKS), tokens or (TOKENS if on_cpu else NPU_TOKENS)
    most = Sizes.experts if on_cpu else 0
    return [
        Sizes(r, t, h, k, most or -(-256 // r) * r)
        for h, k, r, t in product(hidden or [Sizes.hidden], topk or [Sizes.topk], ranks, tokens)
    ]


def target_of(soc: str, folder: Path | None = None) -> Target:
    """What tables a processor's results go to.

    Raises:
        ArgumentError: there is no such processor, or no folder of the user's.
    """
    folder = folder or folder_of_user()
    if folder is None:
        raise ArgumentError("output", None, "there is no home folder to write to", "Name a folder.")
    if soc == CPU:
        return Target(machine_of("cpu", PRODUCT), measured.cores(), measured.source(), folder)
    if soc not in (PRODUCT, SOC_OF_PRODUCT[PRODUCT]):
        rule = f"it must be cpu or {SOC_OF_PRODUCT[PRODUCT]}, whose schemes have plans"
        raise ArgumentError("soc", repr(soc), rule, "Name one of them.")
    cores = int(Modelled(PRODUCT).machine.cores)
    return Target(machine_of("npu", PRODUCT), cores, modelled.source(), folder)


def tune(
    sizes: Sequence[Sizes],
    soc: str = CPU,
    *,
    effort: Effort | None = None,
    folder: Path | None = None,
    settings: bool = True,
    resume: bool = False,
    report: Report = lambda *_: None,
) -> Iterator[tuple[Sizes, list[Row]]]:
    """Searches group by group, and writes the tables after each: what is found is kept whatever comes after.

    Args:
        sizes: the groups.
        soc: "cpu" for this machine, measured; else an NPU's processor, priced by the model.
        effort: how long to measure.
        folder: of the tables; the user's own if None.
        settings: search the settings of the best schemes too.
        resume: leave out groups that the table of schemes has of the same source.
        report: told each result.

    Yields:
        Each group with its rows of the table of schemes.

    Raises:
        ArgumentError: see `target_of`.
        RankFailedError: a rank failed; with `WrongBitsError` in its text, a candidate gives other bits.
    """
    target = target_of(soc, folder)
    known = results.kept(schemes.KIND, target) if resume else None
    done = {row.sizes for row in known.rows} if known else set()
    prices = None if soc == CPU else Modelled(PRODUCT)
    for one in sizes:
        if (one.hidden, one.topk, one.ranks, one.tokens) in done:
            continue
        if prices is None:
            rows = _measure(one, target, effort or Effort(), settings, report)
        else:
            rows = _price(prices, one, target, settings, report)
        yield one, rows


def _measure(sizes: Sizes, target: Target, effort: Effort, settings: bool, report: Report) -> list[Row]:
    with Measured(sizes, effort, report) as ranks:
        found = ranks.schemes()
        rows = results.scheme_rows(sizes, found, [each for each in found[1:] if measured.is_better(each)])
        pipeline_rows = []
        for scheme in dict.fromkeys(str(row.values[0]) for row in rows) if settings else ():
            best = ranks.settings(scheme)
            if best.candidate.settings:
                default_ns = round(best.ns / best.ratio.median)
                pipeline_rows.append(results.pipeline_row(target, sizes, best.candidate, best.ns, default_ns))
    _write(target, rows, pipeline_rows)
    return rows


def _price(prices: Modelled, sizes: Sizes, target: Target, settings: bool, report: Report) -> list[Row]:
    found = prices.schemes(sizes)
    for result in found[1:]:
        report(sizes, result)
    rows = results.scheme_rows(sizes, found, _worth(found))
    pipeline_rows = []
    for scheme in dict.fromkeys(str(row.values[0]) for row in rows) if settings else ():
        own, *others = prices.settings(sizes, scheme)
        for result in others:
            report(sizes, result)
        best = min(_worth([own, *others]), key=lambda each: each.ns, default=None)
        if best:
            pipeline_rows.append(results.pipeline_row(target, sizes, best.candidate, best.ns, own.ns))
    _write(target, rows, pipeline_rows)
    return rows


def _worth(found: Sequence[Result]) -> list[Result]:
    return [each for each in found[1:] if not each.refused and each.ratio.median <= WORTH]


def _write(target: Target, rows: list[Row], pipeline_rows: list[Row]) -> None:
    results.write(schemes.KIND, target, rows)
    if pipeline_rows:
        results.write(pipelines.KIND, target, pipeline_rows)
