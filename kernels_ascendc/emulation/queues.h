// TPipe, TQueBind and TBuf: who owns which part of UB, and the flags between its producer and consumer.
#pragma once

#include <array>
#include <exception>

#include "tensors.h"

namespace AscendC {

// Ids of the flags that queues use internally, above those that a kernel can name.
inline uint64_t QueueEventId(uint32_t offset) { return NUM_EVENT_IDS + offset; }

// Of a buffer: whether InitBuffer has given it memory, which it has until Reset.
class Lease {
public:
    void Begin(const uint32_t& resets) {
        resets_ = &resets;
        begun_ = resets;
    }

    void Require() const {
        moe::emulation::ThisCore().Require(resets_ != nullptr && *resets_ == begun_,
                                           "a tensor of a buffer that InitBuffer has not given memory since Reset");
    }

private:
    const uint32_t* resets_ = nullptr;  // of the pipe, until now
    uint32_t begun_ = 0;
};

template <TPosition source, TPosition target, int32_t depth>
class TQueBind {
    static_assert(source == TPosition::VECIN && target == TPosition::VECOUT, "queues here copy in and copy out");
    static constexpr uint32_t MAX_BUFFERS = 4;

public:
    ~TQueBind() noexcept(false) {
        auto& core = moe::emulation::ThisCore();
        // Throwing during unwinding would end the process.
        if (std::uncaught_exceptions() == 0) {
            core.Require(used_ == 0, "a tensor was never freed");
        }
    }

    template <typename T>
    LocalTensor<T> AllocTensor() {
        auto& core = moe::emulation::ThisCore();
        lease_.Require();
        for (uint32_t i = 0; i < count_; ++i) {
            const uint32_t slot = (next_ + i) % count_;
            if (state_[slot] == State::FREE) {
                next_ = slot + 1;
                ++used_;
                if (returned_[slot]) core.WaitFlag(HardEvent::MTE3_MTE2, Id(slot));
                state_[slot] = State::OWNED;
                return LocalTensor<T>({base_ + slot * bytes_}, bytes_);
            }
        }
        throw moe::emulation::CheckFailed("AllocTensor: every buffer of the queue is in use");
    }

    template <typename T>
    bool EnQue(const LocalTensor<T>& tensor) {
        auto& core = moe::emulation::ThisCore();
        const uint32_t slot = Slot(tensor);
        core.Require(state_[slot] == State::OWNED, "EnQue of a tensor that was not allocated");
        core.Require(filled_ - taken_ < static_cast<uint32_t>(depth), "EnQue beyond the queue's depth");
        core.SetFlag(HardEvent::MTE2_MTE3, Id(slot));
        state_[slot] = State::QUEUED;
        order_[filled_++ % MAX_BUFFERS] = slot;
        return true;
    }

    template <typename T>
    LocalTensor<T> DeQue() {
        if (filled_ == taken_) throw moe::emulation::CheckFailed("DeQue from an empty queue");
        const uint32_t slot = order_[taken_++ % MAX_BUFFERS];
        moe::emulation::ThisCore().WaitFlag(HardEvent::MTE2_MTE3, Id(slot));
        state_[slot] = State::TAKEN;
        return LocalTensor<T>({base_ + slot * bytes_}, bytes_);
    }

    template <typename T>
    void FreeTensor(LocalTensor<T>& tensor) {
        auto& core = moe::emulation::ThisCore();
        const uint32_t slot = Slot(tensor);
        core.Require(state_[slot] == State::TAKEN, "FreeTensor of a tensor that DeQue did not give");
        core.SetFlag(HardEvent::MTE3_MTE2, Id(slot));
        core.Discard({base_ + slot * bytes_}, bytes_);
        state_[slot] = State::FREE;
        returned_[slot] = true;
        --used_;
    }

private:
    friend class TPipe;
    enum class State : uint8_t { FREE, OWNED, QUEUED, TAKEN };

    template <typename T>
    uint32_t Slot(const LocalTensor<T>& tensor) const {
        const uint32_t slot = (tensor.GetPhyAddr().offset - base_) / bytes_;
        moe::emulation::ThisCore().Require(slot < count_, "a tensor of another queue");
        return slot;
    }

    uint64_t Id(uint32_t slot) const { return QueueEventId(base_ + slot); }

    void Take(uint32_t base, uint32_t count, uint32_t bytes) {
        moe::emulation::ThisCore().Require(count >= 1 && count <= MAX_BUFFERS, "a queue has 1 to 4 buffers");
        base_ = base;
        count_ = count;
        bytes_ = bytes;
    }

    Lease lease_;
    uint32_t base_ = 0;
    uint32_t count_ = 0;
    uint32_t bytes_ = 1;
    uint32_t next_ = 0;
    uint32_t used_ = 0;
    std::array<State, MAX_BUFFERS> state_{};
    std::array<bool, MAX_BUFFERS> returned_{};
    std::array<uint32_t, MAX_BUFFERS> order_{};
    uint32_t filled_ = 0;
    uint32_t taken_ = 0;
};

template <TPosition position>
class TBuf {
public:
    template <typename T>
    LocalTensor<T> Get() {
        lease_.Require();
        return LocalTensor<T>({base_}, bytes_);
    }

private:
    friend class TPipe;
    Lease lease_;
    uint32_t base_ = 0;
    uint32_t bytes_ = 0;
};

class TPipe {
public:
    TPipe() { moe::emulation::ThisCore().pipe = this; }
    TPipe(const TPipe&) = delete;
    TPipe& operator=(const TPipe&) = delete;

    ~TPipe() noexcept(false) {
        if (std::uncaught_exceptions() != 0) return;
        for (const uint8_t ids : allocated_) {
            moe::emulation::ThisCore().Require(ids == 0, "AllocEventID without ReleaseEventID");
        }
    }

    // Gives back all memory and events. Nothing may use them any more: a barrier of all pipes comes first.
    void Reset() {
        for (const uint8_t ids : allocated_) {
            moe::emulation::ThisCore().Require(ids == 0, "Reset without ReleaseEventID");
        }
        used_ = 0;
        ++resets_;
    }

    // An id for the moment: the next one that is not allocated.
    TEventID FetchEventID(HardEvent event) const {
        const uint8_t ids = allocated_[static_cast<uint32_t>(event)];
        for (TEventID id = 0; id < static_cast<TEventID>(NUM_EVENT_IDS); ++id) {
            if ((ids >> id & 1) == 0) return id;
        }
        throw moe::emulation::CheckFailed("every id of the event is allocated");
    }

    template <HardEvent event>
    TEventID AllocEventID() {
        const TEventID id = FetchEventID(event);
        allocated_[static_cast<uint32_t>(event)] |= static_cast<uint8_t>(1U << id);
        return id;
    }

    template <HardEvent event>
    void ReleaseEventID(TEventID id) {
        uint8_t& ids = allocated_[static_cast<uint32_t>(event)];
        moe::emulation::ThisCore().Require((ids >> id & 1) == 1, "ReleaseEventID of an id that is not allocated");
        ids &= static_cast<uint8_t>(~(1U << id));
    }

    template <TPosition source, TPosition target, int32_t depth>
    bool InitBuffer(TQueBind<source, target, depth>& queue, uint8_t count, uint32_t bytes) {
        const uint32_t each = Align(bytes);
        queue.Take(Reserve(each * count), count, each);
        queue.lease_.Begin(resets_);
        return true;
    }

    template <TPosition position>
    bool InitBuffer(TBuf<position>& buffer, uint32_t bytes) {
        buffer.bytes_ = Align(bytes);
        buffer.base_ = Reserve(buffer.bytes_);
        buffer.lease_.Begin(resets_);
        return true;
    }

private:
    static uint32_t Align(uint32_t bytes) { return (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES; }

    // Checked in the fast build too: past the end lies other memory of the process.
    uint32_t Reserve(uint32_t bytes) {
        if (bytes > UB_BYTES - used_) throw moe::emulation::CheckFailed("UB overflow");
        used_ += bytes;
        return used_ - bytes;
    }

    uint32_t used_ = 0;
    uint32_t resets_ = 0;
    std::array<uint8_t, NUM_EVENTS> allocated_{};
};

}  // namespace AscendC

inline AscendC::TPipe* GetTPipePtr() { return moe::emulation::ThisCore().pipe; }
