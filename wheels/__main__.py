"""Builds wheels: ``python -m wheels [--machine M...] [--python P...] [--out FOLDER]``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from wheels.build import CHECKOUT, LEFT_OUT, MACHINES, PYTHONS, Wheel, build
from wheels.debian import MissingError


def main(arguments: Sequence[str]) -> int:
    """Builds every wheel that is asked for, and says where it is."""
    parser = argparse.ArgumentParser(prog="python -m wheels", description=__doc__)
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument(
        "--python", nargs="+", default=list(PYTHONS), metavar="VERSION", help=f"default: {' '.join(PYTHONS)}"
    )
    parser.add_argument("--out", type=Path, default=CHECKOUT / "dist")
    chosen = parser.parse_args(arguments)
    failed = False
    for machine in chosen.machine:
        for python in chosen.python:
            begin = time.monotonic()
            try:
                path = build(Wheel(machine, python), chosen.out)
            except MissingError as error:
                print(f"no wheel for {machine}, Python {python}: {error}", file=sys.stderr)
                failed = True
                continue
            took, size = time.monotonic() - begin, path.stat().st_size / 2**20
            print(f"{path}: {size:.1f} MB, after {took:.0f} s", flush=True)
    if none := [python for python in LEFT_OUT if python not in chosen.python]:
        print(f"Python {' and '.join(none)}: no wheels, as Debian has no headers of theirs.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
