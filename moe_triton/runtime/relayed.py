"""What a dispatch keeps where ranks pass tokens on, and what its combine is held to.

Results are then summed on the ranks that have passed their tokens on, with the weights that came with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.layout import ORIGIN, RelayTables
from moe_triton.layout.relay_tables import HOLE
from moe_triton.runtime.communicator import Communicator

Bindings = dict[str, Any]
Ints = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
REMEDY = "Pass what dispatch returned; if this is it, a rank that relays tokens here has sent something else."


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
        bindings: of its holes: "tables" of its dispatch, "topk_weights" (T, K) fp32, "topk_idx" (T, K), and
            "mask" (T,) or (T, K) if there is one; weights of entries that it leaves out, or without an
            expert, do not matter.
        name: what the caller calls the weights.

    Raises:
        ArgumentError: they differ in a bit. Nothing was sent.
    """
    if communicator.backend.is_asynchronous:
        return
    given = bindings["topk_weights"]
    kept = _own_weights(communicator, bindings)[: len(given)]
    others = (kept != given.view(torch.int32)) & (bindings["topk_idx"] >= 0)
    mask = bindings.get("mask")
    if mask is not None:
        others &= mask if mask.dim() == 2 else mask[:, None]
    if others.any():
        token, k = others.nonzero()[0].tolist()
        dispatched = float(kept.view(torch.float32)[token, k])
        raise ArgumentError(
            name,
            f"{float(given[token, k])} at token {token}, k {k}",
            f"dispatch was given {dispatched} there, which other ranks sum with",
            "Pass the weights that were dispatched.",
        )


def check_tables(communicator: Communicator, bindings: Bindings, name: str) -> None:
    """Checks that combine is given tables as a dispatch leaves them, where the host reads tensors.

    Kernels stay in bounds whatever tables hold, but would sum other rows. Numbers of the inner tables that
    another dispatch might have left there are taken.

    Args:
        communicator: which combines, of a scheme that keeps tables.
        bindings: of its holes: "tables" of its dispatch, and "num_tokens".
        name: what the caller calls the tables.

    Raises:
        ArgumentError: a number that no dispatch leaves at its place. Nothing was sent.
    """
    if communicator.backend.is_asynchronous:
        return
    tables, held = _tables_of(communicator), bindings[HOLE]
    of = {part: tables.of(held, part).numpy() for part in tables.parts}
    for part, values, is_wrong in _misfits(communicator.config, of, bindings["num_tokens"]):
        if is_wrong.any():
            _refuse(name, part, values, is_wrong, "no dispatch leaves that there")


def check_origins(communicator: Communicator, bindings: Bindings, name: str) -> None:
    """Checks that the origins of rows, which their relays wrote, are of tokens that there can be.

    Args:
        communicator: which combines, of a scheme that keeps tables.
        bindings: of its holes: "origins", and "recv_offsets" of the same dispatch.
        name: what the caller calls the origins.

    Raises:
        ArgumentError: one is of no rank, token or k. Nothing was sent.
    """
    if communicator.backend.is_asynchronous:
        return
    c, origins = communicator.config, bindings["origins"].numpy()
    num_rows = min(max(int(bindings["recv_offsets"][-1]), 0), len(origins) // ORIGIN.num_words)
    rows = origins[: num_rows * ORIGIN.num_words].reshape(-1, ORIGIN.num_words)
    extents = np.array([c.num_ranks, c.num_max_tokens_per_rank, c.num_topk], np.uint32)
    is_wrong = rows.view(np.uint32) >= extents
    if is_wrong.any():
        _refuse(name, "a row's source, token and k", rows, is_wrong, f"they are below {extents.tolist()}")


def _refuse(name: str, part: str, values: Ints, is_wrong: Mask, rule: str) -> NoReturn:
    place = np.unravel_index(is_wrong.argmax(), is_wrong.shape)
    at = [int(i) for i in place]
    raise ArgumentError(name, f"{int(values[place])} in {part} at {at}", rule, REMEDY)


def _misfits(c: Config, of: dict[str, Ints], num_tokens: int) -> Iterator[tuple[str, Ints, Mask]]:
    """Each table, and where it has numbers that no dispatch of so many tokens leaves.

    A number is at least 0 and below an end if it is below it without its sign.
    """
    servers, most = c.topology.num_servers, c.num_max_tokens_per_rank
    experts = c.num_experts // servers
    ids, rows, counts = of["outer_ids"][:num_tokens], of["outer_rows"][:num_tokens], of["outer_counts"]
    goes = ids >= 0
    so_far = goes.cumsum(0, dtype=np.int32)
    yield "outer_ids", ids, (ids != np.arange(servers)) & (ids != -1)
    yield "outer_rows", rows, goes & (rows != so_far - goes)
    yield "outer_counts", counts, counts != goes.sum(0)
    relayed = of["rail_counts"]
    yield "rail_counts", relayed, relayed.view(np.uint32) > most
    is_there = np.arange(most) < relayed[:, None]
    active = of["inner_active"].reshape(servers, most)
    yield "inner_active", active, active != np.where(is_there, 0, -1)
    shape = servers, most, c.num_topk
    inner, positions = of["inner_ids"].reshape(shape), of["inner_positions"].reshape(shape)
    first = np.arange(0, c.num_experts, experts, dtype=np.int32)[:, None, None]
    is_known = ((inner - first).view(np.uint32) < experts) | (inner == -1)
    yield "inner_ids", inner, is_there[..., None] & ~is_known
    yield "inner_positions", positions, is_there[..., None] & (positions.view(np.uint32) >= most)


def _tables_of(communicator: Communicator) -> RelayTables:
    tables = communicator.site.scheme.tables_of(communicator.config)
    assert tables is not None
    return tables


def _own_weights(communicator: Communicator, bindings: Bindings) -> torch.Tensor:
    return _tables_of(communicator).of(bindings[HOLE], "own_weights")
