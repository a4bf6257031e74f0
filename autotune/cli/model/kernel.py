"""``moe-triton model kernel``: what a core does with its time in one kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autotune.cli.model.options import MOST_BLOCKS, machine_of
from autotune.gate.families import parse_case
from autotune.model.constants import Machine
from autotune.model.kernel_costs.replay import Replayed
from autotune.model.kernel_costs.replay import case as cases
from autotune.npu_compiler.socs import soc_named
from moe_triton.core.group_sizes import MAX_RANKS
from moe_triton.kernels import Case, Sizes
from moe_triton.runtime.traces import TraceFile
from moe_triton.tools.cli.options import MOST_EXPERTS, MOST_TOKENS
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers, print_parts, texts


def kernel(
    case: Annotated[str, typer.Argument(help="a kernel, or a case of the compiler gate's table")],
    soc: Annotated[str, typer.Option(help="chip, or its product: A2 or A3")] = "A3",
    machine: Annotated[str, typer.Option(help="file that a selftest wrote; what is assumed if none")] = "",
    tokens: Annotated[int, typer.Option(help="of this rank", min=8, max=MOST_TOKENS)] = 128,
    ranks: Annotated[int, typer.Option(help="of the group", min=1, max=MAX_RANKS)] = 16,
    experts: Annotated[int, typer.Option(help="of all ranks", min=1, max=MOST_EXPERTS)] = 256,
    blocks: Annotated[int, typer.Option(help="cores; all of the machine's if 0", min=0, max=MOST_BLOCKS)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    trace: Annotated[Path | None, typer.Option(help="file for a timeline of the pipes, for Perfetto")] = None,
) -> None:
    """Replay one kernel, as the NPU's compiler made it, on the pipes of a vector core.

    Inputs are those of the kernel's case: random, each received row count as likely as any other.
    """
    chip = soc_named(soc)
    constants = machine_of(machine or chip.product)
    family, shape = parse_case(case)
    sizes = Sizes(tokens=tokens, num_experts=experts, num_ranks=ranks, unrouted=0.0, first_token=0)
    one = Case(family, shape, sizes)
    num_blocks = blocks or int(constants.cores)
    with progress(f"replaying {one.name}"):
        launch = cases.replay_case(one, chip.name, constants, num_blocks, with_spans=trace is not None)
    if trace is not None:
        file = TraceFile(trace)
        file.start(is_first=True)
        file.add(cases.trace_events(launch.slowest, constants, one.name))
    if as_json:
        typer.echo(json.dumps({"case": one.name, "blocks": num_blocks, **cases.as_json(launch, constants)}))
    else:
        print_parts(_parts(one.name, num_blocks, launch, constants), Console())


def _parts(case: str, blocks: int, launch: Replayed, machine: Machine) -> Iterator[TextTable | str]:
    replay, us = launch.slowest, 1e-3 / machine.clock_ghz
    told = (
        f"{case} on {blocks} cores of {machine.name}: {replay.cycles:.0f} cycles,",
        f"{replay.cycles * us:.2f} us on the slowest core, bound by {replay.bound}.",
        f"{replay.turns} turns of its longest loop,",
        f"{replay.cycles_per_turn:.0f} cycles each. {launch.read} bytes read and {launch.written} written by",
        f"all cores, of which {launch.active} copy, {launch.bytes_per_cycle:.1f} bytes a cycle each.",
    )
    yield " ".join(told)
    yield TextTable(
        (names("critical path"), numbers("cycles"), numbers("us"), numbers("share")),
        [
            (part, f"{cycles:.0f}", f"{cycles * us:.2f}", f"{cycles / (replay.cycles or 1):.0%}")
            for part, cycles in replay.parts.items()
        ],
    )
    pipes = []
    for pipe, busy in replay.busy.items():
        causes = sorted(replay.stalls[pipe].items(), key=lambda each: -each[1])
        pipes.append(
            (pipe, f"{busy:.0f}", ", ".join(f"{cause} {cycles:.0f}" for cause, cycles in causes if cycles))
        )
    yield TextTable((names("pipe"), numbers("busy cycles"), texts("stalls, cycles")), pipes)
