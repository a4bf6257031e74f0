"""Constants that nobody has measured with this library yet, each with the source that it was taken from."""

from __future__ import annotations

from moe_triton.core.errors import ArgumentError
from moe_triton.core.soc import SOCS, UB_BYTES
from moe_triton.costs.constants import FIELDS, MachineConstants

MACHINES = ("A2", "A3", "cpu")

REPLAY = "constants of the replay of compiled kernels; no published source"
ESTIMATE = "estimate; no published source"

# Alike on A2 and A3: (value, source).
_BOTH: dict[str, tuple[float, str]] = {
    "clock_ghz": (1.85, "published: vector cores of Ascend 910B and 910C"),
    "ub_bytes": (float(UB_BYTES), "published: 192 KB of a vector core"),
    "vector_latency_cycles": (18.0, REPLAY),
    "vector_bytes_per_cycle": (256.0, REPLAY),
    "vector_divide_factor": (4.0, REPLAY),
    "vector_reduce_factor": (2.0, REPLAY),
    "load_latency_cycles": (450.0, REPLAY),
    "store_latency_cycles": (250.0, REPLAY),
    "stream_bytes_per_cycle_alone": (128.0, REPLAY),
    "scalar_global_cycles": (350.0, REPLAY),
    "scalar_local_cycles": (12.0, REPLAY),
    "flag_cycles": (6.0, REPLAY),
    "launch_overhead_us": (8.0, ESTIMATE),
    "call_overhead_us": (30.0, "estimate: a device-to-host synchronisation"),
    "sync_all_us": (5.0, "estimate from 'about 15% of dispatch'"),
}
_A2: dict[str, tuple[float, str]] = {
    "cores": (float(SOCS["Ascend910B3"].vector_cores), "published: Ascend 910B3"),
    "stream_bytes_per_cycle": (21.6, "1.6 TB/s of HBM over 40 cores at 1.85 GHz"),
    "remote_write_gb_per_s": (28.0, "published: one HCCS link each way"),
    "remote_write_latency_us": (1.0, ESTIMATE),
    "flag_latency_us": (1.0, ESTIMATE),
    "memcpy_gb_per_s": (850.0, "published: 1.6 to 1.8 TB/s of HBM, read and written"),
}
_A3: dict[str, tuple[float, str]] = {
    "cores": (float(SOCS["Ascend910_9391"].vector_cores), "published: one die of Ascend 910C"),
    "stream_bytes_per_cycle": (18.0, "1.6 TB/s of HBM a die over 48 cores at 1.85 GHz"),
    "remote_write_gb_per_s": (196.0, "published, secondary: UB of one die"),
    "remote_write_latency_us": (0.7, "published, secondary: two dies of one node"),
    "flag_latency_us": (0.7, "published, secondary: two dies of one node"),
    "memcpy_gb_per_s": (800.0, "published: 1.6 TB/s of HBM a die, read and written"),
}


def assumed_constants(machine: str) -> MachineConstants:
    """What is taken to hold until it is measured.

    Args:
        machine: "A2", "A3", or "cpu", which has A3's numbers: what a CPU has of them, a selftest measures.

    Raises:
        ArgumentError: there are none for this machine.
    """
    if machine not in MACHINES:
        raise ArgumentError(
            "machine", repr(machine), f"it must be one of {list(MACHINES)}", "Name one of them."
        )
    known = {**_BOTH, **(_A2 if machine == "A2" else _A3)}
    note = "A3's, not of a CPU; " if machine == "cpu" else ""
    return MachineConstants(
        machine=machine,
        provenance={name: f"assumed: {note}{known[name][1]}" for name in FIELDS},
        **{name: known[name][0] for name in FIELDS},
    )
