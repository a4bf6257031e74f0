"""Each Triton kernel on one core, against torch eager on one thread and a copy of the same bytes.

Run as ``python -m benchmarks.kernels [--json FILE] [--hidden 7168]``. The three routes take turns, and
ratios are medians over the rounds. torch does the same work the way one would write it.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness import (
    Record,
    interleave,
    keep_freed_memory,
    median_ratio,
    parser,
    print_table,
    write_records,
)
from moe_triton.backends.cpu.triton import prepare
from moe_triton.kernels import (
    arrange_kernel,
    offsets_kernel,
    pack_kernel,
    route_kernel,
    weighted_sum_kernel,
)
from moe_triton.layout import TRAILER_WORDS

TOPK = 8
NUM_EXPERTS = 256
NUM_RANKS = 8


@dataclass(frozen=True)
class Case:
    """One kernel with its data.

    Attributes:
        moved: bytes read and written, half of which the copy reads and half it writes.
        floor: vs_torch that the project asks for.
    """

    kernel: str
    dtype: str
    tokens: int
    run: Callable[[], None]
    torch_run: Callable[[], object]
    moved: int
    floor: float


def slot_bytes(hidden: int) -> int:
    return -(-(hidden + 44) // 512) * 512


def pack_case(dtype: torch.dtype, hidden: int, tokens: int) -> Case:
    x = torch.randn(tokens, hidden).to(dtype)
    stride = slot_bytes(hidden)
    slots = torch.zeros(tokens, stride, dtype=torch.int8)
    words = slots.view(-1).view(torch.int32)
    scales, triples = words.view(torch.float32)[hidden // 4 :], words[hidden // 4 + 8 :]
    kernel = pack_kernel(dtype, hidden)
    run = prepare(kernel, [x, slots, scales, triples, 0, 0, tokens, stride, stride // 4, stride // 4])
    other = torch.zeros_like(slots)
    other_words = other.view(torch.int32)
    token = torch.arange(tokens, dtype=torch.int32)

    def eager() -> None:
        xf = x.float()
        peak = xf.abs().amax(1, keepdim=True)
        s = torch.full_like(peak, 127.0) / peak
        other[:, :hidden] = torch.round(xf * s).to(torch.int8)
        other_words.view(torch.float32)[:, hidden // 4] = (1.0 / s)[:, 0]
        other_words[:, hidden // 4 + 9] = token

    moved = tokens * (3 * hidden + 16)
    return Case("pack", str(dtype).removeprefix("torch."), tokens, run, eager, moved, 3)


def pack_smooth_case(hidden: int, tokens: int) -> Case:
    x = torch.randn(tokens, hidden).bfloat16()
    ids = torch.stack([torch.randperm(32)[:TOPK] for _ in range(tokens)]).int()
    smooth = torch.rand(32, hidden) + 0.5
    stride = slot_bytes(hidden)
    slots = torch.zeros(tokens * TOPK, stride, dtype=torch.int8)
    words = slots.view(-1).view(torch.int32)
    scales, triples = words.view(torch.float32)[hidden // 4 :], words[hidden // 4 + 8 :]
    kernel = pack_kernel(torch.bfloat16, hidden, TOPK, smooth=True)
    strides = [stride, stride // 4, stride // 4]
    run = prepare(kernel, [x, ids, smooth, slots, scales, triples, 0, 0, tokens, 0, 32, *strides])
    other = torch.zeros_like(slots)
    other_words = other.view(torch.int32)
    flat = ids.flatten().long()

    def eager() -> None:
        xf = x.float().repeat_interleave(TOPK, 0) * smooth[flat]
        peak = xf.abs().amax(1, keepdim=True)
        s = torch.full_like(peak, 127.0) / peak
        other[:, :hidden] = torch.round(xf * s).to(torch.int8)
        other_words.view(torch.float32)[:, hidden // 4] = (1.0 / s)[:, 0]

    moved = tokens * (2 * hidden + TOPK * (5 * hidden + 20))
    return Case("pack_smooth", "bfloat16", tokens, run, eager, moved, 3)


def arrange_case(hidden: int, tokens: int) -> Case:
    """Every source's block holds some rows, as after a balanced dispatch."""
    experts = 4
    words_per_slot = slot_bytes(hidden) // 4
    per_block = max(tokens // (experts * NUM_RANKS), 1)
    slots = torch.randint(0, 100, (NUM_RANKS, experts, per_block, words_per_slot), dtype=torch.int32)
    rows = NUM_RANKS * experts * per_block
    ends = (torch.arange(NUM_RANKS * experts, dtype=torch.int32) + 1) * per_block
    out = torch.empty(rows, hidden // 4, dtype=torch.int32)
    scales, triples = torch.empty(rows), torch.empty(rows, 3, dtype=torch.int32)
    scale_word = hidden // 4
    kernel = arrange_kernel(hidden // 4, scale_word, scale_word + 8, True)
    source, expert, slot, _ = slots.stride()
    views = [slots, slots.view(torch.float32), ends, out, scales, triples, torch.empty(0)]
    run = prepare(kernel, [*views, NUM_RANKS * experts, NUM_RANKS, source, expert, slot])
    index = torch.arange(rows).view(NUM_RANKS, experts, per_block).transpose(0, 1).reshape(-1)
    flat = slots.view(rows, words_per_slot)
    other, other_scales, other_triples = (torch.empty_like(t) for t in (out, scales, triples))

    def eager() -> None:
        torch.index_select(flat[:, :scale_word], 0, index, out=other)
        torch.index_select(flat.view(torch.float32)[:, scale_word], 0, index, out=other_scales)
        torch.index_select(flat[:, scale_word + 8 : scale_word + 11], 0, index, out=other_triples)

    return Case("arrange", "int8", rows, run, eager, rows * 2 * (hidden + 16), 1)


def weighted_sum_case(dtype: torch.dtype, hidden: int, tokens: int) -> Case:
    slots = torch.randn(tokens, TOPK, hidden).to(dtype)
    ids = torch.randint(0, NUM_EXPERTS, (tokens, TOPK), dtype=torch.int32)
    weights = torch.rand(tokens, TOPK)
    out = torch.empty(tokens, hidden, dtype=dtype)
    kernel = weighted_sum_kernel(dtype, hidden, TOPK)
    run = prepare(kernel, [slots, ids, weights, out, TOPK * hidden, hidden, 0, tokens, NUM_EXPERTS])

    def eager() -> torch.Tensor:
        return (slots.float() * weights[:, :, None]).sum(1).to(dtype)

    moved = tokens * (2 * hidden * (TOPK + 1) + 8 * TOPK)
    return Case("weighted_sum", str(dtype).removeprefix("torch."), tokens, run, eager, moved, 3)


def route_case(tokens: int) -> Case:
    ids = torch.randint(0, NUM_EXPERTS, (tokens, TOPK), dtype=torch.int32)
    index, counts = torch.empty(tokens * TOPK, dtype=torch.int32), torch.empty(NUM_EXPERTS, dtype=torch.int32)
    run = prepare(route_kernel(), [ids, index, counts, ids.numel(), NUM_EXPERTS])

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        count = torch.bincount(flat, minlength=NUM_EXPERTS)
        starts = count.cumsum(0) - count
        place = torch.empty_like(order)
        place[order] = torch.arange(flat.numel()) - starts.repeat_interleave(count)
        return place.int(), count.int()

    return Case("route", "int32", tokens, run, eager, 8 * ids.numel() + 4 * NUM_EXPERTS, 1)


def offsets_case() -> Case:
    experts = 32
    received = torch.randint(0, 64, (experts * NUM_RANKS,), dtype=torch.int32)
    ends, tokens = torch.empty_like(received), torch.empty(experts, dtype=torch.int64)
    trailer = torch.empty(TRAILER_WORDS, dtype=torch.int32)
    sizes = [received.numel(), experts, 64, 10**6]
    run = prepare(offsets_kernel(), [received, ends, tokens, trailer, *sizes])

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        clamped = received.clamp(0, 64)
        return clamped.cumsum(0, dtype=torch.int32), clamped.view(experts, -1).sum(1)

    return Case("offsets", "int32", received.numel(), run, eager, 8 * received.numel() + 8 * experts, 1)


def measure(case: Case, hidden: int, iterations: int) -> list[Record]:
    half = max(case.moved // 2, 1)
    source, target = torch.ones(half, dtype=torch.int8), torch.ones(half, dtype=torch.int8)
    to, from_ = target.data_ptr(), source.data_ptr()
    routes = {
        "ours": case.run,
        "memcpy": lambda: ctypes.memmove(to, from_, half),
        "torch": case.torch_run,
    }
    seconds = interleave(routes, iterations)
    figures = [
        ("us_per_token", statistics.median(seconds["ours"]) / case.tokens * 1e6, "us"),
        ("vs_torch", median_ratio(seconds["torch"], seconds["ours"]), "ratio"),
        ("vs_memcpy", median_ratio(seconds["ours"], seconds["memcpy"]), "ratio"),
    ]
    about: dict[str, object] = {
        "kernel": case.kernel,
        "dtype": case.dtype,
        "hidden": hidden,
        "tokens": case.tokens,
    }
    return [
        {"benchmark": "kernels", "case": about, "metric": metric, "value": value, "unit": unit}
        for metric, value, unit in figures
    ]


def main() -> None:
    arguments = parser("Triton kernels on one core")
    arguments.add_argument("--hidden", type=int, default=7168)
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--iterations", type=int, default=50)
    options = arguments.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden, tokens = options.hidden, options.tokens
    builders: list[Callable[[], Case]] = [
        lambda: route_case(tokens),
        offsets_case,
        lambda: pack_case(torch.bfloat16, hidden, tokens),
        lambda: pack_case(torch.float16, hidden, tokens),
        lambda: pack_smooth_case(hidden, max(tokens // TOPK, 1)),
        lambda: arrange_case(hidden, tokens),
        lambda: weighted_sum_case(torch.bfloat16, hidden, tokens),
        lambda: weighted_sum_case(torch.float16, hidden, tokens),
    ]
    records: list[Record] = []
    rows = []
    for build in builders:  # one at a time, so that only one case's data is in memory
        case = build()
        measured = measure(case, hidden, options.iterations)
        records += measured
        us, vs_torch, vs_memcpy = (record["value"] for record in measured)
        met = vs_torch >= case.floor and vs_memcpy <= 3
        name = f"{case.kernel} ({case.dtype})"
        rows.append(
            [
                name,
                str(case.tokens),
                f"{us:.3f}",
                f"{vs_torch:.1f}",
                f"{vs_memcpy:.2f}",
                "yes" if met else "no",
            ]
        )
    columns = ["kernel", "tokens", "us/token", "torch / ours", "ours / memcpy", "target met"]
    print_table(f"Triton kernels, H = {hidden}, one core", columns, rows)
    write_records(options.json, records)


if __name__ == "__main__":
    main()
