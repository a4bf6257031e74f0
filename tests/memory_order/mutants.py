"""The emulation's headers with less order: what each pattern relies on."""

from __future__ import annotations

from typing import NamedTuple

from tests.ascendc.library import Patch


class Mutant(NamedTuple):
    """Headers with less order.

    Attributes:
        name: what is missing.
        patches: what is changed.
        patterns: names of those that it lets end badly.
    """

    name: str
    patches: tuple[Patch, ...]
    patterns: tuple[str, ...]


def _memory(old: str, new: str) -> Patch:
    return Patch("emulation/memory.h", old, new)


def _settings(old: str, new: str) -> Patch:
    return Patch("emulation/launch_settings.h", old, new)


def _core(old: str, new: str) -> Patch:
    return Patch("emulation/fast_core.h", old, new)


def _bell(old: str, new: str) -> Patch:
    return Patch("emulation/doorbell.h", old, new)


def _ring(old: str, new: str) -> Patch:
    return Patch("emulation/post_ring.h", old, new)


def _meeting(old: str, new: str) -> Patch:
    return Patch("emulation/meeting.h", old, new)


def _pool(old: str, new: str) -> Patch:
    return Patch("emulation/block_pool.h", old, new)


def _transport(old: str, new: str) -> Patch:
    return Patch("emulation/transport.h", old, new)


def _paced(old: str, new: str) -> Patch:
    return Patch("emulation/paced_link.h", old, new)


_FENCE = "    std::atomic_thread_fence(std::memory_order_acq_rel);\n"
_COPY = "    CopyBytes(to, from, bytes, copy_row);\n"
NO_FENCE_BEFORE = _memory(_FENCE + _COPY, _COPY)
NO_FENCE_BEHIND = _memory(_COPY + _FENCE, _COPY)
NO_FENCES = _memory(_FENCE + _COPY + _FENCE, _COPY)
# Of a block's words.
NO_FLAG_BEHIND = _memory("target + 2, third, __ATOMIC_RELEASE", "target + 2, third, __ATOMIC_RELAXED")
NO_FLAG_AHEAD = _memory("source + 2, __ATOMIC_ACQUIRE", "source + 2, __ATOMIC_RELAXED")
NO_LAST_BEHIND = _memory("target + 3, fourth, __ATOMIC_RELEASE", "target + 3, fourth, __ATOMIC_RELAXED")
NO_LAST_AHEAD = _memory("source + 3, __ATOMIC_ACQUIRE", "source + 3, __ATOMIC_RELAXED")
NO_FIRST_BEHIND = _memory("target, first, __ATOMIC_RELEASE", "target, first, __ATOMIC_RELAXED")
NO_FIRST_AHEAD = _memory("source, __ATOMIC_ACQUIRE", "source, __ATOMIC_RELAXED")
NO_LOAD_ORDER = (NO_LAST_AHEAD, NO_FLAG_AHEAD, NO_FIRST_AHEAD)
NO_STORE_ORDER = (NO_LAST_BEHIND, NO_FLAG_BEHIND, NO_FIRST_BEHIND)
NO_ORDER_OF_WORDS = (*NO_STORE_ORDER, *NO_LOAD_ORDER)
COUNT_RELAXED = _bell("count.fetch_add(flags)", "count.fetch_add(flags, std::memory_order_relaxed)")
ROUND_RELAXED = _meeting(
    "round_.store(round + 1, std::memory_order_release)", "round_.store(round + 1, std::memory_order_relaxed)"
)
ROUND_OF_POOL_RELAXED = _pool(
    "            round_.fetch_add(1, std::memory_order_release);\n            wake =",
    "            round_.fetch_add(1, std::memory_order_relaxed);\n            wake =",
)
ROUND_SEEN_RELAXED = (
    _pool(
        "if (round_.load(std::memory_order_acquire) != seen) {",
        "if (round_.load(std::memory_order_relaxed) != seen) {",
    ),
    _pool("seen = round_.load(std::memory_order_acquire);", "seen = round_.load(std::memory_order_relaxed);"),
)
RUNNING_RELAXED = _pool(
    "running_.fetch_sub(1, std::memory_order_release)", "running_.fetch_sub(1, std::memory_order_relaxed)"
)
DONE_SEEN_RELAXED = _pool(
    "running_.load(std::memory_order_acquire) != 0", "running_.load(std::memory_order_relaxed) != 0"
)
RINGS_RELAXED = _ring("rings_.fetch_add(1)", "rings_.fetch_add(1, std::memory_order_relaxed)")
NO_FENCE_BETWEEN_PIECES = _transport(
    f"        {_FENCE}            emulation::CopyBytes(to + at",
    "            emulation::CopyBytes(to + at",
)
NO_FENCE_BEHIND_PIECES = _transport("        std::atomic_thread_fence(std::memory_order_seq_cst);\n", "")
NO_FENCE_OF_PYTHON = Patch("host/fence.cpp", "std::atomic_thread_fence(std::memory_order_acq_rel);", "")
UNORDERED_STREAMS = Patch(
    "emulation/row_copies.h",
    "inline void OrderStreamed() { std::atomic_thread_fence(std::memory_order_release); }",
    "inline void OrderStreamed() {}",
)

_WAKES = "        wakes.fetch_add(1);\n"
_WAKE = (
    "        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&wakes), "
    "FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);\n"
)
_SEEN = "        const uint32_t seen = wakes.load();\n"
_LAST_LOOK = "        if (count.load() >= wanted) return;\n"
_TAKES = "        if (depth_.exchange(Sleep::NONE) == Sleep::NONE) return;\n"
_WAKE_NIC = (
    "        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&depth_), "
    "FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);\n"
)
_SET_BACK = "            arrived_.store(0, std::memory_order_relaxed);\n"
_RELEASE = "            round_.store(round + 1, std::memory_order_release);\n"
_ARRIVES = "arrived_.fetch_add(1, std::memory_order_acq_rel)"
_FIRST_ROUND = "const uint64_t round = round_.load(std::memory_order_acquire);"

MUTANTS = (
    # memory.h
    Mutant(
        "no fence before or in a copy",
        (NO_FENCE_BEFORE, *NO_STORE_ORDER),
        ("flags in band", "cleared entries"),
    ),
    Mutant(
        "no fence behind or in a copy", (NO_FENCE_BEHIND, *NO_ORDER_OF_WORDS), ("bells of calls in rounds",)
    ),
    Mutant(
        "no fences around copies, and words of blocks in any order",
        (NO_FENCES, *NO_ORDER_OF_WORDS),
        ("rows, then their entry", "held back copies", "cleared entries", "flags in band"),
    ),
    Mutant(
        "no fences around copies, of streamed rows",
        (NO_FENCES, *NO_ORDER_OF_WORDS, UNORDERED_STREAMS),
        ("streamed rows, then their entry",),
    ),
    Mutant("a stamp's flag is written at any time", (NO_FLAG_BEHIND,), ("words of a stamp",)),
    Mutant("a stamp's flag is read at any time", (NO_FLAG_AHEAD,), ("words of a stamp",)),
    Mutant("a header's flag is written at any time", (NO_LAST_BEHIND,), ("words of a header",)),
    Mutant("a header's flag is read at any time", (NO_LAST_AHEAD,), ("words of a header",)),
    Mutant("an entry's flag is written at any time", (NO_FIRST_BEHIND,), ("words of an entry",)),
    Mutant("an entry's flag is read at any time", (NO_FIRST_AHEAD,), ("words of an entry",)),
    Mutant(
        "entries by the library's copy",
        (_memory("if (aligned && bytes", "if (aligned && copy_row == nullptr && bytes"),),
        ("rows, then their entry", "words of a stamp"),
    ),
    # fast_core.h
    Mutant(
        "no fence before a streamed row",
        (
            _core(
                "            std::atomic_thread_fence(std::memory_order_acq_rel);\n            StreamBytes",
                "            StreamBytes",
            ),
        ),
        ("a streamed row behind another",),
    ),
    Mutant("streamed rows are never put in order", (UNORDERED_STREAMS,), ("a scalar behind a streamed row",)),
    Mutant(
        "a ring puts nothing in order",
        (UNORDERED_STREAMS, COUNT_RELAXED),
        ("a bell behind a streamed row",),
    ),
    Mutant("no flag is before its count", (NO_FENCES, COUNT_RELAXED), ("a count before its flag",)),
    Mutant(
        "no count is read before its flags",
        (NO_FENCES, _core("= bell->count.load()", "= bell->count.load(std::memory_order_relaxed)")),
        ("a count before its flag",),
    ),
    Mutant(
        "a barrier is none",
        (
            _core(
                "void Barrier(pipe_t) { std::atomic_thread_fence(std::memory_order_seq_cst); }",
                "void Barrier(pipe_t) {}",
            ),
        ),
        ("scalars and a barrier",),
    ),
    # doorbell.h
    Mutant("the count is relaxed", (COUNT_RELAXED,), ("a ring that a sleeper misses",)),
    Mutant(
        "the wish is read relaxed",
        (
            _bell(
                "uint64_t wanted = wake_at.load();",
                "uint64_t wanted = wake_at.load(std::memory_order_relaxed);",
            ),
        ),
        ("a ring that a sleeper misses",),
    ),
    Mutant(
        "the wish is written relaxed",
        (
            _bell(
                "compare_exchange_weak(other, wanted)",
                "compare_exchange_weak(other, wanted, std::memory_order_relaxed)",
            ),
        ),
        ("a ring that a sleeper misses",),
    ),
    Mutant(
        "the last look is relaxed",
        (_bell(_LAST_LOOK, _LAST_LOOK.replace("load()", "load(std::memory_order_relaxed)")),),
        ("a ring that a sleeper misses",),
    ),
    Mutant(
        "who wakes says so too late",
        (_bell(_WAKES, ""), _bell(_WAKE, _WAKE + _WAKES)),
        ("a wake before the sleep",),
    ),
    Mutant(
        "wakes are looked at too late",
        (_bell(_SEEN, ""), _bell(_LAST_LOOK, _LAST_LOOK + _SEEN)),
        ("a wake that seems to be an old one",),
    ),
    # post_ring.h
    Mutant(
        "the tail is written relaxed",
        (
            _ring(
                "tail_.store(tail + 1, std::memory_order_release)",
                "tail_.store(tail + 1, std::memory_order_relaxed)",
            ),
        ),
        ("entries of a queue", "posted bytes"),
    ),
    Mutant(
        "the tail is read relaxed",
        (
            _ring(
                "return tail_.load(std::memory_order_acquire)", "return tail_.load(std::memory_order_relaxed)"
            ),
        ),
        ("entries of a queue", "posted bytes"),
    ),
    Mutant(
        "the head is written relaxed",
        (_ring("+ 1, std::memory_order_release); }", "+ 1, std::memory_order_relaxed); }"),),
        ("places in a queue", "memory that was posted"),
    ),
    Mutant(
        "the head is read relaxed before a push",
        (
            _ring(
                "tail - head_.load(std::memory_order_acquire)", "tail - head_.load(std::memory_order_relaxed)"
            ),
        ),
        ("places in a queue",),
    ),
    Mutant(
        "what is delivered is read relaxed",
        (
            _ring(
                "return head_.load(std::memory_order_acquire)", "return head_.load(std::memory_order_relaxed)"
            ),
        ),
        ("memory that was posted",),
    ),
    Mutant(
        "rings are counted relaxed",
        (RINGS_RELAXED,),
        ("a post that the NIC misses", "a ring before its post"),
    ),
    Mutant(
        "the depth is read relaxed",
        (
            _ring(
                "const Sleep depth = depth_.load();",
                "const Sleep depth = depth_.load(std::memory_order_relaxed);",
            ),
        ),
        ("a post that the NIC misses",),
    ),
    Mutant(
        "the depth is written relaxed",
        (_ring("depth_.exchange(depth);", "depth_.exchange(depth, std::memory_order_relaxed);"),),
        ("a post that the NIC misses",),
    ),
    Mutant(
        "the depth is stored with a release",
        (
            _ring("depth_.exchange(depth);", "depth_.store(depth, std::memory_order_release);"),
            _ring("if (rings_.load() == rings)", "if (rings_.load(std::memory_order_relaxed) == rings)"),
        ),
        ("a post that the NIC misses",),
    ),
    Mutant(
        "rings are read relaxed before a sleep",
        (_ring("if (rings_.load() == rings)", "if (rings_.load(std::memory_order_relaxed) == rings)"),),
        ("a post that the NIC misses",),
    ),
    Mutant(
        "rings are read relaxed before posts",
        (
            _ring(
                "Rings() const { return rings_.load();",
                "Rings() const { return rings_.load(std::memory_order_relaxed);",
            ),
        ),
        ("a ring before its post",),
    ),
    Mutant(
        "who wakes the NIC says so too late",
        (_ring(_TAKES, ""), _ring(_WAKE_NIC, _WAKE_NIC + "        depth_.exchange(Sleep::NONE);\n")),
        ("a post before the NIC sleeps",),
    ),
    # meeting.h
    Mutant(
        "who arrives acquires nothing",
        (_meeting(_ARRIVES, _ARRIVES.replace("acq_rel", "release")),),
        ("SyncAll",),
    ),
    Mutant(
        "who arrives releases nothing",
        (_meeting(_ARRIVES, _ARRIVES.replace("acq_rel", "acquire")),),
        ("SyncAll",),
    ),
    Mutant("the round is released by nobody", (ROUND_RELAXED,), ("SyncAll", "a SyncAll behind another")),
    Mutant(
        "the round is read relaxed",
        (
            _meeting(
                "attempt = 0; round_.load(std::memory_order_acquire) == round;",
                "attempt = 0; round_.load(std::memory_order_relaxed) == round;",
            ),
        ),
        ("SyncAll",),
    ),
    Mutant(
        "arrivals are set back behind the round",
        (_meeting(_SET_BACK + _RELEASE, _RELEASE + _SET_BACK),),
        ("a SyncAll behind another",),
    ),
    Mutant(
        "who arrives may not know the round",
        (
            _meeting(_FIRST_ROUND, _FIRST_ROUND.replace("acquire", "relaxed")),
            _meeting(_ARRIVES, _ARRIVES.replace("acq_rel", "acquire")),
        ),
        ("the round of a SyncAll",),
    ),
    Mutant(
        "ends are read relaxed",
        (_meeting("ended_.load(std::memory_order_acquire)", "ended_.load(std::memory_order_relaxed)"),),
        ("blocks that have ended",),
    ),
    Mutant(
        "ends are counted relaxed",
        (
            _meeting(
                "ended_.fetch_add(1, std::memory_order_acq_rel)",
                "ended_.fetch_add(1, std::memory_order_relaxed)",
            ),
        ),
        ("blocks that have ended",),
    ),
    Mutant(
        "a failure is written relaxed",
        (
            _meeting(
                "failed_.store(true, std::memory_order_release)",
                "failed_.store(true, std::memory_order_relaxed)",
            ),
        ),
        ("why a block failed",),
    ),
    Mutant(
        "a failure is read relaxed",
        (
            _meeting(
                "Failed() const { return failed_.load(std::memory_order_acquire)",
                "Failed() const { return failed_.load(std::memory_order_relaxed)",
            ),
        ),
        ("why a block failed",),
    ),
    # block_pool.h and trace.h
    Mutant(
        "the end of the pool is told relaxed",
        (
            _pool(
                "stopping_ = true;\n            round_.fetch_add(1, std::memory_order_release)",
                "stopping_ = true;\n            round_.fetch_add(1, std::memory_order_relaxed)",
            ),
        ),
        ("the end of the pool",),
    ),
    Mutant("a round of the pool is begun relaxed", (ROUND_OF_POOL_RELAXED,), ("a round of the pool",)),
    Mutant("a round of the pool is seen relaxed", ROUND_SEEN_RELAXED, ("a round of the pool",)),
    Mutant(
        "a round of the pool ends relaxed",
        (RUNNING_RELAXED,),
        (
            "the end of a round",
            "a trace behind its launch",
            "the next round of the pool",
            "a queue from launch to launch",
        ),
    ),
    Mutant(
        "the end of a round is seen relaxed",
        (DONE_SEEN_RELAXED,),
        ("the end of a round", "a trace behind its launch", "the next round of the pool"),
    ),
    Mutant(
        "events are counted in two steps",
        (Patch("emulation/trace.h", "__atomic_fetch_add(&num_events, 1, __ATOMIC_RELAXED)", "num_events++"),),
        ("two blocks that trace",),
    ),
    # launch_settings.h
    Mutant(
        "results are read behind the look at masks",
        (_settings("    std::atomic_thread_fence(std::memory_order_acquire);\n", ""),),
        ("results of a rank that masks their reader",),
    ),
    # transport.h
    Mutant(
        "no fences around pieces of messages, or in blocks",
        (NO_FENCE_BETWEEN_PIECES, NO_FENCE_BEHIND_PIECES, *NO_STORE_ORDER),
        ("a message behind another",),
    ),
    Mutant(
        "no fence before the end of a message",
        (NO_FENCE_BETWEEN_PIECES, *NO_STORE_ORDER),
        ("a long message",),
    ),
    Mutant(
        "a message's bell puts nothing in order",
        (NO_FENCE_BEHIND_PIECES, COUNT_RELAXED),
        ("a bell behind a message",),
    ),
    # paced_link.h, and Python's own reads and writes
    Mutant(
        "turns are taken in two steps",
        (
            _paced(
                "while (!idle_at_ns.compare_exchange_weak(before, after, std::memory_order_relaxed));",
                "while (false);\n        idle_at_ns.store(after, std::memory_order_relaxed);",
            ),
        ),
        ("turns of a paced link",),
    ),
    Mutant(
        "the number of spans is written relaxed",
        (_paced("num_spans + 1, __ATOMIC_RELEASE", "num_spans + 1, __ATOMIC_RELAXED"),),
        ("a span that was logged",),
    ),
    Mutant(
        "spans are written over at once",
        (_paced("        std::atomic_thread_fence(std::memory_order_release);\n", ""),),
        ("a span that is written over",),
    ),
    Mutant(
        "Python has no fence",
        (NO_FENCE_OF_PYTHON,),
        (
            "words of Python's",
            "places that Python gives back",
            "a span that was logged",
            "a span that is written over",
        ),
    ),
)

# What a pattern does not need, and why, beside the single orders that `orders` has.
ENOUGH = (
    # A copy has a fence before it, and a bell releases. On x86-64 streaming stores heed neither.
    Mutant(
        "streamed rows are not put in order before an entry",
        (UNORDERED_STREAMS,),
        ("streamed rows, then their entry", "a bell behind a streamed row"),
    ),
    # Arm lets no store-release pass a load-acquire. qemu does, so there is an exchange.
    Mutant(
        "the depth is stored",
        (_ring("depth_.exchange(depth);", "depth_.store(depth);"),),
        ("a post that the NIC misses",),
    ),
)
