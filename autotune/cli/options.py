"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autotune.kernels.scope import Scope
from autotune.kinds import Kind

MOST_SEED = 2**32 - 1  # of NumPy, by which experts are drawn


def say(line: str) -> None:
    """Prints a line as it is, however long: a terminal breaks it, and a pipe gets all of it."""
    Console().print(line, markup=False, highlight=False, soft_wrap=True)


Soc = Annotated[str, typer.Option(help="chip or product, as A3; cpu measures on this machine")]
Hidden = Annotated[list[int], typer.Option(help="elements of a row; may be repeated")]
Topk = Annotated[list[int], typer.Option(help="routed experts per token; may be repeated")]
Ranks = Annotated[list[int], typer.Option(help="of the group; may be repeated")]
Tokens = Annotated[list[int], typer.Option(help="of each rank; may be repeated")]
Dtype = Annotated[list[str], typer.Option(help="of tokens: bf16 or fp16; may be repeated")]
Kernel = Annotated[list[str], typer.Option(help="only this one; may be repeated")]
Constants = Annotated[str, typer.Option("--machine", help="file of constants that a selftest wrote")]
Workers = Annotated[int, typer.Option(help="processes; 0 for what suits", min=0, max=256)]
Budget = Annotated[int, typer.Option(help="most candidates of one kernel", min=1)]
Seed = Annotated[int, typer.Option(help="of drawn experts and of sampled candidates", min=0, max=MOST_SEED)]

Study = Annotated[Path | None, typer.Option(help="file that keeps candidates, if not in the cache")]

DEFAULT = Scope()


def again(kind: Kind, scope: Scope) -> str:
    """The command that writes a machine's table of a kind."""
    return f"{kind.command} --soc {scope.soc}"


def scope_of(
    soc: str,
    hidden: list[int],
    topk: list[int],
    ranks: list[int],
    tokens: list[int],
    dtype: list[str],
    kernels: list[str],
    constants: str,
    seed: int,
) -> Scope:
    """What a command is asked about."""
    h, k, ep, bs = (tuple(dict.fromkeys(each)) for each in (hidden, topk, ranks, tokens))
    return Scope(soc, h, k, ep, bs, tuple(dict.fromkeys(dtype)), tuple(kernels), constants, seed)
