"""A dispatch that sends rows by the counts of all ranks, and in which ranks are masked.

A rank sends rows when it has the counts of all that were not masked when its call began, and all of these
began with the same ranks masked. So all who send, send by the same counts. Who is told of another mask before
that sends nothing: it lacks what others may have.

Nobody ends a dispatch without the rows' flag of every rank that goes on. If one of them sends none, all of
them are still in it, and can repeat it together. If all send, each can go on alone: it takes the rows of the
masked out of what it has received, and has its results where the senders look for them all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from moe_triton.backends.base import Executable
from moe_triton.core.ascendc import REPORT_MASKED
from moe_triton.core.checks import CPU
from moe_triton.core.errors import BufferStateError
from moe_triton.operators.variants import DispatchVariant
from moe_triton.runtime.executables import Executables
from moe_triton.runtime.masked_run import MaskedRun
from moe_triton.runtime.outcomes import Outcomes
from moe_triton.schemes.direct.ascendc import DIRECT_SEND
from moe_triton.schemes.direct.scheme import WAIT_FOR_COUNTS

STAMPS = "stamps"


class Together(NamedTuple):
    """What ranks do together.

    Attributes:
        learn: has calls go by what is masked now.
        meet: waits until all that go on have come to the same point.
        renew: has whoever is masked, and may live, write to other memory than what others' rows come to: of
            the zone of a run. Where nobody else writes to it.
        fence: orders what this thread has written to the window before what it writes next.
        outcomes: that they agree on.
        timeout_s: of the buffer.
    """

    learn: Callable[[], None]
    meet: Callable[[], None]
    renew: Callable[[Executable], None]
    fence: Callable[[], None]
    outcomes: Outcomes
    timeout_s: float


class RepeatedDispatch(MaskedRun):
    """Brings such a dispatch to its end.

    Attributes:
        places: (rows,) int64 of the rows that are left the places that they had, where some were taken out;
            None where none were.
    """

    places: torch.Tensor | None = None
    _zone: int

    def go_on(self, number: int, executable: Executable, executables: Executables, together: Together) -> int:
        """Repeats it with all others, or goes on with what this rank has received.

        Args:
            number: which dispatch of the buffer it is.
            executable: what has stopped.
            executables: all of them.
            together: with the others.

        Returns:
            What `Executable.run` does.

        Raises:
            BufferStateError: ranks go on to have different ones masked.
            RankMaskedError: the others have gone on without this rank.
        """
        _, self._zone, _, _ = executables.key_of(executable)
        attempt, code, until, masked = 0, REPORT_MASKED, 0.0, None
        while code == REPORT_MASKED:
            together.learn()
            if masked != self._masks.known.masked:
                masked, until = self._masks.known.masked, time.monotonic() + together.timeout_s
            given_up, ran = executable.failed_launch, set[str]()
            if given_up is None:
                ran = {launch.kernel.name for phases in executable.ran for launch in phases}
            if STAMPS in ran:  # all rows have come, of all
                code = executable.resume(self.bindings)
            elif given_up is None and DIRECT_SEND.name not in ran:  # nothing of it has gone out
                code = executable.run(self.bindings)
            elif together.outcomes.settle(number, attempt, repeat=given_up is not None):
                if time.monotonic() > until:
                    raise BufferStateError(
                        f"dispatch number {number} was repeated for {together.timeout_s:g} s, since ranks "
                        f"have masked different ones, here {sorted(masked or ())}. Mask the same ranks on "
                        f"every rank."
                    )
                if given_up is None or given_up.step != WAIT_FOR_COUNTS:
                    self._take_back_stats()
                self._give_up_together(executable, executables, together)
                attempt += 1
                code = executable.run(self.bindings)
            else:
                together.renew(executable)
                self._drop_rows()
                code = executable.resume(self.bindings)
        if code == 0 and self._owns_ids:
            self._mark_ids(self._ids(), self._masks.marked_cut_off)
        return code

    def _give_up_together(self, executable: Executable, executables: Executables, together: Together) -> None:
        """Leaves nothing of the attempt behind, on any rank."""
        # Whoever waits for this rank's rows hears that it is to wait no more.
        recall = executables.operator(self._dispatch, self._zone, "recall", 1)
        code = recall.run({})
        while code == REPORT_MASKED:
            together.learn()
            code = recall.resume({})
        # From here on nobody writes anything of the attempt.
        together.meet()
        for operator, region in self._scheme.statuses:
            if operator == "dispatch":
                first = region.offset(zone=self._zone)
                self._window[first : first + region.stride("expert")] = 0
        together.renew(executable)
        together.fence()
        # And from here on nobody finds a flag of it.
        together.meet()
        together.learn()

    @property
    def _window(self) -> torch.Tensor:
        window = self._fixed["window"]
        assert isinstance(window, torch.Tensor)
        return window

    @property
    def _dispatch(self) -> DispatchVariant:
        assert isinstance(self._variant, DispatchVariant)
        return self._variant

    def _take_back_stats(self) -> None:
        """What this attempt has added to the caller's statistics."""
        ends = self._by_entry("recv_offsets")
        assert ends is not None
        last = ends[:, -1]
        self._count_back(last.diff(prepend=last.new_zeros(1)))

    def _received(self, total: int) -> Iterator[torch.Tensor]:
        """Where rows and their stamps have come, which are not taken apart yet."""
        for region in self._scheme.received(self._dispatch):
            first, stride = region.offset(zone=self._zone), region.stride("index")
            yield self._window[first : first + total * stride].view(total, stride)

    def _drop_rows(self) -> torch.Tensor:
        """The same, and keeps where the others were."""
        kept = super()._drop_rows()
        places = torch.arange(len(kept), device=CPU) if self.places is None else self.places
        self.places = places[kept]
        return kept
