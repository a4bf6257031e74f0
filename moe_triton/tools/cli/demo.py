"""``moe-triton demo``: real tokens through dispatch, experts and combine, every number checked."""

from __future__ import annotations

import functools
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from moe_triton import reference
from moe_triton.backends.cpu.backend import KERNELS
from moe_triton.backends.cpu.triton.loader import COMPILING
from moe_triton.backends.cpu.triton.toolchain import find_program, has_wheels
from moe_triton.core.checks import check_choice
from moe_triton.core.config import Config
from moe_triton.core.handle import DispatchOutput
from moe_triton.core.row_formats import ROW_FORMATS, row_format_of
from moe_triton.layout import STAMP_BYTES, STATUS_ENTRY_BYTES, SlotLayout
from moe_triton.processes import run_ranks, tell
from moe_triton.schemes.rules import check_config
from moe_triton.tools.progress import progress
from moe_triton.tools.selftest import cases
from moe_triton.tools.selftest.cases import Case, Inputs
from moe_triton.tools.text_table import TextTable, names, numbers, say

DTYPE = torch.bfloat16
AUTO, TRITON, TORCH = "auto", "triton", "torch"
SLOW = (
    "kernels: torch, which is slow: triton-ascend, which compiles them, is not installed, and there is none "
    "for Python {version}; for 3.11 there is."
)


@dataclass(frozen=True)
class DemoSettings:
    """What the demo runs."""

    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    shared: int
    shared_ranks: int
    quantize: str | None
    intermediate: int
    rounds: int
    seed: int
    kernels: str
    timeout_s: float

    def config(self) -> Config:
        """The group's settings."""
        sizes = self.ranks, self.tokens, self.hidden, self.topk, self.experts, self.shared, self.shared_ranks
        return Config(*sizes, relaxed=True).normalized()

    def case(self) -> Case:
        """The group and its rounds."""
        tokens = (self.tokens,)
        return Case(self.config(), self.seed, "uniform", tokens, quantize=self.quantize, kernels=self.kernels)


class SwiGLU:
    """An expert: ``w2 (silu(w1 x) * w3 x)`` in fp32, rounded to bf16.

    Weights follow from the expert's number, so that any rank can make any expert for checking.
    """

    def __init__(self, number: int, settings: DemoSettings) -> None:
        generator = torch.Generator().manual_seed(settings.seed * 100_003 + number)
        shape = (settings.intermediate, settings.hidden)
        self.w1 = torch.randn(shape, generator=generator) / settings.hidden**0.5
        self.w3 = torch.randn(shape, generator=generator) / settings.hidden**0.5
        self.w2 = torch.randn(shape[::-1], generator=generator) / settings.intermediate**0.5

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        """One row, (H,) fp32 to (H,) bf16: one at a time, since a GEMM's bits depend on its batch."""
        gate = torch.nn.functional.silu(self.w1 @ row)
        out: torch.Tensor = self.w2 @ (gate * (self.w3 @ row))
        return out.to(DTYPE)


def make_inputs(rank: int, settings: DemoSettings) -> Inputs:
    """Tokens and a random gate's choice: top K of the softmax over all experts."""
    generator = torch.Generator().manual_seed(settings.seed * 1_009 + rank)
    x = torch.randn(settings.tokens, settings.hidden, generator=generator).to(DTYPE)
    logits = torch.randn(settings.tokens, settings.experts, generator=generator)
    weights, ids = logits.softmax(dim=1).topk(settings.topk, dim=1)
    return Inputs(x, ids.int(), weights / weights.sum(dim=1, keepdim=True))


def run_experts(output: DispatchOutput, experts: Sequence[SwiGLU]) -> torch.Tensor:
    """Each local expert on the rows that are its own."""
    y = torch.empty(output.tokens.shape, dtype=DTYPE)
    row = 0
    for expert, count in zip(experts, output.tokens_per_expert.tolist(), strict=True):
        for _ in range(count):
            token, scales = output.tokens[row], output.scales
            y[row] = expert(token.float() if scales is None else reference.dequantize(token, scales[row]))
            row += 1
    return y


def dense_output(inputs: Inputs, rank: int, settings: DemoSettings) -> torch.Tensor:
    """What combine must give for this rank's tokens, computed without any communication."""
    config = settings.config()
    expert = functools.cache(lambda number: SwiGLU(number, settings))
    out = torch.zeros(settings.tokens, settings.hidden)
    for token in range(settings.tokens):
        row = inputs.x[token].float()
        if settings.quantize:
            row = reference.dequantize(*reference.quantize_row(row, ROW_FORMATS[settings.quantize]))
        for k, number in enumerate(inputs.topk_idx[token].tolist()):
            out[token] += expert(number)(row).float() * inputs.topk_weights[token, k]
        for s in range(config.num_shared_experts):
            out[token] += expert(settings.experts + s)(row).float()
    return out.to(DTYPE)


def experts_of(rank: int, settings: DemoSettings) -> list[SwiGLU]:
    """The experts that live on a rank; shared ones are numbered after the routed ones."""
    config = settings.config()
    if config.is_shared_rank(rank):
        first = settings.experts + rank // (config.num_shared_ranks // config.num_shared_experts)
    else:
        first = (rank - config.num_shared_ranks) * config.num_local_experts
    return [SwiGLU(number, settings) for number in range(first, first + config.experts_on(rank))]


def bytes_sent(inputs: Inputs, rank: int, output: DispatchOutput, settings: DemoSettings) -> int:
    """Bytes that this rank wrote into other ranks' windows in one dispatch and one combine."""
    config = settings.config()
    slot = SlotLayout.of(settings.hidden, ROW_FORMATS[settings.quantize], DTYPE)
    owners = config.num_shared_ranks + inputs.topk_idx // config.num_local_experts
    remote = int((owners != rank).sum())
    shared = [config.rank_of_shared_expert(s, rank) for s in range(config.num_shared_experts)]
    remote += settings.tokens * sum(owner != rank for owner in shared)
    entries = sum(config.experts_on(r) for r in range(config.num_ranks) if r != rank)
    back = int((output.handle.origins[: output.handle.num_received(), 0] != rank).sum())
    return (
        remote * (slot.row_bytes + slot.scale_stride * (slot.num_scales > 0) + STAMP_BYTES)
        + entries * STATUS_ENTRY_BYTES
        + back * (settings.hidden * DTYPE.itemsize + STATUS_ENTRY_BYTES)
    )


class _Teller(logging.Handler):
    """Tells who runs the ranks which kernels are compiled."""

    def emit(self, record: logging.LogRecord) -> None:
        """Tells of a kernel that is being compiled, and passes over every other record."""
        if record.msg == COMPILING:
            tell(f"{record.getMessage()}; it is kept for the next time")


def demo_rank(rank: int, num_ranks: int, settings: DemoSettings) -> dict[str, Any]:
    """One rank of the demo: what the table shows of it."""
    logger, teller = logging.getLogger("moe_triton"), _Teller()
    logger.addHandler(teller)
    logger.setLevel(logging.INFO)
    case, inputs = settings.case(), make_inputs(rank, settings)
    experts = experts_of(rank, settings)
    times: dict[str, list[float]] = {"dispatch": [], "experts": [], "combine": []}
    with cases.make_buffer(case, timeout_s=settings.timeout_s) as buffer:
        for number_of_round in range(settings.rounds):
            dist.barrier()
            start = time.perf_counter()
            output = cases.dispatched(buffer, case, inputs)
            received = time.perf_counter()
            y = run_experts(output, experts)
            computed = time.perf_counter()
            dist.barrier()
            ready = time.perf_counter()
            out = cases.combined(buffer, case, inputs, output, y)
            times["dispatch"].append(received - start)
            times["experts"].append(computed - received)
            times["combine"].append(time.perf_counter() - ready)
            if rank == 0:
                tell(number_of_round + 1)
    logger.removeHandler(teller)
    expected = cases.expected_dispatch(case, [make_inputs(r, settings) for r in range(num_ranks)])
    wrong = cases.wrong_received(output, expected[rank])
    if not torch.equal(out, dense_output(inputs, rank, settings)):
        wrong.append("combined output differs from the dense one")
    return {
        "sent": settings.tokens,
        "received": output.handle.num_received(),
        "bytes": bytes_sent(inputs, rank, output, settings),
        "us": {name: statistics.median(values) * 1e6 for name, values in times.items()},
        "wrong": wrong,
    }


def kernels_of(asked: str) -> str:
    """Which kernels the ranks run: Triton's, unless there can be none here.

    Raises:
        ArgumentError: it is neither a kind of kernels nor ``"auto"``.
    """
    check_choice("kernels", asked, [AUTO, *KERNELS])
    if asked != AUTO:
        return asked
    is_there = find_program("triton", "backends/ascend/triton-adapter-opt") is not None
    return TRITON if is_there or has_wheels() else TORCH


def run_demo(settings: DemoSettings, console: Console) -> int:
    """Runs the demo and prints what happened.

    Returns:
        0 if every number was right, else 1.

    Raises:
        ArgumentError: a setting is refused.
        RankFailedError: a rank failed.
    """
    config = settings.config()
    check_config(config)
    row_format = row_format_of(settings.quantize)
    asked, settings = settings.kernels, replace(settings, kernels=kernels_of(settings.kernels))
    if settings.kernels != asked and settings.kernels == TORCH:
        say(SLOW.format(version="{}.{}".format(*sys.version_info)), console)
    scales = row_format.num_scales(config.hidden)
    travel = f"{row_format.name}, {scales} scale(s) per token" if row_format.is_quantized else "bf16"
    say(
        f"{settings.ranks} ranks as processes, {settings.tokens} tokens each, hidden {settings.hidden}, "
        f"top {settings.topk} of {settings.experts} experts, {settings.shared} shared; "
        f"rows travel as {travel}. Times are medians of {settings.rounds} rounds.",
        console,
    )
    ranks = _run(settings)
    console.print()
    _table(ranks).print(console)
    console.print()
    if wrong := {rank: result["wrong"] for rank, result in enumerate(ranks) if result["wrong"]}:
        for rank, texts in wrong.items():
            console.print(f"[red]rank {rank}: {'; '.join(texts)}[/red]")
        return 1
    console.print(
        "[green]Every received row, scale, count and index, and every combined number, equals the dense "
        "reference bit for bit.[/green]"
    )
    return 0


def _run(settings: DemoSettings) -> list[dict[str, Any]]:
    """What each rank found. Meanwhile it is said what they do."""
    with progress("demo", settings.rounds) as work:
        work.begin("starting the ranks")

        def hear(rank: int, said: str | int) -> None:
            if isinstance(said, str):
                work.begin(said)
            else:
                work.advance("checking every number" if said == settings.rounds else "running rounds")

        return run_ranks(demo_rank, settings.ranks, (settings,), timeout_s=settings.timeout_s * 5, hear=hear)


def _table(ranks: Sequence[dict[str, Any]]) -> TextTable:
    columns = (
        *(names("rank"), numbers("tokens in", spare=1), numbers("rows received"), numbers("MB sent")),
        *(numbers(f"{each} us") for each in ("dispatch", "experts", "combine")),
        names("check"),
    )
    rows = [
        (
            *(rank, result["sent"], result["received"], f"{result['bytes'] / 1e6:.2f}"),
            *(f"{result['us'][each]:.0f}" for each in ("dispatch", "experts", "combine")),
            Text("differs", style="red") if result["wrong"] else Text("equal", style="green"),
        )
        for rank, result in enumerate(ranks)
    ]
    return TextTable(columns, rows)
