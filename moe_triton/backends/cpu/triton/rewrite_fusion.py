"""Loops over the same row, made one, so that what both read comes from memory once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from moe_triton.backends.cpu.triton.ir import Block, Operation

_VIEWS = frozenset({"memref.reinterpret_cast", "memref.collapse_shape", "memref.expand_shape"})
# Dialects whose operations touch no memory but that of their operands.
_DIALECTS = frozenset({"arith", "math", "vector", "scf", "linalg", "memref", "affine"})
# Which operands an operation reads and which it writes, where it is not for all of its memory.
_READS = {"vector.load": (0,), "memref.load": (0,), "memref.copy": (0,)}
_WRITES = {"vector.store": (1,), "memref.store": (1,), "memref.copy": (1,)}


@dataclass
class _Touched:
    """Buffers and arguments that operations read and write."""

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)

    def is_free_of(self, other: _Touched) -> bool:
        """Whether either of two may come first."""
        return self.written.isdisjoint(other.read | other.written) and self.read.isdisjoint(other.written)


def fuse_loops(module: Operation) -> None:
    """Put a loop into the next one, if that takes as many turns and reads a row of it.

    The next one, and what stands in between, must neither touch what the loop writes nor write what it reads.
    Different arguments are taken to be different memory: only for builds whose arguments do not overlap.
    Memory that is neither an argument's nor a buffer's could be any of theirs.
    """
    makers = module.makers()
    apart = {buffer.result for buffer in module.walk("memref.alloca")}
    apart.update(*(function.body.arguments for function in module.walk("func.func") if function.regions[0]))
    for block in _blocks(module):
        loops = [each for each in block.operations if each.name == "scf.for"]
        for first, second in itertools.pairwise(loops):
            if _bounds(first, makers) == _bounds(second, makers) and _can_wait(first, second, makers, apart):
                _move_into(first, second)


def _blocks(module: Operation) -> list[Block]:
    regions = itertools.chain(*(each.regions for each in (module, *module.walk())))
    return list(itertools.chain(*regions))


def _bounds(loop: Operation, makers: dict[str, Operation]) -> list[str]:
    """Start, end and step, numbers as such, and what else a loop starts from."""
    return [
        makers[value].attributes.get("value", value) if value in makers else value for value in loop.operands
    ]


def _can_wait(first: Operation, second: Operation, makers: dict[str, Operation], apart: set[str]) -> bool:
    """Whether a loop, of which the second reads a row, may take its turns along with that one's."""
    if first.results or second.results:
        return False
    touched, operations = _touched(first, makers), first.block.operations
    if touched.read.isdisjoint(_touched(second, makers).read):
        return False
    others = operations[operations.index(first) + 1 : operations.index(second) + 1]
    inside = itertools.chain(first.walk(), others, *(each.walk() for each in others))
    if not {each.name.partition(".")[0] for each in inside} <= _DIALECTS:
        return False
    of_others = [_touched(each, makers) for each in others]
    return all(each.read | each.written <= apart for each in (touched, *of_others)) and all(
        touched.is_free_of(each) for each in of_others
    )


def _touched(operation: Operation, makers: dict[str, Operation]) -> _Touched:
    """What an operation and all in it touch; of an unknown one, all its memory is read and written."""
    touched = _Touched()
    for each in (operation, *operation.walk()):
        types = enumerate(each.operand_types)
        memory = [i for i, type_ in types if type_.startswith("memref<") and each.name not in _VIEWS]
        is_known = each.name in _READS or each.name in _WRITES
        reads, writes = (known.get(each.name, () if is_known else memory) for known in (_READS, _WRITES))
        touched.read.update(_owner(each.operands[i], makers) for i in reads)
        touched.written.update(_owner(each.operands[i], makers) for i in writes)
    return touched


def _owner(value: str, makers: dict[str, Operation]) -> str:
    """The argument or the buffer that a memref is a view of."""
    while value in makers and makers[value].name in _VIEWS:
        value = makers[value].operands[0]
    return value


def _move_into(first: Operation, second: Operation) -> None:
    (old,), (new,) = first.body.arguments, second.body.arguments
    turn = first.body.operations[:-1]
    for each in itertools.chain(turn, *(operation.walk() for operation in turn)):
        each.operands = [new if value == old else value for value in each.operands]
    second.body.insert(0, *turn)
    first.erase()
