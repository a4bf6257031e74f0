"""The descriptions of operators against the page that defines them, and against docstrings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.operators import combine, dispatch
from moe_triton.operators.description import Operator, Output, TensorArgument
from moe_triton.torch_npu_ops.declared import arguments_of
from moe_triton.torch_npu_ops.names import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")
DTYPES = {torch.float32: "fp32", torch.int32: "int32", torch.int64: "int64", torch.int8: "int8"}
FUNCTIONS = {
    dispatch.DISPATCH_V1: ops.npu_moe_distribute_dispatch,
    dispatch.DISPATCH: ops.npu_moe_distribute_dispatch_v2,
    dispatch.DISPATCH_SETUP: ops.npu_moe_distribute_dispatch_setup,
    dispatch.DISPATCH_TEARDOWN: ops.npu_moe_distribute_dispatch_teardown,
    combine.COMBINE_V1: ops.npu_moe_distribute_combine,
    combine.COMBINE: ops.npu_moe_distribute_combine_v2,
    combine.COMBINE_ADD_RMS_NORM: ops.npu_moe_distribute_combine_add_rms_norm,
    combine.COMBINE_SETUP: ops.npu_moe_distribute_combine_setup,
    combine.COMBINE_TEARDOWN: ops.npu_moe_distribute_combine_teardown,
}
# What torch_npu calls the outputs that we have another name for; it calls some of them otherwise as inputs.
THEIRS = {
    "tokens": "expand_x",
    "scales": "dynamic_scales",
    "origins": "assist_info_for_combine",
    "tokens_per_expert": "expert_token_nums",
    "recv_offsets": "ep_recv_counts",
    "exchange_counts": "tp_recv_counts",
    "weights": "expand_scales",
    "packed_x": "y",
}


def by_their_names(*outputs: Output) -> dict[str, Output]:
    return {THEIRS.get(output.name, output.name): output for output in outputs}


WHOLE = by_their_names(*dispatch.DISPATCH.outputs, dispatch.DISPATCH_V1.outputs[2])
# Rows of the page's tables: heading, what they begin with, and the outputs that they are about.
TABLES: list[tuple[str, str, dict[str, Output]]] = [
    ("Outputs", "", WHOLE),
    ("Outputs of the halves", "dispatch_setup | ", by_their_names(*dispatch.DISPATCH_SETUP.outputs)),
    ("Outputs of the halves", "combine_setup | ", by_their_names(*combine.COMBINE_SETUP.outputs)),
]


@pytest.mark.parametrize(("heading", "start", "outputs"), TABLES, ids=["whole", "dispatch", "combine"])
def test_the_page_has_the_outputs_that_are_described(
    heading: str, start: str, outputs: dict[str, Output]
) -> None:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(rf"^\| {re.escape(start)}`(\w+)` \| (\(.*?\)) \| ([^|]+?) \|", section, flags=re.M)
    assert {name for name, _, _ in rows} == set(outputs)
    for name, shape, dtype in rows:
        described = outputs[name]
        assert shape in (described.shape, described.with_argument[1]), name
        expected = DTYPES.get(described.dtype, "that of `x`, or int8 with `quant_mode=2`")  # type: ignore[call-overload]
        assert dtype == expected, name


def shapes_in(function: Any) -> dict[str, str]:
    """The shapes that a docstring begins the descriptions of tensors with."""
    text = inspect.getdoc(function) or ""
    return dict(re.findall(r"^ +(\w+): (\([^:]*?,[^:]*?\)) ?(?=\w|,|$)", text, flags=re.M))


@pytest.mark.parametrize("operator", FUNCTIONS, ids=lambda operator: f"{operator.name} {operator.version}")
def test_docstrings_have_the_shapes_that_are_described(operator: Operator) -> None:
    described = {NAMES.get(argument.name, argument.name): argument for argument in operator.tensors}
    for name, shape in shapes_in(FUNCTIONS[operator]).items():
        if name in described and not is_free(described[name]):
            assert shape in (described[name].shape, described[name].other_shape), name


def is_free(argument: TensorArgument) -> bool:
    return bool(re.search(r"\b(n|rows|Hs)\b", argument.shape)) or not argument.shape


def test_every_described_argument_is_somebody_s() -> None:
    for kind in ("dispatch", "combine"):
        of_kind = [operator for operator in FUNCTIONS if operator.name.startswith(kind)]
        taken = {a.name for o in of_kind for a in arguments_of(FUNCTIONS[o]) if a.kind is torch.Tensor}
        taken |= {"cumulative_local_expert_recv_stats"} if kind == "dispatch" else set()  # EPBuffer's
        assert taken == {NAMES.get(t.name, t.name) for operator in of_kind for t in operator.tensors}
