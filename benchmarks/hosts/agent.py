"""Starts a command on another host in place of ssh, for mpirun: plm_ssh_agent is this file.

python benchmarks/hosts/agent.py HOST COMMAND...
"""

from __future__ import annotations

import os
import sys

KEEPERS = "MOE_TEST_HOSTS"  # variable: the processes that keep the hosts, by number


def main(host: str, *command: str) -> None:
    """Becomes what a shell of the host makes of the command."""
    keeper = os.environ[KEEPERS].split()[int(host.removeprefix("host"))]
    # As ssh has it: without what mpirun has added to the environment of the first host.
    kept = [f"{name}={os.environ[name]}" for name in ("PATH", "HOME", "TMPDIR") if name in os.environ]
    shell = "env", "-i", *kept, f"{KEEPERS}={os.environ[KEEPERS]}", "sh", "-c", " ".join(command)
    os.execvp("nsenter", ["nsenter", "-t", keeper, "-n", "-m", "-i", "-u", *shell])


if __name__ == "__main__":
    main(*sys.argv[1:])
