"""What tests ask of a machine."""

from __future__ import annotations

from autotune.model.constants import Machine


def measured_constants(machine: Machine) -> set[str]:
    """Names of the constants that were measured."""
    return {name for name, entry in machine.constants.items() if entry.kind == "measured"}
