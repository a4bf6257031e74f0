"""`Constant`: one number that the model believes of a machine, and `Machine`: all of them.

The numbers are in ``constants.toml``. What a selftest has measured takes the place of what was assumed
(`autotune.selftest_reports.constants`).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from importlib import resources
from typing import Any, Literal, cast, get_args

from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.config import Product
from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT, ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT, VERSION = "moe_triton.machine_constants", 2
REMEDY = "Name a report of moe-triton selftest, or a file of Machine.to_json()."
MACHINES = ("A2", "A3", "cpu")
NETWORK = "rdma_gb_per_s", "rdma_message_us", "rdma_latency_us", "post_aiv_us"
"""Constants of a network between servers, where cores post: a document of a machine without one has none."""
POST_AICPU = "post_aicpu_us"
"""The one of a machine whose AICPU posts as well."""
_DIGITS = 12  # of a digest

Kind = Literal["published", "fitted", "assumed", "measured"]


@dataclass(frozen=True)
class Constant:
    """One number, and why it is believed.

    Attributes:
        value: in the unit that the constant's name ends with.
        kind: whether somebody has published it, it was fitted to published times, nobody knows, or a selftest
            measured it.
        source: where it comes from.
        low, high: between which the true value lies.
    """

    value: float
    kind: Kind
    source: str
    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            _check_number(name, getattr(self, name))
        if self.kind not in get_args(Kind):
            raise _bad("kind", self.kind, f"it must be one of {', '.join(get_args(Kind))}")
        if not isinstance(self.source, str) or not self.source or not self.source.isprintable():
            raise _bad("source", self.source, "every constant says where it comes from")
        if not self.low <= self.value <= self.high:
            raise _bad("value", self.value, f"it must lie between low, {self.low}, and high, {self.high}")


class Machine:
    """What the model takes a machine to be: ``machine.clock_ghz`` is a number.

    Cycles are of the vector cores' clock. A core is one vector core (AIV) of an NPU, or one core of a CPU.

    Args:
        name: what it is of: one of `MACHINES`.
        constants: by name, as ``constants.toml`` has them.

    Raises:
        ArgumentError: a constant is unknown, or is 0 where others are divided by it.
    """

    def __init__(self, name: str, constants: Mapping[str, Constant]) -> None:
        known = _tables()
        if unknown := sorted(constants.keys() - known.keys()):
            remedy = f"Take {', '.join(unknown)} out."
            rule = f"there are these only: {', '.join(known)}"
            raise ArgumentError("constants", unknown, rule, remedy, code=INVALID_ARGUMENT)
        for constant, entry in constants.items():
            if entry.value == 0 and extremes_of(constant, name)[0] > 0:
                raise _bad(constant, entry.value, "it must be above 0: others are divided by it")
        self.name = name
        self.constants = dict(constants)

    def __getattr__(self, name: str) -> float:
        """A constant's value.

        Raises:
            AttributeError: the machine has no such constant.
        """
        constants: dict[str, Constant] = self.__dict__.get("constants", {})
        if name not in constants:
            raise AttributeError(f"{self.__dict__.get('name')} has no constant {name!r}")
        return constants[name].value

    @property
    def product(self) -> Product:
        """Whose limits and distances it has."""
        return "A2" if self.name == "A2" else "A3"

    def replaced(self, values: Mapping[str, float]) -> Machine:
        """This machine with other values, as a fit or a sensitivity tries them: ranges give way.

        Examples:
            >>> machine_named("A3").replaced({"clock_ghz": 2.0}).clock_ghz
            2.0
        """
        self._check_known(values)
        changed = dict(self.constants)
        for name, value in values.items():
            entry = changed[name]
            changed[name] = replace(
                entry, value=value, low=min(entry.low, value), high=max(entry.high, value)
            )
        return Machine(self.name, changed)

    def measured(
        self, values: Mapping[str, float], where: str, ranges: Mapping[str, tuple[float, float]] | None = None
    ) -> Machine:
        """This machine with measured values in the place of assumed ones.

        Args:
            values: numbers by constant.
            where: SoC and date, for the source.
            ranges: low and high by constant, of samples; the value itself where there is none.

        Raises:
            ArgumentError: there is no such constant, a number is none, or a value is outside its range.

        Examples:
            >>> machine_named("A3").measured({"clock_ghz": 1.8}, "910C, today").constants["clock_ghz"].kind
            'measured'
        """
        self._check_known(values)
        for name, value in values.items():
            _check_number(name, value)
        known = ranges or {}
        changed = {
            name: Constant(value, "measured", f"on {where}", *known.get(name, (value, value)))
            for name, value in values.items()
        }
        return Machine(self.name, {**self.constants, **changed})._checked()

    def to_json(self) -> str:
        """A document that `from_json` reads.

        Examples:
            >>> Machine.from_json(machine_named("A3").to_json()) == machine_named("A3")
            True
        """
        constants = {name: asdict(entry) for name, entry in self.constants.items()}
        document = {"format": FORMAT, "version": VERSION, "machine": self.name, "constants": constants}
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Reads what `to_json` wrote.

        Raises:
            ArgumentError: not such a document, another version of it, an unknown machine, or a constant that
                is unknown, missing, no finite number of at least 0, or one that no machine has. Those of a
                network may be missing together, but on A2.

        Examples:
            >>> Machine.from_json(machine_named("A3").to_json()).name
            'A3'
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _bad("constants", f"no JSON ({error})", "they are a JSON document") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise _bad("constants", "another document", f'its "format" must be "{FORMAT}"')
        if document.get("version") != VERSION:
            raise _bad("version", document.get("version"), f"this moe_triton reads version {VERSION}")
        name, constants = document.get("machine"), document.get("constants")
        if not isinstance(name, str) or not isinstance(constants, dict) or not constants:
            raise _bad("constants", "incomplete", 'it must have "machine" and "constants"', NULL_ARGUMENT)
        if name not in MACHINES:
            raise _bad("machine", repr(name), f"it must be one of {list(MACHINES)}")
        needed = machine_named(name).constants.keys() - constants.keys()
        if name != "A2" and not constants.keys() & set(NETWORK):
            needed -= set(NETWORK)
        if missing := sorted(needed):
            raise _bad("constants", f"without {', '.join(missing)}", "none may be missing", NULL_ARGUMENT)
        entries = {constant: _constant_of(constant, entry) for constant, entry in constants.items()}
        return cls(name, entries)._checked()

    def _checked(self) -> Machine:
        """This machine.

        Raises:
            ArgumentError: a constant is beyond `extremes_of` it.
        """
        for constant, entry in self.constants.items():
            least, most = extremes_of(constant, self.name)
            for which in ("value", "low", "high"):
                number = getattr(entry, which)
                if not least <= number <= most:
                    raise _bad(f"{which} of {constant}", number, f"it must be {least:g} to {most:g}")
        return self

    def _check_known(self, values: Mapping[str, float]) -> None:
        if unknown := sorted(values.keys() - self.constants.keys()):
            raise _bad("constants", unknown, f"{self.name} has these only: {', '.join(self.constants)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Machine) and (self.name, self.constants) == (other.name, other.constants)

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self.constants.items())))


_COUNTS = "cores", "queue_entries", "remote_writes_in_flight"
_DIVISORS = "clock_ghz", "vector_reduce_factor", "post_aicpu_us"
_LEAST_DIVISOR, _MOST, _MOST_COUNTED = 1e-3, 1e6, 4096


def extremes_of(constant: str, machine: str) -> tuple[float, float]:
    """What any machine's constant lies between, far beyond what one has: times of it are 64-bit integers.

    Args:
        constant: its name.
        machine: what it is of: one of `MACHINES`.
    """
    if constant in _COUNTS:
        is_npu = machine != "cpu"
        return 1, MAX_BLOCKS if is_npu and constant == "cores" else _MOST_COUNTED
    return (_LEAST_DIVISOR if constant in _DIVISORS or "_per_" in constant else 0), _MOST


def source_of(*machines: Machine) -> str:
    """What modelled figures come from: the model, with a digest of the constants of some machines."""
    text = "".join(machine.to_json() for machine in machines)
    return f"autotune.model, constants {sha256(text.encode()).hexdigest()[:_DIGITS]}"


@functools.cache
def machine_named(name: str) -> Machine:
    """What is taken to hold of a machine until it is measured.

    Args:
        name: "A2", "A3", or "cpu", which has A3's numbers: what a CPU has of them, a selftest measures.

    Raises:
        ArgumentError: there are none for this machine.

    Examples:
        >>> machine_named("A3").cores
        48.0
    """
    if name not in MACHINES:
        raise ArgumentError("machine", repr(name), f"it must be one of {list(MACHINES)}", "Name one of them.")
    return Machine(name, {constant: _entry(table, name) for constant, table in _of(name).items()})


def _constant_of(name: str, entry: Any) -> Constant:
    """A constant of a document, or an error that names it."""
    wanted = sorted(field.name for field in fields(Constant))
    if not isinstance(entry, dict) or sorted(entry) != wanted:
        raise _bad(name, entry, f"it must have {', '.join(wanted)}, and nothing else")
    try:
        return Constant(**entry)
    except ArgumentError as error:
        raise error.renamed({error.argument: f"{error.argument} of {name}"}) from None


def _of(machine: str) -> dict[str, dict[str, Any]]:
    of = (machine, "A3") if machine == "cpu" else (machine,)
    return {
        name: table for name, table in _tables().items() if set(of) & set(table.get("machines", MACHINES))
    }


def _entry(table: Mapping[str, Any], machine: str) -> Constant:
    is_borrowed = machine == "cpu" and "cpu" not in table.get("machines", ())
    product = "A3" if machine == "cpu" else machine

    def number(key: str) -> float:
        given = table[key]
        return float(given[product] if isinstance(given, dict) else given)

    kind = cast(Kind, "assumed" if is_borrowed else table["kind"])
    source = f"A3's, not of a CPU: {table['source']}" if is_borrowed else table["source"]
    return Constant(number("value"), kind, source, number("low"), number("high"))


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("autotune.model").joinpath("constants.toml").read_text())


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer may be larger than any float.
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise _bad(name, value, "it must be a finite number of at least 0")


def _bad(argument: str, value: object, rule: str, code: int = INVALID_ARGUMENT) -> ArgumentError:
    return ArgumentError(argument, value, rule, REMEDY, code=code)
