// The clock of one vector core: four pipes that work in order and side by side.
//
// S runs control flow and scalar instructions in the order of the program, and hands the others' instructions to their
// queues. A pipe takes its queue in order. What an instruction takes:
//
// - a copy occupies MTE2 or MTE3 for its bytes, and is complete a latency later; the next copy may begin meanwhile;
// - a vector instruction occupies V;
// - a flag that is set is seen by the other pipe a while after all that was before it on its own pipe is complete; a
//   pipe that waits for a flag stands still until then;
// - a barrier makes a pipe wait until all that was before it is complete; one of all pipes makes S wait too.
//
// An instruction leaves its queue when it begins, and S waits while a queue is full. Every time is the end of a chain
// of spans, of which each began when the one before it ended, and knows what those were spent on. The chain that ends
// last is the critical path. `autotune/model/kernel_costs/clock.py` calls it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "meeting.h"
#include "types.h"

namespace moe::emulation {

constexpr uint32_t CLOCKED_PIPES = 4;  // S, V, MTE2, MTE3, as `pipe_t` has them

// What time goes to.
enum TimePart : uint32_t { SUM, FLAGS, STORES, VECTORS, BYTES, LOADS, GLOBALS, SCALARS, TIME_PARTS };

// Parts of a cycle since the begin, in all and by what they were spent on. The later one is larger; of two that are as
// late their parts decide, always in the same way.
struct Time : std::array<int64_t, TIME_PARTS> {
    Time After(TimePart part, int64_t by) const {
        Time time = *this;
        time[SUM] += by;
        time[part] += by;
        return time;
    }
};

enum class Clocked : uint8_t {
    SCALAR,  // work of S
    GLOBAL,  // the same, on global memory
    COPY,
    VECTOR,
    SET,   // a flag from `pipe` to `other`
    WAIT,  // of `pipe` for a flag from `other`
    BARRIER,
};

// Bits of `ClockedOp::noted` and values of `ClockEvent::what`.
constexpr uint8_t NOTED_BEFORE = 1;  // when all that was issued before is complete
constexpr uint8_t NOTED_AFTER = 2;   // when S goes on
constexpr uint8_t NOTED_SPAN = 4;    // when it begins and ends on its pipe

struct ClockedOp {
    Clocked kind;
    uint8_t pipe;
    uint8_t other;
    uint8_t noted;
    uint32_t event;   // of a flag
    int64_t before;   // work of S before it
    int64_t ticks;    // that it occupies its pipe, or that a flag takes to be seen
    int64_t latency;  // until it is complete
};

struct ClockEvent {
    uint32_t op;
    uint32_t what;
    int64_t begin;
    int64_t end;
};

struct ClockSettings {
    int64_t issue;   // work of S for an instruction of another pipe
    int64_t scalar;  // for one of its own
    uint32_t queue_entries;
    uint32_t with_spans;
};

// Why a pipe stands still; of `FULL` and `FLAG` the one of a pipe is so many further on.
enum Cause : uint32_t { EMPTY, BARRIER, FULL, FLAG = FULL + CLOCKED_PIPES, CAUSES = FLAG + CLOCKED_PIPES };

// Of one core.
struct ClockResult {
    Time end;
    int64_t busy[CLOCKED_PIPES];
    int64_t free[CLOCKED_PIPES];  // when each pipe has begun and occupied its last one
    int64_t stalls[CLOCKED_PIPES][CAUSES];
};

class CoreClock {
public:
    CoreClock(const ClockSettings& settings, ClockEvent* events, ClockResult& result)
        : settings_(settings), events_(events), result_(result) {}

    // Runs operations, whose numbers begin at `first`. Where the next event goes.
    ClockEvent* Run(const ClockedOp* ops, uint64_t first, uint64_t end) {
        for (uint64_t number = first; number < end; ++number) {
            const ClockedOp& op = ops[number];
            if ((op.noted & NOTED_BEFORE) != 0) Note(number, NOTED_BEFORE, End(), End());
            if (op.before != 0) Work(SCALARS, op.before);
            const auto [begin, done] = Do(op);
            if (settings_.with_spans != 0) Note(number, NOTED_SPAN, begin, done);
            if ((op.noted & NOTED_AFTER) != 0) Note(number, NOTED_AFTER, Scalar().free, Scalar().free);
        }
        // Numbers above are a queue's, which may end set.
        constexpr uint32_t OWN_EVENTS = 8;
        for (const auto& flag : flags_) {
            if (flag.first.event < OWN_EVENTS)
                throw CheckFailed("the flag " + flag.first.Name() + " is still set at the end");
        }
        result_.end = End();
        for (uint32_t pipe = 0; pipe < CLOCKED_PIPES; ++pipe) result_.free[pipe] = units_[pipe].free[SUM];
        return events_;
    }

private:
    struct Unit {
        std::deque<Time> begun;  // the last instructions, as many as its queue has entries
        Time free{};             // when it can begin with the next one
        Time done{};             // when all that it has begun is complete
    };

    struct Flag {
        uint8_t from;
        uint8_t to;
        uint32_t event;

        bool operator==(const Flag& other) const {
            return from == other.from && to == other.to && event == other.event;
        }

        std::string Name() const {
            static const char* const NAMES[] = {"S", "V", "MTE2", "MTE3"};
            return std::string(NAMES[from]) + " -> " + NAMES[to] + " " + std::to_string(event);
        }
    };

    using Span = std::pair<Time, Time>;

    Span Do(const ClockedOp& op) {
        const bool is_of_all = op.kind == Clocked::BARRIER && op.pipe == PIPE_ALL;
        if ((op.pipe >= CLOCKED_PIPES && !is_of_all) || op.other >= CLOCKED_PIPES)
            throw CheckFailed("an instruction of a pipe that there is not");
        switch (op.kind) {
            case Clocked::SCALAR: return Work(SCALARS, op.ticks);
            case Clocked::GLOBAL: return Work(GLOBALS, op.ticks);
            case Clocked::COPY: return Occupy(op, BYTES, op.pipe == PIPE_MTE2 ? LOADS : STORES);
            case Clocked::VECTOR: return Occupy(op, VECTORS, VECTORS);
            case Clocked::SET:
                Take(op.pipe);
                Set({op.pipe, op.other, op.event}, units_[op.pipe].done.After(FLAGS, op.ticks));
                break;
            case Clocked::WAIT:
                Take(op.pipe);
                Stall(op.pipe, FLAG + op.other, Taken({op.other, op.pipe, op.event}));
                break;
            case Clocked::BARRIER: {
                const uint32_t pipe = is_of_all ? uint32_t{PIPE_S} : op.pipe;
                Take(pipe);
                Stall(pipe, BARRIER, is_of_all ? End() : units_[pipe].done);
                break;
            }
        }
        return {};
    }

    Unit& Scalar() { return units_[PIPE_S]; }

    Time End() const {
        Time end{};
        for (const Unit& unit : units_) end = std::max(end, unit.done);
        return end;
    }

    // A pipe stands still until then, if that is yet to come.
    void Stall(uint32_t pipe, uint32_t cause, const Time& until) {
        Unit& unit = units_[pipe];
        if (!(unit.free < until)) return;
        result_.stalls[pipe][cause] += until[SUM] - unit.free[SUM];
        unit.free = until;
        unit.done = std::max(unit.done, until);
    }

    Span Work(TimePart part, int64_t by) {
        Unit& unit = Scalar();
        const Time begin = unit.free;
        result_.busy[PIPE_S] += by;
        unit.done = unit.free = begin.After(part, by);
        return {begin, unit.free};
    }

    // S hands an instruction to a pipe's queue. When that pipe has it in front of itself: S is ready, and the pipe has
    // done what was before it.
    Time Issue(uint32_t pipe) {
        Unit& unit = units_[pipe];
        if (!unit.begun.empty() && unit.begun.size() == settings_.queue_entries) {
            Stall(PIPE_S, FULL + pipe, unit.begun.front());
            unit.begun.pop_front();
        }
        Work(SCALARS, settings_.issue);
        Stall(pipe, EMPTY, Scalar().free);
        unit.begun.push_back(unit.free);
        return unit.free;
    }

    // A flag or a barrier comes in front of a pipe.
    void Take(uint32_t pipe) {
        if (pipe == PIPE_S) {
            Work(SCALARS, settings_.scalar);
        } else {
            Issue(pipe);
        }
    }

    Span Occupy(const ClockedOp& op, TimePart part, TimePart latency) {
        const Time begin = Issue(op.pipe);
        Unit& unit = units_[op.pipe];
        unit.free = begin.After(part, op.ticks);
        unit.done = unit.free.After(latency, op.latency);
        result_.busy[op.pipe] += op.ticks;
        return {begin, unit.free};
    }

    void Set(const Flag& flag, const Time& seen) {
        for (const auto& known : flags_) {
            if (known.first == flag)
                throw CheckFailed("the flag " + flag.Name() + " is set again before it is waited for");
        }
        flags_.emplace_back(flag, seen);
    }

    Time Taken(const Flag& flag) {
        for (auto& known : flags_) {
            if (!(known.first == flag)) continue;
            const Time seen = known.second;
            known = flags_.back();
            flags_.pop_back();
            return seen;
        }
        throw CheckFailed("the flag " + flag.Name() + " is waited for before it is set");
    }

    void Note(uint64_t number, uint8_t what, const Time& begin, const Time& end) {
        *events_++ = {static_cast<uint32_t>(number), what, begin[SUM], end[SUM]};
    }

    const ClockSettings settings_;
    ClockEvent* events_;
    ClockResult& result_;
    std::array<Unit, CLOCKED_PIPES> units_{};
    std::vector<std::pair<Flag, Time>> flags_;  // that are set, few at a time
};

}  // namespace moe::emulation
