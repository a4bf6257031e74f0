"""Call words that are another number in every round, and the cells where ranks keep theirs."""

from __future__ import annotations

import numpy as np

from .case import WrongResultError

WORDS_PER_LINE = 16
KIND_SHIFT = 16


def word_of(operator: str, number: int) -> int:
    """The word of a call, without what was before it."""
    return "DCBE".index(operator) << 12 | number % 1000 + 1


class CallWords:
    """What every rank puts into its entries and expects in those of others.

    Args:
        num_ranks: that keep words.
    """

    def __init__(self, num_ranks: int) -> None:
        self._kinds = [np.zeros(WORDS_PER_LINE, dtype=np.int32) for _ in range(num_ranks)]
        self._words = [np.zeros(WORDS_PER_LINE, dtype=np.int32) for _ in range(num_ranks)]
        self._before = [0] * num_ranks

    def sending(self, rank: int, number: int) -> dict[str, object]:
        """Arguments of a dispatch's first entries."""
        return {
            "call": word_of("D", number),
            "combine_kind": self._kinds[rank],
            "dispatch_word": self._words[rank],
        }

    def waiting(self, rank: int, number: int) -> dict[str, object]:
        """Arguments of the wait for them: the word itself, where it stands, or what it is made of."""
        word = word_of("D", number)
        if number % 3 == 1:
            return {"call": -1, "combine_kind": 0, "dispatch_word": self._words[rank]}
        if number % 3 == 2:
            return {"call": word, "combine_kind": self._kinds[rank], "dispatch_word": 0}
        return {"call": word | self._before[rank], "combine_kind": 0, "dispatch_word": 0}

    def in_one_launch(self, rank: int, number: int) -> dict[str, object]:
        """Arguments of a dispatch's first entries, and of the wait for them in the same launch."""
        return {"call": word_of("D", number), "combine_kind": self._kinds[rank]}

    def combining(self, rank: int, number: int) -> dict[str, object]:
        """Arguments of the kernel that keeps a combine's kind."""
        self._before[rank] = number % 1000 + 1 << KIND_SHIFT
        return {"kind": self._before[rank], "combine_kind": self._kinds[rank]}

    def check(self) -> None:
        """That the cells hold what was kept last, and nothing beside it."""
        for kind, word, before in zip(self._kinds, self._words, self._before, strict=True):
            if kind[0] != before or kind[1:].any() or word[1:].any():
                raise WrongResultError(f"kinds {kind.tolist()}, words {word.tolist()}: {before} was before")


def posting(operator: str, number: int) -> dict[str, object]:
    """Arguments of an entry that has one word in all cases."""
    return {"call": word_of(operator, number), "kind": 0, "combine_kind": 0}


# Of a kernel that posts, where nobody is queued.
NOT_POSTING: dict[str, object] = {"window": 0, "out_offset": 0, "timeout_us": 0, "traffic": 0}


def expecting(operator: str, number: int) -> dict[str, object]:
    """Arguments of the wait for those."""
    return {"call": word_of(operator, number), "combine_kind": 0, "dispatch_word": 0}
