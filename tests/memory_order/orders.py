"""Each order that the emulation's headers ask for, and the headers without it.

An order is a fence, an explicit order of an atomic operation, or the sequential consistency of one that names
none. Without it there is no fence, or the operation is relaxed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.ascendc.library import SOURCES, Patch

# Headers that threads share words in, and the probes that call them.
HEADERS = {
    "memory.h": ("core", "posts"),
    "fast_core.h": ("core",),
    "launch_settings.h": ("core",),
    "row_copies.h": ("core",),
    "doorbell.h": ("doorbell", "core", "posts"),
    "post_ring.h": ("rings", "launch"),
    "meeting.h": ("launch",),
    "block_pool.h": ("launch",),
    "transport.h": ("posts",),
    "paced_link.h": ("posts",),
}
# Where nothing but one word is read and written.
ALONE = {
    "flight.h": "numbers of runs, for other processes that copy all and look at these; no rank goes by them",
    "nic.h": "when to stop: a ring is behind it, as behind a post",
    "trace.h": "a number is taken; the launch's end is behind what is written",
    "wait_control.h": "whether waits are to end",
}

_FENCE = re.compile(r"std::atomic_thread_fence\(std::memory_order_\w+\);")
_NAMED = re.compile(r"memory_order_(?:acquire|release|acq_rel|seq_cst)|__ATOMIC_(?:ACQUIRE|RELEASE)")
_OPERATION = re.compile(r"\b\w+\.(?:load|store|exchange|fetch_add|fetch_sub|compare_exchange_weak)\(")
RELAXED = {"m": "memory_order_relaxed", "_": "__ATOMIC_RELAXED"}


class Order(NamedTuple):
    """One of them.

    Attributes:
        file: the header.
        line: what stands there.
        begin, end, weaker: which part of the text is to be replaced to take it away, and by what.
    """

    file: str
    line: str
    begin: int
    end: int
    weaker: str

    @property
    def name(self) -> str:
        """What a test is called."""
        return f"{self.file}:{re.sub(r'[^a-zA-Z_]+', '_', self.line)}"

    @property
    def patch(self) -> Patch:
        """Takes it away."""
        text = text_of(self.file)
        return Patch(f"emulation/{self.file}", text, text[: self.begin] + self.weaker + text[self.end :])


def text_of(file: str) -> str:
    """A header's."""
    return (SOURCES / "emulation" / file).read_text(encoding="utf-8")


def orders_of(file: str) -> Iterator[Order]:
    """All orders of a header."""
    text = text_of(file)

    def order(begin: int, end: int, weaker: str) -> Order:
        line = text[text.rfind("\n", 0, begin) + 1 : text.find("\n", begin)].strip()
        return Order(file, line, begin, end, weaker)

    for found in _FENCE.finditer(text):
        yield order(*found.span(), "")
    fences = [found.span() for found in _FENCE.finditer(text)]
    for found in _NAMED.finditer(text):
        if not any(begin < found.start() < end for begin, end in fences):
            yield order(*found.span(), RELAXED[found[0][0]])
    for found in _OPERATION.finditer(text):
        end = _closing(text, found.end())
        arguments = text[found.end() : end]
        if "memory_order" not in arguments:
            yield order(end, end, (", " if arguments else "") + "std::memory_order_relaxed")


def _closing(text: str, at: int) -> int:
    """Where the parenthesis closes that has been opened before."""
    depth = 1
    for end in range(at, len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if depth == 0:
            return end
    raise AssertionError("a parenthesis is open")


def has_orders(file: str) -> bool:
    """Whether a header has anything of the kind."""
    return re.search(r"std::atomic|__atomic_|memory_order", text_of(file)) is not None


class Spare(NamedTuple):
    """An order without which no pattern ends badly.

    Attributes:
        file: of the header.
        part: of the line that it stands in, or of the lines around.
        why: what is there in its stead.
    """

    file: str
    part: str
    why: str


KERNEL = "futex has a barrier before the kernel looks for sleepers"
SPARE = (
    Spare(
        "memory.h",
        "    CopyBytes(to, from, bytes, copy_row);\n    std::atomic_thread_fence(",
        "the words of an entry have an order, the copy behind has a fence before it, and a bell a release",
    ),
    Spare(
        "fast_core.h",
        "std::atomic_thread_fence(std::memory_order_acq_rel);\n            copy_row_",
        "blocks come in any order: each has a flag of its own",
    ),
    Spare("fast_core.h", "count_before_look_ = bell->count.load(", "flags are copied behind a fence"),
    Spare(
        "launch_settings.h",
        "return __atomic_load_n(settings->changes,",
        "a word alone: nothing of a rank counts that is masked meanwhile",
    ),
    Spare("doorbell.h", "if (wake_at.exchange(NOBODY", KERNEL),
    Spare("doorbell.h", "wakes.fetch_add(1", KERNEL),
    Spare("doorbell.h", "seen = wakes.load(", "the wish behind it releases"),
    Spare("doorbell.h", "other = wake_at.load(", "the exchange of the same word behind it decides"),
    Spare("post_ring.h", "owner_.exchange(mine", "a word alone: the pool's rounds order launches"),
    Spare("post_ring.h", "if (depth_.exchange(Sleep::NONE", KERNEL),
    Spare("post_ring.h", "depth_.store(Sleep::NONE", "who finds the old depth wakes nobody, in vain"),
    Spare("meeting.h", "const uint64_t round = round_.load(", "the arrival behind it releases"),
    Spare("meeting.h", "if (one_ended && round_.load(", "the load of `ended_` before it acquires"),
    Spare("meeting.h", "if (failed_.load(", "why is looked up behind the end of the launch, by `Failed`"),
    Spare("block_pool.h", "seen = round_.load(std::memory_order_acquire)", "the look before it acquires"),
    Spare("block_pool.h", "if (round_.load(", "the look behind it acquires"),
    Spare("block_pool.h", "wake_.wait(lock, [&] { return round_.load(", "the look behind it acquires"),
    Spare(
        "block_pool.h", "[this, index, seen = round_.load(", "the thread's own, and a thread's start orders"
    ),
    Spare(
        "transport.h",
        "std::atomic_thread_fence(std::memory_order_acq_rel);\n            emulation::CopyBytes",
        "messages have a fence behind them, and the words of each block of 32 bytes an order",
    ),
    Spare(
        "transport.h",
        "std::atomic_thread_fence(std::memory_order_seq_cst);",
        "the next message has a fence before it, and a bell a release",
    ),
)


def spares_of(order: Order) -> list[Spare]:
    """Entries of `SPARE` for an order: in whose part it stands."""
    text = text_of(order.file)
    found = []
    for spare in SPARE:
        if spare.file != order.file:
            continue
        at = text.find(spare.part)
        assert at >= 0, f"{spare.file} has nothing like this: {spare.part}"
        assert text.count(spare.part) == 1, f"{spare.file} has more than one: {spare.part}"
        # An order that is not named stands where the arguments end.
        if at <= order.begin <= at + len(spare.part) + 40 and _is_in(text, at, spare.part, order):
            found.append(spare)
    return found


def _is_in(text: str, at: int, part: str, order: Order) -> bool:
    """Whether an order begins in a part, or in the parentheses that it leaves open."""
    if part.count("(") <= part.count(")"):
        return order.begin < at + len(part)
    return order.begin <= _closing(text, at + len(part))
