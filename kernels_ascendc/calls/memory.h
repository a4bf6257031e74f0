// Memory for outputs, used again once nobody holds it: a fresh output of some megabytes costs more in page faults,
// and again in giving its pages back, than the copy into it.
#ifndef MOE_CALLS_MEMORY_H
#define MOE_CALLS_MEMORY_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace moe::calls {

constexpr size_t ALIGNMENT = 64;  // torch's own
constexpr size_t KEPT_PER_SIZE = 4;
// Sizes that are kept at a time; the oldest goes. Batches of every size would otherwise add up.
constexpr size_t MAX_SIZES = 64;

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
    Pool() = default;
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool() {
        for (Shelf& shelf : shelves_) Empty(shelf);
    }

    // Null where there is no memory.
    Block* Take(size_t num_bytes) {
        num_bytes = Aligned(num_bytes == 0 ? 1 : num_bytes);
        Block* block = nullptr;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            Shelf* const shelf = Find(num_bytes);
            if (shelf != nullptr && !shelf->blocks.empty()) {
                block = shelf->blocks.back();
                shelf->blocks.pop_back();
            }
        }
        if (block == nullptr) {
            auto* const data = static_cast<std::byte*>(std::aligned_alloc(ALIGNMENT, num_bytes));
            if (data == nullptr) return nullptr;
            block = new Block;
            block->num_bytes = num_bytes;
            block->data = data;
        }
        block->pool = shared_from_this();
        return block;
    }

    void Return(Block* block) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Shelf* shelf = Find(block->num_bytes);
        if (shelf == nullptr) {
            shelf = &shelves_.emplace_back(Shelf{block->num_bytes, {}});
            if (shelves_.size() > MAX_SIZES) {
                Empty(shelves_.front());
                shelves_.pop_front();
            }
        }
        if (shelf->blocks.size() < KEPT_PER_SIZE) {
            shelf->blocks.push_back(block);
        } else {
            Free(block);
        }
    }

    // Bytes that wait to be used again.
    size_t KeptBytes() {
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t kept = 0;
        for (const Shelf& shelf : shelves_) kept += shelf.num_bytes * shelf.blocks.size();
        return kept;
    }

private:
    struct Shelf {
        size_t num_bytes;
        std::vector<Block*> blocks;
    };

    Shelf* Find(size_t num_bytes) {
        for (Shelf& shelf : shelves_) {
            if (shelf.num_bytes == num_bytes) return &shelf;
        }
        return nullptr;
    }

    static void Empty(Shelf& shelf) {
        for (Block* block : shelf.blocks) Free(block);
    }

    static void Free(Block* block) {
        std::free(block->data);
        delete block;
    }

    std::mutex mutex_;
    std::list<Shelf> shelves_;
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

#endif  // MOE_CALLS_MEMORY_H
