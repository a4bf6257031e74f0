"""Ranks as processes on this machine: what the demo, the benchmarks and the tests run in."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["moe_triton.preload"]
GRACE_S = 2.0  # for a process to exit by itself before it is killed
DIED = (
    "died without an error. If nothing above says why: a script that starts ranks keeps what it runs "
    'behind `if __name__ == "__main__":`, since every rank imports it'
)
MAIN = "__main__"
GOOD, FAILED, TOLD = "good", "failed", "told"  # what a rank sends

_to_group: Connection[Any, Any] | None = None  # in the process of a rank


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """While it holds, processes that are started do not import the script that the user runs.

    `multiprocessing` has each of them do that, for functions that are defined there. A script that does not
    guard what it runs would run in every process again, and standard input cannot be read twice. Nothing that
    is passed to these processes may be defined in the script. (loky leaves the script out in the same way.)
    """
    main = sys.modules[MAIN]
    sys.modules[MAIN] = types.ModuleType(MAIN)
    try:
        yield
    finally:
        sys.modules[MAIN] = main


def tell(message: object) -> None:
    """Says something to whoever runs this rank's function, see `RankGroup.run`; elsewhere nobody hears it."""
    if _to_group is not None:
        _to_group.send((TOLD, message))


class RankFailedError(RuntimeError):
    """A rank raised, died or outlived the deadline.

    Attributes:
        failures: what happened, by rank, with the traceback if it raised.
        messages: of the ranks that raised an error of ours, what that says.
    """

    def __init__(self, failures: dict[int, str], messages: Mapping[int, str] | None = None) -> None:
        self.failures, self.messages = failures, dict(messages or {})
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))


class RankGroup:
    """Processes in one gloo group that run functions, one at a time.

    They are forked from a server that has imported torch once, so that starting one takes milliseconds.
    A context manager: leaving it ends the processes.

    Args:
        num_ranks: processes to start.
        num_threads: torch's threads in each.
        timeout_s: of gloo's own operations.
        imports_main: whether functions may be defined in the script that is run, which each rank imports
            for that. Without it the script needs no ``if __name__ == "__main__":``.
    """

    def __init__(
        self, num_ranks: int, *, num_threads: int = 1, timeout_s: float = 120.0, imports_main: bool = True
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="moe_triton-")
        store = str(Path(self._folder.name) / "store")
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection[Any, Any]] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, num_ranks, store, num_threads, timeout_s, theirs), daemon=True
            )
            with contextlib.nullcontext() if imports_main else main_hidden():
                process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 120.0,
        allow_failures: bool = False,
        hear: Callable[[int, Any], None] = lambda rank, message: None,
    ) -> list[Any]:
        """Runs ``function(rank, num_ranks, *arguments)`` on every rank.

        Args:
            function: importable from its module; its result must be picklable.
            arguments: passed to each.
            timeout_s: seconds until all ranks must have answered; the group is closed when they have not.
            allow_failures: return a `RankFailedError` in a failed rank's place instead of raising it.
            hear: called with what ranks `tell` meanwhile.

        Returns:
            Results by rank.

        Raises:
            RankFailedError: with every failed rank's traceback.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it died: reported below
                pipe.send((function, arguments))
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        messages: dict[int, str] = {}
        while len(results) + len(failures) < len(self._pipes):
            waiting = [p for r, p in enumerate(self._pipes) if r not in results and r not in failures]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [self._pipes.index(pipe) for pipe in waiting]
                failures.update(dict.fromkeys(late, f"no result within {timeout_s:g} s"))
                self.close()
            for rank in [self._pipes.index(pipe) for pipe in waiting if pipe in ready]:
                try:
                    kind, value = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    kind, value = FAILED, (DIED, None)
                if kind == TOLD:
                    hear(rank, value)
                elif kind == GOOD:
                    results[rank] = value
                else:
                    failures[rank], message = value
                    if message is not None:
                        messages[rank] = message
        if failures and not allow_failures:
            raise RankFailedError(failures, messages)
        return [
            results[rank] if rank in results else _of_rank(rank, failures, messages)
            for rank in range(len(self._pipes))
        ]

    def close(self) -> None:
        """Ends the processes, by force if they do not exit by themselves."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(GRACE_S)  # one inside a driver's call cannot be killed
        self._folder.cleanup()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    arguments: Sequence[Any] = (),
    *,
    timeout_s: float = 120.0,
    allow_failures: bool = False,
    hear: Callable[[int, Any], None] = lambda rank, message: None,
) -> list[Any]:
    """Runs one function on a `RankGroup` of its own; see `RankGroup.run`."""
    with RankGroup(num_ranks, timeout_s=timeout_s) as group:
        return group.run(function, *arguments, timeout_s=timeout_s, allow_failures=allow_failures, hear=hear)


def _of_rank(rank: int, failures: Mapping[int, str], messages: Mapping[int, str]) -> RankFailedError:
    said = {rank: messages[rank]} if rank in messages else {}
    return RankFailedError({rank: failures[rank]}, said)


def _serve(
    rank: int, num_ranks: int, store: str, num_threads: int, timeout_s: float, pipe: Connection[Any, Any]
) -> None:
    import torch
    import torch.distributed as dist

    from moe_triton.core.errors import MoeTritonError

    global _to_group
    _to_group = pipe
    torch.set_num_threads(num_threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while (task := pipe.recv()) is not None:
            function, arguments = task
            try:
                answer: tuple[str, Any] = (GOOD, function(rank, num_ranks, *arguments))
            except BaseException as error:
                message = str(error) if isinstance(error, MoeTritonError) else None
                answer = (FAILED, (traceback.format_exc(), message))
            pipe.send(answer)
    dist.destroy_process_group()
