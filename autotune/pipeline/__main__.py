"""``python -m autotune.pipeline``: the same as ``moe-triton tune pipeline``."""

import typer

from autotune.pipeline.command import pipeline

if __name__ == "__main__":
    typer.run(pipeline)
