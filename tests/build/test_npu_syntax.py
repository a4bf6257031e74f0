"""The kernels as an NPU's compiler sees them: without the emulation, with Ascend C's keywords and launches.

clang parses them as CUDA, which has the same two sides and the same launches, against declarations of the
API (tests/build/api). That finds what does not parse, a call of the API with other types, a function without
``__aicore__`` and a GM address without ``__gm__``. It finds nothing of what bisheng's own back end refuses.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from moe_triton.core.installing import install
from moe_triton.schemes.ascendc import LAUNCHED, tables
from moe_triton.tools import codegen
from tests.build.fake_cann import SOURCES
from tests.patience import seconds
from tests.surroundings import cxx

cindex: Any = pytest.importorskip("clang.cindex", reason=f"clang is missing: {install('dev')}")

API = Path(__file__).resolve().parent / "api"


def posting(package: Path) -> tuple[str, ...]:
    """For kernels that post by this memfabric-hybrid, whose own code is not ours to warn of."""
    return ("-DMOE_MEMFABRIC", f"-isystem{package}/include/smem/device")


# As cmake/npu.cmake passes them, for CANN 9 and 8.3, and with posts.
DIALECTS = {
    "attributes": (),
    "macro": ("-DMOE_KERNEL_TYPE_BY_MACRO",),
    "posts": posting(API / "memfabric"),
}
if (installed := util.find_spec("memfabric_hybrid")) is not None:
    (folder,) = installed.submodule_search_locations or ()
    DIALECTS["posts by memfabric-hybrid itself"] = posting(Path(folder))
dialects = pytest.mark.parametrize("dialect", DIALECTS)
launches = pytest.mark.parametrize("dialect", ["attributes", "macro"])


def system_folders() -> list[str]:
    """Where the compiler has its headers: libclang comes without any."""
    command = [*cxx(), "-E", "-xc++", "-v", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds(60)).stderr
    listed = said.split("#include <...> search starts here:")[1].split("End of search list")[0].split()
    return [word for folder in listed for word in ("-isystem", folder)]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    codegen.write(folder, tables())
    return folder


@cache  # seconds each
def parse(sources: Path, generated: Path, dialect: str) -> tuple[Any, list[str]]:
    """The parsed launchers and what clang says of them."""
    options = ["-x", "cuda", "--cuda-host-only", "-nocudainc", "-nocudalib", "-std=c++17"]
    warnings = ["-Wall", "-Wextra", "-Wno-unknown-cuda-version", "-ferror-limit=0"]
    folders = ["-nostdinc", f"-I{API}", f"-I{sources}/include", f"-I{generated}", *system_folders()]
    unit = cindex.Index.create().parse(
        str(sources / "launch" / "moe_kernels.asc"), args=[*options, *warnings, *folders, *DIALECTS[dialect]]
    )
    said = [f"{d.location.file}:{d.location.line}: {d.spelling}" for d in unit.diagnostics]
    # To CUDA a function is for the device or a kernel; in Ascend C a kernel is written as both.
    both = [line for line in said if line.endswith("'device' and 'global' attributes are not compatible")]
    assert len(both) == len(LAUNCHED)
    return unit, [line for line in said if line not in both]


def kernels_of(unit: Any) -> dict[str, Any]:
    functions = (c for c in unit.cursor.get_children() if c.kind == cindex.CursorKind.FUNCTION_DECL)
    return {
        f.spelling.removesuffix("_kernel"): f
        for f in functions
        if any(child.kind == cindex.CursorKind.CUDAGLOBAL_ATTR for child in f.get_children())
    }


@dialects
def test_the_kernels_parse_without_the_emulation(generated: Path, dialect: str) -> None:
    unit, said = parse(SOURCES, generated, dialect)
    assert said == []
    assert set(kernels_of(unit)) == {kernel.name for kernel in LAUNCHED}


def test_every_kernel_is_of_mixed_type_and_starts_as_a_whole(generated: Path) -> None:
    unit, _ = parse(SOURCES, generated, "attributes")
    for kernel in kernels_of(unit).values():
        children = kernel.get_children()
        notes = [c.spelling for c in children if c.kind == cindex.CursorKind.ANNOTATE_ATTR]
        assert notes == ["mix 0 1", "schedmode 1"]


def test_every_kernel_is_of_mixed_type_where_a_macro_says_so(generated: Path) -> None:
    unit, _ = parse(SOURCES, generated, "macro")
    for kernel in kernels_of(unit).values():
        references = [
            c.spelling
            for variable in kernel.walk_preorder()
            if variable.spelling == "kernel_task_type"
            for c in variable.walk_preorder()
            if c.kind == cindex.CursorKind.DECL_REF_EXPR
        ]
        assert references == ["KERNEL_TYPE_MIX_AIV_1_0"]


@launches
def test_every_launcher_launches_its_own_kernel(generated: Path, dialect: str) -> None:
    unit, _ = parse(SOURCES, generated, dialect)
    names = kernels_of(unit)
    symbols = {kernel.symbol for kernel in LAUNCHED}
    # One walk for all of them: it takes half a second.
    defined = [c for c in unit.cursor.walk_preorder() if c.spelling in symbols and c.is_definition()]
    for kernel in LAUNCHED:
        (launcher,) = [c for c in defined if c.spelling == kernel.symbol]
        types = [argument.type.spelling for argument in launcher.get_arguments()]
        assert types[:2] == ["uint32_t", "void *"]
        assert types[2].startswith("const moe::")
        called = {c.spelling for c in launcher.walk_preorder() if c.kind == cindex.CursorKind.DECL_REF_EXPR}
        assert {f"{name}_kernel" for name in names} & called == {f"{kernel.name}_kernel"}
        # The configuration of the launch: blocks, nothing, and the stream.
        assert {"blocks", "stream", "args"} <= called


@pytest.mark.parametrize(("dialect", "mode"), [("attributes", "1"), ("macro", "0")])
def test_what_the_library_says_of_its_schedule(generated: Path, dialect: str, mode: str) -> None:
    unit, _ = parse(SOURCES, generated, dialect)
    assert answer_of(unit, "moe_schedule_mode", "SCHEDULE_MODE") == mode


@pytest.mark.parametrize(("dialect", "posts"), [("attributes", "false"), ("posts", "true")])
def test_what_the_library_says_of_posts(generated: Path, dialect: str, posts: str) -> None:
    unit, _ = parse(SOURCES, generated, dialect)
    assert answer_of(unit, "moe_posts", "HAS_POSTS") == posts


def answer_of(unit: Any, name: str, constant: str) -> str:
    """The value of the constant by which a function answers."""
    (function,) = [c for c in unit.cursor.walk_preorder() if c.spelling == name]
    found = next(c.referenced for c in function.walk_preorder() if c.spelling == constant)
    *_, equals, value = [token.spelling for token in found.get_tokens()]
    assert equals == "="
    return str(value)


# What the check is worth: it says no.

WRONG = {
    "a post to an address of the host": (
        "include/platform.h",
        "reinterpret_cast<__gm__ uint8_t*>(remote), rank,",
        "reinterpret_cast<uint8_t*>(remote), rank,",
        "no matching function for call to 'smem_shm_roce_write'",
    ),
    "a post without its second scratch": (
        "include/platform.h",
        "QUEUE_PAIR, bytes, scratch.doorbell, scratch.head);",
        "QUEUE_PAIR, bytes, scratch.doorbell);",
        "no matching function for call to 'smem_shm_roce_write'",
    ),
    "a function without __aicore__": (
        "include/flags.h",
        "__aicore__ inline Share SplitEvenly",
        "inline Share SplitEvenly",
        "no matching function for call to 'SplitEvenly'",
    ),
    "an address without __gm__": (
        "include/flags.h",
        "reinterpret_cast<__gm__ T*>(address)",
        "reinterpret_cast<T*>(address)",
        "no matching member function for call to 'SetGlobalBuffer'",
    ),
    "a branch that only an NPU takes": (
        "include/platform.h",
        "AscendC::DataCopy(to, from, blocks * BLOCK_BYTES);",
        "AscendC::DataCopy(to, blocks * BLOCK_BYTES);",
        "no matching function for call to 'DataCopy'",
    ),
    "a call with other types": (
        "include/flags.h",
        "ExactWords(count), NoPadding<int32_t>());",
        "ExactWords(count), NoPadding<float>());",
        "no matching function for call to 'DataCopyPad'",
    ),
    "a launch without a stream": (
        "launch/launch.h",
        "(blocks), nullptr, (stream)>>>(args);",
        "(blocks), nullptr>>>(args);",
        "too few",
    ),
    "an argument too many": (
        "launch/launch.h",
        "(blocks), nullptr, (stream)>>>(args);",
        "(blocks), nullptr, (stream)>>>(args, blocks);",
        "too many arguments to function call",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(tmp_path: Path, generated: Path, name: str) -> None:
    file, old, new, message = WRONG[name]
    copy = tmp_path / "kernels_ascendc"
    shutil.copytree(SOURCES, copy)
    text = (copy / file).read_text()
    assert text.count(old) == 1
    (copy / file).write_text(text.replace(old, new))
    _, said = parse(copy, generated, "posts")
    assert any(message in line for line in said), said
