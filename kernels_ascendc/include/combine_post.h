// Combine, steps 1 and 2 where only queues lead to a peer: posts each row that combine_send left in the out part, then
// its flag, in a message of its own; or no flags, where a post_status follows.
//
// Two zones of the out part are enough: who combines in a zone again has seen flags of every rank that were posted
// after that rank had ended the combine before in it.
#pragma once

#include "posts.h"
#include "row_copy.h"

namespace moe {

class CombinePost : Kernel<CombinePostArgs> {
public:
    __aicore__ inline void Init(const CombinePostArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        peers_.Init(args.peers, args.num_ranks);
        poster_.Init(pipe, &peers_, &report_, args.traffic, args.timeout_us);
        origins_.Init(pipe, ORIGINS_PER_CHUNK * ORIGIN_WORDS);
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_POST);
        if (args_.flag_rows != 0) {
            LeaveFlags();
        }
        // Reported where they were to be sent.
        Report ignored;
        const int64_t rows = args_.num_entries > 0 ? NumResults(args_, ignored) : 0;
        for (int64_t first = 0; first < rows; first += ORIGINS_PER_CHUNK) {
            const int64_t last = Smaller(first + ORIGINS_PER_CHUNK, rows);
            origins_.Fetch(args_.origins, first * ORIGIN_WORDS, (last - first) * ORIGIN_WORDS);
            if (!PostRows(first, last)) {
                break;
            }
        }
        poster_.WriteTraffic(args_.adds_traffic != 0);
        report_.Write();
    }

private:
    static constexpr int64_t ORIGINS_PER_CHUNK = 512;

    // One for each queue of this block: all its messages have the same flag.
    __aicore__ inline void LeaveFlags() {
        const AscendC::LocalTensor<int32_t> flag = NewTensor<int32_t>(GetTPipePtr(), STATUS_ENTRY_WORDS);
        AscendC::Duplicate(flag, RoundNumber(args_), static_cast<int32_t>(STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::V_MTE3>();
        for (int64_t rank = 0; rank < args_.num_ranks; ++rank) {
            if (Poster::IsOwner(rank) && peers_.IsQueued(rank)) {
                AscendC::DataCopy(GlobalAt<int32_t>(FlagOf(rank)), flag, STATUS_ENTRY_WORDS);
            }
        }
        Order<AscendC::HardEvent::MTE3_S>();
    }

    __aicore__ inline uint64_t FlagOf(uint64_t rank) const {
        return args_.window + args_.out_flags.At(args_.zone, rank);
    }

    __aicore__ inline uint64_t OriginOf(int64_t row, uint32_t word) const {
        return static_cast<uint64_t>(static_cast<int64_t>(origins_.At(row * ORIGIN_WORDS + word)));
    }

    // Those of this block's queues. False after the deadline.
    __aicore__ inline bool PostRows(int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const uint64_t rank = OriginOf(row, Origin::SOURCE);
            if (rank < static_cast<uint64_t>(args_.num_ranks) && Poster::IsOwner(rank) && peers_.IsQueued(rank) &&
                !PostRow(row, rank)) {
                return false;
            }
        }
        return true;
    }

    __aicore__ inline bool PostRow(int64_t row, uint64_t rank) {
        const uint64_t zone = args_.zone;
        const uint64_t token = OriginOf(row, Origin::TOKEN);
        const uint64_t k = OriginOf(row, Origin::K);
        if (!NamesPlace(args_, args_.flag_rows != 0, token, k)) {
            return true;  // nor has combine_send left it
        }
        const uint64_t to = peers_.WindowOf(rank);
        const uint64_t local = args_.window + args_.out_rows.At(zone, row);
        const int64_t padding = args_.row_bytes - args_.payload_bytes;
        const bool is_posted =
            poster_.Put(rank, {local, to + args_.slots.At(zone, token, k), args_.payload_bytes, padding, 0});
        if (!is_posted || args_.flag_rows == 0) {
            return is_posted;
        }
        constexpr int64_t FLAG_BYTES = STATUS_ENTRY_BYTES;
        return poster_.Put(rank, {FlagOf(rank), to + args_.status.At(zone, token, k), 0, FLAG_BYTES, 1});
    }

    Peers peers_;
    Poster poster_;
    Table origins_;
};

}  // namespace moe
