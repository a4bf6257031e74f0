"""Where native libraries and the Ascend C sources are: in a checkout, or where pip put them."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

COUNTING_LIBRARY = "libmoe_kernels_counting.so"
"""The CPU build of the kernels that `autotune.model` runs to price them."""

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER = "_native"
_SOURCES = "kernels_ascendc"


def folders() -> tuple[Path, ...]:
    """Folders that may hold native libraries: beside the package, and where an editable install put them."""
    candidates = [_PACKAGE / _FOLDER]
    try:
        installed = metadata.distribution("moe_triton").locate_file(f"moe_triton/{_FOLDER}")
    except metadata.PackageNotFoundError:
        return tuple(candidates)
    return tuple(dict.fromkeys([*candidates, Path(str(installed))]))


def find(library: str) -> Path | None:
    """A native library by its file name."""
    return next((path for folder in folders() if (path := folder / library).exists()), None)


def build_folder() -> Path:
    """Where to put a library that is built later: beside the installation's, to be replaced with them."""
    return next((folder for folder in reversed(folders()) if folder.is_dir()), folders()[0])


def sources() -> Path | None:
    """The Ascend C sources with their CMakeLists.txt: the checkout's, or those that came with the package."""
    candidates = [_PACKAGE.parent / _SOURCES, *(folder / _SOURCES for folder in folders())]
    return next((folder for folder in candidates if (folder / "CMakeLists.txt").is_file()), None)
