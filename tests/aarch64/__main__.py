"""Runs what there is to run on aarch64: ``make test-aarch64``, or ``python -m tests.aarch64 [STEP...]``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.aarch64 import code
from tests.aarch64.machine import Machine, MissingError

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "build" / "aarch64"
STEP_S = 3600.0
CLI = "from moe_triton.tools.cli.app import app; app()"
# Of the tests those that the processor matters to.
FILES = (
    "tests/backends/test_triton_toolchain.py",
    "tests/backends/test_triton_launch.py",
    "tests/backends/test_ids.py",
    "tests/backends/test_extension.py",
    "tests/backends/test_row_copies.py",
    "tests/test_rounds.py",
    "tests/test_layout.py",
)


def _doctor(machine: Machine) -> str:
    return machine.run("-c", CLI, "doctor", timeout_s=STEP_S, check=False).stdout


def _outputs(machine: Machine) -> str:
    path = machine.folder / "outputs.pt"
    command = [sys.executable, "-m", "tests.aarch64.outputs", "write", str(path)]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True)
    return machine.run("-m", "tests.aarch64.outputs", "compare", str(path), timeout_s=STEP_S).stdout


def _rounds(machine: Machine) -> str:
    return machine.run("-m", "tests.aarch64.rounds", timeout_s=STEP_S).stdout


def _tests(machine: Machine) -> str:
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "1800"]
    return machine.run("-m", "pytest", *options, *FILES, timeout_s=STEP_S).stdout


def _demo(machine: Machine) -> str:
    return machine.run("-c", CLI, "demo", timeout_s=STEP_S).stdout


def _code(machine: Machine) -> str:
    said = machine.run("-m", "tests.aarch64.code", timeout_s=STEP_S).stdout
    lines = (line.partition(" ") for line in said.splitlines())
    return "\n".join(f"{name}: {code.read(Path(path))}" for name, _, path in lines)


STEPS: dict[str, Callable[[Machine], str]] = {
    "doctor": _doctor,
    "outputs": _outputs,
    "code": _code,
    "rounds": _rounds,
    "tests": _tests,
    "demo": _demo,
}


def main(names: list[str]) -> int:
    """Runs steps, all of them if none is named."""
    machine, failed = Machine(FOLDER, CHECKOUT), False
    try:
        begin = time.monotonic()
        machine.prepare()
        print(f"the machine is ready after {time.monotonic() - begin:.0f} s", flush=True)
        for name in names or STEPS:
            begin = time.monotonic()
            try:
                said, failed_here = STEPS[name](machine), False
            except subprocess.CalledProcessError as error:
                said, failed_here = f"{error.stdout or ''}{error.stderr or ''}", True
            except subprocess.TimeoutExpired as error:
                said, failed_here = f"{error}: {error.stdout!r}", True
            failed |= failed_here
            verdict = "failed" if failed_here else "is done"
            print(f"--- {name} {verdict} after {time.monotonic() - begin:.0f} s\n{said.rstrip()}", flush=True)
    except MissingError as error:
        print(f"there is no aarch64 machine here: {error}", file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
