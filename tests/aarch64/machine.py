"""An aarch64 machine of Debian's and PyPI's packages, in a folder, whose programs run in qemu.

Nothing outside of the folder changes. Programs run in a user namespace of their own, where its libraries lie
over this machine's, and where binfmt_misc, mounted there too, starts qemu for them (Linux 6.7 and later).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomli

from tests.aarch64.cross import COMPILER, CPU, EMULATOR, PACKAGES, configuration
from wheels.debian import Debian, MissingError, run

TOOLS = {**PACKAGES, "apt-get": "apt"}
SYSTEM = (
    *("python3.11", "libpython3.11-dev", "libgomp1", "libstdc++6", "binutils", "libgfortran5"),
    *("python3-distutils", "libexpat1", "coreutils"),
)
PYTHON = "3.11"
# The last release whose aarch64 wheel is built for CPUs alone.
TORCH = "torch==2.10.0"
WHEELS = (
    *(TORCH, "triton-ascend==3.2.0", "ascendnpu-ir", "numpy", "pybind11", "setuptools<81"),
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing-extensions"),
    *("typer", "rich", "click", "shellingham", "pygments", "markdown-it-py", "mdurl", "packaging"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("annotated-doc", "pytest", "pluggy", "iniconfig", "pytest-timeout", "pytest-xdist", "execnet"),
    *("hypothesis", "sortedcontainers", "attrs", "pip"),
)
# Deadlines of tests are for processors that are not emulated.
PATIENCE = 20
PLATFORMS = (
    "manylinux_2_34",
    "manylinux_2_31",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_17",
    "manylinux2014",
)
# An ELF file for aarch64, whatever its flavour: Linux's documentation of binfmt_misc has the form.
MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"


@dataclass(frozen=True)
class Machine:
    """One of them.

    Attributes:
        folder: where everything of it is.
        checkout: whose code runs.
        wheel: a folder that a wheel of this project is installed in, whose code runs then: the checkout's is
            out of sight.
    """

    folder: Path
    checkout: Path
    wheel: Path | None = None

    @property
    def root(self) -> Path:
        """Debian's files."""
        return self.folder / "root"

    @property
    def site(self) -> Path:
        """Python's packages."""
        return self.folder / "site"

    @property
    def package(self) -> Path:
        """What an installation of this project would bring: its native libraries, and that it is there."""
        return self.folder / "package"

    @property
    def python(self) -> Path:
        """What starts Python there, from here or from there."""
        return self.folder / ("bin" if self.wheel is None else "bin-of-wheel") / "python3"

    @property
    def _constraints(self) -> str:
        """The versions that this project is tested with, but for torch's."""
        lines = (self.checkout / "constraints.txt").read_text().splitlines()
        return "\n".join(line for line in lines if not line.startswith("torch=="))

    def check_tools(self) -> None:
        """Looks whether this machine has what it takes.

        Raises:
            MissingError: it has not.
        """
        missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
        if missing:
            raise MissingError(f"apt-get install {' '.join(missing)}")
        if sys.platform != "linux":
            raise MissingError("this takes Linux")

    def prepare(self) -> None:
        """Makes it, where it is not made yet; native libraries are built anew where sources have changed."""
        self.check_tools()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._once("root", self._unpack_system, SYSTEM)
        self._once("site", self._install_wheels, (*WHEELS, self._constraints))
        self._make_programs()
        self._build()

    def _once(self, name: str, make: object, of: Sequence[str]) -> None:
        stamp, wanted = self.folder / f"{name}.made", "\n".join(of)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self.folder / name, ignore_errors=True)
        make()  # type: ignore[operator]
        stamp.write_text(wanted)

    def _unpack_system(self) -> None:
        Debian(self.folder / "apt", "arm64").unpack(SYSTEM, self.root)

    def _install_wheels(self) -> None:
        platforms = [part for each in PLATFORMS for part in ("--platform", f"{each}_aarch64")]
        abis = [part for each in ("cp311", "abi3", "none") for part in ("--abi", each)]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target"]
        command += [
            str(self.site),
            "--only-binary=:all:",
            "--implementation",
            "cp",
            "--python-version",
            PYTHON,
        ]
        constraints = self.folder / "constraints.txt"
        constraints.write_text(self._constraints)
        run([*command, "--constraint", str(constraints), *platforms, *abis, *WHEELS])

    def _make_programs(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir(exist_ok=True)
        own = {
            "ld": self.root / "usr/bin/aarch64-linux-gnu-ld.bfd",
            # By which CMake knows what machine it is on.
            "uname": self.root / "bin/uname",
        }
        for name, program in own.items():
            (programs / name).unlink(missing_ok=True)
            (programs / name).symlink_to(program)
        self._make_python()

    def _make_python(self) -> None:
        ours = (self.checkout, self.package) if self.wheel is None else (self.wheel,)
        path = ":".join(map(str, (*ours, self.site)))
        root, python = self.root, self.root / "usr" / "bin" / f"python{PYTHON}"
        # Python believes that it is this script: so what it starts as itself comes here again.
        self.python.parent.mkdir(exist_ok=True)
        self.python.write_text(
            "#!/bin/sh\n"
            f"export PYTHONHOME={shlex.quote(str(root / 'usr'))} PYTHONPATH={shlex.quote(path)}\n"
            f"exec {EMULATOR} -cpu {CPU} -0 {shlex.quote(str(self.python))} "
            f'{shlex.quote(str(python))} "$@"\n'
        )
        self.python.chmod(0o755)

    def _build(self) -> None:
        """The native libraries, by the cross compiler with every warning an error."""
        sources, build = self.checkout / "kernels_ascendc", self.folder / "build"
        headers = self.root / "usr/include" / f"python{PYTHON}"
        run(["cmake", "-S", str(sources), "-B", str(build), *configuration(self.folder, headers)])
        run(["cmake", "--build", str(build), "--", "--quiet"])
        native = self.package / "moe_triton" / "_native"
        native.mkdir(parents=True, exist_ok=True)
        for library in build.glob("*.so"):
            shutil.copy2(library, native)
        told = self.package / "moe_triton-0.dist-info"
        told.mkdir(exist_ok=True)
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: moe_triton\nVersion: 0\n")
        (told / "RECORD").touch()
        project = tomli.loads((self.checkout / "pyproject.toml").read_text())["project"]
        groups = {**project["entry-points"], "console_scripts": project["scripts"]}
        (told / "entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in of_group.items())
                for group, of_group in groups.items()
            )
        )

    def with_wheel(self, wheel: Path, timeout_s: float) -> Machine:
        """The same, with a wheel that its pip has installed.

        Raises:
            subprocess.CalledProcessError: pip did not take it.
        """
        target = self.folder / "wheel"
        shutil.rmtree(target, ignore_errors=True)
        options = "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(target)
        self.run("-m", "pip", "install", *options, str(wheel), timeout_s=timeout_s)
        installed = replace(self, wheel=target)
        installed._make_python()
        return installed

    def command(self, *arguments: str) -> list[str]:
        """What runs Python with these arguments, and aarch64 programs that it starts."""
        register = f":qemu-aarch64:M::{MAGIC}:{MASK}:{shutil.which(EMULATOR)}:F"
        # Not by qemu's prefix: programs that walk down from the root folder would walk there.
        libraries = f"{self.root / 'lib'}:{self.root / 'usr' / 'lib'}:/usr/lib"
        script = (
            f"mount -t overlay overlay -o {shlex.quote(f'lowerdir={libraries}')} /usr/lib && "
            "mount -t binfmt_misc none /proc/sys/fs/binfmt_misc && "
            f"printf '%s' {shlex.quote(register)} > /proc/sys/fs/binfmt_misc/register && exec \"$@\""
        )
        namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
        return [*namespace, str(self.python), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """What its programs are to see."""
        path = f"{self.python.parent}:{self.folder / 'bin'}:{os.environ['PATH']}"
        own = {"QEMU_CPU": CPU, "PATH": path, "MOE_TRITON_CACHE": str(self.folder / "kernels")}
        # qemu takes memory from GLib's slices, whose lock stays taken in a forked child (docs/aarch64.md).
        own |= {"G_SLICE": "always-malloc"}
        own |= {"OMP_NUM_THREADS": "1", "CXX": COMPILER, "MOE_TEST_PATIENCE": str(PATIENCE)}
        return {**os.environ, **own}

    def run(self, *arguments: str, timeout_s: float, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs Python there.

        Raises:
            subprocess.CalledProcessError: it failed, and that is to be no answer.
            subprocess.TimeoutExpired: it took longer.
        """
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder if self.wheel else self.checkout,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=check,
        )
