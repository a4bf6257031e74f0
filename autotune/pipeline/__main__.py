"""``python -m autotune.pipeline``: the same as ``moe-triton tune pipeline``."""

import typer

from autotune.pipeline.command import pipeline
from moe_triton.tools.cli.errors import errors_shown

if __name__ == "__main__":
    with errors_shown():
        typer.run(pipeline)
