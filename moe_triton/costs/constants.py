"""`MachineConstants`: times and rates of one machine, each with its source, and their form as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT, ArgumentError

FORMAT, VERSION = "moe_triton.machine_constants", 1
REMEDY = "Write it with moe-triton selftest, or MachineConstants.to_json()."


@dataclass(frozen=True)
class MachineConstants:
    """What the cost models take a machine to be. Every number is above 0, or 0 where that means "none".

    Cycles are of the vector cores' clock. A core is one vector core (AIV) of an NPU, or one core of a CPU.

    Attributes:
        machine: what it is of: a product, or what a selftest ran on.
        provenance: by field, "measured on <SoC> <date>" or "assumed: <source>".
        clock_ghz: cycles per nanosecond.
        cores: vector cores of one device.
        ub_bytes: local memory of one core (unified buffer).
        vector_latency_cycles: of one vector instruction, before its first byte.
        vector_bytes_per_cycle: that one vector instruction processes then.
        vector_divide_factor: how many times as long a division takes.
        vector_reduce_factor: how many times as long a reduction takes.
        load_latency_cycles: of a copy from global memory to local memory (MTE2).
        store_latency_cycles: of a copy from local memory to global memory (MTE3).
        stream_bytes_per_cycle: bytes per cycle and core between global memory and cores, all cores at once.
        stream_bytes_per_cycle_alone: the same of one core while the others are idle.
        scalar_global_cycles: of one scalar access to global memory.
        scalar_local_cycles: of one scalar access to local memory.
        flag_cycles: from a pipe's set_flag to another pipe's wait_flag.
        launch_overhead_us: microseconds that a launch adds to a plan.
        call_overhead_us: microseconds of a plan of one empty launch, from the host's call to its end.
        sync_all_us: microseconds of a barrier of all cores inside a kernel.
        remote_write_gb_per_s: 1e9 bytes per second from one device to one peer's window, all cores.
        remote_write_latency_us: microseconds of a write to a peer that has no bytes.
        flag_latency_us: microseconds from setting a peer's flag to the peer's seeing it.
        memcpy_gb_per_s: 1e9 bytes copied per second on one device, each read once and written once.
    """

    machine: str
    provenance: Mapping[str, str]
    clock_ghz: float
    cores: float
    ub_bytes: float
    vector_latency_cycles: float
    vector_bytes_per_cycle: float
    vector_divide_factor: float
    vector_reduce_factor: float
    load_latency_cycles: float
    store_latency_cycles: float
    stream_bytes_per_cycle: float
    stream_bytes_per_cycle_alone: float
    scalar_global_cycles: float
    scalar_local_cycles: float
    flag_cycles: float
    launch_overhead_us: float
    call_overhead_us: float
    sync_all_us: float
    remote_write_gb_per_s: float
    remote_write_latency_us: float
    flag_latency_us: float
    memcpy_gb_per_s: float

    def __post_init__(self) -> None:
        for name in FIELDS:
            _check_number(name, getattr(self, name))
            if not self.provenance.get(name):
                raise _bad(f"provenance of {name}", "missing", "every constant says where it comes from")
        unknown = sorted(self.provenance.keys() - set(FIELDS))
        if unknown:
            raise _bad("provenance", unknown, f"there are these constants only: {', '.join(FIELDS)}")

    def merge(self, measured: Mapping[str, float], where: str) -> MachineConstants:
        """These constants with measured ones in place of assumed ones.

        Args:
            measured: numbers by field.
            where: SoC and date, for the provenance.

        Raises:
            ArgumentError: there is no such constant, or a number is none.
        """
        unknown = sorted(measured.keys() - set(FIELDS))
        if unknown:
            raise _bad("measured", unknown, f"there are these constants only: {', '.join(FIELDS)}")
        values = {name: getattr(self, name) for name in FIELDS} | dict(measured)
        sources = {**self.provenance, **dict.fromkeys(measured, f"measured on {where}")}
        return MachineConstants(machine=self.machine, provenance=sources, **values)

    def to_json(self) -> str:
        """The constants as a JSON document that `from_json` reads."""
        constants = {
            name: {"value": getattr(self, name), "provenance": self.provenance[name]} for name in FIELDS
        }
        document = {"format": FORMAT, "version": VERSION, "machine": self.machine, "constants": constants}
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MachineConstants:
        """Reads what `to_json` wrote.

        Raises:
            ArgumentError: not such a document, another version of it, or a constant that is unknown,
                missing or no finite number of at least 0.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise _bad("constants", f"no JSON ({error})", "they are a JSON document") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise _bad("constants", "another document", f'its "format" must be "{FORMAT}"')
        if document.get("version") != VERSION:
            raise _bad("version", document.get("version"), f"this moe_triton reads version {VERSION}")
        machine, constants = document.get("machine"), document.get("constants")
        if not isinstance(machine, str) or not isinstance(constants, dict):
            raise _bad("constants", "incomplete", 'it must have "machine" and "constants"')
        if unknown := sorted(constants.keys() - set(FIELDS)):
            raise _bad("constants", unknown, f"there are these constants only: {', '.join(FIELDS)}")
        if missing := [name for name in FIELDS if name not in constants]:
            raise _bad("constants", f"without {', '.join(missing)}", "none may be missing", NULL_ARGUMENT)
        values, provenance = {}, {}
        for name, entry in constants.items():
            if not isinstance(entry, dict) or entry.keys() != {"value", "provenance"}:
                raise _bad(name, entry, 'it must have "value" and "provenance", and nothing else')
            if not isinstance(entry["provenance"], str):
                raise _bad(f"provenance of {name}", entry["provenance"], "it must be text")
            values[name], provenance[name] = entry["value"], entry["provenance"]
        return cls(machine=machine, provenance=provenance, **values)


FIELDS: tuple[str, ...] = tuple(
    field.name for field in fields(MachineConstants) if field.name not in ("machine", "provenance")
)
"""Names of the numbers."""

_NEVER_ZERO = ("clock_ghz", "cores", "ub_bytes", "vector_divide_factor", "vector_reduce_factor")


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise _bad(name, value, "it must be a finite number of at least 0")
    if value == 0 and (name in _NEVER_ZERO or "_per_" in name):
        raise _bad(name, value, "it must be above 0: others are divided by it")


def _bad(argument: str, value: object, rule: str, code: int = INVALID_ARGUMENT) -> ArgumentError:
    return ArgumentError(argument, value, rule, REMEDY, code=code)
