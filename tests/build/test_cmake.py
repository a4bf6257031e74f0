"""What CMake makes of CANN: which commands, by its version, and what it says where it cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_triton.backends.npu import toolchain
from moe_triton.backends.npu.library import LIBRARY
from moe_triton.backends.npu.toolchain import WHY_OLDEST_CANN
from moe_triton.core.native_files import COUNTING_LIBRARY
from moe_triton.schemes.ascendc import tables
from moe_triton.tools import codegen
from tests.build.fake_cann import SOURCES, FakeCann, cmake
from tests.patience import seconds

KERNELS = f"{SOURCES}/launch/moe_kernels.asc"
POSTS = "tests/build/api/memfabric"
COMMON = ["-fPIC", "-O2", "-std=c++17"]
MACRO = "-DMOE_KERNEL_TYPE_BY_MACRO"


def commands(tree: Path, *definitions: str) -> list[list[str]]:
    folders = [f"-I{tree}/generated", f"-I{SOURCES}/include"]
    output = ["-o", f"{tree}/{LIBRARY}"]
    return [
        ["-x", "asc", "-shared", *COMMON, *definitions, "--npu-arch=dav-2201", *folders, KERNELS, *output]
    ]


def configure(
    tree: Path, *options: str, home: Path | None = None, code: int = 0, finds_python: bool = False
) -> str:
    """What CMake says; a Python is named to it, as by ``moe-triton build``, where it need not find one."""
    python = [] if finds_python else [f"-DPython_EXECUTABLE={sys.executable}"]
    text = cmake("-S", SOURCES, "-B", tree, *python, *options, home=home, code=code)
    # CMake breaks the lines of its errors and warnings.
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    ("version", "definitions"),
    [("9.1.0", ()), ("9.0.0-beta.2", ()), ("8.5.0", (MACRO,)), ("8.3.RC1", (MACRO,))],
)
@pytest.mark.parametrize("old_file", [False, True])
def test_the_version_chooses_the_commands(
    tmp_path: Path, version: str, definitions: tuple[str, ...], old_file: bool
) -> None:
    cann, tree = FakeCann(tmp_path / "cann", version, old_file=old_file), tmp_path / "tree"
    said = configure(tree, "-DBACKEND=npu", home=cann.home)
    assert f"CANN {version} in {cann.home}" in said
    printed = cmake("--build", tree)
    expected = commands(tree, *definitions)
    assert cann.calls == expected
    for call in expected:
        assert " ".join(["-- bisheng:", str(cann.bisheng), *call]) in printed
    read = toolchain.cann_version(cann.home)
    assert read is not None
    assert read.text == version


@pytest.mark.parametrize("version", ["8.2.RC1.alpha001", "8.0.0", "7.0.RC1"])
def test_a_cann_whose_kernels_would_hang_is_refused_with_the_reason(tmp_path: Path, version: str) -> None:
    cann, tree = FakeCann(tmp_path / "cann", version), tmp_path / "tree"
    said = configure(tree, "-DBACKEND=npu", home=cann.home, code=1)
    assert f"CANN is {version} (in {cann.home}), but it must be 8.3 or later ({WHY_OLDEST_CANN})" in said
    told = configure(tmp_path / "told", "-DBACKEND=npu", f"-DCANN_VERSION={version}", home=cann.home, code=1)
    assert WHY_OLDEST_CANN in told
    assert cann.calls == []


def test_a_version_can_be_given_where_no_file_tells_it(tmp_path: Path) -> None:
    cann, tree = FakeCann(tmp_path / "cann", None), tmp_path / "tree"
    assert "no file in" in configure(tree, "-DBACKEND=npu", home=cann.home, code=1)
    configure(tree, "-DBACKEND=npu", "-DCANN_VERSION=9.0.0", home=cann.home)
    cmake("--build", tree)
    assert cann.calls == commands(tree)


def test_kernels_post_where_memfabric_is_given(tmp_path: Path) -> None:
    cann, tree, package = FakeCann(tmp_path / "cann"), tmp_path / "tree", SOURCES.parent / POSTS
    configure(tree, "-DBACKEND=npu", f"-DMOE_MEMFABRIC={package}", home=cann.home)
    cmake("--build", tree)
    assert cann.calls == commands(tree, "-DMOE_MEMFABRIC", f"-I{package}/include/smem/device")


def test_a_memfabric_without_the_header_is_refused(tmp_path: Path) -> None:
    cann, tree = FakeCann(tmp_path / "cann"), tmp_path / "tree"
    said = configure(tree, "-DBACKEND=npu", f"-DMOE_MEMFABRIC={tmp_path}", home=cann.home, code=1)
    assert f"MOE_MEMFABRIC is '{tmp_path}', but it must be the folder of the Python package" in said
    assert "pip install memfabric-hybrid==1.3.0" in said


@pytest.mark.parametrize(("here", "other"), [("x86_64", "aarch64"), ("aarch64", "x86_64")])
def test_a_machine_takes_the_cann_that_is_for_it(tmp_path: Path, here: str, other: str) -> None:
    cann, tree = FakeCann(tmp_path / "cann", "8.5.0", machine=here), tmp_path / "tree"
    of_other = cann.home / f"{other}-linux" / "ascend_toolkit_install.info"
    of_other.parent.mkdir()
    of_other.write_text("version=9.1.0\n")
    said = configure(tree, "-DBACKEND=npu", f"-DCANN_MACHINE={here}", home=cann.home)
    assert f"CANN 8.5.0 in {cann.home}" in said
    foreign = FakeCann(tmp_path / "foreign", machine=other)
    said = configure(tree, "-DBACKEND=npu", home=foreign.home, code=1)
    told = f"CANN in {foreign.home} does not run here: it is for {other}, and this machine is {here}."
    assert told in said


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    said = configure(tree, "-DBACKEND=npu", code=1)
    assert "cannot be built for the NPU: CANN_HOME is ''" in said
    assert "-DCANN_HOME=PATH" in said
    said = configure(tree, "-DBACKEND=npu", home=tmp_path / "none", code=1)
    assert f"CANN_HOME is '{tmp_path}/none', but it must be CANN's folder" in said
    bare = FakeCann(tmp_path / "bare", with_bisheng=False)
    assert f"{bare.home} has no bisheng" in configure(tree, "-DBACKEND=npu", home=bare.home, code=1)
    assert "BACKEND is gpu: it must be cpu or npu" in configure(tree, "-DBACKEND=gpu", code=1)


def test_a_folder_of_cann_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, cann = FakeCann(tmp_path / "other"), FakeCann(tmp_path / "cann", in_bin=True)
    monkeypatch.setenv("PATH", str(other.bisheng.parent), prepend=":")
    tree = tmp_path / "tree"
    configure(tree, "-DBACKEND=npu", home=cann.home, finds_python=True)
    cmake("--build", tree)
    assert cann.calls == commands(tree)
    assert not other.calls


def test_a_failing_compiler_fails_the_build_for_the_npu(tmp_path: Path) -> None:
    cann, tree = FakeCann(tmp_path / "cann", fails=True), tmp_path / "tree"
    configure(tree, "-DBACKEND=npu", home=cann.home)
    said = cmake("--build", tree, code=None)
    assert "bisheng failed with status 3" in said
    assert "no such architecture" in said
    assert not (tree / LIBRARY).exists()


# The CPU's build, which is never to fail for want of an NPU's compiler.


def test_without_cann_the_cpu_build_says_nothing_of_it(tmp_path: Path) -> None:
    assert "NPU" not in configure(tmp_path / "tree")


@pytest.mark.parametrize("fails", [False, True])
def test_with_cann_the_cpu_build_takes_the_npu_along(tmp_path: Path, fails: bool) -> None:
    cann, tree = FakeCann(tmp_path / "cann", fails=fails), tmp_path / "tree"
    configure(tree, home=cann.home)
    said = cmake("--build", tree, "--target", "moe_kernels_npu", home=cann.home)
    assert cann.calls == commands(tree)
    assert ("Without the kernels for the NPU: bisheng failed with status 3" in said) == fails
    assert ("moe-triton build" in said) == fails
    of_cpu = {"libmoe_kernels.so", COUNTING_LIBRARY}
    for name in of_cpu:
        (tree / name).write_bytes(b"")  # as if it were built
    cmake("--install", tree, "--component", "library", "--prefix", tmp_path / "prefix")
    names = {path.name for path in (tmp_path / "prefix" / "moe_triton" / "_native").iterdir()}
    assert names == of_cpu | (set() if fails else {LIBRARY})


def test_a_failure_that_was_warned_of_is_tried_again(tmp_path: Path) -> None:
    cann, tree = FakeCann(tmp_path / "cann", fails=True), tmp_path / "tree"
    configure(tree, home=cann.home)
    for _ in range(2):
        cmake("--build", tree, "--target", "moe_kernels_npu")
    assert len(cann.calls) == 2


def test_a_cann_that_does_not_fit_is_a_warning_to_the_cpu_build(tmp_path: Path) -> None:
    cann = FakeCann(tmp_path / "cann", "6.0.1")
    said = configure(tmp_path / "tree", home=cann.home)
    assert "CMake Warning" in said
    assert "Without the kernels for the NPU: CANN is 6.0.1" in said
    assert "Later: moe-triton build" in said


def test_cann_may_come_between_two_configurations(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    configure(tree)
    cann = FakeCann(tmp_path / "cann")
    assert f"CANN 9.0.0 in {cann.home}" in configure(tree, home=cann.home)


def test_the_sources_are_installed_and_can_be_built_from(tmp_path: Path) -> None:
    tree, cann = tmp_path / "tree", FakeCann(tmp_path / "cann")
    configure(tree)
    cmake("--install", tree, "--component", "Unspecified", "--prefix", tmp_path / "prefix")
    installed = tmp_path / "prefix" / "moe_triton" / "_native" / "kernels_ascendc"
    here = {
        path.relative_to(SOURCES) for path in SOURCES.rglob("*") if path.is_file() and path.name[0] != "."
    }
    headers = {Path("include", name) for name in codegen.headers(tables())}
    assert {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()} == here | headers
    cmake("-S", installed, "-B", tmp_path / "later", "-DBACKEND=npu", home=cann.home)
    cmake("--build", tmp_path / "later")
    assert f"{installed}/launch/moe_kernels.asc" in cann.calls[0]


def test_headers_are_made_without_any_package(tmp_path: Path) -> None:
    """A build in isolation has no torch."""
    words = [sys.executable, "-S", SOURCES / "cmake" / "generate.py", SOURCES.parent / "moe_triton", tmp_path]
    subprocess.run(words, check=True, timeout=seconds(60))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == codegen.headers(tables())
