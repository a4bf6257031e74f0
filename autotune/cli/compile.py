"""``moe-triton compile``: what the NPU's compiler makes of one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from autotune.gate import GateReport, compile_for_npu, soc_named
from autotune.gate.families import parse_case, with_sizes
from autotune.gate.table import table
from autotune.npu_compiler.stages import STAGES, save_stages
from moe_triton.kernels import Family, Shape
from moe_triton.kernels.cases import AXES
from moe_triton.tools.text_table import TextTable, names, say, texts


@dataclass(frozen=True)
class CompileSettings:
    """What to compile: a kernel or a case of the table, and what differs from its sizes.

    Attributes:
        save: where the IR of every stage goes, None for nowhere.
    """

    kernel: str
    soc: str
    dtype: str | None = None
    hidden: int | None = None
    topk: int | None = None
    shared: int | None = None
    features: Sequence[str] = ()
    save: Path | None = None


def run_compile(settings: CompileSettings, console: Console) -> int:
    """Prints the report.

    Returns:
        0 if the kernel fits, else 1.

    Raises:
        ArgumentError: there is no such kernel, chip or size.
        ToolchainError: the compiler refuses it, or is missing.
    """
    soc = soc_named(settings.soc)
    family, shape = _shape_of(settings)
    kernel = family.kernel(shape)
    if settings.save is not None:
        _print_stages(save_stages(kernel, soc, settings.save), settings.save, console)
    report = compile_for_npu(kernel, soc.name)
    _print_report(family.case_name(shape), report, console)
    return 0 if report.fits else 1


def _shape_of(settings: CompileSettings) -> tuple[Family, Shape]:
    family, shape = parse_case(settings.kernel)
    given = {axis: getattr(settings, axis) for axis in AXES}
    sizes = {axis: value for axis, value in given.items() if value is not None}
    return family, with_sizes(family, shape, sizes, settings.features)


def _print_stages(saved: Sequence[str], folder: Path, console: Console) -> None:
    for name in saved:
        console.print(f"{folder / name}: {STAGES[name]}", markup=False, soft_wrap=True)


def _print_report(case: str, report: GateReport, console: Console) -> None:
    told = "in the table" if case in table() else "not in the table"
    say(f"{case} for {report.soc} ({told})", console)
    used = f"{report.ub_bytes} of {report.ub_capacity} bytes, {report.ub_share:.1%}"
    rows: list[tuple[str, object]] = [("unified buffer", Text(used, style="" if report.fits else "red"))]
    for transfer in report.transfers:
        twice = "double-buffered" if transfer.double_buffered else "one buffer"
        rows.append((transfer.kind, f"{transfer.tile}, {twice}"))
    rows += [
        ("instructions", _counted(report.instructions)),
        ("flags", f"{report.flags_set} set, {report.flags_waited} waited for"),
        ("pipe barriers", _counted(report.barriers)),
        ("loops", f"{report.loops}, of which {report.scalar_loops} go element by element"),
    ]
    if report.switched_off:
        rows.append(("given up to fit", ", ".join(report.switched_off)))
    TextTable((names("part"), texts("what the compiler made")), rows).print(console)
    if estimate := report.estimate:
        said = (
            f"Estimate, every constant of it assumed: {estimate.cycles:.0f} cycles a turn at least, bound by "
            f"{estimate.bound} (bandwidth {estimate.bandwidth:.0f}, MTE2 {estimate.mte2:.0f}, "
            f"MTE3 {estimate.mte3:.0f}, V {estimate.v:.0f}, S {estimate.s:.0f})."
        )
    else:
        said = "An outlook: nothing is estimated for this chip."
    say(said, console)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
