// Blocks as threads: runs n blocks at once, each on a thread of its own, and lets them meet.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "launch_settings.h"

namespace moe {

inline void CpuPause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // as in Rust's spin loops: to most cores `yield` is nothing
#endif
}

// Spin first, for waits of a microsecond; then yield, since ranks may outnumber cores; then sleep, since such a long
// wait can afford the wake-up time.
inline void Backoff(uint32_t attempt) {
    constexpr uint32_t SPINS = 200;
    constexpr uint32_t YIELDS = 20000;
    constexpr long NAP_NS = 50 * 1000;
    if (attempt < SPINS) {
        CpuPause();
    } else if (attempt < SPINS + YIELDS) {
        sched_yield();
    } else {
        const timespec nap{0, NAP_NS};
        nanosleep(&nap, nullptr);
    }
}

// Whether a wait looks at more than its flags now: not in the first attempts, so that a flag that arrives soon is seen
// without delay; then in each. On a loaded machine every attempt that lets others run takes a tenth of a second.
inline bool IsTimeToLook(uint32_t attempt) {
    constexpr uint32_t SOON = 256;
    return attempt >= SOON;
}

// The threads of one caller. Block 0 runs on the caller itself, so a single block needs no thread.
class BlockPool {
public:
    ~BlockPool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            round_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) {
            thread.join();
        }
    }

    void Run(uint32_t blocks, const std::function<void(uint32_t)>& body) {
        while (threads_.size() + 1 < blocks) {
            const auto index = static_cast<uint32_t>(threads_.size() + 1);
            threads_.emplace_back([this, index, seen = round_.load()] { Serve(index, seen); });
        }
        // Every thread of the pool takes part in every round, so that none is still reading the previous one.
        running_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
        body_ = &body;
        blocks_ = blocks;
        bool wake = false;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            round_.fetch_add(1, std::memory_order_release);
            wake = sleeping_ > 0;
        }
        if (wake) {
            wake_.notify_all();
        }
        body(0);
        for (uint32_t attempt = 0; running_.load(std::memory_order_acquire) != 0; ++attempt) {
            if (IsTimeToLook(attempt)) LookUp();
            Backoff(attempt);
        }
    }

private:
    // Other blocks may be waiting for peers after this thread's own block has ended.
    static void LookUp() {
        if (WaitControl* const control = ControlOfThread()) LookUpFromWait(*control);
    }

    void Serve(uint32_t index, uint64_t seen) {
        for (;;) {
            AwaitRound(seen);
            seen = round_.load(std::memory_order_acquire);
            if (stopping_) {
                return;
            }
            if (index < blocks_) {
                (*body_)(index);
            }
            running_.fetch_sub(1, std::memory_order_release);
        }
    }

    // The next launch of an operator follows within microseconds, the next operator much later.
    void AwaitRound(uint64_t seen) {
        constexpr uint32_t ATTEMPTS_AWAKE = 400;
        for (uint32_t attempt = 0; attempt < ATTEMPTS_AWAKE; ++attempt) {
            if (round_.load(std::memory_order_acquire) != seen) {
                return;
            }
            Backoff(attempt);
        }
        std::unique_lock<std::mutex> lock(mutex_);
        ++sleeping_;
        wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
        --sleeping_;
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
    const std::function<void(uint32_t)>* body_ = nullptr;
    std::atomic<uint64_t> round_{0};
    std::atomic<uint32_t> running_{0};
    uint32_t blocks_ = 0;
    uint32_t sleeping_ = 0;
    bool stopping_ = false;
};

// The calling thread's pool, for all its launches. It is not in the template below, where every kernel would get its
// own threads, and because a library has little room in the static thread-local block.
inline std::unique_ptr<BlockPool>& ThreadPool() {
    thread_local std::unique_ptr<BlockPool> pool;
    return pool;
}

// In a forked process its threads do not exist, and cannot be joined.
inline void ForgetThreadPool() { (void)ThreadPool().release(); }

// Runs body(0) .. body(blocks - 1) at the same time and returns when all have ended.
template <typename Body>
void ParallelFor(uint32_t blocks, Body&& body) {
    if (blocks == 1) {
        body(0U);
        return;
    }
    std::unique_ptr<BlockPool>& pool = ThreadPool();
    if (!pool) pool = std::make_unique<BlockPool>();
    pool->Run(blocks, body);
}

}  // namespace moe
