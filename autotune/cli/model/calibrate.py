"""``moe-triton model calibrate``: refits the model's constants from a selftest's measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def calibrate(
    report: Annotated[Path, typer.Argument(help="folder of a selftest's report, or its report.json")],
    output: Annotated[Path | None, typer.Option(help="file for the machine, for --machine")] = None,
    noise: Annotated[float, typer.Option(help="share by which times repeat", min=1e-4, max=1)] = 0.02,
) -> None:
    """Refit the model's constants to the step times of a selftest on an NPU, where they determine them."""
    from autotune.cli.model.calibrate_tables import run_calibrate
    from autotune.model.bodies.body import body_of
    from autotune.model.bodies.remembered import Remembered

    raise typer.Exit(run_calibrate(report, output, noise, Remembered(body_of), Console()))
