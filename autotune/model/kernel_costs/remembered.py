"""Costs of kernels that remember what they have computed, by the constants that they read of a machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from autotune.model.constants import Constant, Machine
from autotune.model.cost import Cost, KernelCost, Table, Work
from moe_triton.core.kernel import AscendCKernel, TritonKernel

KernelCosts = Callable[[AscendCKernel | TritonKernel], KernelCost]
"""The cost of a kernel."""


class NotedMachine(Machine):
    """A machine that notes which constants are read.

    It equals no other machine, so that what others remember by machine is not taken for it.

    Args:
        machine: whose constants it has.

    Attributes:
        read: names of the constants that have been read.
    """

    def __init__(self, machine: Machine) -> None:
        self.read: set[str] = set()  # the machine's constants are checked: its own `__init__` is not called
        self.name, self.constants = machine.name, _NotedConstants(machine.constants, self.read)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class _NotedConstants(dict[str, Constant]):
    def __init__(self, constants: Mapping[str, Constant], read: set[str]) -> None:
        super().__init__(constants)
        self._read = read

    def __getitem__(self, name: str) -> Constant:
        self._read.add(name)
        return super().__getitem__(name)


class Remembered:
    """Costs of kernels, each computed once for the same work on machines that agree in all that it reads.

    Args:
        kernel_costs: of kernels.
    """

    def __init__(self, kernel_costs: KernelCosts) -> None:
        self._kernel_costs = kernel_costs
        self._known: dict[Hashable, list[tuple[dict[str, Constant], Cost, Work]]] = {}

    def __call__(self, kernel: AscendCKernel | TritonKernel) -> KernelCost:
        """The cost of a kernel, with a memory."""
        return self._price

    def _price(self, work: Work, machine: Machine) -> Cost:
        known = self._known.setdefault(_key(work), [])
        for values, cost, _ in known:
            if all(machine.constants.get(name) == value for name, value in values.items()):
                _note(machine, values)
                return cost
        noted = NotedMachine(machine)
        cost = self._kernel_costs(work.kernel)(work, noted)
        _note(machine, noted.read)
        # The work is kept so that nothing else gets the addresses that stand in its key.
        known.append(({name: machine.constants[name] for name in noted.read}, cost, work))
        return cost


class OfArguments:
    """Costs of Triton kernels, each computed once for the same arguments: numbers, and what tables hold.

    For many ranks: what their kernels do follows from their arguments alone, which are often the same.

    Args:
        kernel_costs: of kernels, which ask Triton kernels' traffic for nothing.
    """

    def __init__(self, kernel_costs: KernelCosts) -> None:
        self._kernel_costs = kernel_costs
        self._known: dict[Hashable, Cost] = {}

    def __call__(self, kernel: AscendCKernel | TritonKernel) -> KernelCost:
        """The cost of a kernel, with a memory if it is Triton's."""
        return self._price if isinstance(kernel, TritonKernel) else self._kernel_costs(kernel)

    def _price(self, work: Work, machine: Machine) -> Cost:
        arguments = tuple((name, _content(value)) for name, value in work.arguments.items())
        key = machine, work.kernel, work.blocks, arguments
        if key not in self._known:
            self._known[key] = self._kernel_costs(work.kernel)(work, machine)
        return self._known[key]


def _content(value: int | tuple[int, ...] | Table) -> Hashable:
    """A number as it is, a table as what it holds."""
    if not isinstance(value, Table):
        return value
    return Table, None if value.values is None else (value.values.dtype.str, value.values.tobytes())


def _note(machine: Machine, names: set[str] | dict[str, Constant]) -> None:
    if isinstance(machine, NotedMachine):
        machine.read.update(names)


def _key(work: Work) -> Hashable:
    if isinstance(work.kernel, AscendCKernel) and work.place is not None:
        return id(work.place.run), work.place.index, work.place.number
    arguments = tuple((name, _word(value)) for name, value in work.arguments.items())
    return work.kernel, work.blocks, id(work.traffic), arguments


def _word(value: int | tuple[int, ...] | Table) -> Hashable:
    """A number as it is, a table as the place of its integers."""
    if not isinstance(value, Table):
        return value
    return Table, None if value.values is None else (value.values.ctypes.data, value.values.size)
