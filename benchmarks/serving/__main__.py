"""``python -m benchmarks.serving``: measure; ``... page``: write the page."""

from __future__ import annotations

import sys

from benchmarks.harness import run_main
from benchmarks.serving.commands import main

if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
