"""Starting ranks: by Open MPI's mpirun, so that each has MPI and gloo, or as a `RankGroup` without MPI."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compare.cases import ROOT, Job
from benchmarks.compare.rank import serve_in_group
from moe_triton.core.installing import install
from moe_triton.processes import RankGroup

# As on a machine with fewer cores than ranks. Idle, MPI gives its core up: what spins would be measured in
# every other route.
MPI_OPTIONS = [
    *("--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    *("--mca", "mpi_yield_when_idle", "1", "--mca", "pml", "ob1", "--mca", "btl", "self,sm"),
]
PROBE_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 10.0
POLL_S = 0.1
# Between two messages of rank 0: the longest is the start of a case, with windows of some gigabytes.
SILENCE_S = 240.0

Message = dict[str, Any]


class BenchmarkError(RuntimeError):
    """Ranks failed or fell silent."""


@dataclass(frozen=True)
class Mpi:
    """How to start ranks under MPI, or why that cannot be done.

    Attributes:
        mpirun: path, or None.
        absent: the reason where it is None.
        version: what the library calls itself.
    """

    mpirun: str | None
    absent: str = ""
    version: str = ""

    @staticmethod
    def find() -> Mpi:
        """Looks beside this Python first, then on the path, and tries it with one rank."""
        if importlib.util.find_spec("mpi4py") is None:
            return Mpi(None, f"mpi4py is not installed: {install('bench')}")
        beside = Path(sys.executable).with_name("mpirun")
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        if mpirun is None:
            return Mpi(None, f"there is no mpirun: {install('bench')}")
        code = "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0])"
        command = [mpirun, *MPI_OPTIONS, "-n", "1", sys.executable, "-c", code]
        try:
            tried = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Mpi(None, f"mpirun does not work: {error}")
        if tried.returncode:
            last = (tried.stderr.strip() or tried.stdout.strip() or "no message").splitlines()[-1]
            return Mpi(None, f"mpirun does not work: {last}")
        return Mpi(mpirun, version=tried.stdout.strip())


def run_job(job: Job, mpi: Mpi, on_message: Callable[[Message], None]) -> None:
    """Starts ranks, hands on what rank 0 says, and returns when all have ended.

    Raises:
        BenchmarkError: a rank failed, or nothing was heard for `SILENCE_S`.
    """
    with tempfile.TemporaryDirectory(prefix="moe_triton-compare-") as name:
        folder = Path(name)
        results = folder / "results.jsonl"
        results.touch()
        job = replace(job, results=str(results))
        started = _MpiRanks(job, mpi.mpirun, folder) if mpi.mpirun else _GroupRanks(job, mpi.absent)
        try:
            for message in _follow(results, started):
                on_message(message)
        finally:
            started.stop()
        started.check()


class _MpiRanks:
    """Ranks that mpirun started. What they print goes to a file, and is shown if they fail."""

    def __init__(self, job: Job, mpirun: str, folder: Path) -> None:
        path = folder / "job.json"
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        self._log = folder / "log"
        command = [mpirun, *MPI_OPTIONS, "-n", str(job.ranks)]
        command += [sys.executable, "-m", "benchmarks.compare.rank", str(path)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        if self.is_running():
            self._process.terminate()  # mpirun then ends its ranks
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def check(self) -> None:
        if self._process.returncode:
            raise BenchmarkError(f"mpirun ended with {self._process.returncode}:\n{self.log()}")

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-6000:]


class _GroupRanks:
    """Ranks of a `RankGroup`, followed from another thread."""

    def __init__(self, job: Job, no_mpi: str) -> None:
        self._group = RankGroup(job.ranks)
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(
            self._group.run, serve_in_group, job, no_mpi, timeout_s=job.num_cases * (job.seconds + SILENCE_S)
        )

    def is_running(self) -> bool:
        return not self._done.done()

    def stop(self) -> None:
        self._group.close()  # ranks that wait for them get an error then
        self._pool.shutdown()

    def check(self) -> None:
        if (error := self._done.exception()) is not None:
            raise BenchmarkError(f"the ranks failed: {error}") from error

    def log(self) -> str:
        return ""


def _follow(path: Path, ranks: _MpiRanks | _GroupRanks) -> Iterator[Message]:
    """Whole lines as they come, until the ranks have ended."""
    heard = time.monotonic()
    with path.open(encoding="utf-8") as file:
        while True:
            running = ranks.is_running()  # before the last look: nothing is written after the end
            here = file.tell()
            line = file.readline()
            if line.endswith("\n"):
                heard = time.monotonic()
                yield json.loads(line)
                continue
            file.seek(here)
            if not running:
                return
            if time.monotonic() - heard > SILENCE_S:
                raise BenchmarkError(f"no word from rank 0 for {SILENCE_S:g} s\n{ranks.log()}")
            time.sleep(POLL_S)
