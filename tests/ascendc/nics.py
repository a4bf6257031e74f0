"""NICs of ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Sequence

from moe_triton.backends.cpu.native import SettingsStruct
from moe_triton.backends.cpu.nic import NicSettings, describe
from moe_triton.core.reach import Queues, token_of

from .library import Library

# As of threads without settings: no streaming stores, no sleep on doorbells.
_DEFAULTS = {"cached_bytes": (1 << 64) - 1, "spins": 200, "yields": 20_000}


class Nics:
    """One for each rank.

    Args:
        library: whose.
        windows: address of each rank's.
        window_bytes: of each of them.
        queues: of each rank.
        settings: of each rank's NIC.

    Attributes:
        words: of each rank's table of peers.
    """

    def __init__(
        self,
        library: Library,
        windows: Sequence[int],
        window_bytes: int,
        queues: Sequence[Queues],
        settings: Sequence[NicSettings],
    ) -> None:
        self._library, self._open = library, []
        self.words: list[list[int]] = []
        for rank, (own, of_nic) in enumerate(zip(queues, settings, strict=True)):
            description, _kept = describe(own, rank, windows, window_bytes, of_nic, has_doorbells=False)
            self._open.append(library.open_nic(description))
            places = [token_of(peer) if peer in own.peers else at for peer, at in enumerate(windows)]
            self.words.append([own.word(rank, peer, at) for peer, at in enumerate(places)])
        self._settings = [SettingsStruct(**_DEFAULTS, nic=nic) for nic in self._open]

    def use(self, rank: int) -> None:
        """This thread's launches are that rank's from now on."""
        self._library.use_settings(self._settings[rank])

    def close(self) -> None:
        """Delivers what was posted, and ends them. May be called twice."""
        self._library.use_settings(None)
        while self._open:
            self._library.close_nic(self._open.pop())
