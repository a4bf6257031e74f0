"""``python -m benchmarks.compare``: measure; ``... scaling``: vary sizes; ``... page``: write the page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks.compare import commands
from benchmarks.harness import run_main

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "run": commands.run,
    "scaling": commands.scaling,
    "page": commands.page,
}


def main(arguments: Sequence[str]) -> None:
    """Without a command's name, measure."""
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    COMMANDS[name or "run"](arguments[bool(name) :])


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
