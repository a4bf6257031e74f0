"""`tune`: the schemes of some groups, and the settings of the best of them, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product as combinations
from pathlib import Path
from typing import NamedTuple

from autotune.kernels import occasions
from autotune.model.clusters.group import OPTIONS as GROUP_OPTIONS
from autotune.model.constants import machine_named, source_of
from autotune.pipeline import measured, results
from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.measured import Effort, Measured
from autotune.pipeline.modelled import Modelled, TunedGroup
from autotune.pipeline.race import Result
from autotune.pipeline.results import Target
from autotune.pipeline.tasks import PipelineTask, Price, schemes_task, settings_task
from autotune.search import Options, run
from moe_triton.backends import CAPABILITIES
from moe_triton.backends.cpu.triton.cache import safe_folder
from moe_triton.core.config import Product
from moe_triton.core.errors import ArgumentError
from moe_triton.core.soc import SOC_OF_PRODUCT
from moe_triton.core.tables import Row
from moe_triton.schemes.rules import check_config
from moe_triton.tables import FOLDER, folder_of_user, machine_of, pipelines, schemes

CPU = "cpu"
PRODUCT: Product = "A3"
RANKS, TOKENS = (2, 4, 8), (16, 64, 256)
"""The usual numbers of ranks and of tokens on a CPU, as `python -m benchmarks.compare` has them."""
NPU_RANKS, NPU_TOKENS = (8, 16, 64, 256), (1, 16, 64, 128, 256, 512)
NPU_EXPERTS = 256
SHIPPED_HIDDEN, SHIPPED_TOPK = occasions.HIDDEN, occasions.TOPK
WORTH = 0.97
"""The ratio to the default from which on a candidate is worth a row: less is within a bad day's noise."""
ALIKE = 0.01
"""Ratios that differ by no more are as good as each other."""

Report = Callable[[Sizes, Result], None]
"""Told each candidate that was priced."""


class Tuned(NamedTuple):
    """What was found for a group.

    Attributes:
        sizes: the group.
        schemes: its rows of the table of schemes; none where no scheme may stand for another.
        pipelines: its rows of the table of settings.
    """

    sizes: Sizes
    schemes: list[Row]
    pipelines: list[Row]


def product_of(soc: str) -> Product | None:
    """The product of a processor, which may be named by its product; None for a CPU.

    Raises:
        ArgumentError: there is no such processor.
    """
    if soc == CPU:
        return None
    for product, chip in SOC_OF_PRODUCT.items():
        if soc in (product, chip):
            return product  # type: ignore[return-value]
    rule = f"it must be cpu or one of {', '.join((*SOC_OF_PRODUCT, *SOC_OF_PRODUCT.values()))}"
    raise ArgumentError("soc", repr(soc), rule, "Name one of them.")


def sizes_of(
    soc: str,
    ranks: Sequence[int] = (),
    hidden: Sequence[int] = (),
    topk: Sequence[int] = (),
    tokens: Sequence[int] = (),
    product: str = PRODUCT,
    all_shipped: bool = False,
) -> list[Sizes]:
    """The groups of every combination of these; where none are given, usual ones that the product takes.

    Args:
        soc: see `tune`.
        ranks, hidden, topk, tokens: of the groups.
        product: whose schemes a CPU runs; a processor has those of its own.
        all_shipped: have every H and K that tables are shipped of.

    Raises:
        ArgumentError: see `check`; or a processor or product that there is not.
    """
    on = product_of(soc)
    if product not in SOC_OF_PRODUCT:
        raise ArgumentError(
            "product", repr(product), f"it must be one of {list(SOC_OF_PRODUCT)}", "Name one."
        )
    given = {"hidden": hidden, "topk": topk, "ranks": ranks, "tokens": tokens}
    usual = {
        "hidden": SHIPPED_HIDDEN if all_shipped else [Sizes.hidden],
        "topk": SHIPPED_TOPK if all_shipped else [Sizes.topk],
        "ranks": NPU_RANKS if on else RANKS,
        "tokens": NPU_TOKENS if on else TOKENS,
    }
    for each in ranks:
        if each < 1:
            raise ArgumentError("ranks", each, "a group has 1 rank or more", "Name how many it has.")
    experts, sizes = NPU_EXPERTS if on else Sizes.experts, []
    for h, k, r, t in combinations(*(given[name] or usual[name] for name in given)):
        one = Sizes(r, t, h, k, -(-experts // r) * r, on or product)  # type: ignore[arg-type]
        try:
            check(one, soc)
        except ArgumentError as error:
            if given.get(error.argument, True):  # else it is a usual one that others take
                raise
        else:
            sizes.append(one)
    return sizes


def check(sizes: Sizes, soc: str) -> None:
    """Checks that there is such a group, by the rules of its product's own scheme.

    Raises:
        ArgumentError: there is none.
    """
    try:
        check_config(sizes.config(sizes.schemes[0]))
    except ArgumentError as error:
        raise error.renamed(GROUP_OPTIONS) from None
    if product_of(soc):
        TunedGroup.of(sizes, Candidate(sizes.schemes[0]), None)


def target_of(soc: str, folder: Path | None = None) -> Target:
    """What tables a processor's results go to.

    Raises:
        ArgumentError: there is no such processor, or no folder of the user's.
    """
    product, folder = product_of(soc), folder or folder_of_user()
    if folder is None:
        raise ArgumentError("output", None, "there is no home folder to write to", "Name a folder.")
    if product is None:
        return Target(machine_of("cpu", PRODUCT), measured.cores(), measured.source(), folder)
    machine = machine_named(product)
    return Target(machine_of("npu", product), int(machine.cores), source_of(machine), folder)


def study_of(soc: str) -> Path:
    """The file that keeps what is known of a machine's candidates."""
    product = product_of(soc)
    machine = machine_of("npu" if product else "cpu", product or PRODUCT)
    return safe_folder() / "autotune" / f"pipelines-{machine}.db"


def tune(
    sizes: Sequence[Sizes],
    soc: str = CPU,
    *,
    effort: Effort | None = None,
    folder: Path | None = None,
    settings: bool = True,
    resume: bool = False,
    study: Path | None = None,
    command: str = pipelines.COMMAND,
    report: Report = lambda *_: None,
) -> Iterator[Tuned]:
    """Searches group by group, and writes the tables as soon as there are rows.

    Every candidate that was priced is kept in the study, so that nothing of it is lost whatever comes after.
    A chip's table in the package whose rows all name the product's own scheme is not left there: without it
    a buffer takes the same one. A CPU's stays: without it a buffer would go by another family's.

    Args:
        sizes: the groups.
        soc: "cpu" for this machine, measured; else an NPU's processor or product, priced by the model.
        effort: how long to measure.
        folder: of the tables; the user's own if None.
        settings: search the settings of the best schemes too.
        resume: keep what the study holds.
        study: its file; by default in the user's cache.
        command: that makes the tables again.
        report: told each candidate.

    Yields:
        Each group with its rows of the tables.

    Raises:
        ArgumentError: see `target_of` and `check`; or another process works on the study.
        WrongBitsError: a candidate gives other bits than the default.
        RankFailedError: a rank failed.
    """
    for one in sizes:
        check(one, soc)
    target = target_of(soc, folder)._replace(command=command)
    effort = effort or Effort()
    options = Options(study or study_of(soc), resume, budget=effort.budget, seed=effort.seed)
    product = product_of(soc)
    for one in sizes:
        # What the model remembers of a group is of no use to the next one.
        with nullcontext(Modelled(one, product)) if product else Measured(one, effort) as prices:
            backend = "npu" if product else "cpu"
            yield _Search(one, target, options, prices.price, report, backend).tuned(settings)
    if product and sizes and target.folder == FOLDER:
        results.drop_without_decision(target, sizes[0].schemes[0])


def priced_schemes(sizes: Sizes, soc: str) -> list[Row]:
    """A group's rows of a modelled table of schemes, priced anew. Nothing is kept.

    Args:
        sizes: the group.
        soc: an NPU's processor or product.
    """
    product = product_of(soc)
    assert product is not None, soc
    prices = Modelled(sizes, product)
    own, *others = map(Candidate, sizes.alike)
    priced = [prices.price(own, each) for each in (own, *others)]
    return results.scheme_rows(sizes, priced, list(filter(is_better, priced)))


def is_better(result: Result) -> bool:
    """Whether a candidate is faster than the default beyond doubt, and by enough to matter."""
    return not result.refused and result.ratio.high < 1 and result.ratio.median <= WORTH


def _best(better: Sequence[Result]) -> Result | None:
    """The fastest; of those that are as fast, with the least settings."""
    least = min((each.ratio.median for each in better), default=0.0) + ALIKE
    fast = [each for each in better if each.ratio.median <= least]
    return min(fast, key=lambda each: (len(each.candidate.settings), each.ratio.median), default=None)


@dataclass(frozen=True)
class _Search:
    """One group's. Candidates are priced one at a time: see `Measured`."""

    sizes: Sizes
    target: Target
    options: Options
    price: Price
    report: Report
    backend: str

    def tuned(self, settings: bool) -> Tuned:
        """Its rows, which are in the tables already."""
        rows, priced = [], self.schemes()
        if len(priced) > 1 or self.backend == "npu":
            rows = results.scheme_rows(self.sizes, priced, list(filter(is_better, priced)))
            results.write(schemes.KIND, self.target, rows)
        fastest = [str(row.values[0]) for row in rows] or self.sizes.schemes[:1]
        others = [name for name in self.sizes.schemes if name not in self.sizes.alike]
        searched = dict.fromkeys((*fastest, *others)) if settings else ()
        return Tuned(self.sizes, rows, [row for scheme in searched for row in self.settings(scheme)])

    def schemes(self) -> list[Result]:
        """Those that may stand for each other, the product's own first; none where that has no price."""
        task = schemes_task(self.sizes, self.price, self.target.source, self.options.seed)
        priced = self._found(task, len(self.sizes.schemes))
        return priced if priced and not priced[0].refused else []

    def settings(self, scheme: str) -> list[Row]:
        """The row of a scheme's best settings, which is in the table then; none where its own are."""
        given = self.price, self.target.source, self.options.seed
        task = settings_task(self.sizes, scheme, CAPABILITIES[self.backend], self.target.cores, *given)
        best = _best(list(filter(is_better, self._found(task, self.options.budget))))
        if best and self.backend == "cpu":
            again = self._found(task.once_more({**task.own, **best.candidate.settings}), 2)
            best = next(filter(is_better, again), None)
        if best is None:
            return []
        default_ns = round(best.ns / best.ratio.median)
        rows = [results.pipeline_row(self.target, self.sizes, best.candidate, best.ns, default_ns)]
        results.write(pipelines.KIND, self.target, rows)
        return rows

    def _found(self, task: PipelineTask, budget: int) -> list[Result]:
        """What all candidates came to, the default's first; nothing while another process is at that."""
        (search,) = run(
            lambda: [task],
            replace(self.options, budget=budget),
            lambda _, settings, outcome: self.report(self.sizes, task.result(settings, outcome)),
        )
        trials = search.trials if search.default else ()
        return [task.result(trial.settings, trial.outcome) for trial in trials]
