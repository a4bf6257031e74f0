"""Hosts on one machine: each has a network, shared memory and a name of its own, and a cable to one switch.

`run` begins a process in namespaces of its own, which makes the hosts in there and starts the ranks. Nothing
of the machine changes, and all of it ends with that process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUTER = "--user", "--map-root-user", "--net", "--mount", "--ipc", "--pid", "--uts", "--fork", "--kill-child"
WITH_US = "setpriv", "--pdeathsig", "KILL"
"""Hosts end with who made them, whatever ends that."""
PORT = 29_500


@dataclass(frozen=True)
class Job:
    """What ranks run.

    Attributes:
        module, function: of what each rank calls with its number and the arguments; what it returns is JSON.
        hosts: ranks of each host.
        arguments: as JSON has them.
        folder: for answers.
        rate: of each host's cable, as tc has it; "" for any.
        clocks: by how many seconds each host's monotonic clock is ahead; () where all have the machine's.
        environment: of all ranks.
        commands: one for each host, in place of the function; an empty one for none there.
        own_name_is_loopback: each host's own name leads to its loopback, as Debian has it, others nowhere.
        mpirun: the path of Open MPI's, which starts the ranks then; "" for none.
    """

    module: str
    function: str
    hosts: tuple[int, ...]
    arguments: Sequence[Any] = ()
    folder: str = ""
    rate: str = ""
    clocks: Sequence[int] = ()
    environment: dict[str, str] = field(default_factory=dict)
    commands: Sequence[Sequence[str]] = ()
    own_name_is_loopback: bool = False
    mpirun: str = ""

    @property
    def num_ranks(self) -> int:
        return sum(self.hosts)


@dataclass(frozen=True)
class Ended:
    """A command of one host, which has ended.

    Attributes:
        status: its exit status.
        said: on both of its outputs.
        left: files in the host's /dev/shm.
    """

    status: int
    said: str
    left: list[str]


@cache
def missing() -> str:
    """Why there can be no such hosts on this machine; "" if there can."""
    for name in ("setpriv", "unshare", "nsenter", "ip"):
        if shutil.which(name) is None:
            return f"{name} is not installed (apt-get install iproute2 util-linux)"
    tried = subprocess.run(["unshare", *OUTER, "--mount-proc", "true"], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


def run(
    function: Callable[..., Any], hosts: tuple[int, ...], *arguments: Any, timeout_s: float, **options: Any
) -> list[Any]:
    """Runs a function on ranks of several hosts, and returns what each has returned; None of who has not.

    Args:
        function: importable from its module; its result is JSON.
        hosts: ranks of each host.
        arguments: passed behind the rank, as JSON has them.
        timeout_s: seconds until all have to have answered.
        options: of `Job`.

    Raises:
        subprocess.TimeoutExpired: they have not.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Job(function.__module__, function.__name__, hosts, arguments, folder, **options)
        return _answers(job, job.num_ranks, timeout_s)


def launch(commands: Sequence[Sequence[str]], *, timeout_s: float, **options: Any) -> list[Ended]:
    """Runs a command on each of several hosts, as a user starts a launcher there, and returns how they ended.

    Args:
        commands: of the hosts; an empty one for none there.
        timeout_s: seconds until all have to have ended.
        options: of `Job`.

    Raises:
        subprocess.TimeoutExpired: they have not.
    """
    with tempfile.TemporaryDirectory() as folder:
        hosts = (0,) * len(commands)
        job = Job("", "", hosts, folder=folder, commands=[list(each) for each in commands], **options)
        return [Ended(**answer) for answer in _answers(job, len(commands), timeout_s)]


def _answers(job: Job, number: int, timeout_s: float) -> list[Any]:
    """What a job has left in its folder."""
    outer = *WITH_US, "unshare", *OUTER, "--mount-proc"
    command = [*outer, sys.executable, "-m", "benchmarks.hosts.inside"]
    done = subprocess.run(
        [*command, json.dumps(asdict(job))], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
    answers = [Path(job.folder) / str(each) for each in range(number)]
    return [json.loads(each.read_text()) if each.exists() else None for each in answers]


def environment_of(job: Job) -> dict[str, str]:
    """What torch.distributed and libfabric find a group by, besides RANK."""
    return {
        "WORLD_SIZE": str(job.num_ranks),
        "MASTER_ADDR": address_of(0),
        "MASTER_PORT": str(PORT),
        **job.environment,
    }


def address_of(host: int) -> str:
    """Of a host on the switch's network."""
    return f"10.77.0.{host + 1}"


def address_v6_of(host: int) -> str:
    """The same in IPv6."""
    return f"fd77::{host + 1}"
