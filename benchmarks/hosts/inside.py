"""Makes hosts in the namespaces that this process is in, and starts the ranks of a job on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.hosts import agent
from benchmarks.hosts.namespaces import Ended, Job, address_of, address_v6_of, environment_of

HOST = "--net", "--mount", "--ipc", "--uts"
WITHIN_S = 20.0
RANK = sys.executable, "-m", "benchmarks.hosts.rank"
MPI_OPTIONS = (
    *("--allow-run-as-root", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"),
    *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "eth0"),
    *("--mca", "mpi_preconnect_mpi", "1"),
)
"""Idle, MPI gives its core up, as in `benchmarks.compare`. Ranks are connected at once: nothing of MPI goes
on outside of its calls, a connection that is being made included."""


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _on(pid: int, *command: str, own_clock: bool = False) -> list[str]:
    clock = ["-T"] if own_clock else []
    return ["nsenter", "-t", str(pid), "-n", "-m", "-i", "-u", *clock, *command]


def _namespace_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def make_host(number: int, names: Path, job: Job) -> int:
    """Makes a host, and returns the process that keeps it."""
    own, rate = _namespace_of(1), job.rate
    clock = ["--time", "--monotonic", str(job.clocks[number])] if job.clocks else []
    keeper = subprocess.Popen(["unshare", *HOST, *clock, "sleep", "infinity"]).pid
    deadline = time.monotonic() + WITHIN_S
    while _namespace_of(keeper) == own:
        assert time.monotonic() < deadline, "no host within 20 s"
        time.sleep(0.005)
    _run("ip", "link", "add", f"port{number}", "type", "veth", "peer", "name", f"cable{number}")
    _run("ip", "link", "set", f"port{number}", "master", "switch", "up")
    _run("ip", "link", "set", f"cable{number}", "netns", str(keeper))
    steps = [
        f"ip link set cable{number} name eth0",
        f"ip address add {address_of(number)}/24 dev eth0",
        f"ip address add {address_v6_of(number)}/64 dev eth0 nodad",
        "ip link set eth0 up",
        "ip link set lo up",
        f"hostname host{number}",
        "mount -t tmpfs tmpfs /dev/shm",
        f"mount --bind {names} /etc/hosts",  # without names gloo takes the loopback
    ]
    if rate:
        steps.append(f"tc qdisc add dev eth0 root tbf rate {rate} burst 128kb latency 100ms")
    _run(*_on(keeper, "sh", "-ec", "\n".join(steps)))
    return keeper


def names_of(host: int, job: Job) -> str:
    """What /etc/hosts of a host says."""
    if job.own_name_is_loopback:
        return f"127.0.0.1 localhost\n127.0.1.1 host{host}\n"
    lines = [f"{address_of(number)} host{number}" for number in range(len(job.hosts))]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def run_commands(keepers: list[int], job: Job) -> None:
    """Runs a command on each host, and leaves how it ended."""
    environment = {**os.environ, **job.environment, agent.KEEPERS: " ".join(map(str, keepers))}
    running = []
    for host, (keeper, command) in enumerate(zip(keepers, job.commands, strict=True)):
        started = _on(keeper, *(command or ["true"]))
        with (Path(job.folder) / f"{host}.said").open("w") as said:
            running.append(subprocess.Popen(started, env=environment, stdout=said, stderr=said))
    statuses = [each.wait() for each in running]
    for host, (keeper, status) in enumerate(zip(keepers, statuses, strict=True)):
        text = (Path(job.folder) / f"{host}.said").read_text()
        shown = subprocess.run(
            _on(keeper, "ls", "-A", "/dev/shm"), capture_output=True, text=True, check=True
        )
        ended = Ended(status, text, shown.stdout.split())
        (Path(job.folder) / f"{host}").write_text(json.dumps(asdict(ended)))


def by_themselves(said: str, job: Job, keepers: list[int], _: Path) -> list[subprocess.Popen[bytes]]:
    """Starts ranks with torch's variables."""
    host_of = [number for number, ranks in enumerate(job.hosts) for _ in range(ranks)]
    given, own_clock = {**os.environ, **environment_of(job)}, bool(job.clocks)
    return [
        subprocess.Popen(
            _on(keepers[host], *RANK, said, own_clock=own_clock), env={**given, "RANK": str(rank)}
        )
        for rank, host in enumerate(host_of)
    ]


def by_mpirun(said: str, job: Job, keepers: list[int], folder: Path) -> list[subprocess.Popen[bytes]]:
    """Starts mpirun on the first host; on the others it starts what it needs by way of an agent."""
    # What it keeps there is named by numbers of processes, which begin anew in these namespaces.
    given = {**environment_of(job), "TMPDIR": str(folder), agent.KEEPERS: " ".join(map(str, keepers))}
    hosts = ",".join(f"host{number}:{ranks}" for number, ranks in enumerate(job.hosts))
    ssh = "--prtemca", "plm_ssh_agent", f"{sys.executable} {agent.__file__}"
    command = [job.mpirun, *MPI_OPTIONS, *ssh, "--host", hosts]
    command += [word for name in given for word in ("-x", name)]
    return [subprocess.Popen(_on(keepers[0], *command, *RANK, said), env={**os.environ, **given})]


def main(said: str) -> int:
    """Runs a job, and returns how many of its ranks, or whether mpirun, have failed."""
    job = Job(**{**json.loads(said), "hosts": tuple(json.loads(said)["hosts"])})
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")
    with tempfile.TemporaryDirectory() as folder:
        keepers = []
        for number in range(len(job.hosts)):
            names = Path(folder) / f"hosts{number}"
            names.write_text(names_of(number, job))
            keepers.append(make_host(number, names, job))
        if job.commands:
            run_commands(keepers, job)
            return 0
        start = by_mpirun if job.mpirun else by_themselves
        ranks = start(said, job, keepers, Path(folder))
        return sum(rank.wait() != 0 for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
