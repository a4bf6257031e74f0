"""The Triton kernels, each with the sizes and variants that decide its code on the NPU.

A family is one kernel, or one of the kernels that a factory makes; a shape is what it is specialised for.
Run-time arguments (tokens, ranks, strides) decide nothing. Of kernels that read windows it is the variant
that an NPU's plans launch: it looks its zone up in device memory.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from moe_triton import kernels
from moe_triton.core.checks import check_choice, check_positive
from moe_triton.core.dtypes import DTYPES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels import SumFeatures
from moe_triton.layout import WORD_BYTES, SlotLayout

AXES = ("dtype", "hidden", "topk", "shared")


@dataclass(frozen=True)
class Shape:
    """What a kernel is specialised for.

    Attributes:
        dtype: of tokens: ``"bf16"`` or ``"fp16"``.
        hidden: H, elements of a token's row.
        topk: K, routed experts per token.
        shared: S, shared experts.
        features: what the variant does beyond the plain kernel, by the names of its family.
    """

    dtype: str = "bf16"
    hidden: int = 7168
    topk: int = 8
    shared: int = 0
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of tokens."""
        return DTYPES[self.dtype]

    def has(self, feature: str) -> bool:
        """Whether the variant does this."""
        return feature in self.features

    @property
    def slot(self) -> SlotLayout:
        """How a row of this shape is packed: feature ``int8`` says that rows travel quantised."""
        return SlotLayout(self.hidden, 1 if self.has("int8") else self.torch_dtype.itemsize)


@dataclass(frozen=True)
class Family:
    """One kernel in all its shapes.

    Attributes:
        name: in the table.
        factory: the function of `moe_triton.kernels` that makes it.
        build: makes it for the NPU.
        axes: sizes that its code depends on, of `AXES`.
        features: names of what its variants do, in the order in which a case's name has them.
    """

    name: str
    factory: Callable[..., TritonKernel]
    build: Callable[[Shape], TritonKernel]
    axes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    def case_name(self, shape: Shape) -> str:
        """As ``weighted_sum/bf16-h7168-k8-s1-weights``: a family and all that decides its code."""
        sizes = {
            "dtype": shape.dtype,
            "hidden": f"h{shape.hidden}",
            "topk": f"k{shape.topk}",
            "shared": f"s{shape.shared}",
        }
        parts = [sizes[axis] for axis in self.axes] + [name for name in self.features if shape.has(name)]
        return f"{self.name}/{'-'.join(parts)}" if parts else self.name

    def check(self, shape: Shape) -> None:
        """Refuses what this family does not have.

        Raises:
            ArgumentError: a dtype that tokens have not, too few experts, or an unknown feature.
        """
        check_choice("dtype", shape.dtype, ["bf16", "fp16"])
        check_positive("topk", shape.topk)
        if shape.shared < 0:
            raise ArgumentError("shared", shape.shared, "must be 0 or more", "Pass 0 where there are none.")
        for name in sorted(shape.features.difference(self.features)):
            rule = f"{self.name} has {', '.join(self.features) or 'none'}"
            raise ArgumentError("feature", repr(name), rule, "Leave it out, or choose another kernel.")


def _npu(factory: Callable[..., TritonKernel], *args: Any, **more: Any) -> TritonKernel:
    """A factory's kernel for the NPU, whether or not it knows targets."""
    if "target" in inspect.signature(factory).parameters:
        more["target"] = "npu"
    return factory(*args, **more)


def _pack(shape: Shape) -> TritonKernel:
    return _npu(kernels.pack_kernel, shape.torch_dtype, shape.hidden)


def _pack_smooth(shape: Shape) -> TritonKernel:
    dtype, hidden, topk, shared = shape.torch_dtype, shape.hidden, shape.topk, shape.shared
    return _npu(kernels.pack_kernel, dtype, hidden, topk, True, num_shared=shared)


def _keep(shape: Shape) -> TritonKernel:
    words = shape.slot.row_bytes // WORD_BYTES
    rows = shape.topk + shape.shared if shape.has("smooth") else 1
    return _npu(kernels.keep_kernel, words, shape.topk, shape.has("int8"), shape.has("weights"), rows)


def _arrange(shape: Shape) -> TritonKernel:
    slot = shape.slot
    words = [n // WORD_BYTES for n in (slot.row_bytes, slot.scale_offset, slot.stamp_offset)]
    return _npu(kernels.arrange_kernel, *words, shape.has("int8"), shape.has("weights"), zoned=True)


def _append(shape: Shape) -> TritonKernel:
    words = [n // WORD_BYTES for n in (shape.slot.row_bytes, shape.slot.scale_offset)]
    return _npu(kernels.append_kernel, *words, shape.has("int8"), zoned=True)


def _const_alphas(shape: Shape) -> TritonKernel:
    sizes = shape.torch_dtype, shape.hidden, shape.topk
    return _npu(kernels.const_alphas_kernel, *sizes, shape.has("per_element"))


def _weighted_sum(shape: Shape) -> TritonKernel:
    # Of results that are found by offset, those of "direct", the host knows the zone.
    features = SumFeatures(
        **{name: shape.has(name) for name in SUM_FEATURES}, zoned=not shape.has("by_offset")
    )
    sizes = shape.torch_dtype, shape.hidden, shape.topk, shape.shared, shape.has("weights")
    return _npu(kernels.weighted_sum_kernel, *sizes, features=features)


SUM_FEATURES = tuple(f.name for f in fields(SumFeatures) if f.name != "zoned")
_ROWS = ("dtype", "hidden")

FAMILIES = {
    family.name: family
    for family in (
        # dispatch
        Family(
            "select",
            kernels.select_kernel,
            lambda s: _npu(kernels.select_kernel, s.topk, s.has("per_entry")),
            ("topk",),
            ("per_entry",),
        ),
        Family(
            "share",
            kernels.share_kernel,
            lambda s: _npu(kernels.share_kernel, s.has("by_position"), s.has("masked")),
            (),
            ("by_position", "masked"),
        ),
        Family("route", kernels.route_kernel, lambda s: _npu(kernels.route_kernel)),
        Family("pack", kernels.pack_kernel, _pack, _ROWS),
        Family("pack_smooth", kernels.pack_kernel, _pack_smooth, (*_ROWS, "topk", "shared")),
        Family(
            "offsets",
            kernels.offsets_kernel,
            lambda s: _npu(kernels.offsets_kernel, cumulative=s.has("cumulative")),
            (),
            ("cumulative",),
        ),
        Family(
            "keep", kernels.keep_kernel, _keep, ("hidden", "topk", "shared"), ("int8", "weights", "smooth")
        ),
        Family("arrange", kernels.arrange_kernel, _arrange, ("hidden",), ("int8", "weights")),
        Family("own_offsets", kernels.own_offsets_kernel, lambda s: _npu(kernels.own_offsets_kernel)),
        Family(
            "waits_of_dispatch",
            kernels.waits_of_dispatch_kernel,
            lambda s: _npu(kernels.waits_of_dispatch_kernel),
        ),
        # the end of an operator
        Family("turn", kernels.turn_kernel, lambda s: _npu(kernels.turn_kernel)),
        # direct
        Family("starts", kernels.starts_kernel, lambda s: _npu(kernels.starts_kernel)),
        Family(
            "places",
            kernels.places_kernel,
            lambda s: _npu(kernels.places_kernel, s.topk, s.shared),
            ("topk", "shared"),
        ),
        Family(
            "stamps",
            kernels.stamps_kernel,
            lambda s: _npu(kernels.stamps_kernel, s.has("weights"), s.has("int8")),
            (),
            ("int8", "weights"),
        ),
        # between tensor-parallel ranks
        Family("append", kernels.append_kernel, _append, ("hidden",), ("int8",)),
        Family(
            "gather_counts",
            kernels.gather_counts_kernel,
            lambda s: _npu(kernels.gather_counts_kernel, zoned=True),
        ),
        Family(
            "add_rows",
            kernels.add_rows_kernel,
            lambda s: _npu(kernels.add_rows_kernel, s.torch_dtype, s.hidden, zoned=True),
            _ROWS,
        ),
        # combine
        Family(
            "returns",
            kernels.returns_kernel,
            lambda s: _npu(kernels.returns_kernel, s.has("shared_rank")),
            (),
            ("shared_rank",),
        ),
        Family(
            "block_quantize",
            kernels.block_quantize_kernel,
            lambda s: _npu(kernels.block_quantize_kernel, s.torch_dtype, s.hidden),
            _ROWS,
        ),
        Family(
            "result_offsets",
            kernels.result_offsets_kernel,
            lambda s: _npu(kernels.result_offsets_kernel, s.topk, s.shared),
            ("topk", "shared"),
        ),
        Family(
            "const_alphas", kernels.const_alphas_kernel, _const_alphas, (*_ROWS, "topk"), ("per_element",)
        ),
        Family("weighted_sum", kernels.weighted_sum_kernel, _weighted_sum, AXES, ("weights", *SUM_FEATURES)),
        Family(
            "rms_norm",
            kernels.rms_norm_kernel,
            lambda s: _npu(kernels.rms_norm_kernel, s.hidden, masked=s.has("masked")),
            ("hidden",),
            ("masked",),
        ),
        Family(
            "waits_of_combine",
            kernels.waits_of_combine_kernel,
            lambda s: _npu(kernels.waits_of_combine_kernel),
        ),
    )
}


def family_named(name: str) -> Family:
    """A family by its name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in FAMILIES:
        rule = f"must be one of {', '.join(FAMILIES)}"
        raise ArgumentError("kernel", repr(name), rule, "Choose one of them.")
    return FAMILIES[name]


_SIZES = {"h": "hidden", "k": "topk", "s": "shared"}


def parse_case(name: str) -> tuple[Family, Shape]:
    """A family and a shape from what `Family.case_name` writes; what is left out is as in `Shape`.

    Raises:
        ArgumentError: the name says something that the family does not know.
    """
    head, _, tail = name.partition("/")
    family = family_named(head)
    sizes: dict[str, Any] = {}
    features = []
    for part in tail.split("-") if tail else ():
        if size := re.fullmatch(r"([hks])(\d+)", part):
            sizes[_SIZES[size[1]]] = int(size[2])
        elif part in ("bf16", "fp16"):
            sizes["dtype"] = part
        else:
            features.append(part)
    return family, with_sizes(family, Shape(), sizes, features)


def with_sizes(family: Family, shape: Shape, sizes: Mapping[str, Any], features: Iterable[str] = ()) -> Shape:
    """A shape with other sizes and further features.

    Args:
        sizes: by the names of `AXES`.

    Raises:
        ArgumentError: a size or a feature that decides nothing about this kernel, or that no kernel takes.
    """
    for axis, value in sizes.items():
        if axis not in family.axes:
            rule = f"{family.name} does not depend on it; it depends on {', '.join(family.axes) or 'no size'}"
            raise ArgumentError(axis, value, rule, "Leave it out.")
    changed = replace(shape, **sizes, features=shape.features.union(features))
    family.check(changed)
    return changed
