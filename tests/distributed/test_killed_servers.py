"""A server whose ranks are killed in the middle of what they send: every survivor names all of them.

All of one rank may have come to a survivor, so that it misses only others of the server. Then it names the
server beside them.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from typing import Literal

import pytest
import torch.distributed as dist

from moe_triton import CommunicationTimeoutError, EPBuffer
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.processes import RankFailedError, run_ranks
from moe_triton.tools.selftest.cases import combined, dispatched
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.failures import unwatched
from tests.distributed.workers import make_buffer, one_round
from tests.patience import seconds

TIMEOUT_S = seconds(3.0)
FAST_GB_PER_S = 10.0
SENDING_S = 2.0
"""That the link of a rank which is to die takes for what it sends to other servers."""
MOMENTS = {"in its first block": 0.1, "in its last block": 0.75}
"""When it dies, of that time: the blocks for other servers' ranks, of which there are 2 to 4, are alike."""
Operator = Literal["dispatch", "combine"]
Said = tuple[str, tuple[int, ...], str]


def case_of(scheme: str, servers: tuple[int, ...]) -> Case:
    """Every token goes to every expert, so that every rank needs every other one in either operator."""
    case = small_case(sum(servers), scheme)
    config = replace(case.config, ranks_per_server=servers, num_topk=case.config.num_experts)
    return replace(case, config=config)


def killed(rank: int, num_ranks: int, case: Case, operator: Operator, moment: str) -> Said:
    """A round over links of the usual speed, then rounds in which the last server dies.

    Returns:
        Of a survivor the operator that failed, whom it missed, and its message.
    """
    inputs, link = inputs_of(case, rank, 0), PacedLink(FAST_GB_PER_S)
    topology = case.config.topology
    dist.barrier()  # all are there to be met
    with paced(link), unwatched(make_buffer(case, timeout_s=TIMEOUT_S)) as buffer:
        one_round(buffer, case, inputs, None)
        if operator == "combine":
            output = dispatched(buffer, case, inputs)
        dist.barrier()  # what was posted at the usual speed is there
        if topology.servers[rank] == topology.num_servers - 1:
            link.set(_sent_between(buffer, operator) / SENDING_S / 1e9)
            own = os.getpid(), signal.SIGKILL
            threading.Timer(MOMENTS[moment] * SENDING_S, os.kill, own).start()
        try:
            if operator == "combine":
                combined(buffer, case, inputs, output)
            while True:
                one_round(buffer, case, inputs, None)
        except CommunicationTimeoutError as error:
            return error.operator, error.missing_ranks, str(error)


def _sent_between(buffer: EPBuffer, operator: Operator) -> int:
    traffic = buffer.traffic(operator)
    assert traffic is not None
    return traffic.payload_bytes.between + traffic.framing_bytes.between


def check(scheme: str, servers: tuple[int, ...], operator: Operator, moment: str) -> list[str]:
    """Raises unless every survivor names all ranks of the last server; which operator failed on each."""
    case = case_of(scheme, servers)
    gone = tuple(case.config.topology.ranks_on(len(servers) - 1))
    results = run_ranks(
        killed, sum(servers), (case, operator, moment), allow_failures=True, timeout_s=seconds(60)
    )
    failed = []
    for rank, result in enumerate(results):
        if rank in gone:
            assert isinstance(result, RankFailedError)
            assert "died without an error" in str(result)
            continue
        assert not isinstance(result, RankFailedError), result
        in_operator, missing, said = result
        assert set(missing) & set(gone), said
        assert case.config.topology.in_words(gone) in said
        failed.append(in_operator)
    return failed


def test_a_server_that_is_killed_in_a_dispatch_is_named() -> None:
    """One rank has all of the server's blocks, and meets the loss in its next operator; the other has not."""
    assert check("fullmesh", (2, 2), "dispatch", "in its last block") == ["combine", "dispatch"]


@pytest.mark.long
@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("operator", ["dispatch", "combine"])
@pytest.mark.parametrize("servers", [(2, 2), (3, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("scheme", ["fullmesh", "fullmesh_v1"])
def test_a_server_that_is_killed_is_named(
    scheme: str, servers: tuple[int, ...], operator: Operator, moment: str
) -> None:
    failed = check(scheme, servers, operator, moment)
    if moment == "in its first block":
        assert failed == [operator] * len(failed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("operator", "moment"), [("dispatch", "in its last block"), ("combine", "in its first block")]
)
def test_a_server_that_is_killed_is_named_across_two_hops(operator: Operator, moment: str) -> None:
    """A survivor has messages of one rank of the server; its neighbour has those of the other one."""
    check("hierarchy", (2, 2), operator, moment)
