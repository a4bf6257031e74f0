// The emulation's headers on Relacy's atomics, which take any order that C++ allows of loads, stores and fences, and
// find races of `rl::var`, lost wake-ups and deadlocks. What follows this are the headers themselves, not copies.
//
// Everything of the standard library comes first: Relacy gives some of its names, as macros, another meaning.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <relacy/relacy.hpp>

namespace moe {

// Relacy can print what an atomic holds.
enum class Sleep : uint32_t;
inline std::ostream& operator<<(std::ostream& to, Sleep depth) { return to << static_cast<uint32_t>(depth); }

}  // namespace moe

namespace checked {

// Whose operations may leave out their order, as those of std::atomic.
template <typename T>
class atomic : public rl::atomic<T> {
    using Base = rl::atomic<T>;

public:
    using Base::Base;

    using Base::compare_exchange_weak;
    using Base::exchange;
    using Base::fetch_add;
    using Base::load;
    using Base::store;

    T load() const { return Base::load(rl::mo_seq_cst, $); }
    void store(T value) { Base::store(value, rl::mo_seq_cst, $); }
    T exchange(T value) { return Base::exchange(value, rl::mo_seq_cst, $); }
    T fetch_add(T value) { return Base::fetch_add(value, rl::mo_seq_cst, $); }
    bool compare_exchange_weak(T& expected, T value) {
        return Base::compare_exchange_weak(expected, value, rl::mo_seq_cst, $);
    }
};

template <typename T>
using Word = atomic<T>;

// futex(2), on a word that is an atomic here. It compares and sleeps in one step, and nobody sleeps for a time only: a
// wake-up that gets lost is a deadlock.
template <typename Word>
long Futex(Word* word, int operation, uint32_t value) {
    auto* const found = reinterpret_cast<atomic<uint32_t>*>(word);
    rl::context& context = rl::ctx();
    rl::atomic_thread_fence(rl::mo_seq_cst, $);
    if ((operation & FUTEX_CMD_MASK) == FUTEX_WAKE) {
        found->wake(context, static_cast<rl::thread_id_t>(value < 16 ? value : 16), $);
    } else if (found->debug_value() == value) {
        found->wait(context, false, false, $);
    }
    return 0;
}

// Runs a suite's iterations; 0 if all of them end well.
template <typename Suite>
int Check(rl::iteration_t iterations) {
    rl::test_params params;
    params.search_type = rl::random_scheduler_type;
    params.iteration_count = iterations;
    params.execution_depth_limit = 20000;
    return rl::simulate<Suite>(params) ? 0 : 1;
}

}  // namespace checked

namespace std {
using rl::atomic_thread_fence;
using rl::mo_acq_rel;
using rl::mo_acquire;
using rl::mo_relaxed;
using rl::mo_release;
using rl::mo_seq_cst;
template <typename T>
using checked_atomic = checked::atomic<T>;
}  // namespace std

// An atomic of Relacy's is larger than its word.
#define static_assert(...)
#define atomic checked_atomic
#define syscall(number, word, operation, value, ...) checked::Futex(word, operation, static_cast<uint32_t>(value))
#define sched_yield() rl::yield(1, $)
