"""``moe-triton tune kernels`` that waits at its third candidate, to be interrupted there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from autotune.kernels.modelled import ModelledTask
from autotune.search import Outcome
from moe_triton.core.space import Settings
from moe_triton.tools.cli.app import app

WAIT_S = 120.0
SMALL = ("--kernel", "stamps", "--tokens", "128", "--dtype", "bf16", "--workers", "1")


def main(folder: Path) -> None:
    usual, asked = ModelledTask.evaluate, folder / "asked"

    def evaluate(task: ModelledTask, settings: Settings, best: float | None) -> Outcome:
        with asked.open("a") as file:
            file.write(f"{task.name} {dict(settings)}\n")
        if len(asked.read_text().splitlines()) == 3:
            (folder / "third").touch()
            time.sleep(WAIT_S)
        return usual(task, settings, best)

    ModelledTask.evaluate = evaluate  # type: ignore[method-assign]
    app(["tune", "kernels", *SMALL, "--study", str(folder / "study.db"), "--output", str(folder)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
