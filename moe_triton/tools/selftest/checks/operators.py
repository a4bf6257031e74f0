"""Dispatch and combine over all ranks against the reference model, bit for bit: by every
scheme, by torch_npu's names, and captured into a graph once and replayed with other inputs.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import torch

from moe_triton import reference, torch_npu_ops
from moe_triton.core.config import Config
from moe_triton.core.records import ORIGIN
from moe_triton.core.row_formats import BY_QUANT_MODE, QUANTIZED
from moe_triton.schemes import SCHEMES as SERVED
from moe_triton.schemes import class_at, product_of, scheme_type
from moe_triton.tools.selftest import cases
from moe_triton.tools.selftest.cases import Case
from moe_triton.tools.selftest.check import HIDDEN, QUICK_HIDDEN, Check, Finding, Place, Settings, few
from moe_triton.tools.selftest.checks.windows import FLAGS, WRITES

STAGE = "operators"
TOKENS, TOPK, EXPERTS_PER_RANK = 16, 8, 8
DIFFERENT_INPUTS = 5  # of a case with more rounds than that; an odd number takes each through both zones
# Those that have all features; hierarchy, which has fewer, is compared where it posts.
SCHEMES = tuple(name for name, place in SERVED["A3"].items() if class_at(place).sums_alike)
MANY, SPARSE = "many rounds", "entries without an expert, ranks without tokens"
QUICK_POSTED = ("bf16", MANY)
MOST_POSTED = (*QUICK_POSTED, SPARSE, *(f"{name}, smooth scales" for name in QUANTIZED))
FIRST = f"{SCHEMES[0]}: bf16"  # what later stages stand on
REPLAYS = 4
LOCAL = "local_topk_idx", "local_topk_weights"


def operator_checks(settings: Settings, ranks: int) -> list[Check]:
    """All features by each scheme; of a quick run the later schemes take those that pack differently."""
    quick = {"bf16", *(f"{name}, smooth scales" for name in QUANTIZED)}
    cases = {
        f"{scheme}: {name}": (compare_rounds, case)
        for scheme in SCHEMES
        for name, case in _cases(settings, scheme, max(ranks, 2)).items()
        if not settings.quick or scheme == SCHEMES[0] or name in quick
    }
    for scheme in SCHEMES[:1] if settings.quick else SCHEMES:
        case = plain_case(settings, max(ranks, 2), scheme)
        if scheme_type(case.config).layout_of(case.config).has_row_tables:
            cases[f"{scheme}: one row for each rank"] = compare_per_rank, case
    cases |= {name: (compare_posted, case) for name, case in _posted(settings, max(ranks, 2))}
    return [
        Check(name, STAGE, function, (case,), ranks=ranks, needs=(FLAGS, WRITES))
        for name, (function, case) in cases.items()
    ]


def _posted(settings: Settings, size: int) -> Iterator[tuple[str, Case]]:
    """The schemes that cross servers, as if each rank were on one of its own."""
    for scheme in dict.fromkeys(name for schemes in SERVED.values() for name in schemes):
        for name, case in _cases(settings, scheme, size).items():
            config = dataclasses.replace(case.config, product=product_of(scheme), ranks_per_server=1)
            posted = dataclasses.replace(case, config=config)
            if name in (QUICK_POSTED if settings.quick else MOST_POSTED) and _is_taken(posted):
                yield f"{scheme}, posted: {name}", posted


def _is_taken(case: Case) -> bool:
    """Whether the case's scheme reaches other servers, and takes smooth scales where there are any."""
    scheme = scheme_type(case.config)
    return scheme.crosses_servers and not (case.smooth and "smooth_scales" in scheme.refuses)


def compare_posted(place: Place, case: Case) -> Finding:
    """`compare_rounds` where all ranks post to each other; skipped where kernels do not post."""
    if why := place.backend.why_no_posts():
        return Finding(skipped=f"several servers: {why}")
    return compare_rounds(place, case)


def compare_rounds(place: Place, case: Case) -> Finding:
    """Runs a case and names everything that differs from the reference in any bit."""
    device = place.backend.device
    if (smooth := cases.smooth_scales_of(case)) is not None:
        smooth = smooth.to(device)
    different = min(case.rounds, DIFFERENT_INPUTS)
    expected = [cases.expected_round(case, number) for number in range(different)]
    inputs = [cases.inputs_of(case, place.rank, number).to(device) for number in range(different)]
    wrong: list[str] = []
    with cases.make_buffer(case, backend=place.settings.backend, timeout_s=place.settings.wait_s) as buffer:
        for number in range(case.rounds):
            output, combined = cases.one_round(buffer, case, inputs[number % different], smooth)
            cases.finish(buffer, place.backend)
            received, sums = expected[number % different]
            differences = cases.wrong_parts(output, combined, received[place.rank], sums[place.rank])
            wrong += [f"round {number}: {text}" for text in differences]
    return Finding(wrong=few(wrong), figures={"rounds": case.rounds})


def compare_per_rank(place: Place, case: Case) -> Finding:
    """The same of rows that come once for each rank."""
    everyone = [cases.inputs_of(case, rank, 0) for rank in range(case.config.num_ranks)]
    x, ids, weights = ([getattr(own, n) for own in everyone] for n in ("x", "topk_idx", "topk_weights"))
    received = reference.dispatch_per_rank(case.config, x, ids, weights)
    y = [cases.experts_of(case, rank, own.tokens) for rank, own in enumerate(received)]
    sums = reference.combine_per_rank(case.config, y, received, list(map(len, x)))
    inputs, expected = everyone[place.rank].to(place.backend.device), received[place.rank]
    wrong: list[str] = []
    with cases.make_buffer(case, backend=place.settings.backend, timeout_s=place.settings.wait_s) as buffer:
        for number in range(case.rounds):
            output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, do_expand=False)
            y_own = cases.experts_of(case, place.rank, output.tokens)
            out = buffer.combine(y_own, output.handle)
            cases.finish(buffer, place.backend)
            rows = {"tokens": output.tokens, **{name: getattr(output.handle, name) for name in LOCAL}}
            n = len(expected.tokens)
            pairs = {name: (have[:n], getattr(expected, name)) for name, have in rows.items()}
            pairs["tokens_per_expert"] = output.tokens_per_expert, expected.tokens_per_expert
            pairs["combined"] = out, sums[place.rank]
            texts = (cases.difference(name, have.cpu(), want) for name, (have, want) in pairs.items())
            wrong += [f"round {number}: {text}" for text in texts if text]
    return Finding(wrong=few(wrong), figures={"rounds": case.rounds})


def plain_case(settings: Settings, ranks: int, scheme: str = SCHEMES[0]) -> Case:
    """Uniform routing, bf16, as many tokens on every rank."""
    hidden = QUICK_HIDDEN if settings.quick else HIDDEN
    config = Config(ranks, TOKENS, hidden, TOPK, EXPERTS_PER_RANK * ranks, scheme=scheme, relaxed=True)
    return Case(config, settings.seed, "uniform", (TOKENS,) * ranks, rounds=3)


def _cases(settings: Settings, scheme: str, ranks: int) -> dict[str, Case]:
    plain = plain_case(settings, ranks, scheme)
    some_empty = (0, TOKENS, 3, 0)
    shared_ranks = max(1, ranks // 4)
    shared = dataclasses.replace(
        plain.config,
        num_experts=EXPERTS_PER_RANK * (ranks - shared_ranks),
        num_shared_experts=1,
        num_shared_ranks=shared_ranks,
    )

    def like(**changes: object) -> Case:
        return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]

    return {
        "bf16": plain,
        "fp16": like(dtype=torch.float16, weights=False),
        **{name: like(quantize=name) for name in QUANTIZED},
        **{f"{name}, fp16": like(quantize=name, dtype=torch.float16) for name in QUANTIZED},
        **{
            f"{name}, smooth scales": like(quantize=name, smooth=True, routing="skewed") for name in QUANTIZED
        },
        SPARSE: like(routing="sparse", tokens=some_empty, quantize="int8"),
        "no expert at all": like(routing="none"),
        "the same experts for all tokens": like(routing="one expert set"),
        "a shared expert on ranks of its own": like(config=shared, quantize="int8", smooth=True),
        MANY: like(
            rounds=20 if settings.quick else 200, tokens=(5, 0, TOKENS, 9), routing="skewed", quantize="int8"
        ),
    }


def torch_npu_checks(ranks: int) -> list[Check]:
    """Not quantised and quantised."""
    return [
        Check(f"quant_mode {mode}", "torch_npu", compare_torch_npu, (mode,), ranks=ranks, needs=(FIRST,))
        for mode in BY_QUANT_MODE
    ]


def compare_torch_npu(place: Place, quant_mode: int) -> Finding:
    """Dispatch and combine of the second version of torch_npu's operators."""
    settings, quantize = place.settings, BY_QUANT_MODE[quant_mode].name
    case = dataclasses.replace(plain_case(settings, place.num_ranks), quantize=quantize)
    torch_npu_ops.configure(backend=settings.backend, relaxed=True, timeout_s=settings.wait_s)
    group_name = torch_npu_ops.group_name()
    group = (group_name, place.num_ranks, place.rank, case.config.num_experts)
    own = cases.inputs_of(case, place.rank, 0).to(place.backend.device)
    try:
        expand_x, scales, assist_info, token_nums, recv_counts, *_ = (
            torch_npu_ops.npu_moe_distribute_dispatch_v2(own.x, own.topk_idx, *group, quant_mode=quant_mode)
        )
        y = cases.experts_of(case, place.rank, expand_x)
        out = torch_npu_ops.npu_moe_distribute_combine_v2(
            y, own.topk_idx, assist_info, recv_counts, own.topk_weights, *group
        )
        place.backend.synchronize()
        received, sums = cases.expected_round(case, 0)
        want = received[place.rank]
        rows, words = len(want.origins), ORIGIN.num_words
        pairs = {
            "expand_x": (expand_x[:rows], want.tokens),
            "dynamic_scales": (scales[:rows], want.scales),
            "assist_info_for_combine": (assist_info[: words * rows].view(-1, words), want.origins),
            "expert_token_nums": (token_nums, want.tokens_per_expert),
            "ep_recv_counts": (recv_counts[: len(want.recv_offsets)], want.recv_offsets),
            "combined": (out, sums[place.rank]),
        }
        said = [cases.difference(n, have.cpu(), ref) for n, (have, ref) in pairs.items() if ref is not None]
        return Finding(wrong=tuple(text for text in said if text))
    finally:
        torch_npu_ops.release(group_name)
        torch_npu_ops.configure()


def graph_checks(ranks: int) -> list[Check]:
    """One check, for back ends that can capture graphs."""
    # torch_npu documentation, "torch_npu.npu.NPUGraph" and "torch_npu.npu.graph" (as in torch.cuda)
    page = "torch_npu: torch_npu.npu.NPUGraph, torch_npu.npu.graph"
    return [Check("capture and replay", "graphs", replay, ranks=ranks, needs=(FIRST,), page=page)]


def replay(place: Place) -> Finding:
    """Captures three rounds, so that every other replay begins in the other zone, and changes the inputs."""
    backend = place.backend
    if not backend.capabilities.captures_graphs:
        return Finding(skipped=f"the {backend.name} back end captures no graphs")
    npu = importlib.import_module("torch_npu").npu
    case = plain_case(place.settings, place.num_ranks)
    own = cases.inputs_of(case, place.rank, 0).to(backend.device)
    wrong: list[str] = []
    with cases.make_buffer(case, backend=place.settings.backend, timeout_s=place.settings.wait_s) as buffer:
        for _ in range(2):  # compiles everything before the capture
            cases.one_round(buffer, case, own, None)
        cases.finish(buffer, backend)
        graph = npu.NPUGraph()
        with npu.graph(graph):
            captured = [cases.one_round(buffer, case, own, None) for _ in range(3)]
        for number in range(REPLAYS):
            fresh = cases.inputs_of(case, place.rank, number)
            own.x.copy_(fresh.x)
            own.topk_idx.copy_(fresh.topk_idx)
            own.topk_weights.copy_(fresh.topk_weights)
            graph.replay()
            cases.finish(buffer, backend)
            received, sums = cases.expected_round(case, number)
            for output, combined in captured:
                differences = cases.wrong_parts(output, combined, received[place.rank], sums[place.rank])
                wrong += [f"replay {number}: {text}" for text in differences]
    return Finding(wrong=tuple(wrong), figures={"replays": REPLAYS})
