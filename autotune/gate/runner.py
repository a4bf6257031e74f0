"""Many cases through the compiler, two at a time: each is a process that a thread waits for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from autotune import npu_compiler
from autotune.gate import compile_for_npu, golden
from autotune.npu_compiler import cache
from autotune.npu_compiler.compile import compiled_for, content_of, npu_ir
from autotune.npu_compiler.socs import soc_named
from moe_triton.backends.cpu.triton.cache import sources_digest
from moe_triton.backends.cpu.triton.toolchain import INSTALL, find_program, find_toolchain
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels import Case

WORKERS = 2


def run(
    pairs: Iterable[tuple[str, Case]], done: Callable[[str, golden.Row], None] = lambda soc, row: None
) -> dict[str, list[golden.Row]]:
    """Lines of every (soc, case) by soc, those of rejected cases included.

    Args:
        done: called with each line, from one thread at a time.

    Raises:
        ToolchainError: a tool is missing.
    """
    work = list(pairs)
    _check_tools({soc for soc, _ in work})
    rows_by_soc: dict[str, list[golden.Row]] = {}
    with ThreadPoolExecutor(WORKERS) as pool:
        for (soc, _), row in zip(work, pool.map(lambda pair: line_of(*pair), work), strict=True):
            rows_by_soc.setdefault(soc, []).append(row)
            done(soc, row)
    return rows_by_soc


def line_of(soc: str, case: Case) -> golden.Row:
    """One case's line, computed again only if the kernel, the compiler or this package has changed."""
    kernel = case.kernel
    try:
        key = ("line", *content_of(npu_ir(kernel), compiled_for(kernel, soc_named(soc))), _reader_version())
    except ToolchainError as error:
        return golden.row_of(case.name, str(error))
    return {**cache.fetch(key, lambda: _fresh_line(kernel, soc)), "case": case.name}


def _fresh_line(kernel: TritonKernel, soc: str) -> golden.Row:
    try:
        return golden.row_of("", compile_for_npu(kernel, soc))
    except ToolchainError as error:
        return golden.row_of("", str(error).partition(f" for {soc}: ")[2] or str(error))


@functools.cache
def _reader_version() -> str:
    return "".join(map(sources_digest, (Path(__file__).parent, Path(npu_compiler.__file__).parent)))


def _check_tools(socs: Iterable[str]) -> None:
    """Raises for missing tools, which would look like rejected kernels otherwise."""
    find_toolchain()
    for soc in socs:
        if find_program("ascendnpuir", soc_named(soc).compiler) is None:
            raise ToolchainError(f"{soc_named(soc).compiler} is missing: {INSTALL}")
