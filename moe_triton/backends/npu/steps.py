"""Prepared launches: everything that does not change from call to call is computed once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from moe_triton.backends.base import Bindings
from moe_triton.backends.npu import library, triton_kernels
from moe_triton.backends.phases import names_of
from moe_triton.core import abi
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Launch, Part, Phases, Placeholder, num_blocks

Fill = tuple[int, int, Callable[[int], int]]
"""Index of the argument, index of the call's value, and the function from one to the other."""


class AscendCStep:
    """An Ascend C kernel: its arguments are words that the launch copies."""

    is_direct = True  # it goes straight to the stream, bypassing torch_npu's queue

    def __init__(
        self, phases: Phases, fixed: Bindings, placeholders: Sequence[str], report_bytes: int
    ) -> None:
        packed = abi.phase_words(phases, report_bytes)
        words = packed.words
        self._fills = _bind(words, packed.placeholders, fixed, placeholders)
        self._words = (ctypes.c_uint64 * len(words))(*words)
        self._address = ctypes.addressof(self._words)
        times = [position for position, placeholder in packed.placeholders if placeholder.name == abi.TIMES]
        self._times = [(position, words[position]) for position in times]
        self.note_times(False)
        self._steps, self._blocks = names_of(phases), num_blocks(phases)
        self._function = library.launcher(packed.kernel)

    def note_times(self, on: bool) -> None:
        """Whether several phases note their times from now on, which takes a store for each: where, or 0."""
        for position, address in self._times:
            self._words[position] = address if on else 0

    def launch(self, values: Sequence[int], stream: int) -> None:
        """Fills in the call's values and puts the kernel straight on the stream.

        Args:
            values: of the plan's placeholders, in their order: addresses and numbers.
            stream: CANN's handle of it.

        Raises:
            ToolchainError: CANN refuses the launch.
        """
        words = self._words
        for position, number, part in self._fills:
            words[position] = part(values[number])
        error: int = self._function(self._blocks, stream, self._address)
        if error:
            raise ToolchainError(
                f"{self._steps}: the launch of {self._blocks} blocks failed with error {error} of "
                f"CANN's run time. See plog in $ASCEND_PROCESS_LOG_PATH, or ~/ascend/log."
            )


class TritonStep:
    """A Triton kernel: its arguments are addresses and numbers. Its launcher uses torch_npu's queue."""

    is_direct = False

    def __init__(self, launch: Launch, fixed: Bindings, placeholders: Sequence[str]) -> None:
        assert not any(isinstance(value, tuple) for value in launch.values)
        unfilled = [(i, value) for i, value in enumerate(launch.values) if isinstance(value, Placeholder)]
        self._arguments = [value if isinstance(value, int) else 0 for value in launch.values]
        self._fills = _bind(self._arguments, unfilled, fixed, placeholders)
        assert isinstance(launch.kernel, TritonKernel)
        self._programs = launch.blocks
        self._launch = triton_kernels.launcher(launch.kernel)

    def note_times(self, on: bool) -> None:
        """Does nothing: the launch has one phase."""

    def launch(self, values: Sequence[int], stream: int) -> None:
        """Fills in the call's values and puts the kernel on the stream by torch_npu's queue."""
        arguments = self._arguments
        for position, number, part in self._fills:
            arguments[position] = part(values[number])
        self._launch(self._programs, stream, arguments)


Step = AscendCStep | TritonStep
"""A launch that lacks only the values of a call."""


def make_step(phases: Phases, fixed: Bindings, placeholders: Sequence[str], report_bytes: int) -> Step:
    """Prepares a launch.

    Args:
        phases: of a launch of a plan.
        fixed: contents of the placeholders that are the same in every call.
        placeholders: names of the others, in the order of a call's values.
        report_bytes: from one phase's report to the next one's.
    """
    if isinstance(phases[0].kernel, AscendCKernel):
        return AscendCStep(phases, fixed, placeholders, report_bytes)
    return TritonStep(phases[0], fixed, placeholders)


def _bind(
    words: list[int],
    unfilled: Sequence[tuple[int, Placeholder]],
    fixed: Bindings,
    placeholders: Sequence[str],
) -> list[Fill]:
    """Fills in what is the same in every call, and returns what each call has to fill in.

    Args:
        words: with a place for each argument.
        unfilled: the places that are placeholders.
        fixed: see `make_step`, as the next.
        placeholders: names of those that a call fills.
    """
    fills: list[Fill] = []
    for position, placeholder in unfilled:
        if placeholder.name in fixed:
            words[position] = abi.word_of(fixed[placeholder.name]) + placeholder.offset
        else:
            fills.append((position, placeholders.index(placeholder.name), _part(placeholder)))
    return fills


def _part(placeholder: Placeholder) -> Callable[[int], int]:
    if isinstance(placeholder, Part):
        return placeholder.of
    offset = placeholder.offset
    return lambda value: value + offset
