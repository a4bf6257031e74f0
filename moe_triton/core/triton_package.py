"""Whose files lie in the package ``triton``, and how they become triton-ascend's for good.

Upstream's triton and triton-ascend are two distributions that write the same folder, and pip lets them: the
files are those of whichever came last, and whichever is uninstalled takes files of the other along. torch's
wheels for CUDA require upstream's, so that pip brings it back with every later command. What holds is a
distribution named ``triton``, of the version that is asked for, without a file in it.

This file needs the standard library and ``packaging``, and nothing of this package: make runs it before
anything else is installed, and it works where torch cannot be imported.

    python -I moe_triton/core/triton_package.py hold    # before torch's requirements are installed
    python -I moe_triton/core/triton_package.py mend    # afterwards: what `moe-triton doctor --fix` does
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

PACKAGE = "triton"
OWNER = "triton-ascend"
FIX = "moe-triton doctor --fix"
SUMMARY = "No files: the package triton is triton-ascend's (moe-triton doctor --fix)"


class MendError(Exception):
    """What stands in the way of mending, and what to do."""


@dataclass(frozen=True)
class Ownership:
    """What lies in the package ``triton``, against what triton-ascend's list of its files says.

    Attributes:
        version: of triton-ascend; empty where it is not installed.
        upstream: version of a distribution ``triton`` that has files; empty where there is none.
        missing: files of triton-ascend that are not there.
        replaced: files of triton-ascend that upstream has overwritten.
        hidden_by: the folder that is imported in place of triton-ascend's; empty where that is.
        added: folders of back ends that are not triton-ascend's, if its front end loads them (3.2.0).
    """

    version: str = ""
    upstream: str = ""
    missing: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    hidden_by: str = ""

    @property
    def problem(self) -> str:
        """What is wrong, without a remedy; empty where triton-ascend is whole, or not installed."""
        wrong = [
            f"{len(files)} {what} ({files[0]}{', ...' if len(files) > 1 else ''})"
            for what, files in (("missing", self.missing), ("replaced", self.replaced), ("added", self.added))
            if files
        ]
        if self.hidden_by:
            return f"triton {self.upstream} in {self.hidden_by} hides {OWNER} {self.version}"
        if not self.version or not wrong:
            return ""
        upstream = f"upstream triton {self.upstream}".rstrip() if self.upstream or self.replaced else ""
        lies = f"{upstream} lies where {OWNER} {self.version} belongs" if upstream else ""
        return f"{lies or f'{OWNER} {self.version} is not whole'}: files {', '.join(wrong)}"


@dataclass(frozen=True)
class ListedFile:
    """A file of the package in a distribution's list (RECORD).

    Attributes:
        name: from the folder of packages on.
        path: where it should be.
        digest: of its bytes, as lists have it.
        size: in bytes.
    """

    name: PurePosixPath
    path: Path
    digest: str
    size: str

    def is_as_listed(self) -> bool:
        """Whether it is there with that size, and with that text where it is Python's."""
        if not self.path.is_file() or (self.size and self.path.stat().st_size != int(self.size)):
            return False
        return self.name.suffix != ".py" or not self.digest or digest(self.path.read_bytes()) == self.digest


@functools.cache
def ownership() -> Ownership:
    """Compares sizes, and the bytes of Python's files, in some milliseconds; looked up once per process."""
    if (owner := _distribution(OWNER)) is None:
        return Ownership()
    listed = _files(owner)
    if not listed:  # built from source in place: there is no list to compare with
        return Ownership(owner.version)
    upstream = _distribution(PACKAGE)
    theirs = {file.name: file for file in _files(upstream)} if upstream is not None else {}
    imported = _imported_folder()
    # Where one environment lies over another's packages.
    if imported is not None and imported != _folder(listed).resolve():
        return Ownership(owner.version, upstream.version if upstream else "", hidden_by=str(imported))
    missing = [file for file in listed if not file.path.exists()]
    changed = [file for file in listed if file.path.exists() and not file.is_as_listed()]
    # A file that somebody has patched is not upstream's. Upstream's own list says which is; where that list
    # has gone, the file that is loaded first does.
    entry = PurePosixPath(PACKAGE, "__init__.py")
    replaced = [
        file
        for file in changed
        if file.name == entry or (file.name in theirs and theirs[file.name].is_as_listed())
    ]
    return Ownership(
        owner.version,
        upstream.version if upstream is not None and theirs else "",
        tuple(str(file.name) for file in missing),
        tuple(str(file.name) for file in replaced),
        () if _lies_over_upstream(owner) else tuple(_foreign_backends(listed)),
    )


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _files(distribution: metadata.Distribution) -> list[ListedFile]:
    """A distribution's list. `Distribution.files` leaves out what is missing (Python 3.12)."""
    files = []
    for line in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        name = PurePosixPath(line[0])
        if name.parts[0] == PACKAGE and name.suffix != ".pyc":
            path = Path(str(distribution.locate_file(line[0])))
            files.append(ListedFile(name, path, line[1].removeprefix("sha256="), line[2]))
    return files


def digest(data: bytes) -> str:
    """SHA-256 as lists of files have it: base64, without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _folder(listed: Sequence[ListedFile]) -> Path:
    """Where the package lies."""
    return listed[0].path.parents[len(listed[0].name.parts) - 2]


def _imported_folder() -> Path | None:
    """Where Python takes the package from, without importing it."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except ValueError:  # a module that nobody has found anywhere
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]).resolve() if locations else None


def hide_remains() -> None:
    """Makes ``import triton`` fail where only a folder is left that uninstalling upstream's has emptied.

    Python would import it as a namespace, without anything of Triton in it.
    """
    if PACKAGE in sys.modules:
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is None:
        sys.modules[PACKAGE] = None  # type: ignore[assignment]


def _lies_over_upstream(owner: metadata.Distribution) -> bool:
    """Whether it requires upstream's and is laid over it on purpose (triton-ascend's FAQ: since 3.2.1)."""
    return any(re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() == PACKAGE for line in owner.requires or ())


def _foreign_backends(listed: Sequence[ListedFile]) -> Iterator[str]:
    """Folders of back ends that are not triton-ascend's: its front end loads whatever stands there."""
    backends = PurePosixPath(PACKAGE, "backends")
    own = {file.name.relative_to(backends).parts[0] for file in listed if backends in file.name.parents}
    folder = _folder(listed) / backends.name
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not path.name.startswith("__") and path.name not in own:
            yield str(backends / path.name)


# What follows changes what is installed.


def hold() -> str:
    """Installs a distribution ``triton`` without files, where something asks for one and none is there.

    Returns:
        Its version; empty where nothing was to be done.

    Raises:
        MendError: pip failed.
    """
    asking, there = _unmet(), _distribution(PACKAGE)
    if not asking:
        return ""
    # Where packages contradict each other, `pip check` says whom the version leaves out.
    version = max(_candidates(asking), key=lambda each: _num_satisfied(each, asking))
    if there is not None and there.version == version:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        _pip("install", "--no-deps", "--no-index", str(write_placeholder(Path(folder), version)))
    return version


def _asking() -> Iterator[SpecifierSet]:
    """Which versions of triton each requires, of all that is installed."""
    from packaging.requirements import Requirement

    for distribution in metadata.distributions():
        for line in distribution.requires or ():
            if PACKAGE not in line.lower():
                continue
            wanted = Requirement(line)
            is_asked = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if wanted.name.lower() == PACKAGE and is_asked:
                yield wanted.specifier


def _unmet() -> list[SpecifierSet]:
    """What is asked for, if not all of it is satisfied by what is there."""
    asking, there = list(_asking()), _distribution(PACKAGE)
    is_met = there is not None and _num_satisfied(there.version, asking) == len(asking)
    return [] if is_met else asking


def _candidates(asking: Sequence[SpecifierSet]) -> Iterator[str]:
    """Versions of which one is what a package asks for, if any is."""
    yield "0"
    for specifier in (specifier for specifiers in asking for specifier in specifiers):
        named = specifier.version.removesuffix(".*")
        yield from (named, f"{named}.1")  # the second where it has to be above the first


def _num_satisfied(version: str, asking: Sequence[SpecifierSet]) -> int:
    return sum(specifiers.contains(version) for specifiers in asking)


def write_placeholder(folder: Path, version: str) -> Path:
    """A wheel named ``triton`` that has no files.

    Args:
        folder: to write it into.
        version: its version.
    """
    info = f"{PACKAGE}-{version}.dist-info"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\nSummary: {SUMMARY}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: moe_triton\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{info}/{name},sha256={digest(text.encode())},{len(text)}" for name, text in texts.items()]
    texts["RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"{PACKAGE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(f"{info}/{name}", text)
    return path


def mend() -> str:
    """Makes the package ``triton`` triton-ascend's, and keeps it so when pip installs what requires another.

    Returns:
        What was done; empty where nothing was to be done.

    Raises:
        MendError: triton-ascend's wheel cannot be had, in which case nothing was changed, or pip failed.
    """
    before = ownership()
    done = ""
    if before.hidden_by:
        _check_writable(Path(before.hidden_by).parent)
        _pip("uninstall", "--yes", PACKAGE)
        done = f"triton {before.upstream} is uninstalled. Before: {before.problem}"
    elif before.problem:
        done = _reinstall(before)
    held = hold() if before.version else ""
    ownership.cache_clear()
    importlib.invalidate_caches()
    if left := ownership().problem:
        raise MendError(f"{left}, after {OWNER} was installed anew: is there a second folder of packages?")
    said = [done, f"the name {PACKAGE} {held} is held by a package without files" if held else ""]
    return "; ".join(filter(None, said))


def would_hold() -> bool:
    """Whether something asks for a version of triton that is not there: pip's next command brings it."""
    return bool(_unmet())


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise MendError(f"{folder} cannot be written: run this as its owner. Nothing was changed.")


def _reinstall(before: Ownership) -> str:
    owner = _distribution(OWNER)
    assert owner is not None
    package = _folder(_files(owner))
    _check_writable(package.parent)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _pip("download", "--no-deps", "--dest", folder, f"{OWNER}=={before.version}")
        except MendError as error:
            raise MendError(f"{error}\nNothing was changed.") from None
        wheels = [str(path) for path in Path(folder).iterdir()]
        _pip("uninstall", "--yes", PACKAGE, OWNER)
        # Nobody's list has what is left: what Python compiled, and what came without a list.
        shutil.rmtree(package, ignore_errors=True)
        _pip("install", "--no-deps", "--no-index", *wheels)
    return f"{OWNER} {before.version} is installed anew. Before: {before.problem}"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        raise MendError("there is no pip in this environment: python -m ensurepip, or uv pip install pip.")
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if not line.startswith("WARNING")]
        raise MendError(f"pip {' '.join(arguments[:2])} failed:\n" + "\n".join(said[-10:]))


def main(arguments: Sequence[str]) -> int:
    """Runs one of the two commands; their names stand above."""
    commands = {"hold": hold, "mend": mend}
    if len(arguments) != 1 or arguments[0] not in commands:
        print(__doc__)
        return 2
    try:
        said = commands[arguments[0]]()
    except MendError as error:
        print(error, file=sys.stderr)
        return 1
    if said:
        print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
