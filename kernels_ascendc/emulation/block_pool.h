// Blocks as threads: runs n blocks at once, each on a thread of its own, and lets them meet.
#ifndef MOE_EMULATION_BLOCK_POOL_H
#define MOE_EMULATION_BLOCK_POOL_H

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace moe {

inline void CpuPause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// Spin first, for what comes within a microsecond; then let others run, since ranks may outnumber cores.
inline void Backoff(uint32_t attempt) {
    constexpr uint32_t SPINS = 200;
    if (attempt < SPINS) {
        CpuPause();
    } else {
        sched_yield();
    }
}

// The threads of one caller. Block 0 runs on the caller itself, so one block costs no thread.
class BlockPool {
public:
    ~BlockPool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) {
            thread.join();
        }
    }

    void Run(uint32_t blocks, const std::function<void(uint32_t)>& body) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (threads_.size() + 1 < blocks) {
                const auto index = static_cast<uint32_t>(threads_.size() + 1);
                threads_.emplace_back([this, index, seen = round_] { Serve(index, seen); });
            }
            body_ = &body;
            blocks_ = blocks;
            running_.store(blocks - 1, std::memory_order_relaxed);
            ++round_;
        }
        wake_.notify_all();
        body(0);
        for (uint32_t attempt = 0; running_.load(std::memory_order_acquire) != 0; ++attempt) {
            Backoff(attempt);
        }
    }

private:
    void Serve(uint32_t index, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
            if (stopping_) {
                return;
            }
            seen = round_;
            if (index >= blocks_) {
                continue;
            }
            const std::function<void(uint32_t)>* body = body_;
            lock.unlock();
            (*body)(index);
            running_.fetch_sub(1, std::memory_order_release);
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
    const std::function<void(uint32_t)>* body_ = nullptr;
    std::atomic<uint32_t> running_{0};
    uint64_t round_ = 0;
    uint32_t blocks_ = 0;
    bool stopping_ = false;
};

// Runs body(0) .. body(blocks - 1) at the same time and returns when all have ended.
template <typename Body>
void ParallelFor(uint32_t blocks, Body&& body) {
    if (blocks == 1) {
        body(0U);
        return;
    }
    thread_local BlockPool pool;
    pool.Run(blocks, body);
}

}  // namespace moe

#endif  // MOE_EMULATION_BLOCK_POOL_H
