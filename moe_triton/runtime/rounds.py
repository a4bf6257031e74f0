"""How often each operator has run, which zone its next run uses, and when a full wait must come first.

`RoundsRecord` is the whole state. `Rounds` and ``moe::calls::Rounds`` (kernels_ascendc/calls/rounds.h)
are the same four operations on it, in Python and for native calls; tests/test_rounds.py tries every order of
two ranks' steps with both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping

from moe_triton.core.errors import BufferStateError
from moe_triton.schemes.rank_context import OPERATORS, Operator, RoundFacts

_NUMBERS: dict[str, int] = {operator: number for number, operator in enumerate(OPERATORS)}
_PerOperator = ctypes.c_uint64 * len(OPERATORS)


class RoundsRecord(ctypes.Structure):
    """``moe::calls::Rounds``.

    Attributes:
        counts: runs of each operator, failed ones too.
        posted: `counts` when the latest operator that waits for every rank posted its flags.
        covered: `posted` of the latest such operator that has ended.
        num_zones: of each operator.
        sharing: bit mask of the operators whose runs turn an operator's zone, its own included.
        waiting: bit mask of the operators that wait for every rank.
        on_device: whether kernels look their zones up.
        covered_in_graph: whether the latest full wait is in a graph.
    """

    _fields_ = (
        ("counts", _PerOperator),
        ("posted", _PerOperator),
        ("covered", _PerOperator),
        ("num_zones", _PerOperator),
        ("sharing", _PerOperator),
        ("waiting", ctypes.c_uint64),
        ("on_device", ctypes.c_uint64),
        ("covered_in_graph", ctypes.c_uint64),
    )


class Counts(Mapping[str, int]):
    """Runs of each operator, by its name."""

    def __init__(self, record: RoundsRecord) -> None:
        self._counts = record.counts

    def __getitem__(self, operator: str) -> int:
        return int(self._counts[_NUMBERS[operator]])

    def __iter__(self) -> Iterator[str]:
        return iter(OPERATORS)

    def __len__(self) -> int:
        return len(OPERATORS)


class Rounds:
    """One rank's count of its operators.

    Two runs in one zone of an operator that does not wait for every rank need a full wait between them: one
    that does (docs/protocol.md, "Which programmes are safe"). It covers the runs that a rank had ended when
    it posted its own flags.

    Args:
        facts: of the scheme.

    Attributes:
        record: the state, shared with native calls.
        counts: runs of each operator, failed ones too.
    """

    def __init__(self, facts: RoundFacts) -> None:
        self._facts = facts
        self.record = RoundsRecord()
        self.counts = Counts(self.record)
        self._numbers = self.record.counts
        self._sharing: dict[str, list[int]] = {}
        for number, operator in enumerate(OPERATORS):
            self._sharing[operator] = [_NUMBERS[other] for other in facts.sharing(operator)]
            self.record.num_zones[number] = facts.num_zones
            self.record.sharing[number] = sum(1 << other for other in self._sharing[operator])
        self.record.waiting = sum(1 << _NUMBERS[operator] for operator in facts.waiting)
        self.record.on_device = facts.on_device

    def copy(self) -> Rounds:
        """One with a record of its own, as this one is now."""
        made = Rounds(self._facts)
        ctypes.memmove(
            ctypes.addressof(made.record), ctypes.addressof(self.record), ctypes.sizeof(self.record)
        )
        return made

    def zone(self, operator: Operator) -> int:
        """The zone that the next plan of this operator is built for."""
        if self._facts.on_device:
            return 0  # one plan serves all zones
        turns = 0
        for number in self._sharing[operator]:  # a loop: this runs in every call
            turns += self._numbers[number]
        return turns % self._facts.num_zones

    def needs_wait(self, operator: Operator, capturing: bool) -> bool:
        """Whether a full wait has to come before the next run of this operator.

        A graph may run any number of times, with anything in between: each combine in it has a full wait
        right before it, in the same graph.
        """
        if operator in self._facts.waiting:
            return False
        number = _NUMBERS[operator]
        uncovered: int = self.counts[operator] - self.record.covered[number]
        if self._facts.on_device:
            return uncovered > 0 or bool(self.record.covered_in_graph) is not capturing
        return uncovered >= self._facts.num_zones

    def begin(self, operator: Operator) -> None:
        """An operator begins. A full wait posts its flags now, which cover the runs that have ended."""
        if operator in self._facts.waiting:
            self.record.posted = self.record.counts

    def end(self, operator: Operator, succeeded: bool, capturing: bool) -> None:
        """An operator has ended. Its zone turns exactly once, on failure too."""
        self.record.counts[_NUMBERS[operator]] += 1
        if succeeded and operator in self._facts.waiting:
            self.record.covered = self.record.posted
            self.record.covered_in_graph = capturing

    def check_graph(self, capturing: bool) -> None:
        """Checks that what is captured can run more than once.

        Raises:
            BufferStateError: it cannot.
        """
        if capturing and self._facts.no_graph:
            raise BufferStateError(self._facts.no_graph)
