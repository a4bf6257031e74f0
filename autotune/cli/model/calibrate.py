"""``moe-triton model calibrate``: refits the model's constants from a selftest's measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from autotune.model.cost import KernelCost
from autotune.model.fits import calibrate as fits
from autotune.model.fits.calibrate import Calibration, Outcome, errors
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.remembered import Remembered
from autotune.selftest_reports.step_times import Measured, StepModel, StepTime, read_report
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers, print_parts, say, texts

MOST_SHOWN = 12


def calibrate(
    report: Annotated[Path, typer.Argument(help="folder of a selftest's report, or its report.json")],
    output: Annotated[Path | None, typer.Option(help="file for the machine, for --machine")] = None,
    noise: Annotated[float, typer.Option(help="share by which times repeat", min=1e-4, max=1)] = 0.02,
) -> None:
    """Refit the model's constants to the step times of a selftest on an NPU, where they determine them."""
    run_calibrate(report, output, noise, Remembered(kernel_cost_of), Console())


def run_calibrate(
    path: Path,
    output: Path | None,
    noise: float,
    kernel_costs: Callable[[AscendCKernel | TritonKernel], KernelCost],
    console: Console,
) -> None:
    """Reads a report, fits, prints what became of each constant, and writes the machine.

    Args:
        path: of the report.
        output: for the machine as JSON, or None.
        noise: share by which times repeat.
        kernel_costs: of kernels.
        console: to print to.

    Raises:
        ArgumentError: the report is none, or says nothing that could be fitted.
        OSError: the machine cannot be written.
    """
    with progress("fitting"):
        calibration = fitted(read_report(path), noise, kernel_costs)
    print_parts((_constants(calibration), _times(calibration), _said(calibration)), console)
    if output is not None:
        output.write_text(calibration.machine.to_json(), encoding="utf-8")
        say(f"Other commands take it as --machine {output}", console)


def fitted(
    measured: Measured, noise: float, kernel_costs: Callable[[AscendCKernel | TritonKernel], KernelCost]
) -> Calibration[StepTime]:
    """The fit to the steps that wait for nobody.

    Raises:
        ArgumentError: the report has a step that plans do not have, or none that does not wait.
    """
    model = StepModel(kernel_costs, int(measured.machine.cores))
    times = [time for time in measured.times if not model.waits(time)]
    return fits.calibrate(measured.machine, times, [time.us for time in times], model, measured.where, noise)


def _constants(calibration: Calibration[StepTime]) -> TextTable:
    figures = map(numbers, ("before", "after", "95 %"))
    columns = names("constant"), *figures, texts("what became of it")
    rows = []
    for constant, outcome in calibration.outcomes.items():
        is_fitted = outcome.verdict == "fitted"
        rows.append(
            (
                Text(constant, style="bold" if is_fitted else ""),
                f"{outcome.before.value:.4g}",
                f"{outcome.after.value:.4g}" if is_fitted else "",
                "{:.4g} to {:.4g}".format(*outcome.interval) if is_fitted else "",
                said_of(outcome),
            )
        )
    return TextTable(columns, rows, f"Constants of {calibration.machine.name}")


def said_of(outcome: Outcome) -> str:
    """What became of a constant, for people."""
    return {
        "measured": "measured directly",
        "fitted": "fitted; ended at the end of its range" if outcome.is_at_bound else "fitted",
        "alike": f"left: the times cannot tell it from {outcome.alike}",
        "weak": "left: the times say too little of it",
        "unused": "left: no time depends on it",
        "fixed": "left: its range has no width",
    }[outcome.verdict]


def _times(calibration: Calibration[StepTime]) -> TextTable:
    """The steps that the model is furthest from."""
    rows = []
    for index in np.argsort(-np.abs(np.log(calibration.after / calibration.measured)))[:MOST_SHOWN]:
        us = (calibration.measured[index], calibration.before[index], calibration.after[index])
        rows.append((calibration.measurements[index].name, *(f"{value:.4g}" for value in us)))
    columns = texts("step"), numbers("measured us"), numbers("before"), numbers("after")
    return TextTable(columns, rows, "Steps, the worst first")


def _said(calibration: Calibration[StepTime]) -> str:
    lines = [
        f"{len(calibration.measured)} times of steps; {len(calibration.fitted)} constants fitted to them; "
        f"condition of the fit {calibration.condition:.3g}."
    ]
    for when, predicted in (("before", calibration.before), ("after", calibration.after)):
        off = np.abs(errors(predicted, calibration.measured))
        lines.append(f"Error {when}: {off.mean():.1%} mean, {off.max():.1%} worst.")
    return "\n".join(lines)
