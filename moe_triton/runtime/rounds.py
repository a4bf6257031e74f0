"""How often each operator has run, which zone that makes it, and where a full wait must come between."""

from __future__ import annotations

from moe_triton.core.errors import BufferStateError
from moe_triton.layout import NUM_ZONES
from moe_triton.schemes.site import Operator, Site


class Rounds:
    """One rank's count of its operators.

    Two combines of one zone need a full wait between them (docs/protocol.md, "Which programmes are safe"): a
    dispatch or a barrier, each of which waits for every rank. It covers the combines that a rank had ended
    when it posted its own flags.

    Args:
        site: where they run.

    Attributes:
        counts: runs of each operator.
    """

    def __init__(self, site: Site) -> None:
        self.counts: dict[str, int] = {"dispatch": 0, "combine": 0, "barrier": 0}
        self._site = site
        self._posted = 0
        self._covered, self._covered_in_graph = 0, False

    def zone(self, operator: Operator) -> int:
        """The zone that the next plan of this operator is built for."""
        if self._site.zones_on_device:
            return 0  # plans are the same for both
        counts = self.counts
        if self._site.is_version_1 and operator != "barrier":
            return (counts["dispatch"] + counts["combine"]) % NUM_ZONES
        return counts[operator] % NUM_ZONES

    def needs_wait(self, capturing: bool) -> bool:
        """Whether a full wait has to come before the next combine.

        A graph may run any number of times, with anything in between: each combine in it has a full wait
        right before it, in the same graph.
        """
        if self._site.combine_waits_for_all:
            return False
        uncovered = self.counts["combine"] - self._covered
        if self._site.zones_on_device:
            return uncovered > 0 or self._covered_in_graph is not capturing
        return uncovered >= NUM_ZONES

    def check_graph(self, capturing: bool) -> None:
        """Checks that what is captured can run more than once.

        Raises:
            BufferStateError: it cannot.
        """
        if capturing and not self._site.zones_on_device:
            raise BufferStateError(
                f"comm_alg={self._site.config.scheme!r} cannot be captured: its outputs are another "
                f"tensor in every other call. Use 'fullmesh_v1' or 'fullmesh_v2'."
            )

    def post(self) -> None:
        """A full wait begins: its flags leave now and cover the combines that have ended by now."""
        self._posted = self.counts["combine"]

    def cover(self, capturing: bool) -> None:
        """The full wait has ended."""
        self._covered, self._covered_in_graph = self._posted, capturing
