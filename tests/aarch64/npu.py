"""What an NPU needs of aarch64, without one: ``python -m tests.aarch64.npu``.

A CANN for this machine is made, by whose compiler the command builds a library that is loaded; doctor
finds both. One for another machine is refused.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from moe_triton.backends.npu import library
from moe_triton.core import native_files
from moe_triton.schemes.ascendc import LAUNCHED
from moe_triton.tools.cli import doctor
from moe_triton.tools.cli.app import app
from tests.build.fake_cann import FakeCann


def command(*words: str | Path) -> tuple[int, str]:
    """What a command of moe-triton exits with, and what it says."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
    return done.exit_code, " ".join(done.output.split())


def check(folder: Path) -> list[str]:
    """What is not as it should be."""
    wrong: list[str] = []
    cann = FakeCann(folder / "cann", compiles=True)
    os.environ["ASCEND_HOME_PATH"] = str(cann.home)
    native_files.folders = lambda: (folder,)  # type: ignore[assignment]
    code, said = command("build", "--output", folder)
    if code or not said.endswith(f"built {folder / library.LIBRARY}"):
        return [f"build --backend npu: {said}"]
    _, tables = library.load(folder / library.LIBRARY)
    tables.check(*LAUNCHED)
    found = {name.removeprefix(doctor.NPU): present for name, present, *_ in doctor.components()}
    needed = "CANN", "bisheng", "Ascend C kernels"
    wrong += [f"doctor: {name} is missing" for name in needed if not found[name]]
    (other,) = {"x86_64", "aarch64"} - {platform.machine()}
    foreign = FakeCann(folder / "foreign", machine=other)
    code, said = command("build", "--cann", foreign.home, "--output", folder)
    if code != 1 or f"it is for {other}, and this machine is {platform.machine()}" not in said:
        wrong.append(f"a CANN for {other}: {said}")
    code, said = command("selftest", "--backend", "npu", "--quick", "--output", folder / "report")
    if code != 1 or "failed environment" not in said:
        wrong.append(f"selftest without a card: {said}")
    return wrong


def main() -> int:
    """Checks, and says what differs."""
    with tempfile.TemporaryDirectory() as folder:
        wrong = check(Path(folder))
    print("\n".join(wrong) or f"built, loaded and found by a CANN for {platform.machine()}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
