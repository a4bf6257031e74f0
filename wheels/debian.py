"""Debian's packages, of any architecture and release, unpacked into a folder: nothing else changes."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIRROR = "http://deb.debian.org/debian"
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class MissingError(Exception):
    """Something that it takes is missing; the message says what, and how to get it."""


def run(command: Sequence[str | Path], **options: Any) -> None:
    """Runs a program.

    Args:
        command: its words.
        options: of `subprocess.run`.

    Raises:
        MissingError: it failed, with the end of what it said.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise MissingError(f"{shlex.join(words)} failed: {(done.stderr or done.stdout).strip()[-2000:]}")


@dataclass(frozen=True)
class Debian:
    """A release for an architecture.

    Attributes:
        folder: for lists and packages.
        architecture: Debian's name of it, as "arm64".
        release: as "trixie"; None for what this machine's apt is set up for.
    """

    folder: Path
    architecture: str
    release: str | None = None

    def unpack(self, names: Sequence[str], root: Path, *, alone: bool = False) -> None:
        """Fetches packages and unpacks them.

        Args:
            names: of the packages.
            root: where to.
            alone: without what they require.

        Raises:
            MissingError: apt failed, and said why.
        """
        archives = self._archives
        environment = {**os.environ, "APT_CONFIG": str(self._configure())}
        run(["apt-get", "update", "-qq"], env=environment)
        if alone:
            run(["apt-get", "download", "-qq", *names], env=environment, cwd=archives)
        else:
            options = "-y", "-qq", "--download-only", "--no-install-recommends"
            run(["apt-get", "install", *options, *names], env=environment)
        for package in sorted(archives.glob("*.deb")):
            run(["dpkg-deb", "-x", package, root])

    @property
    def _archives(self) -> Path:
        return self.folder / "cache" / "archives"

    def _configure(self) -> Path:
        """Makes the folders; returns apt's file about them."""
        for each in (self.folder / "state" / "lists" / "partial", self._archives / "partial"):
            each.mkdir(parents=True, exist_ok=True)
        status, sources = self.folder / "state" / "status", self.folder / "sources.list"
        status.touch()
        settings = {
            "APT::Architecture": self.architecture,
            "APT::Architectures": self.architecture,
            "Dir::State": self.folder / "state",
            "Dir::State::status": status,
            "Dir::Cache": self.folder / "cache",
            "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
        }
        if self.release:
            sources.write_text(f"deb [signed-by={KEYS}] {MIRROR} {self.release} main\n")
            settings |= {"Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "-"}
        config = self.folder / "apt.conf"
        config.write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
        return config
