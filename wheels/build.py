"""One wheel: its compiler, Python's headers, the build."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from wheels.check import problems
from wheels.debian import Debian, MissingError, run

CHECKOUT = Path(__file__).resolve().parents[1]
WORK = CHECKOUT / "build" / "wheels"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Architectures, with Debian's names of them."""
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
"""Debian's releases, each of which has one Python."""
PYTHONS = tuple(RELEASES)
LEFT_OUT = ("3.10", "3.12")
"""Pythons that moe_triton runs on, of which no release of Debian has headers."""
GLIBC = "2.28"
# Compilers and flags of whoever builds; and CANN, whose library would be of this machine.
_FOREIGN = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "ASCEND_HOME_PATH")


@dataclass(frozen=True)
class Wheel:
    """What a wheel is for.

    Attributes:
        machine: the architecture, as `platform.machine` calls it.
        python: its version, as "3.11".
    """

    machine: str
    python: str

    @property
    def platform(self) -> str:
        """The platform of its tag."""
        return f"manylinux_{GLIBC.replace('.', '_')}_{self.machine}"

    @property
    def interpreter(self) -> str:
        """The interpreter of its tag."""
        return f"cp{self.python.replace('.', '')}"

    @property
    def is_for_this_python(self) -> bool:
        """Whether this process could import it."""
        return self.python == _this_python() and self.machine == platform.machine()


def build(wheel: Wheel, out: Path, work: Path = WORK) -> Path:
    """Builds a wheel of this checkout.

    Args:
        wheel: what it is for.
        out: where to put it.
        work: where compiled files, headers and zig's libraries are kept.

    Returns:
        The wheel, which has been checked (`wheels.check`).

    Raises:
        MissingError: zig, auditwheel or Python's headers are missing, or a step failed.
    """
    if wheel.machine not in MACHINES:
        raise MissingError(f"machine is {wheel.machine}, but it must be {' or '.join(MACHINES)}")
    headers, tools = _headers(wheel, work), _make_tools(wheel.machine, work)
    stage = work / "stage" / f"{wheel.interpreter}-{wheel.machine}"
    shutil.rmtree(stage, ignore_errors=True)
    settings = {
        # One folder for each machine: of the libraries only one differs between Pythons.
        "build-dir": work / wheel.machine,
        "wheel.tags": f"{wheel.interpreter}-{wheel.interpreter}-{wheel.platform}",
        # This machine's strip knows no other machine's files; the linker leaves symbols out.
        "install.strip": "false",
        "cmake.define.CMAKE_TOOLCHAIN_FILE": tools,
        "cmake.define.CMAKE_SHARED_LINKER_FLAGS": "-s",
        "cmake.define.CMAKE_MODULE_LINKER_FLAGS": "-s",
        "cmake.define.PYTHON_HEADERS": ";".join(map(str, headers)),
    }
    options = [part for name, value in settings.items() for part in ("--config-settings", f"{name}={value}")]
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    # CMake and ninja are where pip has put them.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    run(
        [*pip, "--no-build-isolation", "--no-deps", "--wheel-dir", stage, *options, CHECKOUT], env=environment
    )
    (built,) = stage.glob("*.whl")
    if wrong := problems(built, wheel.platform):
        raise MissingError(f"{built.name} is not what its name says: {'; '.join(wrong)}")
    out.mkdir(parents=True, exist_ok=True)
    return built.replace(out / built.name)


def _this_python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _headers(wheel: Wheel, work: Path) -> tuple[Path, ...]:
    """The folders that Python.h and what it includes are in."""
    own = Path(sysconfig.get_paths()["include"])
    if wheel.is_for_this_python and (own / "Python.h").exists():
        return (own,)
    if wheel.python not in RELEASES:
        known = " and ".join(f"{python} ({release})" for python, release in RELEASES.items())
        raise MissingError(
            f"there are no headers of Python {wheel.python} for {wheel.machine} here: Debian has those of "
            f"{known}. Build for one of these, or install from a checkout on a machine with that Python."
        )
    release, architecture = RELEASES[wheel.python], MACHINES[wheel.machine]
    folder = work / "headers" / f"{release}-{architecture}"
    include = folder / "root" / "usr" / "include"
    if not (include / f"python{wheel.python}" / "Python.h").exists():
        packages = Debian(folder, architecture, release)
        packages.unpack([f"libpython{wheel.python}-dev"], folder / "root", alone=True)
    # pyconfig.h includes the architecture's own, by a path from the second.
    return include / f"python{wheel.python}", include


def _make_tools(machine: str, work: Path) -> Path:
    """zig as a compiler of one word; returns CMake's file about it."""
    for name in ("ziglang", "auditwheel"):
        if importlib.util.find_spec(name) is None:
            raise MissingError(f"{name} is missing: make wheels, or pip install '{CHECKOUT}[wheels]'")
    spec = importlib.util.find_spec("ziglang")
    assert spec is not None
    assert spec.origin is not None
    zig, tools = Path(spec.origin).parent / "zig", work / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    compiler, description = tools / f"{machine}-c++", tools / f"{machine}.cmake"
    words = [str(zig), "c++", "-target", f"{machine}-linux-gnu.{GLIBC}"]
    # Which has compiled libc++ once: not in a home that changes.
    cache = shlex.quote(str(work / "zig"))
    compiler.write_text(f'#!/bin/sh\nexport ZIG_GLOBAL_CACHE_DIR={cache}\nexec {shlex.join(words)} "$@"\n')
    compiler.chmod(0o755)
    description.write_text(
        f"set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR {machine})\n"
        f"set(CMAKE_CXX_COMPILER {compiler})\n"
    )
    return description
