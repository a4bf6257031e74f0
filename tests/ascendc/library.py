"""Builds the kernels for the CPU, as they are or patched, and calls them."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_triton.backends.cpu.native import SettingsStruct
from moe_triton.backends.cpu.nic import NicDescription
from moe_triton.core.abi import first_words
from moe_triton.core.ascendc import REPORT_WORDS
from moe_triton.core.kernel import AscendCKernel, fused_kernel
from moe_triton.core.region import REGION_DIMS, Region
from moe_triton.schemes.ascendc import FUSED, KERNELS, LAUNCHED, tables
from moe_triton.tools import codegen
from tests.patience import seconds
from tests.processor_time import of_nobody
from tests.surroundings import cxx

SOURCES = Path(__file__).resolve().parents[2] / "kernels_ascendc"
BUILDS = SOURCES.parent / "build" / "ascendc-tests"  # kept between runs; `make clean` removes it
FOLDERS = ("include", "emulation", "launch", "host")
LAUNCHERS = "launch/moe_kernels.asc"
LAUNCHER = re.compile(r"^MOE_(FUSED_)?LAUNCHER\(\w+, (?P<name>\w+)\)$", re.MULTILINE)
COMPILE_SECONDS = seconds(120)
NOT_KEPT = -7
FLAGS = ("-std=c++17", "-shared", "-fPIC", "-pthread", "-fvisibility-inlines-hidden", "-fno-gnu-unique")

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
Phase = tuple[str, Mapping[str, object]]
"""A kernel's name and its arguments."""


@dataclass(frozen=True)
class Patch:
    """A textual change to a source, which must apply exactly once.

    Attributes:
        file: path below ``kernels_ascendc``.
        old: what stands there.
        new: what to put in its place.
    """

    file: str
    old: str
    new: str


def patched(patches: Sequence[Patch]) -> dict[str, str]:
    """The sources by path, changed.

    Raises:
        AssertionError: a patch does not apply exactly once.
    """
    texts = {f"include/{name}": text for name, text in codegen.headers(tables()).items()}
    texts |= {
        str(path.relative_to(SOURCES)): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in sorted((SOURCES / folder).iterdir())
    }
    for patch in patches:
        found = texts[patch.file].count(patch.old)
        assert found == 1, f"{patch.file} has {found} places like this, the patch needs 1:\n{patch.old}"
        texts[patch.file] = texts[patch.file].replace(patch.old, patch.new)
    return texts


def with_launchers(text: str, symbols: Collection[str]) -> str:
    """The file of launchers with these only: what is not launched need not be compiled."""
    return LAUNCHER.sub(lambda found: found[0] if f"moe_{found['name']}" in symbols else "", text)


def build(*, strict: bool, patches: Sequence[Patch] = (), launchers: Collection[str] | None = None) -> Path:
    """Compiles the launchers, unless the same text was compiled before, and returns the library's path.

    Args:
        strict: strict emulation, or the fast one.
        patches: changes to the sources.
        launchers: their symbols; None for all.

    Raises:
        AssertionError: a patch does not apply exactly once.
        subprocess.CalledProcessError: the compiler refuses the text.
    """
    texts = patched(patches)
    if launchers is not None:
        texts[LAUNCHERS] = with_launchers(texts[LAUNCHERS], launchers)
    changes_emulation = any(patch.file.startswith("emulation/") for patch in patches)
    return compiled(texts, LAUNCHERS, strict, is_mutant=bool(patches), is_parsed=not changes_emulation)


def compiled(
    texts: dict[str, str], source: str, strict: bool, is_mutant: bool = False, is_parsed: bool = True
) -> Path:
    """Compiles one of the texts, unless the same were compiled before, and returns the library's path.

    Args:
        texts: by path.
        source: path of the one.
        strict: see `build`.
        is_mutant: whether a kernel is wrong.
        is_parsed: whether a mutant may take the emulation as it was parsed for another.

    Raises:
        subprocess.CalledProcessError: the compiler refuses the text.
    """
    # A mutant runs until it dies, mostly at once: compiling it is what takes time.
    level = ("-O0" if is_mutant else "-O1") if strict else "-O2"
    options = [*FLAGS, level, *(["-DMOE_EMULATION_STRICT"] if strict else [])]
    digest = _digest(options, texts)
    library = BUILDS / f"{digest}.so"
    if library.exists():
        return library
    parsed = _parsed_emulation(options, texts) if is_mutant and is_parsed else []
    with contextlib.nullcontext() if is_mutant else of_nobody():
        return _compile(texts, [*options, *parsed, "-xc++", source], library)


def build_counting(patches: Sequence[Patch], launchers: Collection[str]) -> Path:
    """The same for what counts what kernels do (``emulation/counting_core.h``)."""
    texts = patched(patches)
    texts[LAUNCHERS] = with_launchers(texts[LAUNCHERS], launchers)
    options = [*FLAGS, "-O1", "-DMOE_EMULATION_COUNTING"]
    library = BUILDS / f"{_digest(options, texts)}.so"
    return library if library.exists() else _compile(texts, [*options, "-xc++", LAUNCHERS], library)


def program(text: str, *options: str, compiler: Sequence[str] = ()) -> Path:
    """Compiles a program that may include the kernels and the emulation, unless the same was compiled before.

    Args:
        text: of its source.
        options: for the compiler.
        compiler: another one than this machine's own.
    """
    texts = {**patched([]), "main.cpp": text}
    options = "-std=c++17", "-pthread", *options, "main.cpp"
    path = BUILDS / _digest([*compiler, *options], texts)
    return path if path.exists() else _compile(texts, list(options), path, compiler)


def _digest(options: Sequence[str], texts: Mapping[str, str]) -> str:
    """The name of what is compiled of these texts."""
    return hashlib.sha256(repr((options, sorted(texts.items()))).encode()).hexdigest()[:24]


def _parsed_emulation(options: list[str], texts: dict[str, str]) -> list[str]:
    """Options that take the emulation, 40% of a mutant's build, as the compiler has parsed it before."""
    emulation = {name: text for name, text in texts.items() if name.startswith("emulation/")}
    emulation["include/moe_layout.h"] = texts["include/moe_layout.h"]
    digest = _digest(options, emulation)
    header = BUILDS / f"{digest}.h"
    parsed = header.with_suffix(".h.gch")
    if not parsed.exists():
        for old in BUILDS.glob("*.gch"):  # 80 MB each
            old.unlink(missing_ok=True)
        # What the compiler reads where it cannot use the other file.
        BUILDS.mkdir(parents=True, exist_ok=True)
        header.write_text('#include "kernel_operator.h"\n', encoding="utf-8")
        _compile(emulation, [*options, "-xc++-header", "emulation/kernel_operator.h"], parsed)
    return ["-include", str(header)]


def _compile(texts: dict[str, str], options: list[str], result: Path, compiler: Sequence[str] = ()) -> Path:
    """Has the compiler make `result`, in a folder with these sources."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
        for name, text in texts.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        subprocess.run(
            [*(compiler or cxx()), *options, "-Iemulation", "-Iinclude", "-o", "made"],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
        )
        # Another worker may have made the same: either file will do.
        Path(folder, "made").replace(result)
    return result


def include_options(folder: Path) -> list[str]:
    """For a compiler: where the headers are. The generated ones are written to `folder`."""
    codegen.write(folder, tables())
    return [f"-I{path}" for path in (SOURCES / "emulation", SOURCES / "include", folder)]


class LaunchError(Exception):
    """A check of the emulation failed."""


class NoLauncherError(Exception):
    """A library was built without this launcher."""


def address(array: np.ndarray) -> int:
    """Where an array's first byte lies."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def pack(kernel: AscendCKernel, arguments: dict[str, object]) -> np.ndarray:
    """A kernel's argument struct: 64-bit words in the order of its declaration."""
    assert arguments.keys() == {arg.name for arg in kernel.args}
    words: list[int] = []
    for arg in kernel.args:
        value = arguments[arg.name]
        if arg.type in REGION_DIMS:
            assert isinstance(value, Region)
            words.extend(value.words())
        elif isinstance(value, np.ndarray):
            words.append(address(value))
        else:
            assert isinstance(value, int | np.integer)
            words.append(int(value))
    return np.array(words, dtype=np.int64)


@dataclass(frozen=True)
class Completed:
    """A launch with everything that a test need not say.

    Attributes:
        name: of its kernel.
        arguments: all of them.
        report: (blocks, words).
        kept: cells for zones, and what has to be in each.
    """

    name: str
    arguments: dict[str, object]
    report: np.ndarray
    kept: list[tuple[np.ndarray, int]]

    def check(self) -> None:
        """Raises unless the zones were kept."""
        if any(int(cell[0]) != zone for cell, zone in self.kept):
            raise LaunchError(f"{self.name}: zones kept: {self.kept}")


class Library:
    """One build of the kernels.

    Args:
        path: of the build.
        prefix: of its launchers' symbols.

    Attributes:
        called: symbols of what was launched so far.
        lacked: those of them that this build has not.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._library = ctypes.CDLL(str(path))
        self._prefix = prefix
        self._launches = itertools.count()
        self._library.moe_last_error.restype = ctypes.c_char_p
        self.called: set[str] = set()
        self.lacked: set[str] = set()
        for kernel in LAUNCHED:
            function = getattr(self._library, prefix + kernel.symbol, None)
            if function is not None:
                function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p)
                function.restype = ctypes.c_int
        self._library.moe_nic_open.argtypes = (ctypes.c_void_p,)
        self._library.moe_nic_open.restype = ctypes.c_void_p
        self._library.moe_nic_close.argtypes = (ctypes.c_void_p,)
        self._library.moe_use_settings.argtypes = (ctypes.c_void_p,)
        self.is_strict = hasattr(self._library, "moe_emulation_seed")
        if self.is_strict:
            self._library.moe_emulation_seed.argtypes = (ctypes.c_uint64,)

    def open_nic(self, description: NicDescription) -> int:
        """Starts a NIC; `close_nic` ends it."""
        nic: int = self._library.moe_nic_open(ctypes.addressof(description))
        assert nic
        return nic

    def close_nic(self, nic: int) -> None:
        """Ends a NIC, once it has delivered what was posted."""
        self._library.moe_nic_close(nic)

    def use_settings(self, settings: SettingsStruct | None) -> None:
        """Those of this thread's launches from now on; they must outlive them. None for the defaults."""
        self._library.moe_use_settings(settings and ctypes.addressof(settings))

    def seed(self, seed: int) -> None:
        """Decides the order of completions in this thread's launches from now on. Nothing when fast."""
        if self.is_strict:
            self._library.moe_emulation_seed(seed)

    def launch(self, name: str, blocks: int, **arguments: object) -> np.ndarray:
        """Runs a kernel and returns its report, (blocks, words).

        A kernel that can look its zone up in memory has to do so every other time, or where it is told to. A
        report that is passed is what is there already.

        Raises:
            LaunchError: the emulation found the kernel doing something it must not.
        """
        completed = self._completed(name, blocks, arguments)
        self._run(name, blocks, completed.arguments)
        completed.check()
        return completed.report

    def launch_phases(self, blocks: int, phases: Sequence[Phase], first_blocks: int = 0) -> list[np.ndarray]:
        """Runs kernels as the phases of one launch, and returns the report of each: see `launch`.

        Args:
            blocks: of the launch.
            phases: in their order.
            first_blocks: of these, those that run the phases which are for them; 0: all run all.
        """
        completed = [self._completed(name, blocks, arguments) for name, arguments in phases]
        wanted = [BY_NAME[name] for name, _ in phases]
        kernel, mask = fused_kernel(FUSED, wanted)
        *firsts, size = first_words(kernel)
        words = np.zeros(size, dtype=np.int64)
        words[0], words[2] = mask, first_blocks
        running = [first for number, first in enumerate(firsts) if mask >> number & 1]
        for first, phase in zip(running, completed, strict=True):
            own = pack(BY_NAME[phase.name], phase.arguments)
            words[first : first + len(own)] = own
        self._call(kernel.symbol, blocks, words)
        # Where a phase reports, those after it may be left out.
        if not any(phase.report.any() for phase in completed):
            for phase in completed:
                phase.check()
        return [phase.report for phase in completed]

    def _completed(self, name: str, blocks: int, arguments: Mapping[str, object]) -> Completed:
        """With a report, cells for zones, and the zone where it is to be looked up."""
        names = {arg.name for arg in BY_NAME[name].args}
        zone = arguments.get("zone", 0)
        report = arguments.get("report", np.zeros((blocks, REPORT_WORDS), dtype=np.int32))
        assert isinstance(zone, int)
        assert isinstance(report, np.ndarray)
        cells = {"kept_zone": zone, "turned": 1 - zone}
        kept = {
            word: np.full(1, NOT_KEPT, dtype=np.int32) for word in cells.keys() & names - arguments.keys()
        }
        by_itself = (
            "all_counts",
            "begun",
            "by_source",
            "count_end",
            "is_relayed",
            "adds_traffic",
            "places",
            "known",
            "agreed",
        )
        optional = {name: 0 for name in (*by_itself, "peers", "changes") if name in names}
        arguments = {**kept, **optional, **arguments, "report": report}
        if "zone_at" in names:
            cell = arguments.get("zone_at", np.array([zone], dtype=np.int32))
            is_told = "zone_at" in arguments
            arguments = {"zone_at": 0, **arguments}
            if is_told or next(self._launches) % 2:
                # Who does not look there takes the other one.
                arguments |= {"zone": 1 - zone, "zone_at": cell}
        return Completed(name, arguments, report, [(kept[word], cells[word]) for word in kept])

    def _run(self, name: str, blocks: int, arguments: dict[str, object]) -> None:
        self._call(BY_NAME[name].symbol, blocks, pack(BY_NAME[name], arguments))

    def _call(self, symbol: str, blocks: int, words: np.ndarray) -> None:
        self.called.add(symbol)
        launch = getattr(self._library, self._prefix + symbol, None)
        if launch is None:
            self.lacked.add(symbol)
            raise NoLauncherError(symbol)
        if launch(blocks, None, address(words)) != 0:
            raise LaunchError(f"{symbol}: {self._library.moe_last_error().decode()}")
