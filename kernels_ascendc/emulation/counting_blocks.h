// Launches of the counting build: all blocks on the caller's thread, each in turn up to where it looks for others.
#pragma once

#include <ucontext.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "counting_core.h"

namespace moe::emulation {

// Where this thread's launches run.
inline CountedGroup*& ThreadGroup() {
    thread_local CountedGroup* group = nullptr;
    return group;
}

// Runs functions by turns.
class Turns {
public:
    using Body = std::function<void(uint32_t index)>;

    Turns(uint32_t count, const Body& body) : body_(body), count_(count), turns_(count) {}

    // Each goes on once, unless it has ended. Whether any is left.
    bool Round() {
        Turns* const outer = Running();
        Running() = this;
        uint32_t left = 0;
        for (now_ = 0; now_ < count_; ++now_) {
            Turn& turn = turns_[now_];
            if (turn.has_ended) continue;
            if (turn.stack == nullptr) Begin(turn);
            swapcontext(&caller_, &turn.context);
            if (turn.has_ended) {
                Spare().push_back(std::move(turn.stack));
            } else {
                ++left;
            }
        }
        Running() = outer;
        return left > 0;
    }

    // From inside of one: the next one's turn.
    static void Yield() {
        Turns& turns = *Running();
        swapcontext(&turns.turns_[turns.now_].context, &turns.caller_);
    }

private:
    static constexpr size_t STACK_BYTES = 256 * 1024;
    using Stack = std::unique_ptr<uint8_t[]>;

    struct Turn {
        ucontext_t context;
        Stack stack;
        bool has_ended = false;
    };

    static Turns*& Running() {
        thread_local Turns* running = nullptr;
        return running;
    }

    static std::vector<Stack>& Spare() {
        thread_local std::vector<Stack> spare;
        return spare;
    }

    void Begin(Turn& turn) {
        if (Spare().empty()) {
            turn.stack.reset(new uint8_t[STACK_BYTES]);
        } else {
            turn.stack = std::move(Spare().back());
            Spare().pop_back();
        }
        getcontext(&turn.context);
        turn.context.uc_stack.ss_sp = turn.stack.get();
        turn.context.uc_stack.ss_size = STACK_BYTES;
        turn.context.uc_link = &caller_;
        makecontext(&turn.context, &Turns::Run, 0);
    }

    static void Run() {
        Turns& turns = *Running();
        const uint32_t index = turns.now_;
        turns.body_(index);
        turns.turns_[index].has_ended = true;
    }

    const Body& body_;
    const uint32_t count_;
    uint32_t now_ = 0;
    ucontext_t caller_{};
    std::vector<Turn> turns_;
};

// The UB of each block, of the thread that runs them.
inline uint8_t* UbOf(uint32_t block) {
    thread_local std::vector<std::unique_ptr<UbMemory>> memory;
    while (memory.size() <= block) memory.emplace_back(new UbMemory);
    return memory[block]->bytes;
}

// Runs `kernel()` on every block. Returns 0, or 1 when a check failed (`LastError` says which).
template <typename Kernel>
int RunBlocks(uint32_t blocks, Kernel&& kernel, const void* = nullptr) {
    CountedGroup* const group = ThreadGroup();
    if (group == nullptr) {
        LastError() = "a counted launch is a rank's: moe_counting_begin comes first";
        return 1;
    }
    if (!HasCoreForEach(blocks)) return 1;
    group->awaited.clear();
    group->waits = false;
    group->logs.resize(blocks);
    CountedLaunch launch{*group, &Turns::Yield};
    std::string why;
    const Turns::Body body = [&](uint32_t block) {
        group->logs[block].clear();
        Core core(block, blocks, launch, UbOf(block));
        try {
            current_core = &core;
            kernel();
            core.Finish();
        } catch (const HasEnded&) {
            current_core = nullptr;  // it goes no further
        } catch (const std::exception& error) {
            if (why.empty()) why = "block " + std::to_string(block) + ": " + error.what();
        }
        ++launch.changes;
    };
    Core* const outer = current_core;
    Turns turns(blocks, body);
    // Before each look others go on, so that in some rounds nothing but looks begins.
    constexpr uint32_t MOST_IDLE = 8;
    uint32_t idle = 0;
    uint64_t before = 0;
    while (turns.Round()) {
        idle = launch.changes == before ? idle + 1 : 0;
        before = launch.changes;
        const bool is_stuck = idle > MOST_IDLE || launch.is_over;
        if (is_stuck && why.empty() && group->mode == Mode::LOGGED) why = "its blocks wait for what nobody sends";
        launch.is_over = launch.is_over || is_stuck || !why.empty();
    }
    current_core = outer;
    if (why.empty()) return 0;
    LastError() = why;
    return 1;
}

}  // namespace moe::emulation
