"""A report's document, of this version or of the one before, and the constants of the machine that it is of.

What a selftest has not measured is what is assumed for the machine's product.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.model.constants import Machine, machine_named
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.plain_files import read_text
from moe_triton.tools.selftest import report
from moe_triton.tools.selftest.checks.constants import ALL_BLOCKS, HOP, ONE_BLOCK, STAGE
from moe_triton.tools.selftest.timing import HIGH, LOW

REMEDY = "Pass the folder that moe-triton selftest --backend npu wrote, or its report.json."
WITH_CONSTANTS = 2
"""The version whose reports hold a whole machine, with what was assumed where nothing was measured."""
VERSIONS = WITH_CONSTANTS, report.VERSION
# Parts of torch_npu's device names, and the products whose constants apply.
PRODUCTS = {"910_93": "A3", "910C": "A3", "910B": "A2"}


ENDS = ("", LOW, HIGH)
RATES = {ALL_BLOCKS: "stream_bytes_per_cycle", ONE_BLOCK: "stream_bytes_per_cycle_alone"}


def read_document(path: Path) -> Mapping[str, Any]:
    """Reads a selftest's report.

    Args:
        path: of its folder, or of its JSON.

    Raises:
        ArgumentError: there is none, it cannot be read, or it is of another version.
    """
    file = path / report.JSON_NAME if path.is_dir() else path
    try:
        document = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise bad(str(path), f"it must be a report that can be read ({error})") from None
    if not is_report(document):
        raise bad(str(path), f'its "format" must be "{report.FORMAT}"')
    return of_known_version(document)


def of_known_version(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A report, if it can be read.

    Raises:
        ArgumentError: it is of another version.
    """
    if document.get("version") not in VERSIONS:
        version, known = document.get("version"), " and ".join(map(str, VERSIONS))
        raise bad(f"of version {version}", f"this moe_triton reads versions {known}")
    return document


def is_report(document: object) -> bool:
    """Whether a JSON document is a selftest's report, of any version."""
    return isinstance(document, dict) and document.get("format") == report.FORMAT


def bad(value: object, rule: str) -> ArgumentError:
    """The error about a report."""
    return ArgumentError("report", value, rule, REMEDY, code=INVALID_ARGUMENT)


def read_machine(path: Path) -> Machine:
    """The machine in a file.

    Args:
        path: of a file of `Machine.to_json`, of a selftest's report, or of the report's folder.

    Raises:
        ArgumentError: it holds neither.
        OSError: it cannot be read.
    """
    text = read_text(path / report.JSON_NAME if path.is_dir() else path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    return machine_of_report(of_known_version(document)) if is_report(document) else Machine.from_json(text)


def machine_of_report(document: Mapping[str, Any]) -> Machine:
    """The machine that a report is of.

    Args:
        document: of a known version.

    Raises:
        ArgumentError: it is not complete.
    """
    try:
        if document["version"] == WITH_CONSTANTS:
            return Machine.from_json(json.dumps(document["constants"]))
        passed = [c for c in document["checks"] if (c["stage"], c["status"]) == (STAGE, "passed")]
        figures = {name: figure for check in passed for name, figure in check["figures"].items()}
        machine, date = document["machine"], document["date"].partition("T")[0]
        return constants_of(figures, document["settings"]["backend"], machine["SoC"], date)
    except ArgumentError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise bad("not whole", f"it must be complete ({type(error).__name__}: {error})") from None


def product_of(backend: str, soc: str) -> str:
    """The machine whose assumed constants fill the gaps; A3 for an unknown device."""
    if backend == "cpu":
        return "cpu"
    return next((product for part, product in PRODUCTS.items() if part.lower() in soc.lower()), "A3")


def constants_of(measured: Mapping[str, float], backend: str, soc: str, date: str) -> Machine:
    """The constants of a machine.

    Args:
        measured: figures of the selftest's stage "constants", by name.
        backend: that it ran on.
        soc: name of its devices.
        date: of the run.

    Raises:
        ArgumentError: a figure cannot be a constant.
    """
    assumed = machine_named(product_of(backend, soc))
    figures = dict(measured)
    # Rank 1 is rank 0's nearest neighbour: the other die of a card, or where there is none, another card.
    nearest = next(name for name in ("hop_sibling_us", "hop_node_us") if name in assumed.constants)
    figures |= {nearest + end: figures[HOP + end] for end in ENDS if HOP + end in figures}
    clock = figures.get("clock_ghz", assumed.clock_ghz)
    for rate, name in RATES.items():
        per_cycle = 1 / clock / (figures.get("blocks", 1) if rate == ALL_BLOCKS else 1)
        figures |= {name + end: figures[rate + end] * per_cycle for end in ENDS if rate + end in figures}
    values = {name: value for name, value in figures.items() if name in assumed.constants}
    ranges = {name: (figures[name + LOW], figures[name + HIGH]) for name in values if name + LOW in figures}
    return assumed.measured(values, f"{soc} {date}", ranges)
