"""What a dispatch keeps where ranks pass tokens on, and what its combine is held to.

Results are then summed on the ranks that have passed their tokens on, with the weights that came with them.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.core.errors import ArgumentError
from moe_triton.layout.relay_tables import HOLE
from moe_triton.runtime.communicator import Communicator

Bindings = dict[str, Any]


def keep_weights(communicator: Communicator, bindings: Bindings) -> None:
    """Keeps what a dispatch is given for weights, where the host reads tensors.

    Args:
        communicator: which dispatches, of a scheme that keeps tables.
        bindings: of its holes: "tables", and "topk_weights" (T, K) fp32.
    """
    if not communicator.backend.is_asynchronous:
        given = bindings["topk_weights"]
        _own_weights(communicator, bindings)[: len(given)] = given.view(torch.int32)


def check_weights(communicator: Communicator, bindings: Bindings, name: str) -> None:
    """Checks that combine is given dispatch's weights, where the host reads tensors.

    Args:
        communicator: which combines, of a scheme that keeps tables.
        bindings: of its holes: "tables" of its dispatch, "topk_weights" (T, K) fp32, and "topk_idx" (T, K);
            weights of entries without an expert do not matter.
        name: what the caller calls the weights.

    Raises:
        ArgumentError: they differ in a bit. Nothing was sent.
    """
    if communicator.backend.is_asynchronous:
        return
    given = bindings["topk_weights"]
    kept = _own_weights(communicator, bindings)[: len(given)]
    others = (kept != given.view(torch.int32)) & (bindings["topk_idx"] >= 0)
    if others.any():
        token, k = others.nonzero()[0].tolist()
        dispatched = float(kept.view(torch.float32)[token, k])
        raise ArgumentError(
            name,
            f"{float(given[token, k])} at token {token}, k {k}",
            f"dispatch was given {dispatched} there, which other ranks sum with",
            "Pass the weights that were dispatched.",
        )


def _own_weights(communicator: Communicator, bindings: Bindings) -> torch.Tensor:
    tables = communicator.site.scheme.tables_of(communicator.config)
    assert tables is not None
    return tables.of(bindings[HOLE], "own_weights")
