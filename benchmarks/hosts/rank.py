"""One rank of a job: calls its function, and leaves what that returns."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.hosts.namespaces import Job


def main(said: str) -> None:
    """Runs the function of a job in a group of all its ranks."""
    job = Job(**json.loads(said))
    if job.mpirun:
        os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    function = getattr(importlib.import_module(job.module), job.function)
    answer = function(rank, dist.get_world_size(), *job.arguments)
    path = Path(job.folder) / f"{rank}"
    path.with_suffix(".new").write_text(json.dumps(answer))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    main(sys.argv[1])
