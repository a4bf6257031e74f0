// Messages to ranks that only queues reach: one core at a time on a queue, what is posted complete before.
#pragma once

#include "waits.h"

namespace moe {

// What a block of a launch has moved, for the host: one of `Traffic` for each block.
class TrafficWords {
public:
    // `at`: null, where nothing is counted.
    __aicore__ inline void Init(AscendC::TPipe* pipe, uint64_t at) {
        at_ = at;
        words_ = NewTensor<int64_t>(pipe, TRAFFIC_WORDS);
    }

    __aicore__ inline void Add(uint32_t field, int64_t number) {
        numbers_[field] += number;
    }

    // Every block of the launch writes its own, or adds them to what an earlier phase has written.
    __aicore__ inline void Write(bool adds) {
        if (at_ == 0) {
            return;
        }
        const int64_t first = AscendC::GetBlockIdx() * TRAFFIC_WORDS;
        for (uint32_t i = 0; i < TRAFFIC_WORDS; ++i) {
            words_.SetValue(i, numbers_[i] + (adds ? ReadFresh<int64_t>(at_, first + i) : 0));
        }
        Order<AscendC::HardEvent::S_MTE3>();
        AscendC::DataCopy(GlobalAt<int64_t>(at_)[first], words_, TRAFFIC_WORDS);
    }

private:
    uint64_t at_ = 0;
    AscendC::LocalTensor<int64_t> words_;
    int64_t numbers_[TRAFFIC_WORDS] = {};
};

// The bytes of a message: those of rows, and what goes with them.
struct Message {
    uint64_t local;   // in this rank's out part
    uint64_t remote;  // in the peer's window
    int64_t payload;
    int64_t framing;
    uint32_t flags;  // in it
};

// Posts, and counts what it has posted. The queue of a rank belongs to the block that `IsOwner` names.
class Poster {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, const Peers* peers, Report* report, uint64_t traffic,
                                int64_t timeout_us) {
        peers_ = peers;
        report_ = report;
        traffic_.Init(pipe, traffic);
        pipe->InitBuffer(buffer_, SCRATCH_BYTES);
        deadline_.Start(report->IsOld() ? 0 : timeout_us);
    }

    // Ranks are dealt out among the blocks: a queue takes posts of one core only.
    __aicore__ static inline bool IsOwner(uint64_t rank) {
        return static_cast<int64_t>(rank) % AscendC::GetBlockNum() == AscendC::GetBlockIdx();
    }

    // Behind all that was posted to this rank before; nothing where it is masked. False if its queue was full until the
    // deadline, which is reported; later messages to anybody are then given up at once.
    __aicore__ inline bool Put(uint64_t rank, const Message& message) {
        const uint64_t bytes = static_cast<uint64_t>(message.payload + message.framing);
        const PostScratch scratch{buffer_.Get<uint64_t>(), buffer_.Get<uint32_t>()[UB_ALIGN / sizeof(uint32_t)]};
        // A full queue rings no doorbell when it has room.
        constexpr uint64_t NO_WINDOW = 0;
        for (PollLoop poll(deadline_, NO_WINDOW, static_cast<int64_t>(rank), 1); poll.Next();) {
            if (peers_->IsMasked(rank)) {
                return true;
            }
            if (Post(static_cast<uint32_t>(rank), message.local, message.remote, bytes, message.flags, scratch)) {
                // From the field of posts on: posts, payload, framing.
                const uint32_t posts = peers_->IsInside(rank) ? Traffic::POSTS_INSIDE : Traffic::POSTS_BETWEEN;
                traffic_.Add(posts, 1);
                traffic_.Add(posts + Traffic::PAYLOAD_BETWEEN - Traffic::POSTS_BETWEEN, message.payload);
                traffic_.Add(posts + Traffic::FRAMING_BETWEEN - Traffic::POSTS_BETWEEN, message.framing);
                return true;
            }
        }
        report_->Add(REPORT_TIMEOUT, static_cast<int64_t>(rank));
        return false;
    }

    __aicore__ inline const Deadline& Until() const {
        return deadline_;
    }

    // What this block has posted, for the host. Every block of the launch writes it, or adds to what an earlier phase
    // has written.
    __aicore__ inline void WriteTraffic(bool adds = false) {
        traffic_.Write(adds);
    }

private:
    static constexpr uint32_t SCRATCH_BYTES = 2 * UB_ALIGN;  // of a post

    const Peers* peers_ = nullptr;
    Report* report_ = nullptr;
    TrafficWords traffic_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
    Deadline deadline_;
};

}  // namespace moe
