"""``moe-triton tune pipeline``: which scheme, and what ranks are set to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moe_triton.tools.progress import progress

if TYPE_CHECKING:
    from autotune.pipeline.candidate import Sizes
    from autotune.pipeline.race import Result
    from autotune.pipeline.tune import Report, Tuned

ALL_SHIPPED = "every H and K that tables are shipped of"
INTERRUPTED = 130  # of a process that Ctrl-C ended
MOST_SECONDS, MOST_SEED = 86_400, 2**31 - 1
BUDGET, SECONDS, SEED, SOC, PRODUCT = 24, 20.0, 0, "cpu", "A3"


def pipeline(
    soc: Annotated[str, typer.Option(help="cpu, measured; or a processor or product, by the model")] = SOC,
    product: Annotated[str, typer.Option(help="whose schemes a CPU runs: A3 or A2")] = PRODUCT,
    ranks: Annotated[list[int] | None, typer.Option(help="of the group; may be repeated")] = None,
    hidden: Annotated[list[int] | None, typer.Option(help="elements of a row; may be repeated")] = None,
    topk: Annotated[list[int] | None, typer.Option(help="experts of a token; may be repeated")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="of a rank; may be repeated")] = None,
    all_shipped: Annotated[bool, typer.Option("--all-shipped", help=ALL_SHIPPED)] = False,
    budget: Annotated[int, typer.Option(help="candidates of one scheme at one size", min=0)] = BUDGET,
    seconds: Annotated[
        float, typer.Option(help="that one race of candidates may take", min=1, max=MOST_SECONDS)
    ] = SECONDS,
    seed: Annotated[int, typer.Option(help="of inputs, order and samples", min=0, max=MOST_SEED)] = SEED,
    study: Annotated[
        Path | None, typer.Option(help="file that keeps candidates, if not in the cache")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with what the study holds")] = False,
    output: Annotated[Path | None, typer.Option(help="folder of the tables; the user's own")] = None,
    write_shipped: Annotated[bool, typer.Option("--write-shipped", help="into the package instead")] = False,
) -> None:
    """Find the fastest scheme and settings of a group's ranks, and keep them where buffers look.

    On a CPU candidates run against the default in the same processes, in turn, until it is known which is
    faster; each must give the same bits. A budget of 0 compares schemes only.
    """
    from autotune.pipeline.measured import Effort
    from autotune.pipeline.tune import sizes_of, study_of, tune
    from moe_triton.tables import FOLDER

    console = Console()
    given = {"soc": soc, "product": product, "ranks": ranks, "hidden": hidden, "topk": topk, "tokens": tokens}
    searched = {"budget": budget, "seconds": seconds, "seed": seed}
    switches = {"all_shipped": all_shipped, "write_shipped": write_shipped}
    groups = sizes_of(soc, ranks or (), hidden or (), topk or (), tokens or (), product, all_shipped)
    try:
        with _shown(len(groups)) as (report, through):
            for tuned in tune(
                groups,
                soc,
                effort=Effort(budget, seconds, seed=seed),
                folder=FOLDER if write_shipped else output,
                settings=budget > 0,
                resume=resume,
                study=study,
                command=command_of(**given, **searched, **switches),
                report=report,
            ):
                through()
                for line in _lines(tuned):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        said = f"stopped: what was priced is kept in {study or study_of(soc)}; --resume goes on"
        Console(stderr=True).print(said, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


def command_of(**options: Any) -> str:
    """The command with these options, as far as they are not the defaults."""
    from moe_triton.tables.pipelines import COMMAND

    usual = {"budget": BUDGET, "seconds": SECONDS, "seed": SEED, "soc": SOC, "product": PRODUCT}
    words = [COMMAND]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [f"{option} {each}" for each in value]
        elif name in usual and value != usual[name]:
            words.append(f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}")
    return " ".join(words)


@contextmanager
def _shown(groups: int) -> Iterator[tuple[Report, Callable[[], None]]]:
    """What to tell each candidate, and each group that is through: the best so far is said."""
    with progress("groups", groups) as work:
        best: dict[tuple[Sizes, str], float] = {}

        def report(sizes: Sizes, result: Result) -> None:
            scheme = result.candidate.scheme
            key = sizes, scheme if result.candidate.settings else ""
            if not result.refused:
                best[key] = min(result.ratio.high, best.get(key, 1.0))
            said = f"{sizes}: {result.candidate}: {result.refused or result.ratio}"
            work.begin(f"{said}; best so far {best.get(key, 1.0):.3f} of the default")

        yield report, work.advance


def _lines(tuned: Tuned) -> Iterator[str]:
    """What a group's rows say."""
    said = ", ".join(f"{row.keys[0]}: {row.values[0]}" for row in tuned.schemes)
    yield f"{tuned.sizes}: {said or 'no scheme has others beside it that may stand for it'}"
    for row in tuned.pipelines:
        scheme, (settings, ns, default_ns) = row.keys[0], row.values
        yield f"{tuned.sizes}: {scheme}: {settings} takes {float(ns) / float(default_ns):.3f} of its defaults"
