"""``moe-triton tune pipeline``: which scheme, and what ranks are set to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from autotune.pipeline.candidate import Sizes
    from autotune.pipeline.race import Result


def pipeline(
    soc: Annotated[str, typer.Option(help="cpu, measured; or Ascend910_9391, by the model")] = "cpu",
    ranks: Annotated[list[int] | None, typer.Option(help="of the group; may be repeated")] = None,
    hidden: Annotated[list[int] | None, typer.Option(help="elements of a row; may be repeated")] = None,
    topk: Annotated[list[int] | None, typer.Option(help="experts of a token; may be repeated")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="of a rank; may be repeated")] = None,
    budget: Annotated[int, typer.Option(help="candidates of one scheme at one size", min=0)] = 24,
    seconds: Annotated[float, typer.Option(help="that one race of candidates may take", min=1)] = 20.0,
    seed: Annotated[int, typer.Option(help="of inputs and of the order")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="leave out sizes that the table has")] = False,
    output: Annotated[Path | None, typer.Option(help="folder of the tables; the user's own")] = None,
    write_shipped: Annotated[bool, typer.Option("--write-shipped", help="into the package instead")] = False,
) -> None:
    """Find the fastest scheme and settings of a group's ranks, and keep them where buffers look.

    On a CPU candidates run against the default in the same processes, in turn, until it is known which is
    faster; each must give the same bits. A budget of 0 compares schemes only.
    """
    from autotune.pipeline.measured import Effort
    from autotune.pipeline.tune import sizes_of, tune
    from moe_triton.core.errors import ArgumentError
    from moe_triton.processes import RankFailedError
    from moe_triton.tables import FOLDER

    console = Console()
    show = Console(stderr=True)

    def report(sizes: Sizes, result: Result) -> None:
        said = f"{sizes}: {result.candidate}: {result.refused or result.ratio}"
        show.print(said, markup=False, highlight=False, soft_wrap=True)

    groups = sizes_of(soc, ranks or (), hidden or (), topk or (), tokens or ())
    effort = Effort(budget, seconds, seed=seed)
    folder = FOLDER if write_shipped else output
    try:
        searched = tune(
            groups, soc, effort=effort, folder=folder, settings=budget > 0, resume=resume, report=report
        )
        for sizes, rows in searched:
            said = ", ".join(f"{row.keys[0]}: {row.values[0]}" for row in rows)
            console.print(f"{sizes}: {said}", markup=False, highlight=False, soft_wrap=True)
    except (ArgumentError, RankFailedError) as error:
        show.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        show.print("stopped: the tables hold what was found; --resume goes on", markup=False)
        raise typer.Exit(130) from None
