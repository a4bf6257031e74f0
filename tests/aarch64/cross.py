"""What compiles C++ for aarch64 on this machine, and what runs it."""

from __future__ import annotations

import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}
# The least that is supported has no more than this one has (`moe_triton.backends.cpu.triton.targets`).
CPU = "neoverse-n1"
SOURCES = Path(__file__).resolve().parents[2] / "kernels_ascendc"


def _needs(tool: str) -> pytest.MarkDecorator:
    reason = f"{tool} is missing: apt-get install {PACKAGES[tool]}"
    return pytest.mark.skipif(shutil.which(tool) is None, reason=reason)


needs_compiler, needs_emulator = _needs(COMPILER), _needs(EMULATOR)


def configuration(folder: Path, python_headers: Path | None = None) -> list[str]:
    """The options of CMake's that build for aarch64, with every warning an error.

    Args:
        folder: for files that they name.
        python_headers: folder of an aarch64 machine's; None for this machine's own, which serve to compile.
    """
    toolchain = folder / "toolchain.cmake"
    toolchain.write_text(
        "set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR aarch64)\n"
        f"set(CMAKE_CXX_COMPILER {COMPILER})\n"
    )
    headers = python_headers
    if headers is None:
        headers = Path(sysconfig.get_paths()["include"])
        # Where one folder serves all processors, its header asks for a file of the processor's.
        of_processor = folder / "headers" / "aarch64-linux-gnu" / headers.name
        of_processor.mkdir(parents=True, exist_ok=True)
        (of_processor / "pyconfig.h").write_text(f'#include "{sysconfig.get_config_h_filename()}"\n')
        behind = folder / "headers"
    else:
        behind = headers.parent
    return [
        *("-G", "Ninja", "-Wno-dev", "--log-level=WARNING", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_INCLUDE_DIR={headers}"),
        f"-DCMAKE_CXX_FLAGS=-Werror -idirafter {shlex.quote(str(behind))}",
    ]
