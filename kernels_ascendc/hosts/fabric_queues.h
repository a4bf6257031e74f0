// What a NIC does with the items of queues that lead to other hosts: each message is a write of its own.
//
// Many are under way at a time. Writes to a rank come one after the other there, so that the promise of a queue holds:
// the first piece of a message comes after all of the message before it.
#pragma once

#include <atomic>
#include <deque>
#include <vector>

#include "fabric_endpoint.h"
#include "nic_wires.h"

namespace moe {

class FabricQueues final : public OtherHosts {
public:
    // `lost_after_ns`: of a rank to which nothing can be written. What was posted there is dropped then: a write to a
    // rank that is gone may be refused for ever, and says no more than that it is not possible now.
    FabricQueues(FabricEndpoint& endpoint, uint64_t lost_after_ns)
        : endpoint_(endpoint), lost_after_ns_(lost_after_ns) {}

    void Begin(std::vector<NicPeer>& peers, emulation::Doorbell* bell) override {
        peers_ = &peers;
        bell_ = bell;
        queues_.resize(peers.size());
    }

    void Take(const RingEntry& entry) override {
        queues_[entry.item.rank].items.push_back({entry.item, false});
        ++left_;
    }

    // Starts what can start and ends what has ended. When there may be more to do: never, where only a peer's answer or
    // another post can bring it.
    Due Deliver(uint64_t now_ns) override {
        Poll();
        bool is_held_up = false;
        for (uint32_t rank = 0; rank < queues_.size(); ++rank) {
            is_held_up = !StartAll(rank, now_ns) || is_held_up;
        }
        // A write that is refused is tried again soon: nothing says when it is possible.
        return {is_held_up ? now_ns + AGAIN_NS : Due::NEVER};
    }

    bool IsIdle() const override { return left_ == 0; }
    int Descriptor() const override { return endpoint_.Descriptor(); }
    bool MaySleep() override { return endpoint_.MaySleep(); }
    // Bytes of all writes that have been started.
    uint64_t WrittenBytes() const { return written_bytes_.load(std::memory_order_relaxed); }
    // Whether it was given up that anything can be written to a rank.
    bool IsLost(uint32_t rank) const { return queues_[rank].is_lost; }

private:
    using Started = FabricEndpoint::Started;

    static constexpr uint64_t AGAIN_NS = 50'000;

    struct Item {
        PostItem post;
        bool has_ended;
    };

    // Of these the first ones are under way.
    struct Queue {
        std::deque<Item> items;
        size_t started = 0;
        uint64_t refused_ns = 0;  // since when; 0: it is not
        bool is_lost = false;
    };

    void Poll() {
        if (has_failed_) return;  // what is under way may still be named, and is gone here
        const bool goes_on = endpoint_.Poll(
            [this](void* context, int error) {
                if (context == nullptr) return;  // an error of a peer's write, which is the peer's
                Item& item = *static_cast<Item*>(context);
                item.has_ended = true;
                if (error != 0) queues_[item.post.rank].is_lost = true;
                EndAll(item.post.rank);
            },
            [this](uint32_t flags) {
                // What has come before is to be seen by whoever wakes.
                std::atomic_thread_fence(std::memory_order_seq_cst);
                if (bell_ != nullptr) bell_->Ring(flags);
            });
        if (goes_on) return;
        has_failed_ = true;
        for (uint32_t rank = 0; rank < queues_.size(); ++rank) {
            queues_[rank].is_lost = true;
            for (Item& item : queues_[rank].items) item.has_ended = true;
            EndAll(rank);
        }
    }

    // False where one is refused for now.
    bool StartAll(uint32_t rank, uint64_t now_ns) {
        Queue& queue = queues_[rank];
        for (; queue.started < queue.items.size(); ++queue.started) {
            Item& item = queue.items[queue.started];
            const Started started = Start(rank, item);
            if (started == Started::NOT_NOW) {
                if (queue.refused_ns == 0) queue.refused_ns = now_ns;
                if (now_ns - queue.refused_ns < lost_after_ns_) return false;
            }
            queue.refused_ns = 0;
            if (started == Started::YES) {
                written_bytes_.store(WrittenBytes() + item.post.bytes, std::memory_order_relaxed);
                continue;
            }
            queue.is_lost = true;
            item.has_ended = true;
        }
        EndAll(rank);
        return true;
    }

    Started Start(uint32_t rank, Item& item) {
        if (queues_[rank].is_lost) return Started::NEVER;
        const PostItem& post = item.post;
        return endpoint_.Write(rank, NicMemory::OffsetOf(post), post.Bytes(), post.bytes, post.Flags(), &item);
    }

    // The memory of a message is free when those before it are as well.
    void EndAll(uint32_t rank) {
        Queue& queue = queues_[rank];
        while (queue.started > 0 && queue.items.front().has_ended) {
            queue.items.pop_front();
            --queue.started;
            --left_;
            (*peers_)[rank].ring->Pop();
        }
    }

    std::vector<NicPeer>* peers_ = nullptr;
    FabricEndpoint& endpoint_;
    emulation::Doorbell* bell_ = nullptr;
    const uint64_t lost_after_ns_;
    std::vector<Queue> queues_;
    uint64_t left_ = 0;
    std::atomic<uint64_t> written_bytes_{0};
    bool has_failed_ = false;
};

}  // namespace moe
