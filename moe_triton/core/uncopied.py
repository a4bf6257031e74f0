"""Objects that belong to one process, and are neither copied nor pickled."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, SupportsIndex

from moe_triton.core.errors import CopyError


class Unpickled:
    """Cannot be pickled; ``_uncopied`` says why, and what to do."""

    _uncopied: ClassVar[str]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CopyError(f"{type(self).__name__} cannot be pickled: {self._uncopied}")


class Uncopied(Unpickled):
    """Cannot be copied, either."""

    def __copy__(self) -> NoReturn:
        raise CopyError(f"{type(self).__name__} cannot be copied: {self._uncopied}")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__copy__()
