"""The outputs of a dispatch: which there are, made at the least cost per call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_triton.backends.base import TensorSpec
from moe_triton.layout import TRAILER_WORDS
from moe_triton.runtime.communicator import Communicator
from moe_triton.schemes.variants import DispatchVariant

I32 = torch.int32


@dataclass(frozen=True)
class DispatchOutputs:
    """Makes the outputs of one kind of dispatch on one rank.

    Attributes:
        communicator: whose dispatch.
        variant: what the dispatch is specialised for.
        specs: of the outputs that do not depend on the number of tokens.
    """

    communicator: Communicator
    variant: DispatchVariant
    specs: tuple[TensorSpec, ...]

    @staticmethod
    def of(communicator: Communicator, variant: DispatchVariant) -> DispatchOutputs:
        """What a variant's outputs are."""
        config, capacity = communicator.config, communicator.capacity
        experts = config.experts_on(communicator.rank)
        specs: list[TensorSpec] = [((experts,), torch.int64), ((experts * config.num_ranks,), I32)]
        specs.append(((3 * capacity + TRAILER_WORDS,), I32))
        specs += [((capacity,), torch.float32)] * (variant.quantize + variant.weights)
        if config.scheme != "direct":
            specs.append(((capacity, config.hidden), variant.row_dtype))
        return DispatchOutputs(communicator, variant, tuple(specs))

    def make(self, num_ids: int) -> dict[str, torch.Tensor]:
        """Tensors by the names of the plan's holes."""
        communicator, variant = self.communicator, self.variant
        made = communicator.backend.empty_all([((num_ids,), I32), *self.specs])
        names = ["expand_idx", "tokens_per_expert", "recv_offsets", "triples"]
        if variant.quantize:
            names.append("scales")
        if variant.weights:
            names.append("weights")
        outputs = dict(zip(names, made, strict=False))
        if communicator.config.scheme == "direct":
            outputs["tokens"] = communicator.window_tensor("rows", variant.row_dtype)
        else:
            outputs["tokens"] = made[-1]
        return outputs
