"""Four ranks decode, one of them is killed, and the others go on: its experts have replicas on them.

    python examples/survivors.py [--victim RANK] [--step STEP]

Each step is a forward pass over all ranks, and gives each request a token more. The rank that is lost is
masked in the step in which it dies. Whoever misses results there keeps its requests as they were before and
takes the step again. As vLLM's managers of an all-to-all do, each rank asks behind a step whether there was
a fault; if so, ids go by tables without the replicas on the lost rank from then on, and its requests begin
anew on the ranks that are left.

Exits with 1 if a request is not what it is on one rank that has all experts, to the last bit: combine adds
in one order, whoever computes what it adds.

Shapes: T requests of this rank, H hidden, F inner size of an expert, E experts of the model, P replicas of
them on all ranks, K experts of a token.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe_triton import EPBuffer
from moe_triton.balance import Placement

NUM_RANKS, REQUESTS_OF_RANK = 4, 3
NUM_TOKENS = 8  # that each request gets
NUM_STEPS = 3 * NUM_TOKENS  # enough for requests that begin anew in the last step of others
VOCABULARY, HIDDEN, INNER, NUM_LAYERS, NUM_EXPERTS, NUM_REPLICAS, TOPK = 512, 256, 128, 2, 8, 16, 4
SEED, TIMEOUT_S = 7, 30.0


@dataclass
class Request:
    """What a rank has to know of a request to go on with it.

    Attributes:
        prompt: its first token.
        tokens: that it has got so far.
        outputs: (H,) bf16 of the last layer, by which each of these was chosen. Kept to be compared.
    """

    prompt: int
    tokens: list[int] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def go_on(self, token: int, output: Tensor) -> None:
        """Takes a token more."""
        self.tokens.append(token)
        self.outputs.append(output)


class Model:
    """Weights, the same on every rank. A rank of a server would load those of its experts only.

    Attributes:
        embedding: (vocabulary, H) fp32.
        head: (vocabulary, H) fp32.
        gates: (layers, E, H) fp32.
        up: (layers, E, F, H) bf16.
        down: (layers, E, H, F) bf16.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        experts = NUM_LAYERS, NUM_EXPERTS
        shapes = (
            (VOCABULARY, HIDDEN),
            (*experts, HIDDEN),
            (*experts, INNER, HIDDEN),
            (*experts, HIDDEN, INNER),
        )
        made = [torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes]
        self.head, self.gates, self.up, self.down = *made[:2], made[2].bfloat16(), made[3].bfloat16()
        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)

    def begin(self, requests: list[Request]) -> Tensor:
        """(T, H) of T requests. A mean over what they have so far stands in for attention."""
        x = torch.empty(len(requests), HIDDEN)
        for row, request in zip(x, requests, strict=True):
            row.copy_(self.embedding[[request.prompt, *request.tokens]].mean(0))
        return x.bfloat16()

    def gate(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, K) fp32 weights and (T, K) ids of (T, H) tokens."""
        scores = (x.float()[:, None] * self.gates[layer]).sum(dim=2)
        weights, ids = scores.softmax(dim=1).topk(TOPK, dim=1)
        return weights, ids

    def expert(self, layer: int, expert: int, row: Tensor) -> Tensor:
        """An expert's output for one (H,) row: bits of a product may depend on how many rows it has."""
        inner = functional.silu(functional.linear(row[None], self.up[layer, expert]))
        return functional.linear(inner, self.down[layer, expert])[0]

    def next_tokens(self, x: Tensor) -> list[int]:
        """The token that follows, of each of (T, H)."""
        return [int((self.head @ row).argmax()) for row in x.float()]


class Server:
    """One rank: its requests, and its part of the layers.

    Args:
        buffer: on_lost="mask".
        victim: a rank that is killed.
        step: in which that is.
    """

    def __init__(self, buffer: EPBuffer, victim: int, step: int) -> None:
        self.model, self.buffer, self.rank = Model(), buffer, buffer.rank
        self.victim, self.last_step = victim, step
        # Each expert twice: the first half of the ranks has experts 0, 1, ..., and so has the second.
        self.placement = Placement.initial(NUM_LAYERS, NUM_EXPERTS, NUM_REPLICAS, buffer.num_ranks)
        self.held = self.placement.phy2log.view(NUM_LAYERS, buffer.num_ranks, -1)[:, self.rank].tolist()
        self.tables = [self.placement.table(layer) for layer in range(NUM_LAYERS)]
        self.requests, self.lost_entries, self.repeated = requests_of(self.rank), 0, 0
        self.masked: list[int] = []

    def layer(self, layer: int, x: Tensor, dies: bool) -> tuple[Tensor, Tensor]:
        """(T, H) of (T, H), and (T, K) which entries are missing there. Collective."""
        weights, ids = self.model.gate(layer, x)
        received = self.buffer.dispatch(x, ids, eplb_table=self.tables[layer])
        if dies:  # it has the rows of others, and they wait for its results
            os.kill(os.getpid(), signal.SIGKILL)
        y, first = self.buffer.expert_output(), 0
        for expert, count in zip(self.held[layer], received.tokens_per_expert.tolist(), strict=True):
            for row in range(first, first + count):
                y[row] = self.model.expert(layer, expert, received.tokens[row])
            first += count
        out = self.buffer.combine(y, received.handle, weights)
        return x + out, received.handle.lost

    def step(self, number: int) -> None:
        """A token more for each request, or none if results are missing. Collective."""
        dies = self.rank == self.victim and number == self.last_step
        open_requests = [each for each in self.requests if len(each.tokens) < NUM_TOKENS]
        x, missing = self.model.begin(open_requests), 0
        for layer in range(NUM_LAYERS):
            x, lost = self.layer(layer, x, dies and layer == NUM_LAYERS - 1)
            missing += int(lost.sum())
        if missing:  # nothing has been written to any request: it is as if this step had not been
            self.lost_entries, self.repeated = self.lost_entries + missing, self.repeated + 1
        else:
            for request, token, output in zip(open_requests, self.model.next_tokens(x), x, strict=True):
                request.go_on(token, output)
        has_fault, mask = self.buffer.query_fault()
        if has_fault:
            self.go_on_without(mask)

    def go_on_without(self, mask: Tensor) -> None:
        """Leaves replicas on (EP,) masked ranks out, and takes over a share of these ranks' requests."""
        for layer, table in enumerate(self.tables):
            table.copy_(self.placement.table(layer, mask=mask))
        left = (mask == 0).nonzero().flatten().tolist()
        for rank in mask.nonzero().flatten().tolist():
            if rank not in self.masked:
                self.masked.append(rank)
                # Their tokens have gone with that rank, unless it had told somebody. So they begin anew.
                self.requests += requests_of(rank)[left.index(self.rank) :: len(left)]


def requests_of(rank: int) -> list[Request]:
    """Those that a rank begins with: a front end, which does not die with a rank, knows them."""
    return [Request(prompt) for prompt in range(rank * REQUESTS_OF_RANK, (rank + 1) * REQUESTS_OF_RANK)]


def alone(model: Model, prompt: int) -> Request:
    """A request on one rank that has all experts."""
    request = Request(prompt)
    while len(request.tokens) < NUM_TOKENS:
        x = model.begin([request])
        for layer in range(NUM_LAYERS):
            weights, ids = model.gate(layer, x)
            total = torch.zeros(HIDDEN)  # as combine adds: in fp32, k ascending, rounded once
            for weight, expert in zip(weights[0], ids[0].tolist(), strict=True):
                total += model.expert(layer, expert, x[0]).float() * weight
            x = x + total.bfloat16()
        request.go_on(*model.next_tokens(x), x[0])
    return request


def is_same(request: Request, other: Request) -> bool:
    """Whether both have ended with the same tokens, chosen by the same bits."""
    same = map(torch.equal, request.outputs, other.outputs)
    return request.tokens == other.tokens and all(same)


@torch.no_grad()
def serve(victim: int, step: int) -> int:
    """Decodes on this rank: 0 if all of its requests are what they are on one rank, else 1."""
    torch.set_num_threads(1)
    with EPBuffer(
        num_max_tokens_per_rank=NUM_RANKS * REQUESTS_OF_RANK,
        hidden=HIDDEN,
        num_topk=TOPK,
        num_experts=NUM_REPLICAS,
        timeout_s=TIMEOUT_S,
        on_lost="mask",
    ) as buffer:
        server = Server(buffer, victim, step)
        for number in range(NUM_STEPS):  # all ranks take as many, also those whose requests have ended
            server.step(number)
    same = [is_same(each, alone(server.model, each.prompt)) for each in server.requests]
    print(
        f"rank {server.rank}: {sum(same)} of {len(same)} requests as on one rank; without {server.masked}, "
        f"{server.repeated} step(s) taken again, in which {server.lost_entries} entries were missing\n",
        end="",
    )
    return 0 if all(same) and server.repeated <= 1 else 1


def run_rank(rank: int, port: int, victim: int, step: int) -> None:
    """The process of a rank. The store is elsewhere, so that any rank may die."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    code = serve(victim, step)
    dist.destroy_process_group()
    sys.exit(code)


def main() -> int:
    """Starts the ranks: 0 if the victim was killed, and all others say that their requests are right."""
    parser = argparse.ArgumentParser(description="Decodes on four ranks, of which one is killed.")
    parser.add_argument("--victim", type=int, default=2, choices=range(NUM_RANKS), help="which (default: 2)")
    parser.add_argument("--step", type=int, default=4, choices=range(NUM_TOKENS), help="when (default: 4)")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    of_run = store.port, options.victim, options.step
    ranks = [context.Process(target=run_rank, args=(rank, *of_run)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    codes = [process.exitcode for process in ranks]
    expected = [-signal.SIGKILL if rank == options.victim else 0 for rank in range(NUM_RANKS)]
    print(f"rank {options.victim} was killed in step {options.step}: ", end="")
    print("the others went on" if codes == expected else f"WRONG, the ranks ended with {codes}")
    return 0 if codes == expected else 1


if __name__ == "__main__":
    sys.exit(main())
