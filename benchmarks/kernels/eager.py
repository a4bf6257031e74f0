"""What a kernel computes, as one writes it in torch without a kernel: the baseline where there is one.

Where there is none, the baseline is the kernel's model, which follows the specification row by row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import one_hot

from moe_triton.core.row_formats import QUANTIZED
from moe_triton.kernels import Case
from moe_triton.reference.arithmetic import BLOCK_ELEMENTS

Outputs = dict[str, torch.Tensor]
Eager = Callable[[Case], Outputs]


def _rows(case: Case, name: str) -> torch.Tensor:
    return case.memory[name].view(-1, case.shape.hidden)


def _number(case: Case, name: str) -> int:
    value = case.values[name]
    assert isinstance(value, int)
    return value


def _quantize(rows: torch.Tensor) -> Outputs:
    scales = 127.0 / rows.abs().amax(-1, keepdim=True)
    return {"rows": (rows * scales).round().to(torch.int8), "scales": 1.0 / scales[..., 0]}


def _packed(case: Case, rows: torch.Tensor) -> Outputs:
    block = case.shape.row_format.elements_per_scale
    if block is None:
        return _quantize(rows)
    outputs = _quantize(rows.view(*rows.shape[:-1], -1, block))
    return outputs | {"rows": outputs["rows"].view(rows.shape)}


def _pack(case: Case) -> Outputs:
    return _packed(case, _rows(case, "x").float())


def _pack_smooth(case: Case) -> Outputs:
    smooth = _rows(case, "smooth_scales")[case.memory["topk_idx"].long()]
    return _packed(case, _rows(case, "x").float()[:, None] * smooth)


def _block_quantize(case: Case) -> Outputs:
    rows = _rows(case, "rows")
    return _quantize(rows.view(len(rows), -1, BLOCK_ELEMENTS).float())


def _rms_norm(case: Case) -> Outputs:
    memory = case.memory
    x = memory["acc"] + memory["residual"].float()
    inverse = torch.rsqrt(x.pow(2).mean(1, keepdim=True) + memory["eps"])
    return {"y": (x * inverse).bfloat16() * memory["gamma"], "rstd": inverse[:, 0], "x_out": x.bfloat16()}


def _weighted_sum(case: Case) -> Outputs:
    memory, hidden = case.memory, case.shape.hidden
    rows = memory["slots"].view(-1, case.shape.topk, hidden).float()
    if case.shape.has("weights"):
        rows = rows * memory["topk_weights"][..., None]
    total = rows.sum(1)
    if case.shape.has("shared_x"):
        total = total + _rows(case, "shared_x").float()
    return {"out": total.to(memory["out"].dtype)}


def _const_alphas(case: Case) -> Outputs:
    memory, first = case.memory, _number(case, "first_const")
    ids = memory["topk_idx"]
    at = (ids >= first).nonzero(as_tuple=True)
    chosen = ids[at].long() - first
    alphas = [memory[name][chosen].float() for name in ("alpha1", "alpha2")]
    if case.shape.has("per_element"):
        x = _rows(case, "x")[at[0]].float()
        alphas = [(alpha * x).sum(1) for alpha in alphas]
    all_alphas = torch.zeros(*ids.shape, 2)
    all_alphas[at] = (
        torch.stack(alphas, 1).softmax(1) if case.shape.has("per_element") else torch.stack(alphas, 1)
    )
    return {"alphas": all_alphas}


def _route(case: Case) -> Outputs:
    ids = case.memory["topk_idx"].view(-1).long()
    chosen = one_hot(ids, _number(case, "num_experts"))
    index = (chosen.cumsum(0) - 1).gather(1, ids[:, None])[:, 0]
    return {"expand_idx": index.int(), "counts": chosen.sum(0).int()}


_EAGER: dict[str, Eager] = {
    "pack": _pack,
    "pack_smooth": _pack_smooth,
    "block_quantize": _block_quantize,
    "rms_norm": _rms_norm,
    "weighted_sum": _weighted_sum,
    "const_alphas": _const_alphas,
    "route": _route,
}
# They leave to the model: masks, special experts, int8 blocks, rows found by expert or offset or in a zone.
_PLAIN = {"weights", "shared_x", "fp32_out", "per_element", *QUANTIZED}


def eager_of(case: Case) -> Eager | None:
    """The baseline of a case, without shared experts' rows; or None."""
    has_shared = case.shape.shared > 0 and "shared" in case.family.axes
    is_plain = case.shape.features <= _PLAIN and not has_shared and "zone" not in case.values
    return _EAGER.get(case.family.name) if is_plain else None
