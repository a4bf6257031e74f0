"""Dispatch and combine over all ranks against the reference model, bit for bit, by every scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from moe_triton.core.config import Config
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.schemes import SCHEMES as SERVED
from moe_triton.schemes import product_of, scheme_type
from moe_triton.tools.selftest.cases import (
    Case,
    expected_round,
    finish,
    inputs_of,
    make_buffer,
    one_round,
    smooth_scales_of,
)
from moe_triton.tools.selftest.check import Check, Finding, Place, few
from moe_triton.tools.selftest.checks.windows import FLAGS, WRITES
from moe_triton.tools.selftest.comparison import wrong_parts
from moe_triton.tools.selftest.settings import HIDDEN, QUICK_HIDDEN, Settings

STAGE = "operators"
TOKENS, TOPK, EXPERTS_PER_RANK = 16, 8, 8
DIFFERENT_INPUTS = 5  # of a case with more rounds than that; an odd number takes each through both zones
SCHEMES = tuple(SERVED["A3"])
MANY, SPARSE = "many rounds", "entries without an expert, ranks without tokens"
QUICK_POSTED = ("bf16", MANY)
MOST_POSTED = (*QUICK_POSTED, SPARSE, *(f"{name}, smooth scales" for name in QUANTIZED))
FIRST = f"{SCHEMES[0]}: bf16"  # what later stages stand on


def operator_checks(settings: Settings, ranks: int) -> list[Check]:
    """All features by each scheme; of a quick run the later schemes take those that pack differently."""
    quick = {"bf16", *(f"{name}, smooth scales" for name in QUANTIZED)}
    cases = {
        f"{scheme}: {name}": (compare_rounds, case)
        for scheme in SCHEMES
        for name, case in _cases(settings, scheme, max(ranks, 2)).items()
        if not settings.quick or scheme == SCHEMES[0] or name in quick
    }
    cases |= {name: (compare_posted, case) for name, case in _posted(settings, max(ranks, 2))}
    return [
        Check(name, STAGE, function, (case,), ranks=ranks, needs=(FLAGS, WRITES))
        for name, (function, case) in cases.items()
    ]


def _posted(settings: Settings, size: int) -> Iterator[tuple[str, Case]]:
    """The schemes that cross servers, as if each rank were on one of its own."""
    for scheme in (name for schemes in SERVED.values() for name in schemes):
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
    smooth = smooth_scales_of(case)
    if smooth is not None:
        smooth = smooth.to(device)
    different = min(case.rounds, DIFFERENT_INPUTS)
    expected = [expected_round(case, number) for number in range(different)]
    inputs = [inputs_of(case, place.rank, number).to(device) for number in range(different)]
    wrong: list[str] = []
    with make_buffer(case, backend=place.settings.backend, timeout_s=place.settings.wait_s) as buffer:
        for number in range(case.rounds):
            output, combined = one_round(buffer, case, inputs[number % different], smooth)
            finish(buffer, place.backend)
            received, sums = expected[number % different]
            found = wrong_parts(output, combined, received[place.rank], sums[place.rank])
            wrong += [f"round {number}: {text}" for text in found]
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
