"""Loggers of the library by room, lines that say which rank of which group they are of, and their levels.

Every line goes to a logger below "moe_triton" that is named for its room. Its text begins with the rank and
its group where those are known, so that lines of several ranks in one file can be told apart; and its record
has `FIELDS` as attributes in any case, so that a formatter may name them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # Python 3.10 has no parameter of it
    _Adapter = logging.LoggerAdapter

NAME = "moe_triton"
VARIABLE = "MOE_TRITON_LOG"
ROOMS: Mapping[str, str] = {
    "construction": "settings in which ranks differ, and schemes that are others than were asked for",
    "deaths": "the watch over ends of processes, where that fails",
    "kernels": "what is compiled or timed, and the cache of it",
    "masks": "ranks that are masked, and those that stand in for them",
    "stores": "values in a group's store that are wrong, or could not be written",
    "tables": "rows of tables that fit no kernel",
    "waits": "waits that last, and ranks that are awaited longest",
}
"""What is logged where."""
LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
FIELDS = ("rank", "num_ranks", "group", "operator", "round")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_lock = threading.Lock()
_used: set[str] = set()  # what the variable was when it was used


class RankLog(_Adapter):
    """Logs for a rank, in one room.

    Args:
        room: one of `ROOMS`.
        rank: whose lines they are; None where the code that logs does not know it.
        num_ranks: of its group.
        group: its short name; "" where it has none.
        operator: "dispatch", "combine" or "barrier", of lines about one call.
        number: which of its operator that call is, from 0 on.
    """

    def __init__(
        self,
        room: str,
        rank: int | None = None,
        num_ranks: int | None = None,
        group: str = "",
        operator: str = "",
        number: int | None = None,
    ) -> None:
        values = rank, num_ranks, group, operator, number
        super().__init__(logging.getLogger(f"{NAME}.{room}"), dict(zip(FIELDS, values, strict=True)))
        of_group = f" [group {group}]" if group else ""
        self._of = room, rank, num_ranks, group
        self._prefix = "" if rank is None else f"rank {rank} of {num_ranks}{of_group}: "

    def of_call(self, operator: str, number: int) -> RankLog:
        """The same log for lines about one call, whose texts name it themselves."""
        return RankLog(*self._of, operator, number)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Puts the rank before a text, and the fields beside it."""
        text, kwargs = super().process(msg, kwargs)
        return f"{self._prefix}{text}" if self._prefix else text, kwargs


def log_of(room: str, *, rank: int | None = None, num_ranks: int | None = None, group: str = "") -> RankLog:
    """The log of a room: for a rank where the code that logs knows it.

    Args:
        room: one of `ROOMS`.
        rank: of the group.
        num_ranks: of the group.
        group: its short name.
    """
    return RankLog(room, rank, num_ranks, group)


def levels_of(text: str) -> dict[str, int]:
    """Levels by room, "" for all others, that a value of $MOE_TRITON_LOG asks for.

    Args:
        text: such as "info,waits=debug,kernels=error".

    Raises:
        ArgumentError: it asks for something else.
    """
    found: dict[str, int] = {}
    for item in text.split(","):
        room, is_of_room, level = (part.strip().lower() for part in item.rpartition("="))
        if level not in LEVELS:
            raise _wrong(text, f"{level!r} is no level: these are {', '.join(LEVELS)}")
        if is_of_room and room not in ROOMS:
            raise _wrong(text, f"{room!r} is no room: these are {', '.join(ROOMS)}")
        if room in found:
            raise _wrong(text, f"{f'the room {room!r}' if room else 'all rooms'} may have one level only")
        found[room] = LEVELS[level]
    return found


def _wrong(text: str, rule: str) -> ArgumentError:
    remedy = "Set a level, or levels of rooms too, as in info,waits=debug,kernels=error; or unset it."
    return ArgumentError(VARIABLE, repr(text), rule, remedy, code=INVALID_ARGUMENT)


def use_variable(environment: Mapping[str, str] = os.environ) -> None:
    """Sets levels as $MOE_TRITON_LOG says, once, and has lines written if nobody else does that.

    Every construction of a buffer calls this. What the program sets afterwards holds; without the variable
    nothing is changed.

    Args:
        environment: of this process.

    Raises:
        ArgumentError: the variable asks for something else.
    """
    text = environment.get(VARIABLE, "")
    if not text.strip():
        return
    levels = levels_of(text)
    with _lock:
        if text in _used:
            return
        _used.add(text)
        for room, level in levels.items():
            logging.getLogger(f"{NAME}.{room}" if room else NAME).setLevel(level)
        logger = logging.getLogger(NAME)
        if not logger.hasHandlers():
            logger.addHandler(_Stderr())


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 has no parameter of it
    """Writes lines as long as no other handler does."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line: once, also where the program configures logging after its first buffer."""
        others = (*logging.getLogger().handlers, *logging.getLogger(NAME).handlers)
        if all(handler is self for handler in others):
            super().emit(record)


def _renew() -> None:
    """In a child that was forked: a thread that held the lock does not exist here."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
