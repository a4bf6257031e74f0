"""Several wrong kernels in one library, each in a namespace of its own.

Most of what a compiler does for one mutant it does for the emulation, which all have in common.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from .library import BUILDS, LAUNCHER, LAUNCHERS, Library, Patch, compiled, patched, with_launchers

ALIKE = ("emulation/", "include/moe_layout.h")  # in all mutants of a library
ONCE = "#ifdef MOE_EMULATION\n"  # from here on the file of launchers has what a library has once
MACROS = "MOE_LAUNCHER", "MOE_FUSED_LAUNCHER", "MOE_KERNEL", "MOE_KERNEL_BEGIN", "MOE_LAUNCH"

Wrong = tuple[tuple[Patch, ...], Collection[str]]
"""A mutant's patches, and the symbols of the launchers that it needs."""


def can_share(patches: Sequence[Patch]) -> bool:
    """Whether nothing changes but kernels."""
    return all(patch.file.startswith("include/") and not patch.file.startswith(ALIKE) for patch in patches)


def build_batch(mutants: Sequence[Wrong]) -> Path:
    """Compiles them, strictly, unless the same were compiled before, and returns the library's path.

    Raises:
        AssertionError: a patch does not apply exactly once.
        subprocess.CalledProcessError: the compiler refuses the text.
    """
    true = patched([])
    texts = {name: text for name, text in true.items() if name.startswith(ALIKE)}
    forget = "".join(f"#undef {name}\n" for name in ("moe", *MACROS))
    batch = '#include "kernel_operator.h"\n'
    for number, (patches, launchers) in enumerate(mutants):
        texts |= _of_one(number, patched(patches), launchers)
        batch += f"namespace moe_{number} {{ using namespace ::moe; }}\n#define moe moe_{number}\n"
        batch += f'#include "{_folder(number)}/{Path(LAUNCHERS).name}"\n{forget}'
    texts["batch.cpp"] = batch + ONCE + true[LAUNCHERS].partition(ONCE)[2]
    return compiled(texts, "batch.cpp", strict=True, is_mutant=True)


def load_from_batch(path: Path, number: int) -> Library:
    """One of its mutants, with an emulation of its own: another may have left it in any state."""
    # A file that is loaded already is not loaded again.
    with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
        return Library(Path(shutil.copy(path, folder)), _prefix(number))


def _of_one(number: int, texts: dict[str, str], launchers: Collection[str]) -> dict[str, str]:
    """A mutant's files, in one folder: there the compiler looks first for what they include."""
    *_, last = LAUNCHER.finditer(texts[LAUNCHERS])
    kernels = with_launchers(texts[LAUNCHERS][: last.end()] + "\n", launchers)
    own = {name: text for name, text in texts.items() if not name.startswith(ALIKE)} | {LAUNCHERS: kernels}
    # These are in no namespace.
    for name in (LAUNCHERS, "launch/launch.h"):
        own[name] = re.sub(r"\b(moe_##name|name##_kernel)\b", rf"{_prefix(number)}##\1", own[name])
    # To `#pragma once` files of the same text are one, wherever they lie: the last line tells mutants apart.
    last = f"// {_folder(number)}\n"
    return {f"{_folder(number)}/{Path(name).name}": text + last for name, text in own.items()}


def _folder(number: int) -> str:
    return f"mutant_{number}"


def _prefix(number: int) -> str:
    """Of its launchers' symbols."""
    return f"{_folder(number)}_"
