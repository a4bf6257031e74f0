"""``moe-triton model plan``: where the time of one plan goes; ``model prices``: what all of them take."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from moe_triton.runtime.chosen_scheme import AUTO, Asked, choose_scheme
from moe_triton.schemes import SCHEMES
from moe_triton.tables.schemes import Outputs
from moe_triton.tools.cli.model.machines import MACHINE, machine_of
from moe_triton.tools.cli.servers import SERVERS_HELP, servers_of

if TYPE_CHECKING:
    from moe_triton.core.config import Product
    from moe_triton.model.clusters.group import Group, OperatorName
    from moe_triton.model.clusters.prices import Call, PricedPlan
    from moe_triton.model.constants import Machine
    from moe_triton.model.sensitivity import Judged
    from moe_triton.model.timelines.timeline import Span

COMM_ALGS = (
    f"how tokens travel: {', '.join(SCHEMES['A3'])}; with A2's network also fullmesh; of hierarchy there is "
    "a closed form only, in model cluster"
)
ROWS = "how rows travel: as EPBuffer.dispatch takes it, or none"
LAUNCHED = "whether a captured graph runs, or the host launches every time"
STEP_HEADINGS = (
    "stream",
    "step",
    "kernel x blocks",
    "begin us",
    "us",
    "most of it",
    "waited us",
    "KB here",
    "KB sent",
    "floor us",
)
PRICE_HEADINGS = (
    "EP",
    "BS",
    "rows",
    "dispatch, graph",
    "stream",
    "floor",
    "combine, graph",
    "stream",
    "floor",
)
TABLE_RANKS, TABLE_TOKENS, TABLE_ROWS = (8, 16, 64, 256), (8, 16, 32, 64, 128), ("int8", None)
MOST_SHOWN = 3
NETWORK = "rdma_gb_per_s"
"""Of the constants of a machine that posts to others."""


def plan(
    ranks: Annotated[int, typer.Option(help="ranks in the group")] = 16,
    tokens: Annotated[int, typer.Option(help="tokens of each rank")] = 128,
    hidden: Annotated[int, typer.Option(help="elements of a token's row")] = 7168,
    topk: Annotated[int, typer.Option(help="routed experts per token")] = 8,
    experts: Annotated[int, typer.Option(help="of the group; 256 or more if not given")] = 0,
    quantize: Annotated[str, typer.Option(help=ROWS)] = "int8",
    comm_alg: Annotated[str, typer.Option(help=f"{COMM_ALGS}; or auto, as EPBuffer has it")] = "fullmesh_v1",
    outputs: Annotated[
        Outputs, typer.Option(help="where auto may leave outputs, as EPBuffer takes it")
    ] = "own",
    parts: Annotated[
        int | None,
        typer.Option(help="parts that overlap, where an operator has any; by default a buffer's"),
    ] = None,
    communication_blocks: Annotated[
        int | None,
        typer.Option(help="cores that communicate while the others compute; half with --parts"),
    ] = None,
    ranks_per_server: Annotated[str, typer.Option(help=f"others are posted to; {SERVERS_HELP}")] = "",
    mode: Annotated[Literal["graph", "stream"], typer.Option(help=LAUNCHED)] = "graph",
    machine: Annotated[str, typer.Option(help=MACHINE)] = "A3",
    routing: Annotated[str, typer.Option(help="uniform, node-limited or zipf")] = "uniform",
    seed: Annotated[int, typer.Option(help="of the routing")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="everything, as JSON")] = False,
    trace: Annotated[Path | None, typer.Option(help="file for Perfetto: streams, waits, pipes")] = None,
) -> None:
    """Say where the time of dispatch and combine goes on an NPU, by the model: nothing is run."""
    from moe_triton.core.errors import ArgumentError
    from moe_triton.model.clusters.group import Group, Routing

    rows = None if quantize == "none" else quantize
    console = Console()
    try:
        used = machine_of(machine)
        product = _product_of(comm_alg, used)
        fixed = ranks, tokens, hidden, topk, experts, rows, comm_alg, product, mode
        servers = servers_of(ranks_per_server)
        group = Group(*fixed, parts, communication_blocks, Routing(routing, seed), servers)
        if comm_alg == AUTO:
            group = _with_chosen_scheme(group, outputs, console if not as_json else None)
        if product != used.product and group.config.topology.num_servers == 1:
            rule = f"only between servers has a scheme of {product} a price on {used.product}"
            raise ArgumentError("comm_alg", repr(comm_alg), rule, "Pass --ranks-per-server, or another one.")
        with _saying_what_has_a_price(group.comm_alg, used):
            _plan(console, group, used, as_json, trace)
    except ArgumentError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from None


def _product_of(comm_alg: str, machine: Machine) -> Product:
    """Whose scheme it is: the machine's own, or that of another product, on its network."""
    products: tuple[Product, ...] = (machine.product, "A2", "A3")
    return next((name for name in products if comm_alg in SCHEMES[name]), machine.product)


@contextmanager
def _saying_what_has_a_price(comm_alg: str, machine: Machine) -> Iterator[None]:
    """Around what prices plans.

    Raises:
        ArgumentError: the model has no price of the scheme's plans on this machine.
    """
    from moe_triton.core.errors import ArgumentError
    from moe_triton.model.cost import UnknownWorkError

    try:
        yield
    except UnknownWorkError as error:
        rule = f"the model cannot price its plans: {error}"
        if comm_alg == "hierarchy":
            remedy = "For its closed form run moe-triton model cluster --machine A2 --comm-alg hierarchy."
            raise ArgumentError("comm_alg", repr(comm_alg), rule, remedy) from None
        if NETWORK not in machine.constants:
            remedy = "Pass --machine A2, or a file of constants with a network's."
            raise ArgumentError("comm_alg", repr(comm_alg), rule, remedy) from None
        raise


def _with_chosen_scheme(group: Group, outputs: Outputs, console: Console | None) -> Group:
    """The group with the scheme that its buffers would have, which is said where there is a console.

    Raises:
        ArgumentError: no scheme takes the group, or a table cannot be used.
    """
    usual = replace(group, comm_alg=next(iter(SCHEMES[group.product]))).config
    chosen = choose_scheme(Asked(AUTO, outputs, "npu"), usual, range(group.ranks), exchange=False)
    if console is not None:
        console.print(f"auto: {chosen.source}\n", markup=False, highlight=False, soft_wrap=True)
    return replace(group, comm_alg=chosen.config.scheme)


def prices(
    comm_alg: Annotated[str, typer.Option(help=COMM_ALGS)] = "fullmesh_v1",
    machine: Annotated[str, typer.Option(help=MACHINE)] = "A3",
    as_csv: Annotated[bool, typer.Option("--csv", help="commas between the columns")] = False,
) -> None:
    """Price the plans of all sizes that the documentation shows; H is 7168, of 256 experts 8 per token."""
    from moe_triton.core.errors import ArgumentError
    from moe_triton.tools.markdown import table

    console = Console()
    try:
        used = machine_of(machine)
        with _saying_what_has_a_price(comm_alg, used):
            lines = price_table(comm_alg, used)
    except ArgumentError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from None
    if as_csv:
        made = io.StringIO()
        csv.writer(made, lineterminator="\n").writerows([PRICE_HEADINGS, *lines])
        console.print(made.getvalue(), end="", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(table(PRICE_HEADINGS, lines), markup=False, highlight=False, soft_wrap=True)


def price_table(comm_alg: str, machine: Machine) -> list[tuple[object, ...]]:
    """A line of `PRICE_HEADINGS` for each size: us, "" where a scheme's operators cannot be in a graph."""
    from moe_triton.model.clusters.group import OPERATORS, Group

    lines = []
    for ranks in TABLE_RANKS:
        for tokens in TABLE_TOKENS:
            call = _call(Group(ranks, tokens, comm_alg=comm_alg, product=machine.product))
            for rows in TABLE_ROWS:
                of_rows = replace(call, group=replace(call.group, quantize=rows))
                figures = [
                    figure for operator in OPERATORS for figure in _figures(of_rows, machine, operator)
                ]
                lines.append((ranks, tokens, rows or "bf16", *figures))
    return lines


def _figures(call: Call, machine: Machine, operator: OperatorName) -> tuple[str, str, str]:
    """Of one operator: in a graph, launched by the host, and its floor."""
    in_stream = replace(call, group=replace(call.group, mode="stream"))
    (stream,), graph = in_stream.priced(operator, machine), ""
    if call.group.may_be_captured(machine):
        graph = f"{call.priced(operator, machine)[0].us:.0f}"
    return graph, f"{stream.us:.0f}", f"{stream.floor_us:.1f}"


def _call(group: Group) -> Call:
    from moe_triton.model.bodies.body import body_of
    from moe_triton.model.bodies.remembered import Remembered
    from moe_triton.model.clusters.prices import Call

    return Call.typical(group, Remembered(body_of))


def _plan(console: Console, group: Group, machine: Machine, as_json: bool, trace: Path | None) -> None:
    from moe_triton.model.clusters.group import OPERATORS

    call = _call(group)
    found = [(call.priced(name, machine)[0], call.judged(name, machine)) for name in OPERATORS]
    if as_json:
        console.print_json(json.dumps(document(group, machine, found)))
    else:
        text = "\n\n".join(_text(priced, judged, machine) for priced, judged in found)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if trace is not None:
        from moe_triton.tools.cli.model.plan_trace import write_trace

        write_trace(trace, [priced for priced, _ in found], call.traffics[0], machine)


def _text(priced: PricedPlan, judged: Judged, machine: Machine) -> str:
    from moe_triton.tools.markdown import table

    timeline = priced.timeline
    parts = ", ".join(f"{name} {us:.1f}" for name, us in timeline.parts.items())
    hangs = "; ".join(
        f"{each.name} ({each.at_low:.1f} to {each.at_high:.1f} us, elasticity {each.elasticity:.2f})"
        for each in judged.sensitivities[:MOST_SHOWN]
    )
    return "\n\n".join(
        (
            f"{priced.plan.operator}: {priced.us:.1f} us, between {judged.value - judged.below:.1f} and "
            f"{judged.value + judged.above:.1f}; floor {priced.floor_us:.1f} us "
            f"({priced.floor.local_bytes / 1e3:.0f} KB here, {priced.floor.remote_bytes / 1e3:.0f} KB sent)",
            table(STEP_HEADINGS, [_row(span, machine) for span in timeline.spans]),
            f"The time is made of, in us: {parts}. A host that waits for its end sees "
            f"{priced.seen_by_host_us(machine):.1f} us.",
            f"It depends most on: {hangs}",
        )
    )


def _row(span: Span, machine: Machine) -> tuple[object, ...]:
    from moe_triton.model.floor import floor_of_cost

    cost = span.cost
    return (
        f"{'& ' if span.launch.alongside else '+ ' if span.launch.joined else ''}{span.stream}",
        span.launch.step,
        f"{span.launch.kernel.name} x {span.launch.blocks}",
        f"{span.begin_us:.1f}",
        f"{cost.us:.1f}",
        cost.bound,
        f"{span.waited_us:.1f}",
        f"{(cost.read + cost.written) / 1e3:.1f}",
        f"{cost.leaving / 1e3:.1f}",
        f"{floor_of_cost(cost).us(machine):.2f}",
    )


def document(group: Group, machine: Machine, found: list[tuple[PricedPlan, Judged]]) -> dict[str, Any]:
    """Everything that the model says of a call, as JSON's types."""
    operators = {priced.plan.operator: _operator(priced, judged, machine) for priced, judged in found}
    return {"machine": machine.name, **group.document, "operators": operators}


def _operator(priced: PricedPlan, judged: Judged, machine: Machine) -> dict[str, Any]:
    from moe_triton.model.floor import floor_of_cost

    timeline = priced.timeline
    spans = [
        {
            "step": span.launch.step,
            "kernel": span.launch.kernel.name,
            "blocks": span.launch.blocks,
            "alongside": span.launch.alongside,
            "joined": span.launch.joined,
            "stream": span.stream,
            "begin_us": span.begin_us,
            "end_us": span.end_us,
            "launch_us": span.launch_us,
            "event_us": span.event_us,
            "waited_us": span.waited_us,
            "follows": span.follows,
            "us": span.cost.us,
            "bound": span.cost.bound,
            "parts_us": dict(span.cost.parts),
            "detail_cycles": dict(span.cost.detail),
            "read_bytes": int(span.cost.read),
            "written_bytes": int(span.cost.written),
            "sent_bytes": int(span.cost.leaving),
            "floor_us": floor_of_cost(span.cost).us(machine),
        }
        for span in timeline.spans
    ]
    return {
        "us": priced.us,
        "seen_by_host_us": priced.seen_by_host_us(machine),
        "low_us": judged.value - judged.below,
        "high_us": judged.value + judged.above,
        "floor_us": priced.floor_us,
        "floor": {key: int(value) for key, value in asdict(priced.floor).items()},
        "parts_us": timeline.parts,
        "critical": list(timeline.critical),
        "launches": spans,
        "sensitivities": [
            {
                "constant": each.name,
                "kind": each.constant.kind,
                "elasticity": each.elasticity,
                "low_us": each.at_low,
                "high_us": each.at_high,
            }
            for each in judged.sensitivities
        ],
    }
