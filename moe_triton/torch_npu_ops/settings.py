"""Settings that torch_npu's functions have no argument for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from moe_triton.backends import BACKENDS, make_backend, make_host
from moe_triton.backends.base import Backend, Host
from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.checks import check_choice, check_flag, check_integer, check_seconds
from moe_triton.core.config import Generation, Product, usual_ranks_per_server
from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import RanksPerServer
from moe_triton.core.network import Network, checked_network
from moe_triton.core.topology import Topology, check_ranks_per_server
from moe_triton.core.tuning import Tuning, checked_tuning
from moe_triton.limits import GENERATIONS
from moe_triton.runtime.on_lost import ON_LOST, OnLost
from moe_triton.runtime.traces import TraceFile, TracePath
from moe_triton.tables.kept import Kept, keeping

RANKS_OF_SIZING = usual_ranks_per_server("A2")


@dataclass(frozen=True)
class Settings:
    """What holds for every call of this process. See `configure`."""

    product: Product = "A3"
    relaxed: bool = False
    backend: str = "cpu"
    kernels: str = "triton"
    timeout_s: float = 60.0
    num_blocks: int | None = None
    tuning: Tuning = field(default_factory=Tuning)
    trace: str | None = None
    generation: Generation | None = None
    ranks_per_server: RanksPerServer = None
    on_lost: OnLost = "raise"
    network: Network = field(default_factory=Network)

    def make_backend(self) -> Backend:
        """The back end that these settings name."""
        return make_backend(self.backend, self.kernels, self.tuning)

    def sizing_servers(
        self, num_ranks: int, comm_alg: str | None = "", of_hosts: RanksPerServer = None
    ) -> int:
        """By which the original sizes what a hierarchy keeps for combine: the servers of a group, had they 8
        ranks each, as A2's have. A3's machines have 16, and count twice. Hosts with fewer ranks are more.

        Args:
            num_ranks: of the group.
            comm_alg: how tokens travel.
            of_hosts: as for `topology`.
        """
        usual = usual_ranks_per_server(self.product, comm_alg or "")
        if not usual:
            return num_ranks // RANKS_OF_SIZING
        servers = max(self.topology(num_ranks, comm_alg, sizes).num_servers for sizes in (None, of_hosts))
        return servers * (usual // RANKS_OF_SIZING)

    def topology(
        self, num_ranks: int, comm_alg: str | None = "", of_hosts: RanksPerServer = None
    ) -> Topology:
        """The servers of a group; the usual ones where `ranks_per_server` does not fit its size.

        Args:
            num_ranks: of the group.
            comm_alg: how tokens travel.
            of_hosts: how many ranks its hosts have, which are the servers unless others are named; or None.
        """
        usual = usual_ranks_per_server(self.product, comm_alg or "")
        given = of_hosts if self.ranks_per_server is None else self.ranks_per_server
        return Topology.or_usual(num_ranks, given, usual)


_current = Settings()
_host: Host | None = None
# Tables of settings that a call has needed, since `configure`: no later call reads a file again.
_tables: Kept = {}
# Every settings that were in force, by the number that stands for them in the keys of plans.
_numbers: dict[Settings, int] = {_current: 0}
_number = 0


def current() -> Settings:
    """The settings in force."""
    return _current


def host() -> Host:
    """Where the tensors of calls have to be, and what of them may be read.

    Raises:
        ToolchainError: something that the back end needs is missing.
    """
    global _host
    if _host is None:
        _host = make_host(_current.backend)
    return _host


def keeping_tables() -> AbstractContextManager[None]:
    """Reads tables of settings as they were when a call needed them first."""
    return keeping(_tables)


def number() -> int:
    """What stands for the settings in force where hashing them would take long."""
    return _number


def configure(
    *,
    product: Product = "A3",
    relaxed: bool = False,
    backend: str = "cpu",
    kernels: str = "triton",
    timeout_s: float = 60.0,
    num_blocks: int | None = None,
    tuning: Tuning | None = None,
    trace: TracePath | None = None,
    generation: Generation | None = None,
    ranks_per_server: RanksPerServer = None,
    on_lost: OnLost = "raise",
    network: Network | None = None,
) -> None:
    """Sets what torch_npu's functions have no argument for. Call it before the first of them, on every rank.

    Args:
        product: whose limits and schemes: "A3" or "A2".
        relaxed: allow sizes below the product's minimum, for tests and demos.
        backend: "cpu"; or "npu" for the device that is current in this process: tensors are there, calls
            return before they have run, and a later one raises what went wrong (docs/from-torch-npu.md).
        kernels: "triton", or with "cpu" "torch" for machines without the Triton toolchain (slow).
        timeout_s: seconds that one wait may take before it raises.
        num_blocks: blocks per kernel, None for what suits the machine.
        tuning: how operators are cut into parts, how rows are copied and flags waited for; None for what
            suits the machine. Any setting gives the same bits.
        trace: file that all ranks write to what ran when, for Perfetto (docs/traces.md), on several hosts one
            for each, as trace.host0.json; None for none. It is written when a group's windows are given back,
            and when the process ends.
        generation: of the published limits that shall apply: "v3" or "v4"; None for what either of them
            accepts (docs/limits.md).
        ranks_per_server: how many ranks of a group each server has, one number for all, of which the last may
            have fewer, or one for each in the order of the ranks; None for what the product's have: 8 on A2,
            on A3 all ranks, or 16 with hierarchy. Where ranks are on several hosts, None for these; they are
            found at a group's first call, and what is asked before (a ``plan``, the shapes in a traced graph)
            needs it. The same on every rank.
        on_lost: what becomes of a rank that does not come within ``timeout_s``: "raise" a
            `CommunicationTimeoutError` on those that wait for it; or "mask" it inside the call, in all of the
            group's windows, and go on without it (docs/lost-ranks.md). The same on every rank.
        network: by which ranks on several hosts reach each other (docs/hosts.md); None for what is found.

    Raises:
        ArgumentError: a value that no setting has. What a call cannot have, such as on_lost="mask" with
            tensor parallelism, is refused by that call.

    Examples:
        >>> torch_npu.configure(relaxed=True, timeout_s=10)
    """
    global _current, _number, _host
    if num_blocks is not None:
        num_blocks = check_integer("num_blocks", num_blocks)
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise ArgumentError("num_blocks", num_blocks, f"it must be 1 to {MAX_BLOCKS}", "Pass None.")
    _current = Settings(
        check_choice("product", product, ("A2", "A3")),
        check_flag("relaxed", relaxed),
        check_choice("backend", backend, BACKENDS),
        check_choice("kernels", kernels, ("triton", "torch")),
        check_seconds("timeout_s", timeout_s),
        num_blocks,
        checked_tuning(tuning),
        None if trace is None else str(TraceFile(trace).path),
        check_choice("generation", generation, GENERATIONS),
        check_ranks_per_server(ranks_per_server),
        check_choice("on_lost", on_lost, ON_LOST),
        checked_network(network),
    )
    _number = _numbers.setdefault(_current, len(_numbers))
    _tables.clear()
    _host = None
