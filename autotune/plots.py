"""Pictures of a kernel's space: one setting with the unified buffer's cliff, two settings, pipes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from autotune.search import Found, Trial
from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import install
from moe_triton.core.soc import UB_BYTES
from moe_triton.core.space import text_of

FEWEST_VALUES = 3  # of a setting that is worth a line
SIZE = (7.0, 4.2)


def draw(search: Found, folder: Path) -> Iterator[Path]:
    """Draws what there is to see, as SVG.

    Args:
        search: a kernel with at least one candidate that was priced.
        folder: made if absent.

    Raises:
        ToolchainError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "".join(c if c.isalnum() else "-" for c in search.task.name.partition(" [")[0]).strip("-")
    names = [name for name, values in search.task.choices().items() if len(values) >= FEWEST_VALUES]
    for name in names:
        yield _kept(_over(search, name), folder / f"{stem}-over-{name}.svg")
    for one, other in combinations(search.task.choices(), 2):
        yield _kept(_landscape(search, one, other), folder / f"{stem}-{one}-{other}.svg")
    yield _kept(_pipes(search), folder / f"{stem}-pipes.svg")


def _plotting() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ToolchainError(f"matplotlib is missing: {error}. Run: {install('tune')}") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "moe_triton"
    from matplotlib import pyplot

    return pyplot


def _kept(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    _plotting().close(figure)
    return path


def _us(trial: Trial) -> float:
    return float(trial.outcome.facts["ns"]) / 1e3


def _label(search: Found) -> str:
    return search.task.name.partition(" [")[0]


def _over(search: Found, name: str) -> Any:
    """The best time at each value, and how full the unified buffer is; what cannot be had is a cross."""
    figure, axes = _plotting().subplots(figsize=SIZE)
    share = axes.twinx()
    values = search.task.choices()[name]
    at = [[trial for trial in search.trials if trial.settings[name] == value] for value in values]
    best = [min((t for t in each if t.outcome.is_exact), key=_us, default=None) for each in at]
    drawn = [(str(value), _us(trial)) for value, trial in zip(values, best, strict=True) if trial]
    axes.plot(*zip(*drawn, strict=True), marker="o", color="tab:blue", label="best time")
    refused = [str(value) for value, trial in zip(values, best, strict=True) if trial is None]
    axes.plot(refused, [0.0] * len(refused), "x", color="tab:red", label="not possible")
    fill = [max((t.outcome.facts.get("ub_bytes", 0) for t in each), default=0) / UB_BYTES for each in at]
    share.plot(
        [str(value) for value in values], fill, color="tab:gray", linestyle=":", label="unified buffer"
    )
    share.axhline(1.0, color="tab:red", linewidth=0.8)
    share.set_ylabel("largest share of the unified buffer")
    share.set_ylim(0, 1.1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(name)
    axes.set_ylabel("us")
    axes.set_title(_label(search), fontsize=8)
    axes.legend(loc="lower left")
    return figure


def _landscape(search: Found, one: str, other: str) -> Any:
    """The best time at each pair of values; empty where nothing can be had."""
    figure, axes = _plotting().subplots(figsize=SIZE)
    columns, rows = search.task.choices()[one], search.task.choices()[other]
    cells = [[float("nan")] * len(columns) for _ in rows]
    for trial in search.trials:
        if trial.outcome.is_exact:
            y, x = rows.index(trial.settings[other]), columns.index(trial.settings[one])
            cells[y][x] = min(_us(trial), cells[y][x]) if cells[y][x] == cells[y][x] else _us(trial)
    image = axes.imshow(cells, aspect="auto", origin="lower", cmap="viridis_r")
    for y, line in enumerate(cells):
        for x, us in enumerate(line):
            axes.text(x, y, f"{us:.2f}" if us == us else "-", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(one)
    axes.set_ylabel(other)
    axes.set_title(_label(search), fontsize=8)
    figure.colorbar(image, label="us")
    return figure


def _pipes(search: Found) -> Any:
    """How long each pipe is occupied: the best, the runner-up, the default."""
    figure, axes = _plotting().subplots(figsize=SIZE)
    shown = [*search.ranking[:2], *([search.default] if search.default not in search.ranking[:2] else [])]
    trials = [trial for trial in shown if trial and "busy" in trial.outcome.facts]
    pipes = list(trials[0].outcome.facts["busy"])
    height = 0.8 / len(trials)
    for number, trial in enumerate(trials):
        places = [index + number * height for index in range(len(pipes))]
        us = [trial.outcome.facts["busy"].get(pipe, 0.0) / 1e3 for pipe in pipes]
        axes.barh(places, us, height, label=f"{text_of(trial.settings)}: {_us(trial):.2f} us")
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(pipes))], pipes)
    axes.set_xlabel("us occupied")
    axes.set_title(_label(search), fontsize=8)
    axes.legend(fontsize=7)
    return figure
