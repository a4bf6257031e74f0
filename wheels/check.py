"""Whether a wheel's libraries run where its name says: what auditwheel finds, and what it leaves."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

# The C library's parts, which are there where it is.
OF_LIBC = ("libc.", "libm.", "libpthread.", "libdl.", "librt.", "ld-linux-")


def problems(wheel: Path, platform: str) -> list[str]:
    """Why a wheel is not what its name says; nothing if it is.

    Args:
        wheel: its file.
        platform: of its tag, as "manylinux_2_28_aarch64".
    """
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"auditwheel: {(done.stderr or done.stdout).strip()}"]
    found = json.loads(done.stdout)
    wrong = [f"it needs {library}" for library in found["external_libs"]]
    if not _allows(found["overall_tag"], platform):
        wrong.append(f"it runs on {found['overall_tag']}, by auditwheel, and not on {platform}")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                wrong += [f"{name} {text}" for text in library_problems(archive.read(name))]
    return wrong


def _allows(tag: str, platform: str) -> bool:
    """Whether what runs on a platform runs on another one, both manylinux's: PEP 600."""
    kinds, numbers, machines = zip(*(_parts(name) for name in (tag, platform)), strict=True)
    return kinds == ("manylinux", "manylinux") and machines[0] == machines[1] and numbers[0] <= numbers[1]


def _parts(tag: str) -> tuple[str, tuple[int, int], str]:
    kind, *rest = tag.split("_", 3)
    if len(rest) != 3 or not rest[0].isdecimal() or not rest[1].isdecimal():
        return tag, (0, 0), ""
    return kind, (int(rest[0]), int(rest[1])), rest[2]


def library_problems(library: bytes) -> list[str]:
    """What of a shared library would depend on the process that loads it, or is slower than it need be.

    Args:
        library: the content of its file.
    """
    from elftools.elf.elffile import ELFFile

    file: Any = ELFFile(io.BytesIO(library))
    dynamic, symbols = file.get_section_by_name(".dynamic"), file.get_section_by_name(".dynsym")
    needed = [tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
    wrong = [f"needs {name}" for name in needed if not name.startswith(OF_LIBC)]
    exported: set[str] = set()
    imported: set[str] = set()
    for symbol in symbols.iter_symbols():
        (imported if symbol["st_shndx"] == "SHN_UNDEF" else exported).add(symbol.name)
    if cxx := sorted(name for name in exported if name.startswith("_Z")):
        wrong.append(f"shows C++ names, which another library's could replace: {', '.join(cxx[:5])}")
    if "memcpy" not in imported:
        wrong.append("copies by another memcpy than the C library's, which chooses by the processor")
    return wrong
