"""The command line ``moe-triton``: try, build and check it, look at layouts, plans and traces.

Other packages add commands, as `autotune` adds ``compile``, ``gate``, ``model`` and ``tune``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

import moe_triton
from moe_triton.core.group_sizes import MAX_RANKS
from moe_triton.schemes import SCHEMES
from moe_triton.tools.cli.extensions import Extended
from moe_triton.tools.cli.options import MOST_EXPERTS, MOST_HIDDEN, MOST_TOKENS, SERVERS_HELP

app = typer.Typer(cls=Extended, no_args_is_help=True, add_completion=False, help=__doc__)

ROWS_HELP = "how rows travel: as EPBuffer.dispatch takes it, or none"
_NAMES = "; ".join(f"{product}: {', '.join(schemes)}" for product, schemes in SCHEMES.items())
COMM_ALG_HELP = f"how tokens travel: auto, or a scheme ({_NAMES})"
OUTPUTS_HELP = "where auto may leave outputs, as EPBuffer takes it"
PRODUCT_HELP = "whose limits and schemes; if not given, that which has the scheme"
MEMFABRIC_HELP = (
    "for groups of several servers, by posts: 'installed', or the folder of the package memfabric_hybrid"
)
HOSTS_HELP = "on all ranks of a launcher: whether they reach each other, and how fast"
KERNELS_HELP = "triton, torch (slow), or auto: triton wherever triton-ascend is, or can be installed"
MOST_SEED = 2**31 - 1
Outputs = Literal["own", "window"]
Product = Literal["A2", "A3"]
Posts = Literal["aiv", "aicpu"]


def _print_version(asked: bool) -> None:
    if asked:
        Console().print(f"moe_triton {moe_triton.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print it and end", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What stands before a command."""


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="processes, one rank each", min=1, max=MAX_RANKS)] = 4,
    tokens: Annotated[int, typer.Option(help="tokens per rank", min=1, max=MOST_TOKENS)] = 16,
    hidden: Annotated[int, typer.Option(help="elements of a token's row", min=1, max=MOST_HIDDEN)] = 7168,
    topk: Annotated[int, typer.Option(help="routed experts per token", min=1)] = 8,
    experts: Annotated[int, typer.Option(help="routed experts in the group", min=1, max=MOST_EXPERTS)] = 32,
    shared: Annotated[int, typer.Option(help="shared experts that every token goes to", min=0)] = 0,
    shared_ranks: Annotated[int, typer.Option(help="ranks for them; one each if not given", min=0)] = 0,
    quantize: Annotated[str, typer.Option(help=ROWS_HELP)] = "int8",
    intermediate: Annotated[int, typer.Option(help="width of an expert", min=1, max=MOST_HIDDEN)] = 64,
    rounds: Annotated[int, typer.Option(help="of dispatch and combine; times are medians", min=1)] = 5,
    seed: Annotated[int, typer.Option(help="of tokens, routing and experts", min=0, max=MOST_SEED)] = 0,
    kernels: Annotated[str, typer.Option(help=KERNELS_HELP)] = "auto",
    timeout_s: Annotated[
        float, typer.Option(help="seconds that one wait may take", min=0.1, max=86_400)
    ] = 60.0,
) -> None:
    """Send real tokens through dispatch, experts and combine, and check every number."""
    from moe_triton.tools.cli.demo import DemoSettings, run_demo

    sizes = ranks, tokens, hidden, topk, experts, shared, shared_ranks or shared
    rows = None if quantize == "none" else quantize
    settings = DemoSettings(*sizes, rows, intermediate, rounds, seed, kernels, timeout_s)
    raise typer.Exit(run_demo(settings, Console()))


@app.command()
def build(
    backend: Annotated[Literal["npu", "cpu"], typer.Option(help="what the kernels are built for")] = "npu",
    arch: Annotated[str, typer.Option(help="bisheng's architecture; dav-2201 is A2 and A3")] = "dav-2201",
    cann: Annotated[Path | None, typer.Option(help="CANN's folder, if not in ASCEND_HOME_PATH")] = None,
    cann_version: Annotated[str, typer.Option(help="as 8.5.0, where CANN's files do not tell it")] = "",
    jobs: Annotated[int, typer.Option(help="processes of the build")] = 1,
    output: Annotated[Path | None, typer.Option(help="folder for the library, if not the package's")] = None,
    memfabric: Annotated[Path | None, typer.Option(help=MEMFABRIC_HELP)] = None,
    scheme: Annotated[list[Path] | None, typer.Option(help="a further scheme's folder; any number")] = None,
) -> None:
    """Build the native library of a back end, as installing does where its compiler is there."""
    from moe_triton.tools.cli.build import BuildSettings
    from moe_triton.tools.cli.build import build as build_library

    settings = BuildSettings(backend, arch, cann, cann_version, jobs, output, memfabric, tuple(scheme or ()))
    build_library(settings, Console())


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="put triton-ascend where upstream's triton is")] = False,
    hosts: Annotated[bool, typer.Option("--hosts", help=HOSTS_HELP)] = False,
) -> None:
    """Say what of the toolchain is present, what is not, and how to get it."""
    from moe_triton.tools.cli.doctor import run_doctor, run_fix

    if hosts:
        from moe_triton.tools.cli.doctor_hosts import run_doctor_on_hosts

        raise typer.Exit(run_doctor_on_hosts(Console()))
    if fix:
        run_fix(Console())
    raise typer.Exit(run_doctor(Console()))


@app.command()
def layout(
    ranks: Annotated[int, typer.Option(help="ranks in the group")] = 8,
    tokens: Annotated[int, typer.Option(help="most tokens per rank")] = 64,
    hidden: int = 7168,
    topk: int = 8,
    experts: int = 64,
    shared: int = 0,
    shared_ranks: int = 0,
    product: Annotated[Product | None, typer.Option(help=PRODUCT_HELP)] = None,
    ranks_per_server: Annotated[str, typer.Option(help=SERVERS_HELP)] = "",
    comm_alg: Annotated[str, typer.Option(help=COMM_ALG_HELP)] = "auto",
    outputs: Annotated[Outputs, typer.Option(help=OUTPUTS_HELP)] = "own",
    backend: Annotated[Literal["cpu", "npu"], typer.Option(help="that auto chooses for")] = "cpu",
) -> None:
    """Print where everything lies in a window of these sizes."""
    from moe_triton.core.config import Config
    from moe_triton.runtime.chosen_scheme import Asked
    from moe_triton.tools.cli.show import Group, show_layout

    make = partial(Config, ranks, tokens, hidden, topk, experts, shared, shared_ranks)
    show_layout(Group(make, Asked(comm_alg, outputs, backend), product, ranks_per_server), Console())


@app.command()
def plan(
    ranks: Annotated[int, typer.Option(help="ranks in the group")] = 8,
    tokens: Annotated[int, typer.Option(help="most tokens per rank")] = 64,
    hidden: int = 7168,
    topk: int = 8,
    experts: int = 64,
    quantize: Annotated[str, typer.Option(help=ROWS_HELP)] = "int8",
    product: Annotated[Product | None, typer.Option(help=PRODUCT_HELP)] = None,
    ranks_per_server: Annotated[str, typer.Option(help=SERVERS_HELP)] = "",
    comm_alg: Annotated[str, typer.Option(help=COMM_ALG_HELP)] = "auto",
    outputs: Annotated[Outputs, typer.Option(help=OUTPUTS_HELP)] = "own",
    backend: Annotated[Literal["cpu", "npu"], typer.Option(help="whose plans")] = "cpu",
    blocks: Annotated[
        int | None, typer.Option(help="per kernel; 1, or on an NPU one for each vector core", min=1)
    ] = None,
    communication_blocks: Annotated[int, typer.Option(help="of those, see Tuning")] = 0,
    dispatch_tokens: Annotated[int | None, typer.Option(help="of a part, see Tuning")] = None,
    combine_tokens: Annotated[int | None, typer.Option(help="of a part, see Tuning")] = None,
    posts: Annotated[Posts | None, typer.Option(help="who posts in hierarchy, see Tuning")] = None,
    post_parts: Annotated[int | None, typer.Option(help="of blocks that are posted, see Tuning")] = None,
    message_tokens: Annotated[int | None, typer.Option(help="of a message, see Tuning")] = None,
    return_pieces: Annotated[int | None, typer.Option(help="of results in hierarchy, see Tuning")] = None,
) -> None:
    """Print the launches of dispatch and combine on rank 0, in zone 0 where plans are of one zone.

    What a buffer refuses is refused.
    Above each stands in how many parts a call of that many tokens is cut, and where the number comes from.
    """
    from moe_triton.core.config import Config
    from moe_triton.core.tuning import Tuning
    from moe_triton.runtime.chosen_scheme import Asked
    from moe_triton.tools.cli.show import Group, show_plans

    make = partial(Config, ranks, tokens, hidden, topk, experts)
    tuning = Tuning(
        dispatch_tokens,
        combine_tokens,
        communication_blocks,
        posts=posts,
        post_parts=post_parts,
        message_tokens=message_tokens,
        return_pieces=return_pieces,
    )
    group = Group(make, Asked(comm_alg, outputs, backend), product, ranks_per_server)
    show_plans(group, None if quantize == "none" else quantize, blocks, tuning, Console())


@app.command()
def trace(
    picture: Annotated[Path, typer.Argument(help="the SVG to write; or, with --hosts, a .json for Perfetto")],
    traces: Annotated[list[Path], typer.Argument(help="files that buffers wrote; one below the other")],
    hosts: Annotated[
        bool, typer.Option(help="files are of one run's hosts: all ranks, on one clock")
    ] = False,
    operator: Annotated[list[str] | None, typer.Option(help="one only: dispatch or combine")] = None,
    rank: Annotated[int, typer.Option(help="whose calls, as numbered in the trace")] = 0,
    calls: Annotated[int, typer.Option(help="of the last so many, the one of median duration", min=1)] = 1,
) -> None:
    """Draw a call of each operator: launches that communicate above those that compute."""
    from moe_triton.tools.cli.trace import draw_calls, draw_hosts
    from moe_triton.tools.host_traces import on_one_clock, write_merged
    from moe_triton.tools.plots import write_plots

    operators, console = operator or ["dispatch", "combine"], Console()
    if hosts:
        merged = on_one_clock(traces)
        for each in merged:
            console.print(each.in_words(), highlight=False, markup=False, soft_wrap=True)
        if picture.suffix == ".json":
            write_merged(picture, merged)
        else:
            write_plots(console, lambda: [draw_hosts(picture, merged, operators, rank, calls)])
        return
    write_plots(Console(), lambda: [draw_calls(picture, traces, operators, rank, calls)])


@app.command()
def status(
    pids: Annotated[
        list[str] | None, typer.Argument(metavar="PID", help="ranks of this machine; yours if not given")
    ] = None,
    group: Annotated[
        bool, typer.Option("--group", help="of all ranks of their groups; first, who holds them up")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON object")] = False,
) -> None:
    """Say what ranks of this machine do now: their calls, whom they wait for, and since when."""
    from moe_triton.tools.cli.status import show_status

    raise typer.Exit(show_status(pids or [], is_of_groups=group, as_json=as_json, console=Console()))


@app.command()
def flight(
    files: Annotated[
        list[Path], typer.Argument(help="flight recorders, or JSON that errors wrote; or folders of them")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON object")] = False,
    picture: Annotated[Path | None, typer.Option(help="a trace to write, a .json for Perfetto")] = None,
) -> None:
    """Say what went wrong before, by what several ranks have recorded of their last calls."""
    from moe_triton.tools.cli.flight import show_flights

    raise typer.Exit(show_flights(files, as_json=as_json, picture=picture, console=Console()))


@app.command()
def selftest(
    backend: Annotated[Literal["cpu", "npu"], typer.Option(help="what to test")] = "cpu",
    ranks: Annotated[
        int | None, typer.Option(help="all devices of the machine; on a CPU 2", min=2, max=MAX_RANKS)
    ] = None,
    output: Annotated[Path, typer.Option(help="folder for the report")] = Path("moe_triton-selftest"),
    quick: Annotated[bool, typer.Option("--quick", help="fewer sizes, cases and repetitions")] = False,
    only: Annotated[list[str] | None, typer.Option(help="a stage, beside the environment")] = None,
    timeout_s: Annotated[
        float, typer.Option(help="seconds that one check may take", min=20, max=86_400)
    ] = 120.0,
) -> None:
    """Check that this machine does what it should, measure it, and write a report to attach to an issue."""
    from moe_triton.tools.cli.selftest import run
    from moe_triton.tools.selftest.check import Settings

    raise typer.Exit(run(Settings(backend, ranks, quick, tuple(only or ()), timeout_s), output, Console()))
