"""Runs what there is to run on aarch64: ``make test-aarch64``, or ``python -m tests.aarch64 [STEP...]``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.aarch64 import code
from tests.aarch64.machine import PYTHON, Machine
from wheels.build import Wheel, build
from wheels.debian import MissingError

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "build" / "aarch64"
STEP_S = 3600.0
CLI = "from moe_triton.tools.cli.app import app; app()"
# Of the tests those that the processor matters to.
FILES = (
    "tests/backends/test_triton_toolchain.py",
    "tests/backends/test_triton_lowering.py",
    "tests/backends/test_triton_launch.py",
    "tests/backends/test_ids.py",
    "tests/backends/test_extension.py",
    "tests/backends/test_row_copies.py",
    "tests/kernels/test_route.py",
    "tests/test_rounds.py",
    "tests/test_layout.py",
)
# How what an NPU needs is found and built, and rounds on the stand-in for torch_npu.
NPU_FILES = (
    "tests/build/test_toolchain.py",
    "tests/build/test_cmake.py::test_a_version_can_be_given_where_no_file_tells_it",
    "tests/build/test_cmake.py::test_with_cann_the_cpu_build_takes_the_npu_along",
    "tests/build/test_library.py",
    "tests/npu/test_windows.py",
    "tests/npu/test_dispatch_combine.py::test_rows_that_are_padded",
    "tests/npu/test_dispatch_combine.py::test_two_streams_give_the_same_bits",
    "tests/npu/test_graphs.py::test_graphs_give_the_references_bits",
)
# By the NPU's compiler: kernels of different kinds that have few variants, for the chips whose compiler the
# package has for aarch64, which are not 950.
GATED, CHIPS = ("route", "select", "own_offsets"), ("A2", "A3")


def _doctor(machine: Machine) -> str:
    return machine.run("-c", CLI, "doctor", timeout_s=STEP_S, check=False).stdout


def _outputs(machine: Machine) -> str:
    path = machine.folder / "outputs.pt"
    command = [sys.executable, "-m", "tests.aarch64.outputs", "write", str(path)]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True)
    return machine.run("-m", "tests.aarch64.outputs", "compare", str(path), timeout_s=STEP_S).stdout


def _rounds(machine: Machine) -> str:
    return machine.run("-m", "tests.aarch64.rounds", timeout_s=STEP_S).stdout


def _pytest(machine: Machine, *files: str) -> str:
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "1800"]
    return machine.run("-m", "pytest", *options, *files, timeout_s=STEP_S).stdout


def _tests(machine: Machine) -> str:
    return _pytest(machine, *FILES)


def _demo(machine: Machine) -> str:
    return machine.run("-c", CLI, "demo", timeout_s=STEP_S).stdout


def _code(machine: Machine) -> str:
    said = machine.run("-m", "tests.aarch64.code", timeout_s=STEP_S).stdout
    lines = (line.partition(" ") for line in said.splitlines())
    return "\n".join(f"{name}: {code.read(Path(path))}" for name, _, path in lines)


def _npu(machine: Machine) -> str:
    said = machine.run("-m", "tests.aarch64.npu", timeout_s=STEP_S).stdout
    return said + _pytest(machine, *NPU_FILES)


def _gate(machine: Machine) -> str:
    options = [f"--kernel={kernel}" for kernel in GATED] + [f"--soc={chip}" for chip in CHIPS]
    return machine.run("-c", CLI, "gate", *options, timeout_s=STEP_S).stdout


def _wheel(machine: Machine) -> str:
    """An installation of the wheel, of which nothing is the checkout's."""
    wheel = build(Wheel("aarch64", PYTHON), machine.folder / "dist")
    installed = machine.with_wheel(wheel, STEP_S)
    is_of_wheel = "import sys, moe_triton as m; sys.exit(not m.__file__.startswith(sys.argv[1]))"
    installed.run("-c", is_of_wheel, f"{installed.wheel}/", timeout_s=STEP_S)
    said = installed.run("-c", CLI, "doctor", timeout_s=STEP_S).stdout
    sizes = {"ranks": 2, "tokens": 4, "hidden": 512, "topk": 2, "experts": 4, "rounds": 2}
    options = [f"--{name}={size}" for name, size in sizes.items()]
    return f"{wheel.name}\n{said}{installed.run('-c', CLI, 'demo', *options, timeout_s=STEP_S).stdout}"


STEPS: dict[str, Callable[[Machine], str]] = {
    "doctor": _doctor,
    "outputs": _outputs,
    "code": _code,
    "rounds": _rounds,
    "tests": _tests,
    "demo": _demo,
    "npu": _npu,
    "gate": _gate,
    "wheel": _wheel,
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
            except MissingError as error:
                said, failed_here = str(error), True
            failed |= failed_here
            verdict = "failed" if failed_here else "is done"
            print(f"--- {name} {verdict} after {time.monotonic() - begin:.0f} s\n{said.rstrip()}", flush=True)
    except MissingError as error:
        print(f"there is no aarch64 machine here: {error}", file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
