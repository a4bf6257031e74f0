// How bytes that were posted get to a peer's window: the one place that a transport between hosts has to fill in.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "doorbell.h"
#include "memory.h"

namespace moe {

// Used by one thread. What a message may overtake is decided by its caller, before the bytes are put.
class Transport {
public:
    virtual ~Transport() = default;

    // A peer that can be written to from now on.
    virtual void Register(uint32_t rank, uint64_t window, emulation::Doorbell* bell) = 0;
    // Starts a write of bytes in this process's memory to an offset of a peer's window.
    virtual void Put(uint32_t rank, uint64_t offset, const uint8_t* from, uint64_t bytes) = 0;
    // After all that was put to this peer: wakes it if it waits for as many flags.
    virtual void Flag(uint32_t rank, uint32_t number) = 0;
    // Whether all that was put is there. Whatever needs a push to get on gets it here.
    virtual bool Progress() = 0;
};

// Between processes of one machine. What was put is there when `Put` returns; flags at a message's ends keep its order.
class SharedMemory final : public Transport {
public:
    explicit SharedMemory(uint64_t num_ranks) : peers_(num_ranks) {}

    void Register(uint32_t rank, uint64_t window, emulation::Doorbell* bell) override { peers_[rank] = {window, bell}; }

    void Put(uint32_t rank, uint64_t offset, const uint8_t* from, uint64_t bytes) override {
        uint8_t* const to = reinterpret_cast<uint8_t*>(peers_[rank].window) + offset;
        constexpr uint64_t END = emulation::LONGEST_POLLED_BYTES;
        if (bytes <= 2 * END) {
            PutInOrder(to, from, bytes);
            return;
        }
        // A long copy may move its first bytes last: flags, which are at the ends of a message, are not in it.
        PutInOrder(to, from, END);
        emulation::CopyBytes(to + END, from + END, bytes - 2 * END);
        PutInOrder(to + bytes - END, from + bytes - END, END);
    }

    void Flag(uint32_t rank, uint32_t number) override {
        if (peers_[rank].bell != nullptr) peers_[rank].bell->Ring(number);
    }

    bool Progress() override { return true; }

private:
    static void PutInOrder(uint8_t* to, const uint8_t* from, uint64_t bytes) {
        for (uint64_t at = 0; at < bytes; at += emulation::LONGEST_POLLED_BYTES) {
            std::atomic_thread_fence(std::memory_order_acq_rel);
            emulation::CopyBytes(to + at, from + at, std::min(bytes - at, emulation::LONGEST_POLLED_BYTES));
        }
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }

    struct Peer {
        uint64_t window = 0;
        emulation::Doorbell* bell = nullptr;
    };

    std::vector<Peer> peers_;
};

}  // namespace moe
