"""How commands end that cannot do what they are asked: with a message, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from typer.core import TyperGroup

from moe_triton.core.errors import MoeTritonError
from moe_triton.processes import RankFailedError

FAILED = 1  # of a process


class Commands(TyperGroup):
    """A group of commands: what one of them raises on purpose is a message, and ends the process with 1."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        with errors_shown():
            return super().invoke(ctx)


@contextmanager
def errors_shown() -> Iterator[None]:
    """Around what a command does.

    Raises:
        SystemExit: it failed, which has been said: an error of ours, also one of a rank, or a file that the
            system refuses. Anything else is a bug, and keeps its traceback.
    """
    try:
        yield
    except MoeTritonError as error:
        said = str(error)
    except RankFailedError as error:
        said = _of_ranks(error)
    except OSError as error:
        if error.filename is None:  # a pipe that nobody reads any more
            raise
        said = f"{error.filename}: {error.strerror}"
    else:
        return
    Console(stderr=True).print(said, style="red", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(FAILED)


def _of_ranks(error: RankFailedError) -> str:
    """What failed, once for all ranks of which it is the same."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(error.failures):
        by_text.setdefault(error.messages.get(rank, error.failures[rank]), []).append(rank)
    return "\n".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {said}"
        for said, ranks in by_text.items()
    )
