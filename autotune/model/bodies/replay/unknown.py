"""`UNKNOWN`: a value that depends on data which the model does not have, such as a row's elements."""

from __future__ import annotations

from typing import Any, NoReturn


class UndecidedError(Exception):
    """Control flow asks for a value that is not known."""


class Unknown:
    """Whatever is computed from it is unknown too; nothing can be decided by it."""

    def _itself(self, *_: Any) -> Unknown:
        return self

    def _undecided(self) -> NoReturn:
        raise UndecidedError

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _itself
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __neg__ = _itself
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _itself
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _itself
    __lt__ = __le__ = __gt__ = __ge__ = _itself
    __bool__ = __index__ = __int__ = _undecided
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return self

    def __ne__(self, other: object) -> Any:
        return self

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()
Number = int | Unknown
