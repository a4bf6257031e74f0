// A block in the strict build. Each pipe takes its instructions in order; their effects happen late, in pieces, and
// in any order that flags and barriers allow. A seed decides which.
#pragma once

#include <time.h>

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "hazards.h"
#include "launch_settings.h"
#include "meeting.h"
#include "memory.h"
#include "nic.h"
#include "random.h"
#include "scalar_cache.h"
#include "trace.h"
#include "types.h"

namespace moe::emulation {

class Core : public CoreOfBlock {
public:
    using Effect = std::function<void()>;

    Core(uint32_t index, uint32_t count, Meeting& meeting, uint8_t* ub, Nic* nic, uint64_t seed)
        : CoreOfBlock{index, count}, meeting_(meeting), ub_(ub), nic_(nic), random_(seed * AscendC::UB_BYTES + index) {
        // UB is undefined at the start: filled with garbage, so that no kernel relies on it.
        for (uint32_t at = 0; at < AscendC::UB_BYTES; at += sizeof(uint64_t)) {
            const uint64_t garbage = random_();
            std::memcpy(ub_ + at, &garbage, sizeof(garbage));
        }
        constexpr pipe_t SLOW[] = {PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_MTE3, PIPE_MTE3, PIPE_ALL, PIPE_ALL};
        slow_pipe_ = SLOW[random_() % (sizeof(SLOW) / sizeof(SLOW[0]))];
        newest_first_ = random_.OneIn(2);
        hazards_.Begin();
        // Blocks of a launch do not start together.
        if (blocks > 1 && random_.OneIn(4)) Stall();
    }

    uint8_t* Ub(UbAddress address) { return ub_ + address.offset; }

    void Issue(pipe_t pipe, Effect effect) { Put(pipe, {Kind::EFFECT, {{std::move(effect), {}}}, {}, Stalls::NEVER}); }

    // What follows on this pipe, up to the next call, is of one instruction.
    void BeginInstruction(pipe_t pipe, bool = false) { hazards_.BeginInstruction(pipe); }

    void AccessUb(pipe_t pipe, UbAddress at, uint64_t bytes, bool writes) {
        hazards_.AccessUb(pipe, at.offset, bytes, writes);
    }

    void CopyIn(UbAddress to, const uint8_t* from, uint64_t bytes) {
        hazards_.AccessGm(PIPE_MTE2, from, bytes, false);
        AccessUb(PIPE_MTE2, to, bytes, true);
        Copy(PIPE_MTE2, ub_ + to.offset, from, bytes);
    }

    void CopyOut(uint8_t* to, UbAddress from, uint64_t bytes) {
        AccessUb(PIPE_MTE3, from, bytes, false);
        hazards_.AccessGm(PIPE_MTE3, to, bytes, true);
        Copy(PIPE_MTE3, to, ub_ + from.offset, bytes);
    }

    void Discard(UbAddress, uint32_t) {}

    // Blocks arrive in any order, each with its data before its flag.
    void CopyBlocksOut(uint8_t* to, UbAddress from, uint32_t blocks, FlaggedBlock block) {
        AccessUb(PIPE_MTE3, from, uint64_t{blocks} * block.bytes, false);
        hazards_.AccessGm(PIPE_MTE3, to, uint64_t{blocks} * block.bytes, true);
        const uint8_t* source = ub_ + from.offset;
        std::vector<Piece> pieces;
        for (uint32_t b = 0; b < blocks; ++b, to += block.bytes, source += block.bytes) {
            pieces.push_back(
                {[=] { CopyBytes(to, source, block.data_bytes); },
                 [=] { CopyBytes(to + block.data_bytes, source + block.data_bytes, block.bytes - block.data_bytes); }});
        }
        Put(PIPE_MTE3, {Kind::EFFECT, std::move(pieces), {}, Stalls::BETWEEN_PIECES});
    }

    uint64_t PieceBytes(uint64_t bytes, uint32_t) const { return bytes; }

    // The bytes that a load leaves behind its last ones are undefined.
    void Spoil(UbAddress at, uint32_t bytes) {
        if (bytes == 0) return;
        AccessUb(PIPE_MTE2, at, bytes, true);
        uint8_t* to = ub_ + at.offset;
        Put(PIPE_MTE2, {Kind::EFFECT, {{[=] { std::memset(to, 0x5A, bytes); }, {}}}, {}, Stalls::NEVER});
    }

    void SetFlag(AscendC::HardEvent event, uint64_t id) {
        hazards_.SetFlag(event, id);
        Put(AscendC::SourcePipe(event), {Kind::SET, {}, {event, id}, Stalls::NEVER});
    }

    void WaitFlag(AscendC::HardEvent event, uint64_t id) {
        const Flag flag{event, id};
        hazards_.WaitFlag(event, id);
        if (AscendC::TargetPipe(event) != PIPE_S) {
            Put(AscendC::TargetPipe(event), {Kind::WAIT, {}, flag, Stalls::NEVER});
            return;
        }
        DrainScalar();
        while (!flags_[flag]) StepOr("WaitFlag waits for a flag that nothing sets");
        flags_[flag] = false;
    }

    void Barrier(pipe_t pipe) {
        hazards_.Barrier(pipe);
        if (pipe == PIPE_ALL) {
            DrainAll();
        } else if (pipe == PIPE_S) {
            DrainScalar();
        } else {
            Put(pipe, {Kind::BARRIER, {}, {}, Stalls::NEVER});
        }
    }

    // The scalar unit sees its own writes.
    void DrainScalar() {
        while (!pipes_[PIPE_S].empty()) StepOr("the scalar unit is stuck");
    }

    // None of these waits for the scalar unit's writes to UB.
    template <typename T>
    T ScalarLoad(const T* from) {
        hazards_.BeginInstruction(PIPE_S);
        hazards_.AccessGm(PIPE_S, from, sizeof(T), false);
        return cache_.Load(from);
    }

    template <typename T>
    void ScalarStore(T* to, T value) {
        hazards_.BeginInstruction(PIPE_S);
        hazards_.AccessGm(PIPE_S, to, sizeof(T), true);
        cache_.Store(to, value);
    }

    void CleanAndInvalidate(const void* address) { cache_.CleanAndInvalidate(address); }
    void CleanAndInvalidateAll() { cache_.CleanAndInvalidateAll(); }

    // Waits for the other blocks, not for this block's own pipes: that is PipeBarrier<PIPE_ALL>'s work.
    void SyncAll() {
        DrainScalar();
        meeting_.Wait();
    }

    void Notify(const void* flags, uint64_t) { hazards_.RaiseFlag(flags); }

    // Copies that are under way may be overtaken: nothing that this core still writes is posted, and what others do may
    // be read as it is now.
    bool Post(const PostItem& item) {
        hazards_.BeginInstruction(PIPE_S);
        hazards_.AccessGm(PIPE_S, reinterpret_cast<const void*>(item.local), item.bytes, false);
        return PostTo(nic_, meeting_, block, item, random_.OneIn(2));
    }

    void Poll(uint32_t attempt, const void*, uint64_t, Awaited) {
        meeting_.ThrowIfFailed();
        Step();
        Backoff(attempt);
    }
    void BeginLook() {}
    void BeginPhase(uint32_t) {}
    void Mark(uint32_t) {}
    bool IsStopped() const { return false; }

    // A kernel must end with nothing in flight: the barrier at TPipe's end does not exist in a super kernel, where the
    // next kernel begins at once. It must not leave flags set for that one either, nor dirty lines in its cache.
    void Finish() {
        for (const std::deque<Instruction>& queue : pipes_) {
            for (const Instruction& instruction : queue) {
                Require(instruction.kind != Kind::EFFECT,
                        "a kernel ended before its copies: PipeBarrier<PIPE_ALL> comes last");
            }
        }
        DrainAll();
        Require(!cache_.HasDirty(), "SetValue of GM without DataCacheCleanAndInvalid: it may stay in the core's cache");
        for (const auto& [flag, set] : flags_) {
            Require(!set || flag.id >= AscendC::NUM_EVENT_IDS, "SetFlag without a WaitFlag");
        }
    }

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

    // A part of an instruction, and an effect that must come after it.
    struct Piece {
        Effect effect;
        Effect then;
    };

    // Where a block may pause for long: when a copy as small as a flag has overtaken another one; when a row has
    // arrived in part.
    enum class Stalls : uint8_t { NEVER, WHEN_AHEAD, BETWEEN_PIECES };

    struct Instruction {
        Kind kind;
        std::vector<Piece> pieces;
        Flag flag;
        Stalls stalls;
    };

    using Candidate = std::pair<uint32_t, size_t>;  // pipe, position in it

    // A copy arrives in pieces, in any order: a reader that is too early sees half a row. It also reads its source
    // late: reusing the source too early sends other data.
    void Copy(pipe_t pipe, uint8_t* to, const uint8_t* from, uint64_t bytes) {
        const uint64_t both = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
        Require(both >> NicMemory::TOKEN_SHIFT == 0, "a copy to or from a rank that only a queue reaches");
        std::vector<Piece> pieces;
        for (uint64_t begin = 0; begin < bytes;) {
            const uint64_t left = bytes - begin;
            const uint64_t wanted = (random_() % (bytes / 2 / AscendC::BLOCK_BYTES + 1) + 1) * AscendC::BLOCK_BYTES;
            const uint64_t length = wanted < left ? wanted : left;
            pieces.push_back({[=] { CopyBytes(to + begin, from + begin, length); }, {}});
            begin += length;
        }
        const bool is_small = pipe == PIPE_MTE3 && bytes <= 2ULL * AscendC::BLOCK_BYTES;
        const Stalls stalls = is_small ? Stalls::WHEN_AHEAD : Stalls::BETWEEN_PIECES;
        if (!pieces.empty()) Put(pipe, {Kind::EFFECT, std::move(pieces), {}, stalls});
    }

    void Put(pipe_t pipe, Instruction instruction) {
        pipes_[pipe].push_back(std::move(instruction));
        // Usually nothing takes effect yet; sometimes an earlier instruction does.
        if (random_.OneIn(4)) Step();
    }

    // Positions in a pipe that may go on now. The scalar unit works strictly in order; elsewhere an
    // effect may overtake another one, but not a barrier, nor a flag that is being waited for. A flag
    // that is still set is set again only after the wait for the first time has passed.
    void Candidates(uint32_t pipe, std::vector<Candidate>& found) {
        const std::deque<Instruction>& queue = pipes_[pipe];
        for (size_t i = 0; i < queue.size(); ++i) {
            const Instruction& instruction = queue[i];
            if (instruction.kind == Kind::EFFECT) {
                found.emplace_back(pipe, i);
            } else if (instruction.kind == Kind::SET) {
                if (i == 0 && !flags_[instruction.flag]) found.emplace_back(pipe, i);
            } else {
                const bool passes = instruction.kind == Kind::WAIT ? flags_[instruction.flag] : i == 0;
                if (passes) found.emplace_back(pipe, i);
                return;
            }
            if (pipe == PIPE_S) return;
        }
    }

    // Chance alone rarely finds the one bad order. So in some launches one pipe lags behind all others, and in half of
    // them the newest instruction comes first.
    Candidate Choose(const std::vector<Candidate>& found) {
        const Candidate any = found[random_() % found.size()];
        if (any.first == slow_pipe_ && !random_.OneIn(16)) {
            for (const Candidate& other : found) {
                if (other.first != slow_pipe_) return other;
            }
        }
        if (!newest_first_) return any;
        Candidate newest = any;
        for (const Candidate& other : found) {
            if (other.first == any.first) newest = other;
        }
        return newest;
    }

    bool Step() {
        if (random_.OneIn(8)) cache_.WriteBackOne(random_());
        std::vector<Candidate> found;
        for (uint32_t pipe = 0; pipe < AscendC::NUM_PIPES; ++pipe) Candidates(pipe, found);
        if (found.empty()) return false;
        const auto [pipe, position] = Choose(found);
        std::deque<Instruction>& queue = pipes_[pipe];
        Instruction& instruction = queue[position];
        if (instruction.kind == Kind::EFFECT) {
            Run(instruction);
            MaybeStall(instruction, pipe, position);
            if (!instruction.pieces.empty()) return true;
        } else if (instruction.kind == Kind::SET) {
            flags_[instruction.flag] = true;
        } else if (instruction.kind == Kind::WAIT) {
            flags_[instruction.flag] = false;
        }
        queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(position));
        return true;
    }

    // One of its pieces, and no more than one step of it.
    void Run(Instruction& instruction) {
        const size_t index = random_() % instruction.pieces.size();
        Piece& piece = instruction.pieces[index];
        piece.effect();
        if (piece.then) {
            piece.effect = std::exchange(piece.then, {});
        } else {
            instruction.pieces.erase(instruction.pieces.begin() + static_cast<std::ptrdiff_t>(index));
        }
    }

    void MaybeStall(const Instruction& instruction, uint32_t pipe, size_t position) {
        if (instruction.stalls == Stalls::WHEN_AHEAD && position > 0 && stalls_left_ > 0 && random_.OneIn(4)) {
            --stalls_left_;
            Stall();
        }
        bool& may_stall = pipe == PIPE_MTE2 ? load_stall_left_ : store_stall_left_;
        const bool is_partial = instruction.stalls == Stalls::BETWEEN_PIECES && !instruction.pieces.empty();
        if (is_partial && may_stall && random_.OneIn(8)) {
            may_stall = false;
            Stall();
        }
    }

    // Long enough for peers to act on what is already visible, while the rest is still in flight.
    static void Stall() {
        constexpr long STALL_NS = 1500 * 1000;
        const timespec stall{0, STALL_NS};
        nanosleep(&stall, nullptr);
    }

    void StepOr(const char* stuck) { Require(Step(), stuck); }

    void DrainAll() {
        for (;;) {
            size_t left = 0;
            for (const std::deque<Instruction>& queue : pipes_) left += queue.size();
            if (left == 0) return;
            StepOr("a pipe waits for a flag that nothing sets, or sets one that nothing waits for");
        }
    }

    Meeting& meeting_;
    Hazards& hazards_ = ThreadHazards();
    uint8_t* ub_;
    Nic* const nic_;
    Random random_;
    uint32_t slow_pipe_ = PIPE_ALL;
    bool newest_first_ = false;
    uint32_t stalls_left_ = 3;
    bool load_stall_left_ = true;
    bool store_stall_left_ = true;
    std::array<std::deque<Instruction>, AscendC::NUM_PIPES> pipes_;
    std::map<Flag, bool> flags_;
    ScalarCache cache_;
};

inline thread_local Core* current_core = nullptr;

inline Core& ThisCore() { return *current_core; }

}  // namespace moe::emulation
