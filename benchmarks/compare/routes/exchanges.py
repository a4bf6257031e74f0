"""Collectives over torch tensors, by gloo or by Open MPI: the same routes run over either."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Exchange(Protocol):
    """The collectives that the usual routes need. Every rank has the same number of tokens."""

    def all_to_all(
        self, out: torch.Tensor, rows: torch.Tensor, receive_splits: list[int], send_splits: list[int]
    ) -> None:
        """Sends the same number of rows to every rank, and receives them from every rank."""
        ...

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, by rank."""
        ...

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of this rank's share of the fp32 rows."""
        ...


class Gloo:
    """By torch.distributed."""

    def __init__(self) -> None:
        self._num_ranks = dist.get_world_size()

    def all_to_all(
        self, out: torch.Tensor, rows: torch.Tensor, receive_splits: list[int], send_splits: list[int]
    ) -> None:
        """Sends every rank its share of the rows by gloo, and receives what every rank has for this one."""
        dist.all_to_all_single(out.view(torch.int8), rows.view(torch.int8), receive_splits, send_splits)

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, by rank, as gloo gathers them."""
        out = rows.new_empty(self._num_ranks * rows.shape[0], *rows.shape[1:])
        dist.all_gather(list(out.view(torch.int8).chunk(self._num_ranks)), rows.view(torch.int8))
        return out

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns gloo's sum over ranks of this rank's share of the fp32 rows."""
        out = rows.new_empty(rows.shape[0] // self._num_ranks, *rows.shape[1:])
        dist.reduce_scatter(out, list(rows.chunk(self._num_ranks)))
        return out


class Mpi:
    """By mpi4py, from and to the tensors' memory.

    Args:
        comm: an ``mpi4py.MPI.Comm``.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        mpi: Any = importlib.import_module("mpi4py.MPI")
        self._byte, self._float = mpi.BYTE, mpi.FLOAT

    def all_to_all(
        self, out: torch.Tensor, rows: torch.Tensor, receive_splits: list[int], send_splits: list[int]
    ) -> None:
        """Sends every rank its share of the rows by MPI, and receives what every rank has for this one."""
        size = rows[:1].nbytes if rows.numel() else out[:1].nbytes
        sent = [n * size for n in send_splits]
        received = [n * size for n in receive_splits]
        self._comm.Alltoallv([_bytes(rows), sent, self._byte], [_bytes(out), received, self._byte])

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, by rank, as MPI gathers them."""
        out = rows.new_empty(self._comm.size * rows.shape[0], *rows.shape[1:])
        self._comm.Allgather([_bytes(rows), self._byte], [_bytes(out), self._byte])
        return out

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns MPI's sum over ranks of this rank's share of the fp32 rows."""
        out = rows.new_empty(rows.shape[0] // self._comm.size, *rows.shape[1:])
        self._comm.Reduce_scatter_block([rows.numpy(), self._float], [out.numpy(), self._float])
        return out


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
