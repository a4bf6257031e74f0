// What a NIC does with the items of queues that lead to other hosts.
//
// Many writes are under way at a time. Those to a rank come one after the other there, as its messages were posted, so
// that the promise of a queue holds. Where that is loose, messages that wait at the same time go together, for a write
// costs the same whatever its size: some without flags, and then those with flags among and behind them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "fabric_endpoint.h"
#include "nic_wires.h"

namespace moe {

class FabricQueues final : public OtherHosts {
public:
    // `lost_after_ns`: of a rank to which nothing can be written. What was posted there is dropped then: a write to a
    // rank that is gone may be refused for ever, and says no more than that it is not possible now.
    FabricQueues(FabricEndpoints& endpoints, uint64_t lost_after_ns)
        : endpoints_(endpoints),
          lost_after_ns_(lost_after_ns),
          drops_(std::make_unique<std::atomic<Dropping>[]>(endpoints.NumRanks())) {}

    void Begin(std::vector<NicPeer>& peers, emulation::Doorbell* bell, bool is_loose) override {
        peers_ = &peers;
        bell_ = bell;
        if (is_loose) most_pieces_ = endpoints_.MostPieces();
        queues_ = std::vector<Queue>(peers.size());
    }

    void Take(const RingEntry& entry) override {
        queues_[entry.item.rank].items.push_back({entry.item, false, false});
        ++left_;
    }

    // Starts what can start and ends what has ended. When there may be more to do: never, where only a peer's answer or
    // another post can bring it.
    Due Deliver(uint64_t now_ns) override {
        bool is_held_up = are_drops_wanted_.exchange(false) && !DropAll();
        Poll();
        for (uint32_t rank = 0; rank < queues_.size(); ++rank) {
            is_held_up = !StartAll(rank, now_ns) || is_held_up;
        }
        // A write that is refused is tried again soon: nothing says when it is possible.
        return {is_held_up ? now_ns + AGAIN_NS : Due::NEVER};
    }

    bool IsIdle() const override { return left_ == 0; }

    void Drop(uint32_t rank) override {
        Dropping none = Dropping::NO;
        drops_[rank].compare_exchange_strong(none, Dropping::WANTED);
        are_drops_wanted_.store(true);
    }

    bool IsDropped(uint32_t rank) const override { return drops_[rank].load() == Dropping::DONE; }
    int Descriptor() const override { return endpoints_.Descriptor(); }
    bool MaySleep() override { return endpoints_.MaySleep(); }
    // Bytes of all writes that have been started.
    uint64_t WrittenBytes() const { return written_bytes_.load(std::memory_order_relaxed); }
    // Whether it was given up that anything can be written to a rank.
    bool IsLost(uint32_t rank) const { return queues_[rank].is_lost; }

private:
    using Started = FabricEndpoints::Started;

    static constexpr uint64_t AGAIN_NS = 50'000;

    struct Item {
        PostItem post;
        bool has_started;
        bool has_ended;
    };

    enum class Dropping : uint8_t { NO, WANTED, DONE };

    // One write, and the messages in it.
    struct Batch {
        uint32_t rank;
        size_t number = 0;
        std::array<Item*, FabricEndpoints::MOST_PIECES> items{};
    };

    struct Queue {
        std::deque<Item> items;
        size_t started = 0;       // of the first ones, all
        uint64_t refused_ns = 0;  // since when; 0: it is not
        bool is_lost = false;
        std::vector<std::unique_ptr<Batch>> under_way;
    };

    // A write has ended.
    std::unique_ptr<Batch> Taken(Batch* named) {
        std::vector<std::unique_ptr<Batch>>& batches = queues_[named->rank].under_way;
        const auto found =
            std::find_if(batches.begin(), batches.end(), [&](const auto& each) { return each.get() == named; });
        if (found == batches.end()) return nullptr;
        std::unique_ptr<Batch> batch = std::move(*found);
        batches.erase(found);
        return batch;
    }

    // False where it has to be tried again.
    bool DropAll() {
        for (uint32_t rank = 0; rank < queues_.size(); ++rank) {
            if (drops_[rank].load() != Dropping::WANTED) continue;
            if (!endpoints_.Close(rank)) {
                are_drops_wanted_.store(true);
                continue;
            }
            Queue& queue = queues_[rank];
            queue.is_lost = true;
            // What was under way may still be named, and is nobody's then.
            for (std::unique_ptr<Batch>& batch : queue.under_way) {
                End(*batch);
                batch->number = 0;
                dropped_.push_back(std::move(batch));
            }
            queue.under_way.clear();
            EndAll(rank);
            // What it has written before is to be seen by whoever sees this.
            drops_[rank].store(Dropping::DONE);
        }
        return !are_drops_wanted_.load();
    }

    void Poll() {
        if (has_failed_) return;  // what is under way may still be named, and is gone here
        const bool goes_on = endpoints_.Poll(
            [this](void* context, int error) {
                if (context == nullptr) return;  // an error of a peer's write, which is the peer's
                const std::unique_ptr<Batch> batch = Taken(static_cast<Batch*>(context));
                if (batch == nullptr) return;  // of a rank that was dropped
                End(*batch);
                if (error != 0) queues_[batch->rank].is_lost = true;
                EndAll(batch->rank);
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
        while (queue.started < queue.items.size()) {
            auto batch = std::make_unique<Batch>(Next(queue, rank));
            const Started started = Start(*batch);
            if (started == Started::NOT_NOW) {
                if (queue.refused_ns == 0) queue.refused_ns = now_ns;
                if (now_ns - queue.refused_ns < lost_after_ns_) return false;
            }
            queue.refused_ns = 0;
            for (size_t i = 0; i < batch->number; ++i) batch->items[i]->has_started = true;
            while (queue.started < queue.items.size() && queue.items[queue.started].has_started) ++queue.started;
            if (started == Started::YES) {
                queue.under_way.push_back(std::move(batch));
                continue;
            }
            queue.is_lost = true;
            End(*batch);
        }
        EndAll(rank);
        return true;
    }

    // The next messages that can be one write: those without flags, as far as they are disjoint from all before them
    // that have not gone; else the first ones with flags.
    Batch Next(Queue& queue, uint32_t rank) {
        Batch rows{rank}, flags{rank};
        std::array<const PostItem*, 2 * FabricEndpoints::MOST_PIECES> seen{};
        size_t number = 0;
        for (size_t at = queue.started; at < queue.items.size() && number < seen.size(); ++at) {
            Item& item = queue.items[at];
            if (item.has_started) continue;
            Batch& batch = item.post.Flags() == 0 ? rows : flags;
            const auto meets = [&](const PostItem* other) { return other->Meets(item.post); };
            if (batch.number == most_pieces_ || std::any_of(seen.begin(), seen.begin() + number, meets)) break;
            batch.items[batch.number++] = &item;
            seen[number++] = &item.post;
            if (most_pieces_ == 1) return batch;  // in the order of posting
        }
        return rows.number > 0 ? rows : flags;
    }

    Started Start(Batch& batch) {
        if (queues_[batch.rank].is_lost) return Started::NEVER;
        std::array<FabricEndpoints::Piece, FabricEndpoints::MOST_PIECES> pieces{};
        uint32_t flags = 0;
        uint64_t bytes = 0;
        for (size_t i = 0; i < batch.number; ++i) {
            const PostItem& post = batch.items[i]->post;
            pieces[i] = {post.Bytes(), NicMemory::OffsetOf(post), post.bytes};
            flags += post.Flags();
            bytes += post.bytes;
        }
        const Started started = endpoints_.Write(batch.rank, pieces.data(), batch.number, flags, &batch);
        if (started == Started::YES) {
            written_bytes_.store(WrittenBytes() + bytes, std::memory_order_relaxed);
        }
        return started;
    }

    static void End(const Batch& batch) {
        for (size_t i = 0; i < batch.number; ++i) batch.items[i]->has_ended = true;
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
    FabricEndpoints& endpoints_;
    emulation::Doorbell* bell_ = nullptr;
    size_t most_pieces_ = 1;
    const uint64_t lost_after_ns_;
    std::vector<Queue> queues_;
    uint64_t left_ = 0;
    std::vector<std::unique_ptr<Batch>> dropped_;
    const std::unique_ptr<std::atomic<Dropping>[]> drops_;  // of each rank
    std::atomic<bool> are_drops_wanted_{false};
    std::atomic<uint64_t> written_bytes_{0};
    bool has_failed_ = false;
};

}  // namespace moe
