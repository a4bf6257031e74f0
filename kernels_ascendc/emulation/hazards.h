// Whether what one core does to the same bytes of UB or GM is ordered, in the strict build.
//
// The scalar unit hands instructions to the pipes and goes on; each pipe begins its own in order and may end them in
// another. So an instruction that touches what an earlier one touches, if either writes, has to be ordered behind it:
// by SetFlag and WaitFlag between their pipes, by PipeBarrier inside one, or by way of others that are ordered (Ascend
// C API, "SetFlag/WaitFlag" and "PipeBarrier"). Accesses of the scalar unit are no exception: nothing but an event
// makes a pipe wait for them, while whatever is handed on behind WaitFlag<X_S> begins when that wait is over.
//
// What is not ordered is an error at once, in every order in which things happen to end: some of them no chance finds.
// Only for flags in GM, those that `RaiseFlags` writes, a poll is enough.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "meeting.h"
#include "types.h"

namespace moe::emulation {

class Hazards {
public:
    // A launch: all that this thread did before it has ended.
    void Begin() {
        // Numbers go on from launch to launch, so that nothing has to be forgotten; but they must not overflow.
        if (*std::max_element(begun_.begin(), begun_.end()) > UINT32_MAX / 2) {
            begun_ = {};
            words_.assign(words_.size(), {});
        }
        BarrierOfAll();
        gm_.clear();
        set_.clear();
    }

    void SetFlag(AscendC::HardEvent event, uint64_t id) {
        const pipe_t pipe = AscendC::SourcePipe(event);
        Dispatch(pipe);
        Clock ended = ended_[pipe];
        ended[pipe] = begun_[pipe];
        set_.push_back({event, id, ended});
    }

    // A pipe that waits for a flag which is set only later learns nothing from it.
    void WaitFlag(AscendC::HardEvent event, uint64_t id) {
        const pipe_t pipe = AscendC::TargetPipe(event);
        Dispatch(pipe);
        const auto first = std::find_if(set_.begin(), set_.end(),
                                        [&](const SetEvent& set) { return set.event == event && set.id == id; });
        if (first == set_.end()) return;
        Join(ended_[pipe], first->ended);
        set_.erase(first);
    }

    void Barrier(pipe_t pipe) {
        if (pipe == PIPE_ALL) {
            BarrierOfAll();
            return;
        }
        Dispatch(pipe);
        ended_[pipe][pipe] = begun_[pipe];
    }

    // Accesses of a pipe belong to the instruction that it has begun last.
    void BeginInstruction(pipe_t pipe) {
        Dispatch(pipe);
        ++begun_[pipe];
    }

    void AccessUb(pipe_t pipe, uint64_t at, uint64_t bytes, bool writes) {
        if (bytes == 0) return;
        const Clock& ended = ended_[pipe];
        for (uint64_t word = at / WORD_BYTES; word <= (at + bytes - 1) / WORD_BYTES; ++word) {
            Word& last = words_[word];
            if (IsLater(last.written, ended) || (writes && IsLater(last.read, ended))) {
                RequireOrder(pipe, writes, word, last.written, true);
                if (writes) RequireOrder(pipe, writes, word, last.read, false);
            }
            (writes ? last.written : last.read)[pipe] = begun_[pipe];
        }
    }

    void AccessGm(pipe_t pipe, const void* at, uint64_t bytes, bool writes) {
        const auto begin = reinterpret_cast<uint64_t>(at);
        const GmAccess access{begin, begin + bytes, pipe, begun_[pipe], writes, false};
        bool is_known = false;
        for (GmAccess& other : gm_) {
            const bool conflicts = (writes || other.writes) && other.begin < access.end && begin < other.end;
            const bool is_seen = other.is_flag && pipe != PIPE_S;
            if (conflicts && !is_seen && !IsOrdered(pipe, other.pipe, other.number)) {
                Fail(pipe, writes, "GM", other.pipe, other.writes);
            }
            if (other.begin == begin && other.end == access.end && other.pipe == pipe && other.writes == writes) {
                other = access;
                is_known = true;
            }
        }
        if (is_known) return;
        if (gm_.size() >= most_) ForgetOrdered();
        gm_.push_back(access);
    }

    // What was written last to this place is a flag: copies that look for it, or clear it, need nothing else.
    void RaiseFlag(const void* at) {
        for (GmAccess& access : gm_) {
            if (access.begin == reinterpret_cast<uint64_t>(at) && access.writes) access.is_flag = true;
        }
    }

private:
    static constexpr uint32_t WORD_BYTES = 4;
    static constexpr size_t FEW = 64;

    // Of each pipe, the number of an instruction.
    using Clock = std::array<uint32_t, AscendC::NUM_PIPES>;

    // What has ended when it is waited for.
    struct SetEvent {
        AscendC::HardEvent event;
        uint64_t id;
        Clock ended;
    };

    // The last ones that touched it.
    struct Word {
        Clock read;
        Clock written;
    };

    struct GmAccess {
        uint64_t begin;
        uint64_t end;
        pipe_t pipe;
        uint32_t number;
        bool writes;
        bool is_flag;
    };

    static void Join(Clock& to, const Clock& from) {
        for (uint32_t pipe = 0; pipe < AscendC::NUM_PIPES; ++pipe) to[pipe] = std::max(to[pipe], from[pipe]);
    }

    // What the scalar unit has waited for has ended before it hands on anything more; its own accesses may not have.
    void Dispatch(pipe_t pipe) { Join(ended_[pipe], ended_[PIPE_S]); }

    void BarrierOfAll() { ended_.fill(begun_); }

    // The scalar unit does one thing after the other.
    bool IsOrdered(pipe_t pipe, uint32_t other, uint32_t number) const {
        if (number <= ended_[pipe][other]) return true;
        return other == pipe && (pipe == PIPE_S || number == begun_[pipe]);
    }

    // In any pipe.
    static bool IsLater(const Clock& one, const Clock& other) {
        static_assert(AscendC::NUM_PIPES == 4);
        return one[0] > other[0] || one[1] > other[1] || one[2] > other[2] || one[3] > other[3];
    }

    // Behind those that touched a word last.
    void RequireOrder(pipe_t pipe, bool writes, uint64_t word, const Clock& last, bool wrote) const {
        for (uint32_t other = 0; other < AscendC::NUM_PIPES; ++other) {
            if (IsOrdered(pipe, other, last[other])) continue;
            Fail(pipe, writes, "byte " + std::to_string(word * WORD_BYTES) + " of UB", other, wrote);
        }
    }

    // Of accesses that all pipes which reach GM know to have ended, nothing can come of.
    void ForgetOrdered() {
        const auto is_over = [this](const GmAccess& access) {
            return std::all_of(std::begin(GM_PIPES), std::end(GM_PIPES), [&](pipe_t pipe) {
                return (pipe == PIPE_S && access.pipe == PIPE_S) ||
                       access.number <= std::max(ended_[pipe][access.pipe], ended_[PIPE_S][access.pipe]);
            });
        };
        gm_.erase(std::remove_if(gm_.begin(), gm_.end(), is_over), gm_.end());
        most_ = std::max(FEW, 2 * gm_.size());
    }

    [[noreturn]] static void Fail(pipe_t pipe, bool writes, const std::string& place, uint32_t other, bool wrote) {
        const std::string one = NAMES[pipe];
        const std::string before = NAMES[other];
        throw CheckFailed("PIPE_" + one + (writes ? " writes " : " reads ") + place + " that PIPE_" + before +
                          (wrote ? " wrote" : " read") + " before, and nothing orders them: " +
                          (other == pipe ? "PipeBarrier<PIPE_" + one + ">" : "HardEvent::" + before + "_" + one));
    }

    static constexpr const char* NAMES[AscendC::NUM_PIPES] = {"S", "V", "MTE2", "MTE3"};
    static constexpr pipe_t GM_PIPES[] = {PIPE_S, PIPE_MTE2, PIPE_MTE3};

    Clock begun_{};
    std::array<Clock, AscendC::NUM_PIPES> ended_{};  // what has, when the pipe begins its next instruction
    std::vector<SetEvent> set_;  // and not waited for, in their order
    std::vector<Word> words_ = std::vector<Word>(AscendC::UB_BYTES / WORD_BYTES);
    std::vector<GmAccess> gm_;
    size_t most_ = FEW;
};

// Large, and so kept from launch to launch.
inline Hazards& ThreadHazards() {
    thread_local Hazards hazards;
    return hazards;
}

}  // namespace moe::emulation
