"""The words that operators are described in.

Shapes are texts in symbols (docs/operators.md, "Symbols"), as that page has them: "(BS * K,)". `Symbols`
computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

Dtype = torch.dtype | str
"""A dtype; or "x" for that of the operator's first tensor, "row" for that of the rows that travel."""
Modes = Mapping[str, Callable[[Any], Any]]
"""Fields of a variant, and how `Symbols` of a call decide them."""


@dataclass(frozen=True)
class TensorArgument:
    """A tensor that an operator takes.

    Attributes:
        name: torch_npu's.
        shape: that it must have; "" where nobody looks at the tensor, or other code checks it.
        dtype: that it must have, or several.
        read_as: dtype that kernels read; a tensor of another one is converted.
        holes: of a plan that it fills. EPBuffer's argument has the name of the first.
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
    holes: tuple[str, ...] = ()
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


@dataclass(frozen=True)
class Output:
    """A tensor that an operator returns.

    Attributes:
        name: torch_npu's.
        shape: of it.
        dtype: of it.
        hole: of a plan that it fills; "" where no kernel writes it.
        with_argument: an argument with which its shape is another, and that shape.
        only_with: attribute of the variant without which there is none.
    """

    name: str
    shape: str
    dtype: Dtype
    hole: str = ""
    with_argument: tuple[str, str] = ("", "")
    only_with: str = ""


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
        names: what the caller calls arguments that have other names here.
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
