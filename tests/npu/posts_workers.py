"""What ranks of several servers run on the stand-in; each function as ``f(rank, num_ranks, case, ...)``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.backends.npu import library, window
from moe_triton.core.errors import CommunicationTimeoutError
from moe_triton.core.soc import SOC_OF_PRODUCT
from moe_triton.core.traffic import Traffic
from moe_triton.torch_npu_ops import registry
from tests.distributed.cases import Case
from tests.distributed.workers import make_buffer
from tests.npu import graph_workers, layers, standin
from tests.npu.graph_workers import eager
from tests.npu.layers import on_npu
from tests.npu.window_workers import attempt, fake_shmem
from tests.npu.workers import compare_rounds, start
from tests.patience import seconds
from tests.torch_npu_ops.setting import TOKENS, make_round


@contextmanager
def _on_server(server: int, rank: int, folder: str) -> Iterator[None]:
    """The kernel's boot id is that of a server of this number."""
    file = Path(folder, f"boot-{rank}")
    file.write_text(f"server {server}")
    usual, window.BOOT_ID = window.BOOT_ID, file
    try:
        yield
    finally:
        window.BOOT_ID = usual


def compare(rank: int, num_ranks: int, case: Case, policy: str, folder: str) -> list[str]:
    """See `tests.npu.workers.compare_rounds`."""
    with _on_server(case.config.topology.servers[rank], rank, folder):
        return compare_rounds(rank, num_ranks, case, policy, None)


def replay(rank: int, num_ranks: int, case: Case, policy: str, folder: str) -> list[str]:
    """See `tests.npu.graph_workers.replay_graphs`."""
    with _on_server(case.config.topology.servers[rank], rank, folder):
        return graph_workers.replay_graphs(rank, num_ranks, case, policy, (2, 1))


def traffic(rank: int, num_ranks: int, case: Case) -> tuple[Traffic | None, ...]:
    """What a round has posted: by the handle of its dispatch, and by the buffer, which waits."""
    _, buffer = start(case, "random", rank)
    inputs = graph_workers.inputs_of(case, rank, 0)
    with buffer:
        output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
        sent = output.handle.traffic, buffer.traffic("dispatch")
        buffer.combine(output.tokens, output.handle, inputs.topk_weights)
        return *sent, buffer.traffic("combine")


def traffic_of_rounds(
    rank: int, num_ranks: int, case: Case, do_expand: bool
) -> tuple[list[list[int]], list[int]]:
    """Messages between servers of a dispatch in rounds and of its combine: of each round by hand, of all."""
    _, buffer = start(case, "random", rank)
    own, size, found = graph_workers.inputs_of(case, rank, 0), case.config.num_max_tokens_per_rank, []
    most = max(case.tokens or ())
    with buffer:
        for first, last in [*((n, n + size) for n in range(0, most, size)), (0, most)]:
            parts = (tensor[first:last] for tensor in (own.x, own.topk_idx, own.topk_weights))
            output = buffer.dispatch(*parts, do_expand=do_expand, num_max_tokens_per_rank=last - first)
            assert output.handle.traffic is None
            sent = buffer.traffic("dispatch")
            buffer.combine(output.tokens, output.handle)
            counted = [sent, buffer.traffic("combine")]
            found.append([number.posts.between for number in counted if number])
    return found[:-1], found[-1]


def gone(rank: int, num_ranks: int, case: Case) -> Sequence[int]:
    """Whom the others name when the last server makes no second call."""
    _, buffer = start(case, "random", rank, timeout_s=seconds(4.0))
    eager(buffer, case, 0)
    if rank == num_ranks - 1:
        return ()
    try:
        eager(buffer, case, 1)
    except CommunicationTimeoutError as error:
        return error.missing_ranks
    return (-1,)


def operators(rank: int, num_ranks: int, folder: str) -> list[bool]:
    """torch_npu's functions on A2: barriers between, and other shapes, for which windows make room."""
    good = []
    with _on_server(rank, rank, folder), on_npu(rank, product="A2", ranks_per_server=1):
        name = ops.group_name()
        for tokens in (TOKENS, 2, TOKENS):
            ops._npu_distribute_barrier(torch.zeros(1), name, num_ranks)
            r, keep = make_round(rank, num_ranks, tokens=tokens, seed=tokens), []  # type: ignore[var-annotated]
            out = layers.v2(r, keep)
            ops._npu_distribute_barrier(torch.zeros(1), name, num_ranks)
            ops.synchronize(name)
            good += [layers.is_right(layers.v2, r, out), len(registry._communicators[name]) == 1]
    return good


def without_posts(rank: int, num_ranks: int, case: Case) -> tuple[str, int]:
    """What is said where the library was built without them, and how many kernels were launched."""
    device = standin.install(soc=SOC_OF_PRODUCT[case.config.product])
    library.library().moe_posts = lambda: 0  # type: ignore[method-assign]
    return attempt(case), len(device.launches())


def over_shmem(rank: int, num_ranks: int, case: Case) -> str:
    """What is said where windows would be CANN SHMEM's."""
    standin.install(soc=SOC_OF_PRODUCT[case.config.product])
    with fake_shmem():
        return attempt(case)


def several(rank: int, num_ranks: int, case: Case, plain: Case) -> tuple[list[bool], str]:
    """A buffer of one server, then one that posts, then what a second one says; and one after it."""
    _, first = start(plain, "random", rank)
    with first:
        with make_buffer(case, backend="npu") as posting:
            good = [eager(first, plain, 1), eager(posting, case, 2), eager(first, plain, 3)]
            said = attempt(case)
            good.append(eager(posting, case, 4))
        with make_buffer(case, backend="npu") as posting:
            good.append(eager(posting, case, 5))
    return good, said
