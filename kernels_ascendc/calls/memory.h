// Memory for outputs, used again once nobody holds it: a fresh output of some megabytes costs more in page faults,
// and again in giving its pages back, than the copy into it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <sys/mman.h>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace moe::calls {

constexpr size_t ALIGNMENT = 64;  // torch's own
// Rows go to places far from one another: on small pages nearly each one is a miss of the page table's cache. Of less
// than some pages too much would be in none of them.
constexpr size_t HUGE_BYTES = 2 << 20, LARGE_BYTES = 4 * HUGE_BYTES;
// More than a round makes: small outputs share a size, and a loop that gives back more than are kept would take them
// from the system each time.
constexpr size_t KEPT_PER_SIZE = 16;
// Sizes that are kept at a time; the one used longest ago goes. Batches of every size would otherwise add up.
constexpr size_t MAX_SIZES = 64;
// What the latest outputs have had in use at once is kept whatever the limit says: from so many to twice as many of
// them. A round makes about ten.
constexpr uint32_t PERIOD = 32;

constexpr size_t Aligned(size_t num_bytes) { return (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

class Pool;

// Memory with as many holders as there are `Hold`s.
struct Block {
    std::atomic<uint32_t> holders{0};
    size_t num_bytes = 0;
    std::byte* data = nullptr;
    std::shared_ptr<Pool> pool;  // while it is held
};

// Thread-safe: torch gives tensors back on whatever thread held them last.
class Pool : public std::enable_shared_from_this<Pool> {
public:
    // Keeps so many bytes for later, or what the latest calls have had in use at once, if that is more.
    explicit Pool(size_t limit) : limit_(limit) {}
    ~Pool() {
        while (!shelves_.empty()) DropOldest();
    }

    // Null where there is no memory.
    Block* Take(size_t num_bytes) {
        num_bytes = Aligned(num_bytes == 0 ? 1 : num_bytes);
        const std::lock_guard<std::mutex> lock(mutex_);
        Block* block = nullptr;
        Shelf* const shelf = Find(num_bytes);
        if (shelf != nullptr && !shelf->blocks.empty()) {
            block = shelf->blocks.back();
            shelf->blocks.pop_back();
            kept_ -= num_bytes;
        } else {
            block = Allocate(num_bytes);
            if (block == nullptr) return nullptr;
        }
        held_ += num_bytes;
        if (++taken_ % PERIOD == 0) most_before_ = std::exchange(most_, 0);
        most_ = std::max(most_, held_);
        block->pool = shared_from_this();
        return block;
    }

    void Return(Block* block) {
        const std::lock_guard<std::mutex> lock(mutex_);
        held_ -= block->num_bytes;
        if (is_closed_) return Free(block);
        Shelf* shelf = Find(block->num_bytes);
        if (shelf == nullptr) {
            shelf = &shelves_.emplace_back(Shelf{block->num_bytes, {}});
            if (shelves_.size() > MAX_SIZES) DropOldest();
        }
        if (shelf->blocks.size() == KEPT_PER_SIZE) return Free(block);
        shelf->blocks.push_back(block);
        kept_ += block->num_bytes;
        const size_t most = std::max(most_, most_before_);
        const size_t allowed = std::max(limit_, most - std::min(most, held_));
        while (kept_ > allowed) {
            if (shelves_.front().blocks.empty()) {
                DropOldest();
            } else {
                FreeOneOf(shelves_.front());
            }
        }
    }

    // Keeps nothing any more, and returns what it has to the system. Memory that is held stays until it is not.
    void Close() {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_closed_ = true;
        while (!shelves_.empty()) DropOldest();
#ifdef __GLIBC__
        malloc_trim(0);  // free memory between pieces that are in use stays the process's otherwise
#endif
    }

    // Bytes that wait to be used again.
    size_t KeptBytes() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return kept_;
    }

    // How often memory came from the system.
    size_t Allocations() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return allocations_;
    }

private:
    struct Shelf {
        size_t num_bytes;
        std::vector<Block*> blocks;
    };

    // It is the one used last from now on.
    Shelf* Find(size_t num_bytes) {
        for (auto shelf = shelves_.begin(); shelf != shelves_.end(); ++shelf) {
            if (shelf->num_bytes != num_bytes) continue;
            shelves_.splice(shelves_.end(), shelves_, shelf);
            return &*shelf;
        }
        return nullptr;
    }

    // Where there is no memory, what is kept is given up for it.
    Block* Allocate(size_t num_bytes) {
        for (;; DropOldest()) {
            const bool is_large = num_bytes >= LARGE_BYTES;
            auto* const data =
                static_cast<std::byte*>(std::aligned_alloc(is_large ? HUGE_BYTES : ALIGNMENT, num_bytes));
            if (data != nullptr) {
#ifdef MADV_HUGEPAGE
                if (is_large) madvise(data, num_bytes, MADV_HUGEPAGE);  // where it cannot be, all is as it was
#endif
                ++allocations_;
                return new Block{{0}, num_bytes, data, nullptr};
            }
            if (shelves_.empty()) return nullptr;
        }
    }

    void FreeOneOf(Shelf& shelf) {
        Free(shelf.blocks.back());
        shelf.blocks.pop_back();
        kept_ -= shelf.num_bytes;
    }

    void DropOldest() {
        while (!shelves_.front().blocks.empty()) FreeOneOf(shelves_.front());
        shelves_.pop_front();
    }

    static void Free(Block* block) {
        std::free(block->data);
        delete block;
    }

    std::mutex mutex_;
    std::list<Shelf> shelves_;  // the one used longest ago first
    const size_t limit_;
    size_t kept_ = 0, held_ = 0;  // bytes
    size_t most_ = 0, most_before_ = 0;  // that were held at once, in this period and in the one before
    size_t allocations_ = 0;
    uint32_t taken_ = 0;
    bool is_closed_ = false;
};

// One holder of a block, or of none.
class Hold {
public:
    Hold() = default;
    explicit Hold(Block* block) : block_(block) {
        if (block_ != nullptr) block_->holders.fetch_add(1, std::memory_order_relaxed);
    }
    Hold(const Hold& other) : Hold(other.block_) {}
    Hold(Hold&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
    Hold& operator=(Hold other) noexcept {
        std::swap(block_, other.block_);
        return *this;
    }
    ~Hold() {
        if (block_ == nullptr || block_->holders.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        // The pool may have no other owner left, and then ends here, the block with it.
        const std::shared_ptr<Pool> pool = std::move(block_->pool);
        pool->Return(block_);
    }

    std::byte* data() const { return block_->data; }
    explicit operator bool() const { return block_ != nullptr; }

private:
    Block* block_ = nullptr;
};

}  // namespace moe::calls
