"""``python -m benchmarks.balance``: simulate and measure; ``... page``: write the page."""

from __future__ import annotations

import sys

from benchmarks.balance.commands import main
from benchmarks.harness import run_main

if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
