"""Folders that look like CANN, with a compiler that is none: it writes down how it was called.

Nothing that comes out of it runs on an NPU. Where a test loads the result, it holds the kernels compiled by
g++ against the emulation.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

from moe_triton.tools.cli.build import find_program
from tests.patience import seconds
from tests.surroundings import cxx

SOURCES = Path(__file__).resolve().parents[2] / "kernels_ascendc"

_BISHENG = """#!{python}
import json, pathlib, subprocess, sys

words = sys.argv[1:]
with open({record!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
if {fails}:
    print("error: no such architecture", file=sys.stderr)
    sys.exit(3)
output = words[words.index("-o") + 1]
sources = [word for word in words if word.endswith(".asc")]
if {compiles}:
    kept = [word for word in words if word.startswith(("-I", "-D")) or word in ("-shared", "-fPIC")]
    command = [*{cxx!r}, "-std=c++17", "-O0", "-pthread", "-I{emulation}", *kept, "-xc++", *sources]
    sys.exit(subprocess.run([*command, "-o", output]).returncode)
pathlib.Path(output).write_bytes(b"")
"""


class FakeCann:
    """One of these folders.

    Args:
        home: where to make it.
        version: for its version file; None for a folder without one.
        old_file: write version.cfg, as packages before ascend_toolkit_install.info had it.
        in_bin: put bisheng into bin, not into compiler/ccec_compiler/bin.
        compiles: whether bisheng leaves a library that can be loaded.
        fails: whether bisheng fails.
        machine: the architecture that it says to be for; None for this machine's.
    """

    def __init__(
        self,
        home: Path,
        version: str | None = "9.0.0",
        *,
        old_file: bool = False,
        in_bin: bool = False,
        compiles: bool = False,
        fails: bool = False,
        with_bisheng: bool = True,
        machine: str | None = None,
    ) -> None:
        self.home = home
        self._record = home / "calls.jsonl"
        of_machine = home / f"{machine or platform.machine()}-linux"
        of_machine.mkdir(parents=True)
        if version is not None and old_file:
            text = f"runtime_running_version=[1.2:{version}]\ntoolkit_running_version=[7.7.0.1.2:{version}]\n"
            (home / "version.cfg").write_text(text)
        elif version is not None:
            text = f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100R001C25\n"
            (of_machine / "ascend_toolkit_install.info").write_text(text)
        self.bisheng = home / ("bin" if in_bin else "compiler/ccec_compiler/bin") / "bisheng"
        if with_bisheng:
            self.bisheng.parent.mkdir(parents=True)
            self.bisheng.write_text(
                _BISHENG.format(
                    python=sys.executable,
                    record=str(self._record),
                    compiles=compiles,
                    fails=fails,
                    emulation=SOURCES / "emulation",
                    cxx=cxx(),
                )
            )
            self.bisheng.chmod(self.bisheng.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of every call of the compiler."""
        if not self._record.exists():
            return []
        return [json.loads(line) for line in self._record.read_text().splitlines()]


def cmake(*words: str | Path, home: Path | None = None, code: int | None = 0) -> str:
    """Runs CMake, ASCEND_HOME_PATH being `home` or unset, and returns what it prints.

    Args:
        code: what it exits with; None for any failure, whose number is the build program's own.
    """
    environment = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}
    if home is not None:
        environment["ASCEND_HOME_PATH"] = str(home)
    done = subprocess.run(
        [find_program("cmake"), *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds(240),
        check=False,
    )
    assert done.returncode == code if code is not None else done.returncode != 0, done.stdout
    return done.stdout
