"""A library built as one for an NPU is, by a compiler that is g++: it is loaded, checked and refused."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from moe_triton.backends.cpu import native
from moe_triton.backends.npu import library
from moe_triton.core import abi, ascendc, native_files
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import AscendCKernel
from moe_triton.layout import CALL_WORD
from moe_triton.schemes.ascendc import FUSED, KERNELS, LAUNCHED, Tables
from moe_triton.schemes.common.ascendc import EXCHANGE, EXCHANGE_SEND
from moe_triton.tools import codegen
from moe_triton.tools.cli import build as build_module
from moe_triton.tools.cli import doctor
from moe_triton.tools.cli.app import app
from tests.ascendc.library import pack
from tests.build.fake_cann import SOURCES, FakeCann


def run_build(*words: str | Path, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["build", *map(str, words)], catch_exceptions=False
    )
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(autouse=True)
def no_cann_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Libraries are looked for once per process: not across these tests."""
    library._loaded.cache_clear()
    yield
    library._loaded.cache_clear()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library in it."""
    folder = tmp_path_factory.mktemp("built")
    cann = FakeCann(folder / "cann", "9.0.0", compiles=True)
    printed = run_build("--cann", cann.home, "--output", folder)
    assert f"-- bisheng: {cann.bisheng} -x asc -shared" in printed
    assert printed.endswith(f"built {folder / library.LIBRARY}\n")
    return folder


def test_the_library_is_loaded_and_agrees(
    built: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    monkeypatch.setattr(native_files, "folders", lambda: (built,))
    assert library.find() == built / library.LIBRARY
    loaded = library.library()
    loaded.moe_abi.restype = ctypes.c_char_p
    assert loaded.moe_abi().decode() == abi.text(KERNELS, FUSED)
    assert library.blocks_start_together()
    for kernel in LAUNCHED:
        address = library.symbol_address(kernel.symbol)
        assert address == ctypes.cast(getattr(loaded, kernel.symbol), ctypes.c_void_p).value
    with pytest.raises(AttributeError):
        library.symbol_address("moe_nothing")


def test_a_launcher_takes_blocks_a_stream_and_words(
    built: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    monkeypatch.setattr(native_files, "folders", lambda: (built,))
    launch = library.launcher(ascendc.POST_STATUS)
    peers = (ctypes.c_uint64 * 1)()
    window = (ctypes.c_uint8 * 256)()
    peers[0] = ctypes.addressof(window)
    arguments: dict[str, object] = {
        "peers": ctypes.addressof(peers),
        "num_ranks": 1,
        "count": 0,
        "call": 7,
        "kind": 0,
        "combine_kind": 0,
        "rank": 0,
        "zone": 0,
        "zone_at": 0,
        "window": 0,
        "out_offset": 0,
        "timeout_us": 0,
        "traffic": 0,
        "status": region_at(64),
        "report": 0,
    }
    words = pack(ascendc.POST_STATUS, arguments)
    assert launch(1, None, words.ctypes.data) == 0
    entry = ctypes.cast(ctypes.addressof(window) + 64, ctypes.POINTER(ctypes.c_float))
    assert entry[0] == 1.0
    assert ctypes.cast(entry, ctypes.POINTER(ctypes.c_int32))[CALL_WORD] == 7
    assert launch(49, None, words.ctypes.data) != 0
    with pytest.raises(ctypes.ArgumentError):
        launch(1, None, 1.5)


def region_at(base: int) -> object:
    from moe_triton.core.region import region_of

    return region_of("dispatch_status", base, 32, (2, 64), (1, 32), (1, 32))


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / library.LIBRARY
    path.write_bytes(b"")
    with pytest.raises(ToolchainError, match=r"cannot be loaded.*Source the set_env\.sh"):
        library.load(path)


def test_without_the_library_the_error_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    monkeypatch.setattr(native_files, "folders", lambda: (tmp_path,))
    with pytest.raises(ToolchainError, match=r"were not built for the NPU.*moe-triton build"):
        library.library()


# Built from other tables.


def sources_of(kernels: Sequence[AscendCKernel], folder: Path) -> Path:
    copy = folder / "kernels_ascendc"
    shutil.copytree(SOURCES, copy)
    codegen.write(copy / "include", Tables(tuple(kernels), FUSED))
    return copy


def test_a_library_of_other_tables_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = EXCHANGE_SEND
    theirs = replace(ours, args=(ours.args[1], ours.args[0], *ours.args[2:]))
    changed = [theirs if kernel is ours else kernel for kernel in KERNELS]
    copy = sources_of(changed, tmp_path)
    monkeypatch.setattr(native_files, "sources", lambda: copy)
    cann = FakeCann(tmp_path / "cann", compiles=True)
    run_build("--cann", cann.home, "--output", tmp_path)
    path = tmp_path / library.LIBRARY
    _, said = library.load(path)
    with pytest.raises(ToolchainError) as caught:
        said.check(EXCHANGE)
    message = str(caught.value)
    assert f"{path} does not fit this moe_triton: exchange_send differs" in message
    assert abi.layout_of(ours) in message
    assert abi.layout_of(theirs) in message
    assert "moe-triton build --backend npu" in message

    # Doctor and the CPU's back end look the same way.
    monkeypatch.setattr(library, "find", lambda: path)
    console = Console(record=True, width=2000)
    doctor.run_doctor(console)
    row = next(line for line in console.export_text().splitlines() if "npu: Ascend C kernels" in line)
    assert "missing" in row
    assert "exchange_send differs" in row
    loaded = ctypes.CDLL(str(path))
    monkeypatch.setattr(native, "_loaded", lambda: (loaded, abi.Abi(loaded, path, native.REBUILD)))
    with pytest.raises(ToolchainError, match=r"exchange_send differs.*--backend cpu"):
        native.launcher(ours)


# The command.


def test_the_default_folder_is_the_installations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site" / "_native"
    installed.mkdir(parents=True)
    monkeypatch.setattr(native_files, "folders", lambda: (tmp_path / "checkout", installed))
    cann = FakeCann(tmp_path / "cann")
    run_build("--cann", cann.home)
    assert [path.name for path in installed.iterdir()] == [library.LIBRARY]
    assert native_files.find(library.LIBRARY) == installed / library.LIBRARY


def test_the_version_can_be_given(tmp_path: Path) -> None:
    cann = FakeCann(tmp_path / "cann", None)
    run_build("--cann", cann.home, "--output", tmp_path, "--cann-version", "8.5.0", "--jobs", "2")
    assert "-DMOE_KERNEL_TYPE_BY_MACRO" in cann.calls[0]
    said = run_build("--cann", cann.home, "--output", tmp_path, "--cann-version", "8.2.RC1", code=1)
    assert "it must be 8.3 or later" in " ".join(said.split())
    assert len(cann.calls) == 1


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_command_builds_by_the_cann_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    cann = FakeCann(tmp_path / "cann", machine=machine)
    assert "CANN 9.0.0 in" in run_build("--cann", cann.home, "--output", tmp_path)
    (other,) = {"x86_64", "aarch64"} - {machine}
    foreign = FakeCann(tmp_path / "foreign", machine=other)
    said = run_build("--cann", foreign.home, "--output", tmp_path, code=1)
    assert f"it is for {other}, and this machine is {machine}" in " ".join(said.split())
    assert not foreign.calls


@pytest.mark.parametrize("installed", [False, True])
def test_kernels_post_where_memfabric_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None, installed: bool
) -> None:
    cann, package = (
        FakeCann(tmp_path / "cann", compiles=installed),
        Path(__file__).parent / "api" / "memfabric",
    )
    found = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(build_module.util, "find_spec", lambda name: found)
    monkeypatch.chdir(package.parent)
    run_build(
        "--cann", cann.home, "--output", tmp_path, "--memfabric", "installed" if installed else "memfabric"
    )
    assert {"-DMOE_MEMFABRIC", f"-I{package}/include/smem/device"} <= set(cann.calls[0])
    monkeypatch.setattr(native_files, "folders", lambda: (tmp_path,))
    if installed:
        assert library.has_posts()
        console = Console(record=True, width=2000)
        doctor.run_doctor(console)
        assert f"{library.LIBRARY}, with posts to other servers" in console.export_text()


def test_a_memfabric_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module.util, "find_spec", lambda name: None)
    said = run_build("--cann", FakeCann(tmp_path / "cann").home, "--memfabric", "installed", code=1)
    assert "memfabric_hybrid is not installed, by which kernels are to post" in said


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / library.LIBRARY).write_bytes(b"the one before")
    cann = FakeCann(tmp_path / "cann", fails=True)
    said = run_build("--cann", cann.home, "--output", tmp_path, code=1)
    assert "error: no such architecture" in said
    assert "bisheng failed with status 3" in said
    assert re.search(r"`\S*cmake --build ...` failed", said)
    assert (tmp_path / library.LIBRARY).read_bytes() == b"the one before"
    assert {path.name for path in tmp_path.iterdir()} == {"cann", library.LIBRARY}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arch", "dav-3510"], "arch is dav-3510, but the kernels are for dav-2201"),
        (["--jobs", "0"], "jobs is 0, but it must be 1 or more"),
        (["--backend", "cpu", "--memfabric", "x"], "memfabric is x, but an emulated rank posts to its own"),
        (["--cann", "/dev/null/cann"], "CANN is missing (/dev/null/cann)"),
    ],
)
def test_what_cannot_be_built_is_said(options: list[str], message: str) -> None:
    assert message in run_build(*options, code=1)


def test_an_installation_without_sources_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_files, "sources", lambda: None)
    assert "has no kernels_ascendc folder" in run_build(code=1)


def test_without_cmake_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module.shutil, "which", lambda *names, **options: None)
    assert "cmake is missing, which the build needs. Run: pip install cmake" in run_build(code=1)


def test_sources_are_found_in_a_checkout_and_in_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native_files.sources() == SOURCES
    monkeypatch.setattr(native_files, "_PACKAGE", tmp_path / "site" / "moe_triton")
    monkeypatch.setattr(native_files, "folders", lambda: (tmp_path / "site" / "moe_triton" / "_native",))
    assert native_files.sources() is None
    installed = tmp_path / "site" / "moe_triton" / "_native" / "kernels_ascendc"
    installed.mkdir(parents=True)
    (installed / "CMakeLists.txt").touch()
    assert native_files.sources() == installed
