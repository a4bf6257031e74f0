// Times the ways to copy a row, so that a machine can take its fastest (moe_triton/backends/cpu/row_copies.py).
#include "row_copies.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <exception>
#include <iterator>
#include <thread>
#include <vector>

#include "block_pool.h"

namespace {

using Clock = std::chrono::steady_clock;
using moe::emulation::NamedRowCopy;
using moe::emulation::ROW_COPIES;
using moe::emulation::RowCopy;

constexpr uint64_t NUM_COPIES = std::size(ROW_COPIES);
constexpr uint64_t ROW_BYTES = 14336;  // a hidden size of 7168 in bf16
constexpr uint64_t PLACES = 8;         // of each row

// What this thread has had of its core. Where others use the machine, the rest is waiting for a turn, which made one of
// two equal ways look five times as fast as the other.
double CoreSeconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

class Meeting {
public:
    explicit Meeting(uint32_t threads) : threads_(threads) {}

    void Wait(uint32_t& number) {
        ++number;
        arrived_.fetch_add(1);
        for (uint32_t attempt = 0; arrived_.load() < number * threads_; ++attempt) moe::Backoff(attempt);
    }

private:
    const uint32_t threads_;
    std::atomic<uint32_t> arrived_{0};
};

// What a dispatch does to memory: each thread copies every one of its rows to several places of the next thread's
// memory, which was in use there last, and then reads what it was given.
class Exchange {
public:
    Exchange(uint64_t rows, uint32_t threads)
        : rows_(rows), threads_(threads), meeting_(threads), received_(threads), sent_(threads) {
        for (auto& memory : received_) memory.resize(rows * PLACES * ROW_BYTES);
        for (auto& memory : sent_) memory.resize(rows * ROW_BYTES);
    }

    // How many times as fast as the first way each one is: the median of rounds in which each has a turn, so that who
    // else uses the machine meets all of them. There are rounds until the time is over, but some at least.
    std::vector<double> SpeedUps(const std::vector<RowCopy>& ways, std::chrono::nanoseconds most) {
        constexpr size_t FEWEST_ROUNDS = 5;
        std::vector<std::vector<double>> ratios(ways.size());
        std::atomic<bool> is_over{false};
        const auto begin = Clock::now();
        auto work = [&](uint32_t thread) {
            std::vector<double> seconds(ways.size());
            for (uint32_t number = 0; !is_over;) {
                for (size_t way = 0; way < ways.size(); ++way) {
                    meeting_.Wait(number);
                    seconds[way] = Took([&] { Send(thread, ways[way]); });
                    meeting_.Wait(number);
                    seconds[way] += Took([&] { Receive(thread); });
                }
                if (thread == 0) {
                    for (size_t way = 0; way < ways.size(); ++way) ratios[way].push_back(seconds[0] / seconds[way]);
                    is_over = ratios[0].size() >= FEWEST_ROUNDS && Clock::now() - begin > most;
                }
                meeting_.Wait(number);
            }
        };
        std::vector<std::thread> others;
        for (uint32_t thread = 1; thread < threads_; ++thread) others.emplace_back(work, thread);
        work(0);
        for (std::thread& other : others) other.join();
        std::vector<double> medians;
        for (std::vector<double>& each : ratios) {
            std::nth_element(each.begin(), each.begin() + static_cast<int64_t>(each.size() / 2), each.end());
            medians.push_back(each[each.size() / 2]);
        }
        return medians;
    }

private:
    // Seconds of the core.
    template <typename Work>
    static double Took(const Work& work) {
        const double begin = CoreSeconds();
        work();
        return CoreSeconds() - begin;
    }

    void Send(uint32_t thread, RowCopy copy) {
        uint8_t* const to = received_[(thread + 1) % threads_].data();
        for (uint64_t row = 0; row < rows_; ++row) {
            for (uint64_t place = 0; place < PLACES; ++place) {
                copy(to + (place * rows_ + row) * ROW_BYTES, sent_[thread].data() + row * ROW_BYTES, ROW_BYTES);
            }
        }
        moe::emulation::OrderStreamed();
    }

    void Receive(uint32_t thread) {
        const std::vector<uint8_t>& memory = received_[thread];
        uint64_t sum = 0;
        for (uint64_t at = 0; at < memory.size(); at += sizeof(sum)) {
            uint64_t word;
            std::memcpy(&word, memory.data() + at, sizeof(word));
            sum += word;
        }
        sum_ += sum;
    }

    const uint64_t rows_;
    const uint32_t threads_;
    Meeting meeting_;
    std::vector<std::vector<uint8_t>> received_;
    std::vector<std::vector<uint8_t>> sent_;
    std::atomic<uint64_t> sum_{0};
};

}  // namespace

extern "C" {

// The name of a way to copy rows through the caches, by its number; null behind the last one.
const char* moe_row_copy_name(uint64_t number) { return number < NUM_COPIES ? ROW_COPIES[number].name : nullptr; }

// The way itself, as `LaunchSettings` takes it.
void* moe_row_copy(uint64_t number) { return reinterpret_cast<void*>(ROW_COPIES[number].copy); }

// Copies past the caches, and is seen by whoever sees what is written after it.
void moe_stream(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    moe::emulation::StreamBytes(to, from, bytes);
    moe::emulation::OrderStreamed();
}

// How many times as fast as the first way each one is, by its number, and behind them streaming stores; 0 if there are
// none. So many rows of each thread go to `PLACES` places each. 1 where there is no memory or thread for that.
int moe_time_row_copies(uint64_t rows, uint32_t threads, uint64_t most_ns, double* speed_ups) try {
    std::vector<RowCopy> ways;
    for (const NamedRowCopy& each : ROW_COPIES) ways.push_back(each.copy);
    if (moe::emulation::HAS_STREAMS) ways.push_back(moe::emulation::StreamBytes);
    speed_ups[NUM_COPIES] = 0;
    const std::vector<double> found = Exchange(rows, threads).SpeedUps(ways, std::chrono::nanoseconds(most_ns));
    std::copy(found.begin(), found.end(), speed_ups);
    return 0;
} catch (const std::exception&) {
    return 1;
}

}  // extern "C"
