"""The words that operators are described in, and what a call makes of them.

Shapes are texts in symbols (docs/operators.md, "Symbols"), as that page has them: "(BS * K,)". `Symbols`
computes them: sizes of one call, by these names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import CodeType
from typing import Any

import torch

from moe_triton.layout import TRAILER_WORDS

Dtype = torch.dtype | str
"""A dtype; or "x" for that of the operator's first tensor, "row" for that of the rows that travel."""
Modes = Mapping[str, Callable[[Any], Any]]
"""Fields of a variant, and how `Symbols` of a call decide them."""


@dataclass(frozen=True)
class TensorArgument:
    """A tensor that an operator takes.

    Attributes:
        name: `EPBuffer`'s, or torch_npu's where only its functions take it.
        shape: that it must have; "" where nobody looks at the tensor, or other code checks it.
        dtype: that it must have, or several.
        read_as: dtype that kernels read; a tensor of another one is converted.
        placeholders: of a plan that it fills; "" is that of its name.
        mode: field of the variant that is True where it is given.
        other_shape: that it may have instead, where it has as many dimensions.
        by_dims: values of ``mode`` for ``shape`` and for ``other_shape``, instead of True.
        dims_of: another argument that decides between the two shapes; "" for itself.
        only_with: mode without which nobody looks at it, and with which it is needed.
        empty_is_none: whether one without elements counts as not given, where there are tokens.
        on_any_device: the host reads it.
        is_written: whether the operator writes to it.
        is_usual: whether `EPBuffer`'s native calls take it: its mode is then True where it is given.
        of_setup: what the matching setup has returned. It is checked once there is one in flight.
        by_scheme: whether only schemes take it that say so (`moe_triton.schemes.scheme.Scheme.takes`).
    """

    name: str
    shape: str = ""
    dtype: Dtype | tuple[Dtype, ...] = ()
    read_as: torch.dtype | None = None
    placeholders: tuple[str, ...] = ("",)
    mode: str = ""
    other_shape: str = ""
    by_dims: tuple[Any, Any] = (True, True)
    dims_of: str = ""
    only_with: str = ""
    empty_is_none: bool = False
    on_any_device: bool = False
    is_written: bool = False
    is_usual: bool = False
    of_setup: bool = False
    by_scheme: bool = False

    def __post_init__(self) -> None:
        """Names the placeholder that has the argument's name."""
        object.__setattr__(self, "placeholders", tuple(each or self.name for each in self.placeholders))


@dataclass(frozen=True)
class Output:
    """A tensor that an operator returns.

    Attributes:
        name: of it.
        shape: of it.
        dtype: of it.
        placeholder: of a plan that it fills, where a kernel writes it; "" for that of its name.
        with_argument: an argument with which its shape is another, and that shape.
        only_with: attribute of the variant without which there is none.
    """

    name: str
    shape: str
    dtype: Dtype
    placeholder: str = ""
    with_argument: tuple[str, str] = ("", "")
    only_with: str = ""

    def __post_init__(self) -> None:
        """Names the placeholder that has the output's name."""
        object.__setattr__(self, "placeholder", self.placeholder or self.name)


@dataclass(frozen=True, eq=False)
class Operator:
    """A dispatch or a combine, whole or a half, of one version.

    Attributes:
        name: as rules have it (`moe_triton.limits.Operator`).
        version: 1 or 2.
        variant: what its plans are specialised for.
        tensors: every one that a function may take. Sizes are read off the first two.
        outputs: what it returns.
        modes: fields of the variant that attributes decide.
        unreturned: what kernels write and no caller sees.
        names: what the caller calls arguments and sizes that have other names here.
    """

    name: str
    version: int
    variant: type
    tensors: tuple[TensorArgument, ...]
    outputs: tuple[Output, ...]
    modes: Modes
    unreturned: tuple[Output, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def called(self, argument: str) -> str:
        """What the caller calls an argument."""
        return self.names.get(argument, argument)

    def returned(self, variant: object) -> tuple[Output, ...]:
        """The outputs that there are, of a call that is specialised for a variant."""
        return tuple(o for o in self.outputs if not o.only_with or attrgetter(o.only_with)(variant))


Shape = tuple[Any, ...]

FREE = ("n", "Hs", "BS", "H", "K", "rows")
"""Sizes that may be anything, or that tensors decide: their names stand for them until then."""

# What functions that lack an argument have instead.
ABSENT = {
    "tp_world_size": 0,
    "global_bs": 0,
    "quant_mode": 0,
    "comm_quant_mode": 0,
    "expert_token_nums_type": 1,
    "given_ids": None,
    "per_rank": False,
    "servers": 1,
}
ABSENT |= {"num_zero_experts": 0, "num_copy_experts": 0, "num_const_experts": 0}


def _shared_experts(s: Symbols) -> int:
    """S. A setup counts shared experts even where no rank holds one."""
    counts = s["R"] or s.operator.name in ("dispatch_setup", "dispatch_teardown")
    return int(s["num_shared_experts"]) if counts else 0


def _capacity(s: Symbols) -> Any:
    """A. With elastic_info a rank may hold what it did not hold before."""
    routed = s["G"] * _smaller(s["routed localE"], s["K"])
    if not s["R"]:
        return routed
    if s.operator.version == 1:
        shared = s["G"] // s["R"]
    else:
        shared = s["G"] // s["EP"] * -(-s["EP"] // (s["R"] // s["S"]))
    if s.is_given("elastic_info"):
        return _larger(routed, shared)
    return shared if s["rank"] < s["R"] else routed


def _reported_experts(s: Symbols) -> Any:
    if s.is_given("elastic_info"):
        return max(1, s["routed localE"])
    return 1 if s["rank"] < s["R"] else s["routed localE"]


def _larger(a: Any, b: Any) -> Any:
    return torch.sym_max(a, b)  # type: ignore[no-untyped-call]


def _smaller(a: Any, b: Any) -> Any:
    return torch.sym_min(a, b)  # type: ignore[no-untyped-call]


def _align(unit: int) -> Callable[[Any], Any]:
    return lambda size: (size + unit - 1) // unit * unit


_DERIVED: dict[str, Callable[[Symbols], Any]] = {
    "EP": lambda s: s["num_ranks"],
    "M": lambda s: s["num_experts"],
    "R": lambda s: s["num_shared_ranks"],
    "S": _shared_experts,
    "C": lambda s: s["num_const_experts"],
    "tp": lambda s: max(s["tp_world_size"], 1),
    "G": lambda s: s["global_bs"] or s["BS"] * s["EP"],
    "routed localE": lambda s: s["M"] // (s["EP"] - s["R"]),
    "localE": _reported_experts,
    "A": _capacity,
    "received": lambda s: _smaller(s["A"], s["G"]) if s["per_rank"] else s["A"],
    "W": lambda s: s.size(
        "Align512(Align32(H) + 4)" if s["row_format"].is_quantized else "Align512(Align32(2 * H)) // 2"
    ),
    "scales_of": lambda s: lambda rows: s["row_format"].scales_shape(rows, s["H"]),
    "trailer": lambda s: TRAILER_WORDS,
    "max": lambda s: _larger,
    "Align8": lambda s: _align(8),
    "Align32": lambda s: _align(32),
    "Align512": lambda s: _align(512),
}


class Symbols(Mapping[str, Any]):
    """Sizes and modes of one call, by name: its attributes too. Sizes of its tensors may be symbolic.

    Where an argument breaks a rule they are those of the nearest call that does not.

    Args:
        operator: which one.
        named: the call's arguments.
    """

    def __init__(self, operator: Operator, named: Mapping[str, Any]) -> None:
        self.operator = operator
        # Shapes only: plans keep this, and are not to keep tensors.
        self.given: dict[str, Shape] = {
            t.name: named[t.name].shape
            for t in operator.tensors
            if named.get(t.name) is not None and not (t.empty_is_none and self._is_nothing(t, named))
        }
        tensors = {t.name for t in operator.tensors}
        self._known: dict[str, Any] = {**ABSENT, **{k: v for k, v in named.items() if k not in tensors}}
        for argument in operator.tensors:
            if argument.only_with and not self[argument.only_with]:
                self.given.pop(argument.name, None)
        for argument in operator.tensors[:2]:
            names, shape = _sizes_in(argument.shape), self.given[argument.name]
            if len(names) == len(shape):
                self._known = dict(zip(names, shape, strict=True)) | self._known
        self.dtype: torch.dtype = named[operator.tensors[0].name].dtype

    def _is_nothing(self, argument: TensorArgument, named: Mapping[str, Any]) -> bool:
        """Whether a tensor has no elements though there are tokens, or not even a row for each of none."""
        tensor, tokens = named[argument.name], named[self.operator.tensors[0].name]
        if tensor.numel():
            return False
        return bool(tokens.shape[0]) or tensor.dim() != len(_sizes_in(argument.shape))

    def __getitem__(self, name: str) -> Any:
        known = self._known
        if name not in known:
            derive = self.operator.modes.get(name) or _DERIVED.get(name)
            if derive is None and name not in FREE:
                raise KeyError(name)
            known[name] = derive(self) if derive else name
        return known[name]

    def __iter__(self) -> Any:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def is_given(self, name: str) -> bool:
        """Whether a tensor is given, and looked at."""
        return name in self.given

    def size(self, text: str) -> Any:
        """What a size or a shape in symbols is."""
        return eval(_compiled(text), {"__builtins__": {}}, self)

    def dtype_of(self, dtype: Dtype) -> torch.dtype:
        """What a dtype of a description is."""
        if dtype == "row":
            return self["row_format"].dtype or self.dtype
        return dtype if isinstance(dtype, torch.dtype) else self.dtype

    def dtypes(self, argument: TensorArgument) -> tuple[torch.dtype, ...]:
        """The dtypes that a tensor may have."""
        several = argument.dtype if isinstance(argument.dtype, tuple) else (argument.dtype,)
        return tuple(map(self.dtype_of, several))

    def expected(self, argument: TensorArgument) -> Shape:
        """The shape that a given tensor must have; names of `FREE` stand for any size."""
        shape = self.given.get(argument.dims_of or argument.name, ())
        if not _is_other(argument, shape):
            return self.size(argument.shape)  # type: ignore[no-any-return]
        # Tokens may stand in two dimensions: "a" is the first of them.
        self._known["a"] = math.gcd(self["BS"], shape[0])
        return self.size(argument.other_shape)  # type: ignore[no-any-return]

    def spec(self, output: Output) -> tuple[Shape, torch.dtype]:
        """Shape and dtype of an output."""
        argument, shape = output.with_argument
        return self.size(shape if self.is_given(argument) else output.shape), self.dtype_of(output.dtype)

    def specs(self) -> list[tuple[Shape, torch.dtype]]:
        """Shapes and dtypes of all outputs."""
        return [self.spec(output) for output in self.operator.outputs]

    def variant(self) -> Any:
        """What the plans of this call are specialised for."""
        modes = {mode: self[mode] for mode in self.operator.modes}
        for argument in self.operator.tensors:
            if argument.mode and argument.name in self.given:
                modes[argument.mode] = argument.by_dims[_is_other(argument, self.given[argument.name])]
        return self.operator.variant(dtype=self.dtype, **modes)


def _sizes_in(shape: str) -> list[str]:
    return [size.strip() for size in shape.strip("()").split(",") if size.strip()]


def _is_other(argument: TensorArgument, shape: Shape) -> bool:
    """Whether a tensor has as many dimensions as an argument's other shape."""
    return len(shape) == len(_sizes_in(argument.other_shape)) > 0


@functools.cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<shape>", "eval")
