// What the waiting kernels share: deadlines, polling of flags, sums of them, and times of arrival.
#pragma once

#include "flags.h"

namespace moe {

class Deadline {
public:
    __aicore__ inline void Start(int64_t timeout_us) {
        start_ = AscendC::GetSystemCycle();
        looked_ = start_;
        length_ = timeout_us * CYCLES_PER_US;
        end_ = start_ + length_;
    }

    // A process that has not run for a quarter of its time waits as long again, once: where all ranks of a machine were
    // paused together, what others have to send comes soon (`moe_triton/core/threads.py`).
    __aicore__ inline bool Passed() const {
        const int64_t now = AscendC::GetSystemCycle();
        if constexpr (CAN_BE_PAUSED) {
            if (now - looked_ > Larger(SHORTEST_PAUSE_US * CYCLES_PER_US, length_ / 4) && !was_paused_) {
                was_paused_ = true;
                end_ = now + length_;
            }
            looked_ = now;
        }
        return now > end_ || WaitsAreStopped();
    }

    // Microseconds since the start, at least 1: 0 means that the flag was already set.
    __aicore__ inline int32_t WaitedUs() const {
        return static_cast<int32_t>(Larger<int64_t>(1, (AscendC::GetSystemCycle() - start_) / CYCLES_PER_US));
    }

    __aicore__ inline void TraceWait(int64_t peer, int32_t us) const {
        moe::TraceWait(peer, start_, us);
    }

    __aicore__ inline void TraceWaitEnds(int64_t peer) const {
        moe::TraceWaitEnds(peer, start_);
    }

private:
    // Shorter pauses are what a busy machine does to any process.
    static constexpr int64_t SHORTEST_PAUSE_US = 100'000;

    int64_t start_ = 0;
    int64_t length_ = 0;
    mutable int64_t end_ = 0;
    mutable int64_t looked_ = 0;
    mutable bool was_paused_ = false;
};

// Polls flags in a window until the deadline: `for (PollLoop poll(deadline, window); poll.Next();)`. The clock is read
// before the flags, so that flags that were in time count, and flags are polled at least once. It waits for `count`
// tokens or entries from `first` on.
class PollLoop {
public:
    __aicore__ inline PollLoop(const Deadline& deadline, uint64_t window, int64_t first = 0, int64_t count = 0)
        : deadline_(deadline), window_(window), first_(first), count_(count) {}

    __aicore__ inline bool Next() {
        if (is_last_) {
            return false;
        }
        if (number_ == 0) {
            BeginLook();
        } else {
            PollPause(number_ - 1, window_, missing_, first_, count_);
            is_last_ = deadline_.Passed();
        }
        ++number_;
        return true;
    }

    // From now on it waits for others.
    __aicore__ inline void AwaitFrom(int64_t first, int64_t count) {
        first_ = first;
        count_ = count;
    }

    // The number of flags that this poll did not find.
    __aicore__ inline void Miss(int64_t flags) {
        missing_ = flags;
    }

    // For flags that this poll is the first to find; 0 if they were already set.
    __aicore__ inline int32_t WaitedUs() const {
        return number_ == 1 ? 0 : deadline_.WaitedUs();
    }

private:
    const Deadline& deadline_;
    const uint64_t window_;
    int64_t first_;
    int64_t count_;
    int64_t missing_ = 1;
    uint32_t number_ = 0;
    bool is_last_ = false;
};

// Status entries or flags in UB, and how many of them are set.
class FlagCounter {
public:
    // A vector instruction takes 256 bytes, eight entries, at a time, and repeats up to 255 times.
    static constexpr int64_t ENTRIES_PER_REPEAT = 8;

    __aicore__ inline void Init(AscendC::TPipe* pipe, uint32_t words) {
        entries_ = NewTensor<float>(pipe, words);
        work_ = NewTensor<float>(pipe, WORK_ENTRIES);
        sum_ = NewTensor<float>(pipe, 1);
    }

    __aicore__ inline const AscendC::LocalTensor<float>& Entries() const {
        return entries_;
    }

    // Of flags that fill whole 32-byte units with 1.0f: their words need no mask.
    __aicore__ inline int64_t SumWords(uint32_t first, uint32_t words) {
        BeginSum();
        AscendC::ReduceSum(sum_, entries_[first], work_, static_cast<int32_t>(words));
        return Result();
    }

    // Of entries that have other words, no floats, beside the one that is the flag.
    __aicore__ inline int64_t SumWordOfEach(uint32_t word, int64_t repeats) {
        const uint64_t mask[2] = {FIRST_WORDS << word, 0};
        BeginSum();
        AscendC::ReduceSum(sum_, entries_, work_, mask, static_cast<int32_t>(repeats),
                           static_cast<int32_t>(ENTRIES_PER_REPEAT));
        return Result();
    }

private:
    static constexpr int64_t WORK_ENTRIES = 256;
    static constexpr uint64_t FIRST_WORDS = 0x0101010101010101ULL;

    // The entries are there, and the sum before has been read.
    __aicore__ inline void BeginSum() {
        Order<AscendC::HardEvent::MTE2_V>();
        Order<AscendC::HardEvent::S_V>();
    }

    // CANN's ReduceSum for these processors waits for the vector unit itself, since its last step is the scalar
    // unit's. No page promises that, and a flag that is set already costs a poll next to nothing.
    __aicore__ inline int64_t Result() {
        Order<AscendC::HardEvent::V_S>();
        return static_cast<int64_t>(sum_.GetValue(0));
    }

    AscendC::LocalTensor<float> entries_, work_, sum_;
};

// Microseconds until each of some contiguous entries was seen. Recorded only if the caller wants them, at an address,
// or for a trace; and from the first look on that misses some, if the host asks for whom waits last.
class WaitedTimes : Table {
public:
    using Table::At;
    using Table::Set;

    __aicore__ inline void Init(AscendC::TPipe* pipe, uint64_t address, uint32_t max_entries) {
        address_ = address;
        is_wanted_ = address != 0 || IsTraced();
        is_watched_ = !is_wanted_ && IsWatched();
        if (is_wanted_ || is_watched_) {
            Table::Init(pipe, max_entries);
        }
    }

    // Before each wait.
    __aicore__ inline void BeginWait() {
        is_late_ = false;
    }

    // A look has missed some. Whether they are recorded from now on, and what is there is to be noted first.
    __aicore__ inline bool BeginLate() {
        const bool begins = is_watched_ && !is_late_;
        is_late_ = is_watched_;
        return begins;
    }

    // In this wait, by now.
    __aicore__ inline bool AreRecorded() const {
        return is_wanted_ || is_late_;
    }

    __aicore__ inline bool IsWanted() const {
        return is_wanted_;
    }

    __aicore__ inline void Load(int64_t first, int64_t count) {
        if (address_ == 0) {
            for (int64_t i = 0; is_wanted_ && i < count; ++i) {
                Set(i, 0);
            }
            return;
        }
        Fetch(address_, first, count);
        Begin(0);
    }

    __aicore__ inline void Store(int64_t first, int64_t count) {
        if (address_ != 0) {
            Begin(first);
            Table::Store(address_, count);
            Begin(0);
        }
    }

    __aicore__ inline void Expect(int64_t i, bool is_expected = true) {
        Set(i, is_expected ? NOT_SEEN : NOTHING_EXPECTED);
    }

    __aicore__ inline void Raise(int64_t i, int32_t us) {
        if (is_wanted_) {
            Set(i, Larger(us, At(i)));
        }
    }

    // Records the time of entries that are set in `entries` and were expected but not seen before.
    __aicore__ inline void NoteArrivals(const AscendC::LocalTensor<int32_t>& entries, int32_t flag, int64_t first,
                                        int64_t count, int32_t us) {
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t entry = static_cast<uint32_t>(i * STATUS_ENTRY_WORDS);
            const bool is_there = entries.GetValue(entry + StatusEntry::FLAG) == flag;
            if (is_there && IsMissing(first + i)) {
                Set(first + i, us);
            }
        }
    }

    __aicore__ inline void NoteMissing(int64_t first, int64_t count, int32_t us) {
        for (int64_t i = first; AreRecorded() && i < first + count; ++i) {
            if (IsMissing(i)) {
                Set(i, us);
            }
        }
    }

    __aicore__ inline bool IsMissing(int64_t i) const {
        return At(i) == NOT_SEEN;
    }

private:
    static constexpr int32_t NOT_SEEN = -1;
    // Whoever records waits passes over what nobody waits for.
    static constexpr int32_t NOTHING_EXPECTED = -2;

    uint64_t address_ = 0;
    bool is_wanted_ = false, is_watched_ = false, is_late_ = false;
};

}  // namespace moe
