"""The launch boundary: arguments as words in memory, and whether a library agrees about them.

Both sides pass arguments as 64-bit words, in the order of the kernel's table (`moe_triton.schemes.ascendc`,
`moe_triton.core.kernel.TritonKernel.args`): one word per number or address, and the words of `Region.words`
where an argument is a region. `moe_triton.tools.codegen` makes the C++ structs from the same tables and
compiles `text` into every library as ``moe_abi()``, so that one built from other tables is refused when a
plan is made ready, and not when a kernel reads an address where a number stands.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moe_triton.core import ascendc, reach, records
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import Arg, AscendCKernel, FusedKernel
from moe_triton.core.plan import Launch, Phases, Placeholder, fused_kernel_of, num_first_blocks
from moe_triton.core.records import DEVICE_RECORDS
from moe_triton.core.region import REGION_DIMS, fields_of

if TYPE_CHECKING:  # `moe_triton.tools.codegen` runs where torch is not installed
    import torch

WORD_BYTES = 8
REPORT = "report"
"""The placeholder for where an Ascend C kernel reports."""

# What both sides count with, beside the arguments. The generated header has them by these names.
CONSTANTS: dict[str, int] = {
    "PROTOCOL_VERSION": records.PROTOCOL_VERSION,
    "UB_ALIGN": records.UB_ALIGN,
    "BLOCK_BYTES": records.BLOCK_BYTES,
    "BLOCK_DATA_BYTES": records.BLOCK_DATA_BYTES,
    "FLAG_BITS": records.FLAG_BITS,
    "TRAILER_MARK": records.TRAILER_MARK,
    "LOST_COUNT": records.LOST_COUNT,
    "POSITION_SHIFT": records.POSITION_SHIFT,
    "REPORT_TIMEOUT": ascendc.REPORT_TIMEOUT,
    "REPORT_BAD_ROW": ascendc.REPORT_BAD_ROW,
    "REPORT_MISMATCH": ascendc.REPORT_MISMATCH,
    "REPORT_STRAY": ascendc.REPORT_STRAY,
    "REPORT_MASKED": ascendc.REPORT_MASKED,
    "MAX_BLOCKS": ascendc.MAX_BLOCKS,
    "MAX_POST_PARTS": ascendc.MAX_POST_PARTS,
    "QUEUED_BIT": reach.QUEUED_BIT,
    "INSIDE_BIT": reach.INSIDE_BIT,
    "MASKED_BIT": reach.MASKED_BIT,
    "SILENT_BIT": reach.SILENT_BIT,
    "KNOWN_BIT": reach.KNOWN_BIT,
    "GONE_BIT": reach.GONE_BIT,
    **{name: value for name, value in vars(ascendc).items() if name.startswith("TRACE_")},
}
_CONSTANTS_LINE = "constants"


def words_of(arg: Arg) -> int:
    """64-bit words that an argument takes."""
    return len(fields_of(arg.type)) if arg.type in REGION_DIMS else 1


def word_offsets(args: Sequence[Arg]) -> Iterator[tuple[Arg, int]]:
    """Every argument with the index of its first word."""
    first = 0
    for arg in args:
        yield arg, first
        first += words_of(arg)


def layout_of(kernel: AscendCKernel) -> str:
    """An argument list as text: names, types and first words, and the dimensions of regions, in order."""
    return " ".join(f"{arg.name}:{_type(arg)}@{first}" for arg, first in word_offsets(kernel.args))


def line_of(kernel: AscendCKernel) -> str:
    """One kernel in `text`: its name, the number of words, a digest of its layout, and the layout."""
    return _line(kernel.name, struct_words(kernel), layout_of(kernel))


def struct_words(kernel: AscendCKernel) -> int:
    """64-bit words of an argument struct."""
    return sum(map(words_of, kernel.args))


def first_words(kernel: FusedKernel) -> list[int]:
    """The first word of each phase's struct, and the number of words of all of them."""
    return list(itertools.accumulate(map(struct_words, kernel.phases), initial=struct_words(kernel.HEAD)))


def _line_of_fused(kernel: FusedKernel) -> str:
    *firsts, size = first_words(kernel)
    phases = " ".join(f"{phase.name}@{first}" for phase, first in zip(kernel.phases, firsts, strict=True))
    return _line(kernel.name, size, f"{layout_of(kernel.HEAD)} {phases}")


def text(kernels: Sequence[AscendCKernel], fused: Sequence[FusedKernel]) -> str:
    """What ``moe_abi()`` of a library of these tables returns: constants, and each record and kernel."""
    lines = [*_shared_lines(), *map(line_of, kernels), *map(_line_of_fused, fused)]
    return "".join(f"{line}\n" for line in lines)


def _shared_lines() -> list[str]:
    """What all kernels count with."""
    constants = " ".join(f"{name}={value}" for name, value in CONSTANTS.items())
    lines = [_line(_CONSTANTS_LINE, len(CONSTANTS), constants)]
    for record in DEVICE_RECORDS:
        fields = " ".join(f"{name}:{type_}" for name, type_ in record.fields)
        lines.append(_line(record.name, record.num_words, fields))
    return lines


class Abi:
    """What arguments a library's kernels take, as it says. Kernels are compared when they are first used.

    Args:
        library: what was loaded.
        path: of its file, for errors.
        remedy: how to rebuild it, as a sentence.

    Raises:
        ToolchainError: it counts with other constants or records, or is from before libraries said so.
    """

    def __init__(self, library: ctypes.CDLL, path: Path, remedy: str) -> None:
        self._path, self._remedy = path, remedy
        try:
            function = library.moe_abi
        except AttributeError:
            raise ToolchainError(
                f"{path} does not say which arguments its kernels take: it is from an older moe_triton. "
                f"{remedy}"
            ) from None
        function.restype = ctypes.c_char_p
        self._said = frozenset((function() or b"").decode().splitlines())
        self._fits: set[str] = set()
        self._compare(_shared_lines())

    def check(self, *kernels: AscendCKernel | FusedKernel) -> None:
        """Checks that the library has kernels as this package calls them, with their phases.

        Raises:
            ToolchainError: it was built from other tables.
        """
        lines: list[str] = []
        fresh = [kernel for kernel in kernels if kernel.name not in self._fits]
        for kernel in fresh:
            if isinstance(kernel, FusedKernel):
                lines += [*map(line_of, kernel.phases), _line_of_fused(kernel)]
            else:
                lines.append(line_of(kernel))
        if fresh:
            self._compare(lines)
            self._fits.update(kernel.name for kernel in fresh)

    def _compare(self, lines: Sequence[str]) -> None:
        if self._said.issuperset(lines):
            return
        ours = {_name_in(line): line for line in lines if line not in self._said}
        theirs = {_name_in(line): line for line in self._said}
        first, verb = next(iter(ours)), "differs" if len(ours) == 1 else "differ"
        raise ToolchainError(
            f"{self._path} does not fit this moe_triton: {', '.join(ours)} {verb}. {first} in the library: "
            f"{_shown(theirs.get(first))}; in moe_triton: {_shown(ours[first])}. {self._remedy}"
        )


def _name_in(line: str) -> str:
    return line.partition(" ")[0]


def words(launch: Launch) -> tuple[list[int], list[tuple[int, Placeholder]]]:
    """The words of a launch's arguments, and which of them a call fills in.

    Returns:
        The words, as unsigned 64-bit integers, 0 where a placeholder is; and the placeholders with their
        positions.

    Raises:
        ValueError: a value that its argument cannot take: a region's words for a number, too few of them,
            or a number of more than 64 bits.
    """
    packed: list[int] = []
    placeholders: list[tuple[int, Placeholder]] = []
    for arg, value in zip(launch.kernel.args, launch.values, strict=True):
        given = len(value) if isinstance(value, tuple) else 1
        if given != words_of(arg) or isinstance(value, tuple) != (arg.type in REGION_DIMS):
            raise ValueError(
                f"{launch.kernel.name}: {arg.name} is {value}, but {arg.type} takes {words_of(arg)} word(s)"
            )
        if isinstance(value, Placeholder):
            placeholders.append((len(packed), value))
            packed.append(0)
            continue
        for word in value if isinstance(value, tuple) else (value,):
            if not -(1 << 63) <= word < 1 << 64:
                raise ValueError(f"{launch.kernel.name}: {arg.name} is {value}, more than 64 bits")
            packed.append(word % (1 << 64))
    return packed, placeholders


TIMES = "times"
"""The placeholder for where a launch of several phases writes their times: see `FusedKernel.HEAD`."""


class PhaseWords(NamedTuple):
    """The words of a launch with its phases.

    Attributes:
        kernel: whose launcher takes them.
        words: unsigned 64-bit integers, 0 where a placeholder is.
        placeholders: with their positions; `TIMES` among them where there are several phases.
        firsts: the first word of each phase.
    """

    kernel: AscendCKernel | FusedKernel
    words: list[int]
    placeholders: list[tuple[int, Placeholder]]
    firsts: list[int]


def phase_words(phases: Phases, report_bytes: int = 0) -> PhaseWords:
    """The words of a launch's arguments with all of its phases: see `words`.

    Args:
        phases: of Ascend C.
        report_bytes: from one phase's report to the next one's.

    Raises:
        ValueError: as `words` does; or no kernel has these phases.
    """
    first = phases[0].kernel
    assert isinstance(first, AscendCKernel)
    if len(phases) == 1:
        packed, placeholders = words(phases[0])
        return PhaseWords(first, packed, placeholders, [0])
    kernel, mask = fused_kernel_of(phases)
    *places, size = first_words(kernel)
    running = [place for number, place in enumerate(places) if mask >> number & 1]
    packed, placeholders = [0] * size, [(1, Placeholder(TIMES))]
    packed[0], packed[2] = mask, num_first_blocks(phases)
    for number, (phase, place) in enumerate(zip(phases, running, strict=True)):
        own, unfilled = words(phase)
        packed[place : place + len(own)] = own
        for position, placeholder in unfilled:
            if placeholder.name == REPORT:
                placeholder = replace(placeholder, offset=placeholder.offset + number * report_bytes)
            placeholders.append((place + position, placeholder))
    return PhaseWords(kernel, packed, placeholders, running)


def word_of(bound: torch.Tensor | int) -> int:
    """The word of a placeholder's content: its address, or the number itself."""
    return bound if isinstance(bound, int) else bound.data_ptr()


def _type(arg: Arg) -> str:
    return f"{arg.type}({','.join(REGION_DIMS[arg.type])})" if arg.type in REGION_DIMS else arg.type


def _line(name: str, num_words: int, content: str) -> str:
    digest = hashlib.sha256(f"{name} {num_words} {content}".encode()).hexdigest()[:16]
    return f"{name} {num_words} {digest} {content}"


def _shown(line: str | None) -> str:
    if line is None:
        return "no such kernel"
    name, num_words, digest, content = (line.split(" ", 3) + [""] * 3)[:4]
    unit = "constants" if name == _CONSTANTS_LINE else "words"
    return f"{num_words} {unit}, {digest} ({content})"
