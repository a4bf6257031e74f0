"""Where C++ test programs run: here, and as on an aarch64 machine in an emulator.

What the emulator computes is what such a machine does; in what order others see it is neither's
(docs/aarch64.md): a program that ends well there shows its numbers and its code, and no order of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.aarch64.cross import COMPILER, CPU, EMULATOR, needs_compiler, needs_emulator

from .library import program


@dataclass(frozen=True)
class Target:
    """A machine.

    Attributes:
        compiler: for it; none for this machine's own.
        options: of the compiler.
        runner: what runs a program of it.
    """

    compiler: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()

    @property
    def is_emulated(self) -> bool:
        """Whether it is another machine than this one."""
        return bool(self.runner)

    def program(self, name: str, *options: str) -> list[str]:
        """What runs one of the programs in this folder, compiled with these options."""
        text = Path(__file__).with_name(f"{name}.cpp").read_text(encoding="utf-8")
        return [*self.runner, str(program(text, *self.options, *options, compiler=self.compiler))]


HERE = Target()
# Static: it needs nothing of that machine's own.
AARCH64 = Target((COMPILER,), ("-static", "-Wall", "-Wextra", "-Werror"), (EMULATOR, "-cpu", CPU))
TARGETS = [
    pytest.param(HERE, id="here"),
    pytest.param(AARCH64, id="aarch64", marks=[pytest.mark.long, needs_compiler, needs_emulator]),
]
