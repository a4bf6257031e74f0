"""What ``moe-triton model calibrate`` reads, prints and writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.model.cost import Body
from moe_triton.model.fits.calibrate import Calibration, Outcome, calibrate, errors
from moe_triton.tools.selftest.step_times import Measured, StepModel, StepTime, read_report

MOST_SHOWN = 12


def run_calibrate(
    path: Path,
    output: Path | None,
    noise: float,
    bodies: Callable[[AscendCKernel | TritonKernel], Body],
    console: Console,
) -> int:
    """Reads a report, fits, prints what became of each constant, and writes the machine.

    Args:
        path: of the report.
        output: for the machine as JSON, or None.
        noise: share by which times repeat.
        bodies: of kernels.
        console: to print to.

    Returns:
        0, or 1 if something could not be read or written.
    """
    try:
        measured = read_report(path)
        found = fitted(measured, noise, bodies)
    except ArgumentError as error:
        console.print(f"[red]{escape(str(error))}[/red]")
        return 1
    console.print(_constants(found))
    console.print(_times(found))
    console.print(_said(found), highlight=False)
    if output is not None:
        try:
            output.write_text(found.machine.to_json(), encoding="utf-8")
        except OSError as error:
            console.print(f"[red]The machine cannot be written: {escape(str(error))}[/red]")
            return 1
        console.print(f"Other commands take it as --machine {escape(str(output))}", highlight=False)
    return 0


def fitted(
    measured: Measured, noise: float, bodies: Callable[[AscendCKernel | TritonKernel], Body]
) -> Calibration[StepTime]:
    """The fit to the steps that wait for nobody.

    Raises:
        ArgumentError: the report has a step that plans do not have, or none that does not wait.
    """
    model = StepModel(bodies, int(measured.machine.cores))
    times = [time for time in measured.times if not model.waits(time)]
    return calibrate(measured.machine, times, [time.us for time in times], model, measured.where, noise)


def _constants(found: Calibration[StepTime]) -> Table:
    table = Table("constant", "before", "after", "95 %", "", title=f"Constants of {found.machine.name}")
    for name, outcome in found.outcomes.items():
        is_fitted = outcome.verdict == "fitted"
        table.add_row(
            name,
            f"{outcome.before.value:.4g}",
            f"{outcome.after.value:.4g}" if is_fitted else "",
            "{:.4g} to {:.4g}".format(*outcome.interval) if is_fitted else "",
            said_of(outcome),
            style="bold" if is_fitted else "",
        )
    return table


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


def _times(found: Calibration[StepTime]) -> Table:
    """The steps that the model is furthest from."""
    table = Table("step", "measured us", "before", "after", title="Steps, the worst first")
    for index in np.argsort(-np.abs(np.log(found.after / found.measured)))[:MOST_SHOWN]:
        us = (found.measured[index], found.before[index], found.after[index])
        table.add_row(found.measurements[index].name, *(f"{value:.4g}" for value in us))
    return table


def _said(found: Calibration[StepTime]) -> str:
    lines = [
        f"{len(found.measured)} times of steps; {len(found.fitted)} constants fitted to them; "
        f"condition of the fit {found.condition:.3g}."
    ]
    for name, predicted in (("before", found.before), ("after", found.after)):
        off = np.abs(errors(predicted, found.measured))
        lines.append(f"Error {name}: {off.mean():.1%} mean, {off.max():.1%} worst.")
    return "\n".join(lines)
