"""What a kernel's module declares beside its code: the shapes that determine the code, and inputs to run it
on.

A family is one kernel, or one of the kernels that a factory makes; a case is a family in one shape, with
the sizes of one call. Compiler gate, selftest, benchmarks and tests draw their cases from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TypeAlias

import torch

from moe_triton.core.checks import check_choice, check_positive
from moe_triton.core.dtypes import DTYPES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Placeholder
from moe_triton.core.row_formats import AS_THEY_ARE, QUANTIZED, RowFormat, row_format_of
from moe_triton.kernels.checks import Launch
from moe_triton.layout import SLOT_ALIGN, SlotLayout, align

I8, I32, I64, F32 = torch.int8, torch.int32, torch.int64, torch.float32
AXES = ("dtype", "hidden", "topk", "shared")
NUM_SPECIAL = 2  # of each kind: zero, copy and constant experts
CANARY = 0x5A  # in every byte that has not been written

Features: TypeAlias = tuple[str, ...]
Inputs: TypeAlias = dict[str, torch.Tensor | Placeholder | int]


@dataclass(frozen=True)
class Shape:
    """What a kernel is specialised for.

    Attributes:
        dtype: of tokens: ``"bf16"`` or ``"fp16"``.
        hidden: H, elements of a token's row.
        topk: K, routed experts per token.
        shared: S, shared experts.
        features: what the variant does beyond the plain kernel, by the names of its family.
        target: back end that it is specialised for.
        zoned: it reads its zone from device memory, as in plans of an NPU, if it reads a window.
    """

    dtype: str = "bf16"
    hidden: int = 7168
    topk: int = 8
    shared: int = 0
    features: frozenset[str] = field(default_factory=frozenset)
    target: str = "npu"
    zoned: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of tokens."""
        return DTYPES[self.dtype]

    def has(self, feature: str) -> bool:
        """Whether the variant does this."""
        return feature in self.features

    @property
    def row_format(self) -> RowFormat:
        """How rows travel: a feature may name it."""
        return next((r for name, r in QUANTIZED.items() if self.has(name)), AS_THEY_ARE)

    @property
    def slot(self) -> SlotLayout:
        """How a row of this shape is packed."""
        return SlotLayout.of(self.hidden, self.row_format, self.torch_dtype)

    @property
    def slot_bytes(self) -> int:
        """From one slot of a window to the next."""
        return align(SlotLayout(self.hidden, 2).packed_bytes, SLOT_ALIGN)

    @property
    def blocks_bytes(self) -> int:
        """From one row of int8 in blocks, with its scales, to the next."""
        return align(self.hidden * 5 // 4, SLOT_ALIGN)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one rank's call, and the seed of its data.

    Attributes:
        tokens: T, at least 8.
        num_experts: M.
        num_ranks: W.
        unrouted: share of the entries that name no expert.
        first_token: the first one that kernels of a range of tokens work on.
    """

    tokens: int = 16
    num_experts: int = 32
    num_ranks: int = 4
    unrouted: float = 0.25
    first_token: int = 1
    seed: int = 0


class Draw:
    """Random data of one rank's call: the same for the same sizes.

    Attributes:
        num_local: experts of each rank.
        num_shared_ranks: ranks of shared experts, for kernels that know any.
        rank: this one, of routed experts.
        entries: number of (expert, source rank) pairs, whose rows are received in expert-major order.
        ids: (T, K) int32, the chosen experts, -1 for none.
        ends: (entries,) int32, the inclusive prefix sum of the received rows.
        usual: by name, what arguments of kernels are unless a family makes them otherwise.
    """

    num_shared_ranks, rank = 2, 3

    def __init__(self, topk: int, sizes: Sizes) -> None:
        self.tokens, self.num_experts, self.num_ranks = sizes.tokens, sizes.num_experts, sizes.num_ranks
        self.topk = topk
        self.range = {"first_token": sizes.first_token, "num_tokens": sizes.tokens - sizes.first_token}
        self.num_local = sizes.num_experts // sizes.num_ranks
        self.entries = self.num_local * sizes.num_ranks
        self.generator = torch.Generator().manual_seed(sizes.seed)
        self.ids = self.uniform(self.tokens, self.num_experts).topk(topk, dim=1).indices.int()
        self.ids[self.uniform(self.tokens, topk) < sizes.unrouted] = -1
        self.most_rows = 2 * max(self.tokens * topk // self.num_experts, 1)
        self.ends = self.integers(0, self.most_rows + 1, self.entries).cumsum(0, dtype=I32)
        self.usual: Inputs = {
            "topk_idx": self.ids,
            "recv_offsets": self.ends,
            "num_tokens": self.tokens,
            "num_experts": self.num_experts,
            "num_local_experts": self.num_local,
            "first_expert": self.rank * self.num_local,
            "num_ranks": self.num_ranks,
            "rank": self.rank,
        }

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
        """Uniform integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def words(self, *shape: int) -> torch.Tensor:
        """int32 of any bits."""
        return self.integers(-(2**31), 2**31, *shape)

    def uniform(self, *shape: int) -> torch.Tensor:
        """fp32 in [0, 1)."""
        return torch.rand(shape, generator=self.generator)

    def normal(self, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        """Numbers as weights and results have them."""
        return torch.randn(shape, generator=self.generator).to(dtype)

    def rows(self, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """(T, H) of every magnitude that tokens have; one row is zeros."""
        rows = self.normal(self.tokens, hidden) * 10.0 ** self.integers(-4, 4, self.tokens, 1).float()
        rows[1] = 0
        return rows.clamp(-60000, 60000).to(dtype)

    def active_index(self) -> torch.Tensor:
        """(T,) int32: numbers of the tokens that take part, -1 for the others."""
        takes_part = self.uniform(self.tokens) < 0.7
        return torch.where(takes_part, takes_part.cumsum(0) - 1, -1).int()

    def special_ids(self) -> torch.Tensor:
        """`ids`, with one entry of each token a zero, copy or constant expert."""
        ids = self.ids.clone()
        ids[:, -1] = self.num_experts + self.integers(0, 3 * NUM_SPECIAL, self.tokens)
        return ids


def blank(*shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
    """Memory for an output, full of canaries."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), CANARY, dtype=torch.uint8).view(dtype).view(shape)


def subsets(names: Iterable[str]) -> Iterator[Features]:
    """Every set of features; rows have one format."""
    pool = tuple(names)
    every = (chosen for size in range(len(pool) + 1) for chosen in combinations(pool, size))
    return (chosen for chosen in every if len(QUANTIZED.keys() & set(chosen)) <= 1)


# Parameters of factories that are no features.
_SIZES = {"dtype": "torch_dtype", "hidden": "hidden", "topk": "topk", "num_shared": "shared"}
_OTHERS = ("target", "zoned")
# What stands before a size in a case's name.
_PREFIXES = {"dtype": "", "hidden": "h", "topk": "k", "shared": "s"}


@dataclass(frozen=True)
class Family:
    """One kernel in all its shapes.

    Attributes:
        name: in the compiler gate's table.
        factory: makes the kernel. Its parameters are attributes of `Shape` (``num_shared`` is S), every
            other one a feature, unless `build` says how it is called.
        inputs: makes every argument of any variant, in its own memory or inside another argument's, but for
            those that are as `Draw.usual` has them. If the kernel cannot tell how much it moves,
            ``bytes_moved`` is among them.
        build: of another factory.
        axes: sizes that the code depends on, of `AXES`; from the factory if `build` is not given.
        features: names of what variants do, in the order in which a case's name has them; likewise.
        variants: every set of features that plans can launch; all if not given.
        shown: the variants that stand for all in the docs and in a selftest; all if not given.
        main: the variant whose sizes are crossed in the gate's table.
        as_launched: a shape with no more shared experts than plans launch it with.
        window: the argument that begins in a zone, if the kernel reads its zone from memory.
        computes: it does arithmetic on rows; otherwise it only moves them.
        streams: it reads and writes whole rows once, so it is bound by memory.
    """

    name: str
    factory: Callable[..., TritonKernel]
    inputs: Callable[[Shape, Draw], Inputs]
    build: Callable[[Shape], TritonKernel] | None = None
    axes: tuple[str, ...] = ()
    features: Features = ()
    variants: tuple[Features, ...] = ()
    shown: tuple[Features, ...] = ()
    main: Features = ()
    as_launched: Callable[[Shape], Shape] = lambda shape: shape
    window: str = "slots"
    computes: bool = True
    streams: bool = False

    def __post_init__(self) -> None:
        if self.build is None:
            names = inspect.signature(self.factory).parameters
            axes = tuple(axis for axis, name in zip(AXES, _SIZES, strict=True) if name in names)
            object.__setattr__(self, "axes", axes)
            features = tuple(name for name in names if name not in _SIZES and name not in _OTHERS)
            object.__setattr__(self, "features", features)
        object.__setattr__(self, "variants", self.variants or tuple(subsets(self.features)))
        object.__setattr__(self, "shown", self.shown or self.variants)

    def kernel(self, shape: Shape) -> TritonKernel:
        """Makes the kernel of a shape."""
        if self.build is not None:
            return self.build(shape)
        known = {name: getattr(shape, attribute) for name, attribute in _SIZES.items()}
        known |= {name: getattr(shape, name) for name in _OTHERS}
        names = inspect.signature(self.factory).parameters
        return self.factory(**{name: known[name] if name in known else shape.has(name) for name in names})

    def case_name(self, shape: Shape) -> str:
        """As ``weighted_sum/bf16-h7168-k8-s1-weights``: a family and all that decides its code."""
        sizes = [f"{_PREFIXES[axis]}{getattr(shape, axis)}" for axis in self.axes]
        parts = [*sizes, *(name for name in self.features if shape.has(name))]
        return f"{self.name}/{'-'.join(parts)}" if parts else self.name

    def check(self, shape: Shape) -> None:
        """Refuses shapes that this family does not have.

        Raises:
            ArgumentError: a dtype that tokens cannot have, too few experts, an unknown feature, or rows of a
                size that does not fit their format.
        """
        check_choice("dtype", shape.dtype, ["bf16", "fp16"])
        check_positive("topk", shape.topk)
        row_format_of(shape.row_format.name)
        if shape.shared < 0:
            raise ArgumentError("shared", shape.shared, "must be 0 or more", "Pass 0 where there are none.")
        for name in sorted(shape.features.difference(self.features)):
            rule = f"{self.name} has {', '.join(self.features) or 'none'}"
            raise ArgumentError("feature", repr(name), rule, "Leave it out, or choose another kernel.")


@dataclass(frozen=True)
class Case:
    """One kernel in one shape, and one call of it.

    Attributes:
        given: arguments in place of those that the family makes.
    """

    family: Family
    shape: Shape
    sizes: Sizes = field(default_factory=Sizes)
    given: Mapping[str, torch.Tensor | Placeholder | int] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Family, sizes and features: everything that determines the code, except target and zones."""
        return self.family.case_name(self.shape)

    @cached_property
    def kernel(self) -> TritonKernel:
        """The kernel."""
        return self.family.kernel(self.shape)

    @cached_property
    def inputs(self) -> Inputs:
        """Every argument, including those that only other variants have.

        A kernel that reads its zone from memory gets the second of two; the first one is full of canaries.
        """
        draw = Draw(self.shape.topk, self.sizes)
        made = {**draw.usual, **self.family.inputs(self.shape, draw), **self.given}
        if any(arg.name == "zone_stride" for arg in self.kernel.args) and "zone" not in self.given:
            memory = made[self.family.window]
            assert isinstance(memory, torch.Tensor)
            made[self.family.window] = torch.cat([blank(*memory.shape, dtype=memory.dtype), memory])
            made |= {"zone": torch.ones(1, dtype=I32), "zone_stride": memory.numel()}
        return made

    @cached_property
    def values(self) -> dict[str, Placeholder | int]:
        """By argument: a number, or a place in `memory`."""
        made = {arg.name: self.inputs[arg.name] for arg in self.kernel.args}
        return {n: Placeholder(n) if isinstance(value, torch.Tensor) else value for n, value in made.items()}

    @cached_property
    def memory(self) -> dict[str, torch.Tensor]:
        """The tensors, by the argument that is at their beginning."""
        names = dict.fromkeys(
            placeholder.name for placeholder in self.values.values() if isinstance(placeholder, Placeholder)
        )
        return {name: tensor for name in names if isinstance(tensor := self.inputs[name], torch.Tensor)}

    @property
    def outputs(self) -> list[str]:
        """Names of the memory that the kernel writes to."""
        placeholders = [
            self.values[arg.name] for arg in self.kernel.args if arg.direction in ("out", "inout")
        ]
        return sorted(
            {placeholder.name for placeholder in placeholders if isinstance(placeholder, Placeholder)}
        )

    @property
    def bytes_moved(self) -> int | None:
        """Bytes read and written, if kernel or inputs can tell."""
        if self.kernel.bytes_moved is None:
            moved = self.inputs.get("bytes_moved")
            return moved if isinstance(moved, int) else None
        numbers = {name: value for name, value in self.values.items() if isinstance(value, int)}
        return self.kernel.bytes_moved(**numbers)

    def arguments(self, memory: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | int]:
        """Values by argument: numbers, and flat views of this memory."""
        arguments: dict[str, torch.Tensor | int] = {}
        for arg in self.kernel.args:
            if isinstance((value := self.values[arg.name]), Placeholder):
                flat = memory[value.name].view(-1).view(torch.uint8)
                arguments[arg.name] = flat[value.offset :].view(arg.dtype)
            else:
                arguments[arg.name] = value
        return arguments

    def model(self, programs: int = 1) -> dict[str, torch.Tensor]:
        """The memory after the kernel has run, by its model in torch."""
        memory = {name: tensor.clone() for name, tensor in self.memory.items()}
        self.kernel.fallback(programs, **self.arguments(memory), **self.kernel.constants)
        return memory

    def run(self, launch: Launch, programs: int = 1) -> dict[str, torch.Tensor]:
        """The memory after the kernel has run."""
        memory = {name: tensor.clone() for name, tensor in self.memory.items()}
        launch(self.kernel, list(self.arguments(memory).values()), programs)
        return memory
