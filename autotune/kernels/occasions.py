"""When kernels are launched: the plans that are asked for, and the sizes that shipped tables are of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from autotune.kernels.scope import Scope
from autotune.model.clusters.group import EXPERTS
from moe_triton.core.config import Config
from moe_triton.core.dtypes import DTYPES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.plan import Plan
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.core.soc import SOC_OF_PRODUCT
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes import SCHEMES
from moe_triton.schemes.rules import check_config
from moe_triton.schemes.scheme import Scheme

HIDDEN = 7168, 4096, 5120, 8192, 2048
"""H of shipped tables. Rows of kernels whose code does not depend on it are of the first."""
TOPK = 1, 4, 6, 8, 16
"""K of shipped tables: rows of kernels whose code does not depend on it are of all."""

_GIVEN_IDS = None, torch.int32, torch.int64


def shipped(scope: Scope) -> Iterator[Scope]:
    """The sizes that shipped tables are of, an H at a time: each is a table's part that can be kept."""
    for hidden in HIDDEN:
        yield replace(scope, hidden=(hidden,), topk=TOPK, by_hidden=hidden != HIDDEN[0])


def configs(scope: Scope) -> Iterator[Config]:
    """Groups of these sizes, of every scheme that takes them: a chip's own product's; on a CPU those of all.

    Raises:
        ArgumentError: no scheme takes any of them.
    """
    refused: ArgumentError | None = None
    served = False
    known = {name: of for name, of in SCHEMES.items() if scope.is_cpu or SOC_OF_PRODUCT[name] == scope.chip}
    schemes = [(name, comm_alg) for name, of in known.items() for comm_alg in of]
    for ranks, tokens, hidden, topk in product(scope.ranks, scope.tokens, scope.hidden, scope.topk):
        for name, comm_alg in schemes:
            experts = max(-(-EXPERTS // ranks), -(-topk // ranks)) * ranks
            sizes = ranks, tokens, hidden, topk, experts
            config = Config(*sizes, product=name, scheme=comm_alg, relaxed=True)  # type: ignore[arg-type]
            try:
                check_config(config)
            except ArgumentError as error:
                refused = error
                continue
            served = True
            yield config
    if refused is not None and not served:
        raise refused


def usual_plans(scheme: Scheme, dtypes: tuple[str, ...]) -> Iterator[Plan]:
    """What buffers are asked for: all formats of rows and ids; results in place, as int8, or normalised."""
    yield from (_plan(scheme, variant) for variant in _variants(scheme, dtypes))


def rare_plans(scheme: Scheme) -> Iterator[Plan]:
    """What few callers ask for: masks, recorded waits, and V1, whose combine computes where rows return to.

    Only for kernels that no usual plan launches.
    """
    c, dtype = scheme.context.config, torch.bfloat16
    if c.version == 1:
        yield _plan(scheme, CombineVariant(dtype, weights=True))
        return
    yield _plan(scheme, DispatchVariant(dtype, mask="tokens", waits=True))
    yield _plan(scheme, DispatchVariant(dtype, mask="entries", given_ids=torch.int64))
    yield _plan(scheme, CombineVariant(dtype, weights=True, mask="entries", waits=True))


def _plan(scheme: Scheme, variant: Variant) -> Plan:
    operator = "dispatch" if isinstance(variant, DispatchVariant) else "combine"
    tokens = scheme.context.config.num_max_tokens_per_rank
    return scheme.whole(variant, 0, scheme.context.parts(operator, tokens))


def _variants(scheme: Scheme, dtypes: tuple[str, ...]) -> Iterator[Variant]:
    keeping = (False, True) if scheme.local_bypass else (False,)
    for dtype in (DTYPES[name] for name in dtypes):
        variants = product(ROW_FORMATS.values(), _GIVEN_IDS, (False, True), keeping)
        for row_format, given_ids, weights, own in variants:
            yield DispatchVariant(dtype, row_format, given_ids=given_ids, weights=weights, local_bypass=own)
        in_place = scheme.place("results", dtype.itemsize) is not None
        for quantize, norm, own in product((False,) if in_place else (False, True), (False, True), keeping):
            if (not norm or dtype == torch.bfloat16) and not (own and quantize):
                yield CombineVariant(
                    dtype, True, block_quantize=quantize, norm=norm, in_place=in_place, local_bypass=own
                )
