"""What a candidate takes on this machine's CPU: by stop-watch, against the default, in turns.

One round runs both once, so that both see the same state of the machine, and gives one ratio. Rounds go on
until the 95% interval of the ratios' median is narrow, or the candidate is clearly worse.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

import torch

from autotune.intervals import Interval
from autotune.kernels.scope import CPU
from autotune.kernels.tunables import Tunable
from autotune.kernels.versions import digest_of_values
from autotune.search.task import Outcome, Task, WrongBitsError
from moe_triton import __version__, tables
from moe_triton.backends.cpu.triton import prepare
from moe_triton.backends.cpu.triton.toolchain import versions
from moe_triton.core.cpu_family import cpu_family
from moe_triton.core.dtypes import DTYPES
from moe_triton.core.errors import ArgumentError, ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.space import Settings, text_of
from moe_triton.kernels import Case, Shape, Sizes, families

NARROW = 0.02
"""How wide the 95% interval of a ratio may be for the ratio to count as known."""
CLEARLY_WORSE = 1.1
FEWEST, MOST = 15, 301  # rounds
BATCH_S = 200e-6  # of calls that are timed together: the clock costs nothing then
now = time.process_time
"""A kernel waits for nothing, and runs in its caller's thread: others' time on its core is not its own."""
LEAST_TOKENS = 8  # of a kernel's inputs


@dataclass(frozen=True)
class Ratio:
    """A candidate's time over the default's.

    Attributes:
        low, middle, high: 95% interval of the median, and the median.
        rounds: that it took.
        default_ns: median of the default.
    """

    low: float
    middle: float
    high: float
    rounds: int
    default_ns: float


def is_enough(ratios: Sequence[float]) -> bool:
    """The stop rule."""
    if len(ratios) < FEWEST:
        return False
    low, _, high = Interval.of(ratios)
    return high - low <= NARROW or low > CLEARLY_WORSE or len(ratios) >= MOST


def compared(candidate: Callable[[], float], default: Callable[[], float]) -> Ratio:
    """Runs both in turns until the stop rule holds.

    Args:
        candidate, default: run once, and give the seconds of a call.
    """
    ratios: list[float] = []
    times: list[float] = []
    while not is_enough(ratios):
        if len(ratios) % 2:
            seconds, usual = candidate(), default()
        else:
            usual, seconds = default(), candidate()
        ratios.append(seconds / usual)
        times.append(usual)
    return Ratio(*Interval.of(ratios), len(ratios), 1e9 * statistics.median(times))


Memory = dict[str, torch.Tensor]


def case_of(tunable: Tunable, target: str = CPU) -> Case:
    """Inputs of a tunable's kernel.

    Args:
        tunable: of the kernel.
        target: what it is specialised for.

    Raises:
        ToolchainError: none of the kernels' cases is of it.
    """
    _, topk, ranks, tokens = tunable.sizes
    dtype = tunable.keys[2] if tunable.keys[2] in DTYPES else "bf16"
    config = tunable.situations[0].works[0][0].traffic.config
    sizes = Sizes(max(tokens, LEAST_TOKENS), config.num_experts, ranks, unrouted=0.0, first_token=0)
    named = tuple(tunable.keys[1].split("-"))
    # The last sum of a hierarchy is of a row from each server.
    widths = dict.fromkeys((config.num_topk, topk))
    for family in families().values():
        of_name = tuple(name for name in named if name in family.features)
        for features, zoned, width in product((*family.variants, of_name), (False, True), widths):
            given = dtype, config.hidden, width, 0, frozenset(features)
            shape = Shape(*given, target=target, zoned=zoned)
            with contextlib.suppress(ArgumentError):  # no such variant, or rows that do not fit their format
                if _same(family.kernel(shape), tunable.kernel):
                    return Case(family, shape, sizes)
    raise ToolchainError(f"no case has inputs for {tunable.label}")


def _same(one: TritonKernel, other: TritonKernel) -> bool:
    return (one.name, one.args, dict(one.constants)) == (other.name, other.args, dict(other.constants))


@dataclass(frozen=True)
class MeasuredTask(Task):
    """A kernel's settings, measured here. A value is the high end of the ratio to the default.

    Attributes:
        tunable: the kernel and its sizes.
        target: what kernels are specialised for.
    """

    tunable: Tunable = field(kw_only=True)
    target: ClassVar[str] = CPU

    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        """Measures a candidate against the default, once both have given the same bits."""
        default = self.tunable.kernel
        case = case_of(self.tunable, self.target)
        try:
            shared = self.copy_of(case.memory)  # places differ in speed: both have the same
            usual, expected = self.stop_watch(case, default, shared)
            if dict(settings) == dict(self.own):
                ns = 1e9 * statistics.median(usual() for _ in range(FEWEST))
                return Outcome(1.0, facts={"ns": ns, "default_ns": ns, "ratio": 1.0})
            candidate, actual = self.stop_watch(case, default.with_settings(settings), shared)
        except ToolchainError as error:
            return Outcome.infeasible(str(error).partition("\n")[0])
        check_bits(f"{self.tunable.label} with {text_of(settings)}", actual, expected)
        ratio = compared(candidate, usual)
        facts = {
            "ns": ratio.middle * ratio.default_ns,
            "default_ns": ratio.default_ns,
            "ratio": ratio.middle,
            "low": ratio.low,
            "high": ratio.high,
            "rounds": ratio.rounds,
        }
        reason = "given up: clearly slower than the default" if ratio.low > CLEARLY_WORSE else ""
        return Outcome(ratio.high, reason, facts)

    def copy_of(self, memory: Mapping[str, torch.Tensor]) -> Memory:
        """Memory of a case, where its kernel runs."""
        return {name: tensor.clone() for name, tensor in memory.items()}

    def stop_watch(
        self, case: Case, kernel: TritonKernel, memory: Memory
    ) -> tuple[Callable[[], float], Memory]:
        """What runs a kernel and gives the seconds of a call, and all memory after its first call, here.

        The first call has memory of its own, as the case has it.

        Args:
            case: with the kernel's arguments.
            kernel: with any settings.
            memory: of the calls that are timed.

        Raises:
            ToolchainError: a compiler refuses the kernel.
        """
        first_memory = self.copy_of(case.memory)
        prepare(kernel, list(case.arguments(first_memory).values()))()
        call = prepare(kernel, list(case.arguments(memory).values()))
        call()
        start = now()
        call()
        calls = max(1, round(BATCH_S / max(now() - start, 1e-9)))

        def seconds() -> float:
            start = now()
            for _ in range(calls):
                call()
            return (now() - start) / calls

        return seconds, first_memory


def check_bits(what: str, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Checks that two kernels left the same memory.

    Raises:
        WrongBitsError: they did not.
    """
    for name, tensor in expected.items():
        one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (actual[name], tensor))
        if not torch.equal(one, other):
            number = int((one != other).sum())
            raise WrongBitsError(
                f"{what}: {number} bytes of {name} are not the default's. Settings may change no result: "
                "this is a bug of the kernel or of its compiler."
            )


def source() -> str:
    """What measured settings come from."""
    named = ", ".join(f"{name} {version}" for name, version in versions() if name != "pipeline")
    return f"measured on cpu-{cpu_family()}, moe_triton {__version__}, {named}"


def digest_of_task(kernel: TritonKernel, *others: object) -> str:
    """A digest of a kernel, and of what else decides its outcomes."""
    source_text = getattr(kernel.fn, "cache_key", kernel.name)
    decides = others, source_text, kernel.args, sorted(kernel.constants.items(), key=str)
    return digest_of_values((decides, tables.VALUES))


def task_of(tunable: Tunable) -> MeasuredTask:
    """The task of a tunable, named by all that decides its outcomes."""
    kernel = tunable.kernel
    assert kernel.space is not None
    digest = digest_of_task(kernel, source(), versions())
    return MeasuredTask(f"cpu: {tunable.label} [{digest}]", kernel.space, kernel.settings, tunable=tunable)
