// A second thread for work that runs in parallel to its owner's.
#ifndef MOE_HOST_COMPANION_H
#define MOE_HOST_COMPANION_H

#include <sched.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace moe {

class Companion {
public:
    ~Companion() {
        if (!thread_.joinable()) return;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    // `work` must live until `Wait` has returned.
    void Start(const std::function<void()>& work) {
        if (!thread_.joinable()) thread_ = std::thread([this] { Serve(); });
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
        }
        changed_.notify_all();
    }

    void Wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return work_ == nullptr; });
    }

private:
    void Serve() {
        // Where both share a core, who communicates sleeps in between and must be let in at once: the scheduler lets
        // what wakes preempt a thread of this class. A batch thread would end its time slice first, and the wire wait.
        const sched_param none{};
        sched_setscheduler(0, SCHED_IDLE, &none);
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return work_ != nullptr || stopping_; });
            if (work_ == nullptr) return;
            lock.unlock();
            (*work_)();
            lock.lock();
            work_ = nullptr;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::thread thread_;
    const std::function<void()>* work_ = nullptr;
    bool stopping_ = false;
};

}  // namespace moe

#endif  // MOE_HOST_COMPANION_H
