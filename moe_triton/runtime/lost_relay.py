"""The relay's part of a lost rank's calls, which another rank of its server runs in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from threading import get_ident
from typing import Any, NoReturn

import torch

from moe_triton.backends.base import Backend, Bindings, Executable, StandsIn, Window
from moe_triton.backends.waits import Waiting
from moe_triton.core.ascendc import REPORT_MASKED
from moe_triton.core.plan import Phases
from moe_triton.operators.buffer import DISPATCHED, TABLES
from moe_triton.operators.variants import Variant
from moe_triton.runtime.diagnosis import Run, failure
from moe_triton.runtime.executables import Executables, PlanMemory
from moe_triton.runtime.masks import Masks
from moe_triton.runtime.turns import operator_of
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.scheme import Scheme
from moe_triton.tables import KernelSettings

_NUMBERS = "round_numbers"


class LostRelay:
    """Runs launches of a lost rank beside the calls of this one, in a thread of its own.

    Args:
        scheme: of this rank.
        rank: the lost one, of this rank's server.
        since: the first dispatch of the buffer that it passes on.
        settings: of kernels.
        backend: of this rank.
        window: of this rank.
        fixed: what placeholders hold in every run of this rank.
        masks: of this rank.
        timeout_s: after which a rank is missed.
        missing: is told of waits that last as long, on the thread that waits, and where they are.

    Attributes:
        window: of the lost rank.
        fixed: what placeholders hold in every run here.

    Raises:
        WindowError: there can be no thread for its queues.
    """

    def __init__(
        self,
        scheme: Scheme,
        rank: int,
        since: int,
        settings: KernelSettings,
        backend: Backend,
        window: Window,
        fixed: Mapping[str, torch.Tensor],
        masks: Masks,
        timeout_s: float,
        missing: Callable[[RankContext, Waiting], None],
    ) -> None:
        (spec,) = scheme.windows
        assert isinstance(backend, StandsIn)
        assert spec.queues is not None
        self._scheme, self._rank, self._masks = make_scheme(scheme.context.of_rank(rank)), rank, masks
        self._context = self._scheme.context
        self._backend, self.window = backend.stand_in(window, rank, spec.queues)
        self._tables, self._since = scheme.tables_of(scheme.context.config), since
        memory = PlanMemory(self._scheme, [self.window], self._backend.device)
        # Of one server all reach the same peers in the same ways.
        self._peers = memory.bindings["peers"] = masks.make_table()
        memory.add_scratch([_NUMBERS])
        self.fixed, self._of_rank = memory.bindings, fixed
        self._executables = Executables(self._scheme, settings, self._backend, memory, None)
        context = self._context
        self._backend.waits.give_up_after(timeout_s, lambda waiting: missing(context, waiting))
        self._worker = futures.ThreadPoolExecutor(1, "moe-relay")

    def begin(self, variant: Variant, zone: int, number: int, bindings: Bindings) -> futures.Future[None]:
        """Begins the same run of an operator that this rank begins.

        Args:
            variant: what that is specialised for.
            zone: of it.
            number: which run of it.
            bindings: of it; tables are twice as long as one rank's, and the second half is the lost one's.

        Returns:
            Its end, or what went wrong.
        """
        run = Run(operator_of(variant), number, {**bindings, TABLES: self._tables_for(bindings)})
        executable = self._executables.operator(variant, zone, "pass_on", 1)
        # All ranks count alike; this one has not begun its own run yet.
        self.fixed[_NUMBERS].copy_(self._of_rank[_NUMBERS])
        return self._worker.submit(self._run, executable, run)

    def _tables_for(self, bindings: Bindings) -> torch.Tensor:
        """Those of the lost rank; of a dispatch that it has passed on itself they are gone with it."""
        tables, dispatched = bindings[TABLES], bindings.get(DISPATCHED, self._since)
        assert isinstance(tables, torch.Tensor)
        assert isinstance(dispatched, int)
        assert self._tables is not None
        own = tables[self._tables.num_words :]
        return own if dispatched >= self._since else self._tables.empty(own)

    def _run(self, executable: Executable, run: Run) -> None:
        waits, operator, bindings = self._backend.waits, run.operator, run.memory
        waits.holder.value = get_ident()
        try:
            self._learn(operator, bindings, ())
            code = executable.run(bindings)
            while code == REPORT_MASKED:
                self._learn(operator, bindings, executable.ran)
                code = executable.resume(bindings)
        finally:
            waits.holder.value = 0
        if code:
            self._fail(run, executable, code)

    def _learn(self, operator: str, bindings: Mapping[str, Any], ran: Sequence[Phases]) -> None:
        """From now on launches go by what is masked; results that will not come are not summed."""
        masked = self._masks.learn_in(self._peers).masked
        if operator == "combine":
            assert self._tables is not None
            of_run = {**self.fixed, **bindings}
            self._masks.mark_tables_of(self._rank, masked, self._tables, of_run, ran)

    def _fail(self, run: Run, executable: Executable, code: int) -> NoReturn:
        launch, report = executable.failed_launch, executable.failed_report
        assert launch is not None
        _, error = failure(self._context, run, launch, code, report, self.fixed, ())
        raise error

    def stop(self) -> None:
        """Ends its waits. Callable from any thread."""
        self._backend.waits.stop()

    def close(self) -> None:
        """Gives everything back, once nothing runs."""
        self.stop()
        self._worker.shutdown()
        self._executables.clear()
        self._masks.drop_table(self._peers)
        self.window.close()
        self._backend.close()
