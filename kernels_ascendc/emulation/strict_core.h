// A block in the strict build. Each pipe takes its instructions in order; what they do happens late, in
// pieces, and in any order that flags and barriers leave open. A seed decides which.
#ifndef MOE_EMULATION_STRICT_CORE_H
#define MOE_EMULATION_STRICT_CORE_H

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "meeting.h"
#include "types.h"

namespace moe::emulation {

class Core {
public:
    using Effect = std::function<void()>;

    Core(uint32_t index, uint32_t count, Meeting& meeting, uint8_t* ub, uint64_t seed)
        : block(index), blocks(count), meeting_(meeting), ub_(ub), random_(seed * 0x9E3779B97F4A7C15ULL + index) {
        // What UB holds at the start is nobody's business: make sure that nobody relies on it.
        for (uint32_t i = 0; i < AscendC::UB_BYTES; ++i) ub_[i] = static_cast<uint8_t>(random_());
    }

    const uint32_t block;
    const uint32_t blocks;

    uint8_t* Ub(UbAddress address) { return ub_ + address.offset; }

    void Issue(pipe_t pipe, Effect effect) {
        std::vector<Effect> pieces;
        pieces.push_back(std::move(effect));
        Put(pipe, {Kind::EFFECT, std::move(pieces), {}});
    }

    // A copy arrives in pieces: who looks early sees half a row.
    void Copy(pipe_t pipe, uint8_t* to, const uint8_t* from, uint64_t bytes) {
        std::vector<Effect> pieces;
        const uint64_t step = bytes <= 64 ? bytes : (bytes / 3 + 31) / 32 * 32;
        for (uint64_t begin = 0; begin < bytes; begin += step) {
            const uint64_t length = begin + step < bytes ? step : bytes - begin;
            pieces.push_back([=] { std::memcpy(to + begin, from + begin, length); });
        }
        if (!pieces.empty()) Put(pipe, {Kind::EFFECT, std::move(pieces), {}});
    }

    void SetFlag(AscendC::HardEvent event, uint64_t id) {
        Put(AscendC::SourcePipe(event), {Kind::SET, {}, {event, id}});
    }

    void WaitFlag(AscendC::HardEvent event, uint64_t id) {
        const Flag flag{event, id};
        if (AscendC::TargetPipe(event) != PIPE_S) {
            Put(AscendC::TargetPipe(event), {Kind::WAIT, {}, flag});
            return;
        }
        DrainScalar();
        while (!flags_[flag]) StepOr("WaitFlag waits for a flag that nothing sets");
        flags_[flag] = false;
    }

    void Barrier(pipe_t pipe) {
        if (pipe == PIPE_ALL) {
            DrainAll();
        } else if (pipe == PIPE_S) {
            DrainScalar();
        } else {
            Put(pipe, {Kind::BARRIER, {}, {}});
        }
    }

    // The scalar unit sees its own writes.
    void DrainScalar() {
        while (!pipes_[PIPE_S].empty()) StepOr("the scalar unit is stuck");
    }

    // Waits for the other blocks, not for this block's own pipes: that is PipeBarrier<PIPE_ALL>'s work.
    void SyncAll() {
        DrainScalar();
        meeting_.Wait();
    }

    void Poll(uint32_t attempt) {
        meeting_.ThrowIfFailed();
        Step();
        Backoff(attempt);
    }

    // The end of a kernel waits for its pipes, and leaves no flag behind for the next one.
    void Finish() {
        DrainAll();
        for (const auto& [flag, set] : flags_) {
            Require(!set || flag.id >= AscendC::NUM_EVENT_IDS, "SetFlag without a WaitFlag");
        }
    }

    static constexpr bool CHECKS = true;
    void Require(bool holds, const char* rule) {
        if (!holds) throw CheckFailed(rule);
    }

private:
    enum class Kind : uint8_t { EFFECT, BARRIER, SET, WAIT };

    struct Flag {
        AscendC::HardEvent event{};
        uint64_t id = 0;
        bool operator<(const Flag& other) const { return std::tie(event, id) < std::tie(other.event, other.id); }
    };

    struct Instruction {
        Kind kind;
        std::vector<Effect> pieces;
        Flag flag;
    };

    void Put(pipe_t pipe, Instruction instruction) {
        pipes_[pipe].push_back(std::move(instruction));
        // Mostly nothing happens yet; now and then something that was given earlier does.
        if (random_() % 4 == 0) Step();
    }

    // Positions in a pipe that may go on now. The scalar unit works strictly in order; elsewhere an
    // effect may overtake another one, but not a barrier, nor a flag that is being waited for.
    void Candidates(uint32_t pipe, std::vector<std::pair<uint32_t, size_t>>& found) {
        const std::deque<Instruction>& queue = pipes_[pipe];
        for (size_t i = 0; i < queue.size(); ++i) {
            const Instruction& instruction = queue[i];
            if (instruction.kind == Kind::EFFECT) {
                found.emplace_back(pipe, i);
            } else if (instruction.kind == Kind::SET) {
                if (i == 0) found.emplace_back(pipe, i);
            } else {
                const bool passes = instruction.kind == Kind::WAIT ? flags_[instruction.flag] : i == 0;
                if (passes) found.emplace_back(pipe, i);
                return;
            }
            if (pipe == PIPE_S) return;
        }
    }

    bool Step() {
        std::vector<std::pair<uint32_t, size_t>> found;
        for (uint32_t pipe = 0; pipe < AscendC::NUM_PIPES; ++pipe) Candidates(pipe, found);
        if (found.empty()) return false;
        const auto [pipe, position] = found[random_() % found.size()];
        std::deque<Instruction>& queue = pipes_[pipe];
        Instruction& instruction = queue[position];
        if (instruction.kind == Kind::EFFECT) {
            const size_t piece = random_() % instruction.pieces.size();
            instruction.pieces[piece]();
            instruction.pieces.erase(instruction.pieces.begin() + static_cast<std::ptrdiff_t>(piece));
            if (!instruction.pieces.empty()) return true;
        } else if (instruction.kind == Kind::SET) {
            Require(!flags_[instruction.flag], "SetFlag on a flag that is still set");
            flags_[instruction.flag] = true;
        } else if (instruction.kind == Kind::WAIT) {
            flags_[instruction.flag] = false;
        }
        queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(position));
        return true;
    }

    void StepOr(const char* stuck) { Require(Step(), stuck); }

    void DrainAll() {
        for (;;) {
            size_t left = 0;
            for (const std::deque<Instruction>& queue : pipes_) left += queue.size();
            if (left == 0) return;
            StepOr("a pipe waits for a flag that nothing sets");
        }
    }

    Meeting& meeting_;
    uint8_t* ub_;
    std::mt19937_64 random_;
    std::array<std::deque<Instruction>, AscendC::NUM_PIPES> pipes_;
    std::map<Flag, bool> flags_;
};

inline thread_local Core* current_core = nullptr;

inline Core& ThisCore() { return *current_core; }

}  // namespace moe::emulation

#endif  // MOE_EMULATION_STRICT_CORE_H
