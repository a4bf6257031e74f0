"""``moe-triton model plan``: where the time of one plan goes; ``prices`` and ``parts``: what all plans take.

A trace of a plan has a process for the rank, and threads for streams, waits and the pipes of a core.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from autotune.cli.model.options import MACHINE, MARKDOWN, Experts, Hidden, Markdown, Seed, machine_of
from autotune.model.clusters import parts as in_parts
from autotune.model.clusters.group import OPERATORS, Group, OperatorName, Routing
from autotune.model.clusters.prices import Call, PricedPlan
from autotune.model.constants import Machine
from autotune.model.cost import NoNetworkError, Place, Work, work_of
from autotune.model.floor import floor_of_cost
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.movement import us_of
from autotune.model.kernel_costs.remembered import Remembered
from autotune.model.kernel_costs.replay import replay_of
from autotune.model.sensitivity import Judged
from autotune.model.timelines.timeline import Span
from autotune.model.traffic import Traffic
from autotune.npu_compiler.socs import SOC_OF_PRODUCT
from moe_triton.core.config import Product
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.tuning import Posts
from moe_triton.runtime.chosen_scheme import AUTO, Asked, choose_scheme
from moe_triton.runtime.traces import TraceFile
from moe_triton.schemes import SCHEMES
from moe_triton.tables.schemes import Outputs
from moe_triton.tools.cli.options import MOST_TOKENS, SERVERS_HELP, servers_of
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers, print_parts, texts

COMM_ALGS = (
    f"how tokens travel: {', '.join(SCHEMES['A3'])}; with A2's network also {', '.join(SCHEMES['A2'])}"
)
ROWS = "how rows travel: as EPBuffer.dispatch takes it, or none"
LAUNCHED = "whether a captured graph runs, or the host launches every time"
STEP_COLUMNS = (
    names("stream", spare=1),
    names("step"),
    names("kernel x blocks"),
    numbers("begin us"),
    numbers("us"),
    texts("most of it", spare=3),
    numbers("waited us"),
    numbers("KB here", spare=2),
    numbers("KB sent", spare=2),
    numbers("floor us", spare=2),
)
PRICE_COLUMNS = (
    numbers("EP"),
    numbers("BS"),
    names("rows"),
    numbers("dispatch, graph"),
    numbers("stream", alone="dispatch, stream"),
    numbers("floor", alone="dispatch, floor"),
    numbers("combine, graph"),
    numbers("stream", alone="combine, stream"),
    numbers("floor", alone="combine, floor"),
)
TABLE_RANKS, TABLE_TOKENS, TABLE_ROWS = (8, 16, 64, 256), (8, 16, 32, 64, 128), ("int8", None)
MOST_SHOWN = 3
Json = dict[str, Any]
THREADS = "compute", "communication", "waits for other ranks"
PIPES = "S", "MTE2", "V", "MTE3"


def plan(
    ranks: Annotated[int, typer.Option(help="ranks in the group")] = 16,
    tokens: Annotated[int, typer.Option(help="tokens of each rank", max=MOST_TOKENS)] = 128,
    hidden: Hidden = 7168,
    topk: Annotated[int, typer.Option(help="routed experts per token")] = 8,
    experts: Experts = 0,
    quantize: Annotated[str, typer.Option(help=ROWS)] = "int8",
    comm_alg: Annotated[str, typer.Option(help=f"{COMM_ALGS}; or auto, as EPBuffer has it")] = "fullmesh_v1",
    outputs: Annotated[
        Outputs, typer.Option(help="where auto may leave outputs, as EPBuffer takes it")
    ] = "own",
    parts: Annotated[
        int | None, typer.Option(help="parts that overlap, where an operator has any; by default a buffer's")
    ] = None,
    communication_blocks: Annotated[
        int | None, typer.Option(help="cores that communicate while the others compute; half with --parts")
    ] = None,
    ranks_per_server: Annotated[str, typer.Option(help=f"others are posted to; {SERVERS_HELP}")] = "",
    posts: Annotated[Posts | None, typer.Option(help="who posts in hierarchy; the model prices both")] = None,
    message_tokens: Annotated[int | None, typer.Option(help="of a message of hierarchy, see Tuning")] = None,
    return_pieces: Annotated[int | None, typer.Option(help="of results in hierarchy, see Tuning")] = None,
    mode: Annotated[Literal["graph", "stream"], typer.Option(help=LAUNCHED)] = "graph",
    machine: Annotated[str, typer.Option(help=MACHINE)] = "A3",
    routing: Annotated[str, typer.Option(help="uniform, node-limited or zipf")] = "uniform",
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="everything, as JSON")] = False,
    as_markdown: Markdown = False,
    trace: Annotated[Path | None, typer.Option(help="file for Perfetto: streams, waits, pipes")] = None,
) -> None:
    """Say where the time of dispatch and combine goes on an NPU, by the model: no NPU is needed."""
    rows = None if quantize == "none" else quantize
    console = Console()
    if trace is not None:
        TraceFile(trace).check_writable()
    used = machine_of(machine)
    product = _product_of(comm_alg, used)
    fixed = ranks, tokens, hidden, topk, experts, rows, comm_alg, product, mode
    servers = servers_of(ranks_per_server)
    messages = posts, message_tokens, return_pieces
    group = Group(*fixed, parts, communication_blocks, Routing(routing, seed), servers, *messages)
    if comm_alg == AUTO:
        group = _with_chosen_scheme(group, outputs, console if not as_json else None)
    if product != used.product and group.config.topology.num_servers == 1:
        rule = f"only between servers has a scheme of {product} a price on {used.product}"
        raise ArgumentError("comm_alg", repr(comm_alg), rule, "Pass --ranks-per-server, or another one.")
    with _saying_what_has_a_price(group.comm_alg):
        call, priced_operators = _priced(group, used)
    if as_json:
        console.print_json(json.dumps(document(group, used, priced_operators)))
    else:
        print_parts(_parts(priced_operators, used), console, as_markdown)
    if trace is not None:
        write_trace(trace, [priced for priced, _ in priced_operators], call.traffics[0], used)


def _product_of(comm_alg: str, machine: Machine) -> Product:
    """Whose scheme it is: the machine's own, or that of another product, on its network."""
    products: tuple[Product, ...] = (machine.product, "A2", "A3")
    return next((name for name in products if comm_alg in SCHEMES[name]), machine.product)


@contextmanager
def _saying_what_has_a_price(comm_alg: str) -> Iterator[None]:
    """Around what prices plans.

    Raises:
        ArgumentError: the model has no price of the scheme's plans on this machine.
    """
    try:
        yield
    except NoNetworkError as error:
        rule = f"the model cannot price its plans: {error}"
        remedy = "Pass --machine A2, or a file of constants that has them."
        raise ArgumentError("comm_alg", repr(comm_alg), rule, remedy) from None


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
    as_markdown: Markdown = False,
) -> None:
    """Price the plans of all sizes that the documentation shows; H is 7168, of 256 experts 8 per token."""
    console, used = Console(), machine_of(machine)
    with _saying_what_has_a_price(comm_alg):
        priced = price_table(comm_alg, used)
    if as_csv:
        made = io.StringIO()
        headings = [column.heading for column in priced.columns]
        csv.writer(made, lineterminator="\n").writerows([headings, *priced.rows])
        console.print(made.getvalue(), end="", markup=False, highlight=False, soft_wrap=True)
    else:
        print_parts([priced], console, as_markdown)


def price_table(comm_alg: str, machine: Machine) -> TextTable:
    """A row for each size: us, "" where a scheme's operators cannot be in a graph."""
    lines = []
    sizes = [(ranks, tokens) for ranks in TABLE_RANKS for tokens in TABLE_TOKENS]
    with progress("sizes", len(sizes)) as work:
        for ranks, tokens in sizes:
            call = _call(Group(ranks, tokens, comm_alg=comm_alg, product=machine.product))
            for rows in TABLE_ROWS:
                of_rows = replace(call, group=replace(call.group, quantize=rows))
                figures = [
                    figure for operator in OPERATORS for figure in _figures(of_rows, machine, operator)
                ]
                lines.append((ranks, tokens, rows or "bf16", *figures))
            work.advance()
    return TextTable(PRICE_COLUMNS, lines, more=f"{MARKDOWN}, --csv")


def _figures(call: Call, machine: Machine, operator: OperatorName) -> tuple[str, str, str]:
    """Microseconds of one operator, as text: in a graph, launched by the host, and its floor."""
    in_stream = replace(call, group=replace(call.group, mode="stream"))
    (stream,), graph = in_stream.priced(operator, machine), ""
    if call.group.may_be_captured(machine):
        graph = f"{call.priced(operator, machine)[0].us:.0f}"
    return graph, f"{stream.us:.0f}", f"{stream.floor_us:.1f}"


def _call(group: Group) -> Call:
    return Call.typical(group, Remembered(kernel_cost_of))


def _priced(group: Group, machine: Machine) -> tuple[Call, list[tuple[PricedPlan, Judged]]]:
    """A typical call, and what each of its operators takes."""
    priced_operators = []
    with progress("pricing", len(OPERATORS)) as work:
        work.begin("kernels of the plan")
        call = _call(group)
        for operator in OPERATORS:
            work.begin(operator)
            priced_operators.append((call.priced(operator, machine)[0], call.judged(operator, machine)))
            work.advance()
    return call, priced_operators


def _parts(
    priced_operators: Iterable[tuple[PricedPlan, Judged]], machine: Machine
) -> Iterator[TextTable | str]:
    """What is printed of each operator: its time and range, its steps, its parts, and what it depends on."""
    for priced, judged in priced_operators:
        timeline = priced.timeline
        parts = ", ".join(f"{part} {us:.1f}" for part, us in timeline.parts.items())
        hangs = "; ".join(
            f"{each.name} ({each.at_low:.1f} to {each.at_high:.1f} us, elasticity {each.elasticity:.2f})"
            for each in judged.sensitivities[:MOST_SHOWN]
        )
        yield (
            f"{priced.plan.operator}: {priced.us:.1f} us, between {judged.value - judged.below:.1f} and "
            f"{judged.value + judged.above:.1f}; floor {priced.floor_us:.1f} us "
            f"({priced.floor.local_bytes / 1e3:.0f} KB here, {priced.floor.remote_bytes / 1e3:.0f} KB sent)"
        )
        yield TextTable(STEP_COLUMNS, [_row(span, machine) for span in timeline.spans], more="--json")
        yield (
            f"The time is made of, in us: {parts}. A host that waits for its end sees "
            f"{priced.seen_by_host_us(machine):.1f} us."
        )
        yield f"It depends most on: {hangs}"


def _row(span: Span, machine: Machine) -> tuple[object, ...]:
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


def document(
    group: Group, machine: Machine, priced_operators: list[tuple[PricedPlan, Judged]]
) -> dict[str, Any]:
    """Everything that the model says of a call, as JSON's types."""
    operators = {
        priced.plan.operator: _operator(priced, judged, machine) for priced, judged in priced_operators
    }
    return {"machine": machine.name, **group.document, "operators": operators}


def _operator(priced: PricedPlan, judged: Judged, machine: Machine) -> dict[str, Any]:
    timeline = priced.timeline
    spans = [
        {
            "step": span.launch.step,
            "kernel": span.launch.kernel.name,
            **{name: getattr(span.launch, name) for name in ("blocks", "alongside", "joined")},
            **{name: getattr(span, name) for name in ("stream", "begin_us", "end_us", "launch_us")},
            **{name: getattr(span, name) for name in ("event_us", "waited_us", "follows")},
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


def write_trace(path: Path, operators: Sequence[PricedPlan], traffic: Traffic, machine: Machine) -> None:
    """Writes operators that follow one another, with every instruction of the slowest cores.

    Raises:
        ArgumentError: the file cannot be written.
    """
    file = TraceFile(path)
    file.start(is_first=True)
    file.add(events_of(operators, traffic, machine))


def events_of(operators: Sequence[PricedPlan], traffic: Traffic, machine: Machine) -> Iterator[Json]:
    """The events, in Chrome's JSON; times in microseconds."""
    yield _meta(traffic.rank, 0, "process_name", f"rank {traffic.rank}")
    threads = [*THREADS, *map(_pipe_thread, PIPES)]
    for number, name in enumerate(threads):
        yield _meta(traffic.rank, number, "thread_name", name)
    begin = 0.0
    for priced in operators:
        line = priced.timeline
        for index, span in enumerate(line.spans):
            work = work_of(span.launch, traffic, Place(line.run, index, line.number))
            for event in (*_of_launch(priced, span), *_of_pipes(span, work, machine)):
                tid = threads.index(event["tid"])
                yield {**event, "ph": "X", "pid": traffic.rank, "tid": tid, "ts": begin + event["ts"]}
        begin += priced.us


def _of_launch(priced: PricedPlan, span: Span) -> Iterator[Json]:
    operator, step, cost = priced.plan.operator, span.launch.step, span.cost
    before = span.launch_us + span.event_us
    yield _span("launch", operator, span.stream, span.begin_us - before, before, of=step)
    arguments = {
        "of": operator,
        "kernel": span.launch.kernel.name,
        "blocks": span.launch.blocks,
        "most of it": cost.bound,
        "parts_us": dict(cost.parts),
        "bytes": int(cost.read + cost.written),
        "sent_bytes": int(cost.leaving),
    }
    yield _span(step, span.stream, span.stream, span.begin_us, span.end_us - span.begin_us, **arguments)
    if span.waited_us > 0:
        begin = span.end_us - span.waited_us
        yield _span(step, "wait", THREADS[-1], begin, span.waited_us, of=operator)


def _of_pipes(span: Span, work: Work, machine: Machine) -> Iterator[Json]:
    """Every instruction of the slowest core of a launch that is replayed."""
    kernel, step = span.launch.kernel, span.launch.step
    if not isinstance(kernel, TritonKernel):
        return
    soc = SOC_OF_PRODUCT[work.traffic.config.product]
    replayed = replay_of(kernel, soc, work.arguments, work.blocks, machine, with_spans=True)  # type: ignore[arg-type]
    for each in replayed.slowest.spans:
        begin, us = span.begin_us + us_of(machine, each.begin), us_of(machine, each.end - each.begin)
        yield _span(each.name, "pipe", _pipe_thread(each.pipe), begin, us, of=step, bytes=each.num_bytes)


def _pipe_thread(pipe: str) -> str:
    return f"slowest core: {pipe}"


def _span(name: str, category: str, thread: str, begin_us: float, us: float, **arguments: object) -> Json:
    return {"name": name, "cat": category, "tid": thread, "ts": begin_us, "dur": us, "args": arguments}


def _meta(pid: int, tid: int, kind: str, name: str) -> Json:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def parts(as_markdown: Markdown = False) -> None:
    """Price plans in 1, 2 and 4 parts on two streams; exit with 1 where one part, the default, is slower."""
    kernel_costs, groups = Remembered(kernel_cost_of), list(in_parts.groups())
    priced_operators = []
    with progress("groups", len(groups)) as work:
        for group in groups:
            priced_operators += in_parts.priced(group, kernel_costs)
            work.advance()
    columns = (
        names("scheme"),
        *map(numbers, ("H", "EP", "BS")),
        names("operator"),
        *(numbers(f"{n} parts, us") for n in in_parts.PARTS),
        numbers("fastest"),
    )
    console = Console()
    table = TextTable(columns, [_in_parts(each) for each in priced_operators], more=MARKDOWN)
    print_parts([table], console, as_markdown)
    in_one = sum(each.parts == 1 for each in priced_operators)
    console.print(
        f"one part, which buffers take unless set, is fastest in {in_one} of {len(priced_operators)}"
    )
    raise typer.Exit(int(in_one < len(priced_operators)))


def _in_parts(priced: in_parts.Priced) -> tuple[object, ...]:
    g = priced.group
    us = (f"{each:.1f}" for each in priced.us.values())
    return g.comm_alg, g.hidden, g.ranks, g.tokens, priced.operator, *us, priced.parts
