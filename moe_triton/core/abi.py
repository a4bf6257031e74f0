"""The launch boundary: arguments as words in memory, and whether a library agrees about them.

Both sides pass arguments as 64-bit words, in the order of the kernel's table (`moe_triton.core.ascendc`,
`moe_triton.core.kernel.TritonKernel.args`): one word per number or address, and the words of `Region.words`
where an argument is a region. `moe_triton.tools.codegen` makes the C++ structs from the same tables and
compiles `text` into every library as ``moe_abi()``, so that one built from other tables is refused when
it is loaded, and not when a kernel reads an address where a number stands.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_triton.core import ascendc, records
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import Arg, AscendCKernel
from moe_triton.core.plan import Hole, Launch
from moe_triton.core.records import DEVICE_RECORDS, Record
from moe_triton.core.region import REGION_DIMS

if TYPE_CHECKING:  # `moe_triton.tools.codegen` runs where torch is not installed
    import torch

WORD_BYTES = 8

# What both sides count with, beside the arguments. The generated header has them by these names.
CONSTANTS: dict[str, int] = {
    "PROTOCOL_VERSION": records.PROTOCOL_VERSION,
    "UB_ALIGN": records.UB_ALIGN,
    "BLOCK_BYTES": records.BLOCK_BYTES,
    "BLOCK_DATA_BYTES": records.BLOCK_DATA_BYTES,
    "FLAG_BITS": records.FLAG_BITS,
    "REPORT_TIMEOUT": ascendc.REPORT_TIMEOUT,
    "REPORT_BAD_ROW": ascendc.REPORT_BAD_ROW,
    "REPORT_MISMATCH": ascendc.REPORT_MISMATCH,
    "MAX_BLOCKS": ascendc.MAX_BLOCKS,
    **{name: value for name, value in vars(ascendc).items() if name.startswith("TRACE_")},
}
_CONSTANTS_LINE = "constants"


def words_of(arg: Arg) -> int:
    """64-bit words that an argument takes."""
    return 1 + 2 * len(REGION_DIMS[arg.type]) if arg.type in REGION_DIMS else 1


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
    num_words = sum(words_of(arg) for arg in kernel.args)
    return _line(kernel.name, num_words, layout_of(kernel))


def _line_of_record(record: Record) -> str:
    fields = " ".join(f"{name}:{type_}" for name, type_ in record.fields)
    return _line(record.name, record.num_words, fields)


def text(kernels: Sequence[AscendCKernel] = ascendc.KERNELS) -> str:
    """What ``moe_abi()`` of a library of these tables returns: constants, and each record and kernel."""
    constants = " ".join(f"{name}={value}" for name, value in CONSTANTS.items())
    lines = [_line(_CONSTANTS_LINE, len(CONSTANTS), constants)]
    lines += [*map(_line_of_record, DEVICE_RECORDS), *map(line_of, kernels)]
    return "".join(f"{line}\n" for line in lines)


def check(library: ctypes.CDLL, path: Path, remedy: str) -> None:
    """Compares a library with the tables.

    Args:
        library: what was loaded.
        path: of its file, for the error.
        remedy: how to rebuild it, as a sentence.

    Raises:
        ToolchainError: it was built from other tables, or before libraries said from which.
    """
    try:
        function = library.moe_abi
    except AttributeError:
        raise ToolchainError(
            f"{path} does not say which arguments its kernels take: it is from an older moe_triton. {remedy}"
        ) from None
    function.restype = ctypes.c_char_p
    found = (function() or b"").decode()
    if found != text():
        raise ToolchainError(f"{path} does not fit this moe_triton: {difference(found, text())}. {remedy}")


def difference(found: str, expected: str) -> str:
    """Which kernels differ between two texts, and the first one's two layouts."""
    theirs, ours = ({line.split(" ", 1)[0]: line for line in side.splitlines()} for side in (found, expected))
    names = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    if not names:
        return "its kernels stand in another order"
    first = names[0]
    return (
        f"{', '.join(names)} differ{'s' if len(names) == 1 else ''}. {first} in the library: "
        f"{_shown(theirs.get(first))}; in moe_triton: {_shown(ours.get(first))}"
    )


def words(launch: Launch) -> tuple[list[int], list[tuple[int, Hole]]]:
    """The words of a launch's arguments, and which of them a call fills in.

    Returns:
        The words, as unsigned 64-bit integers, 0 where a hole is; and the holes with their positions.

    Raises:
        ValueError: a value that its argument cannot take: a region's words for a number, too few of them,
            or a number of more than 64 bits.
    """
    packed: list[int] = []
    holes: list[tuple[int, Hole]] = []
    for arg, value in zip(launch.kernel.args, launch.values, strict=True):
        given = len(value) if isinstance(value, tuple) else 1
        if given != words_of(arg) or isinstance(value, tuple) != (arg.type in REGION_DIMS):
            raise ValueError(
                f"{launch.kernel.name}: {arg.name} is {value}, but {arg.type} takes {words_of(arg)} word(s)"
            )
        if isinstance(value, Hole):
            holes.append((len(packed), value))
            packed.append(0)
            continue
        for word in value if isinstance(value, tuple) else (value,):
            if not -(1 << 63) <= word < 1 << 64:
                raise ValueError(f"{launch.kernel.name}: {arg.name} is {value}, more than 64 bits")
            packed.append(word % (1 << 64))
    return packed, holes


def word_of(bound: torch.Tensor | int) -> int:
    """The word of a hole's content: its address, or the number itself."""
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
