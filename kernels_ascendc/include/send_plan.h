// What a dispatch sends from where to where: tasks of blocks, tables of indices, slots, stamps.
#pragma once

#include "direct_starts.h"

namespace moe {

constexpr uint32_t MAX_VISIT = 32;

// One source row, and for each result that it is sent for the addresses of slot, stamp and, where they lie
// apart, several scales.
struct Visit {
    uint64_t row;
    int64_t row_number;
    int64_t token;
    uint32_t num_slots;
    uint64_t slots[MAX_VISIT];
    uint64_t stamps[MAX_VISIT];
    uint64_t scales[MAX_VISIT];
    int64_t ks[MAX_VISIT];
};

// Where a row goes in its receiver's window: to a slot of its own, which its stamp is in as well.
template <typename Args>
struct Destination {
    static constexpr bool HAS_SCALES = false;
    static constexpr bool HAS_FLAGS = true;
    static constexpr bool HAS_SHARED = true;
    static constexpr bool MAY_POST = true;  // what is for a queued rank

    // Whose routed rows stay where they are.
    __aicore__ static inline bool IsKept(const Args& args, uint64_t rank) {
        return static_cast<int64_t>(rank) == args.kept_rank;
    }

    __aicore__ static inline uint64_t NumRanks(const Args& args) {
        return args.slots.source_extent;
    }

    __aicore__ static inline uint64_t LocalExperts(const Args& args) {
        return args.slots.expert_extent;
    }

    // In the receiver's window. Its own rows for this rank would lie at the same place, as sources are rotated by the
    // receiver's number: so this is the place in the out part, too.
    __aicore__ static inline bool Locate(const Args& args, uint64_t rank, uint64_t /*source*/, uint64_t expert,
                                         uint64_t index, uint64_t& slot, uint64_t& stamp, uint64_t&) {
        const uint64_t zone = args.zone;
        const uint64_t source = static_cast<uint64_t>(args.rank);
        slot = args.slots.AtOn(rank, zone, source, expert, index);
        stamp = slot + args.stamp_offset;
        return args.slots.Contains(zone, source, expert, index);
    }
};

// What kernels have that are told how many ranks and experts there are, and keep no rows.
template <typename Args>
struct NumberedRanks {
    static constexpr bool MAY_POST = false;

    __aicore__ static inline bool IsKept(const Args&, uint64_t) {
        return false;
    }

    __aicore__ static inline uint64_t NumRanks(const Args& args) {
        return static_cast<uint64_t>(args.num_ranks);
    }

    __aicore__ static inline uint64_t LocalExperts(const Args& args) {
        return static_cast<uint64_t>(args.num_local_experts);
    }
};

// Straight to its place in the receiver's output; stamps have a region of their own.
template <>
struct Destination<DirectSendArgs> : NumberedRanks<DirectSendArgs> {
    static constexpr bool HAS_SCALES = true;
    static constexpr bool HAS_FLAGS = false;  // one for a rank's rows
    static constexpr bool HAS_SHARED = true;

    const DirectStarts* starts = nullptr;

    __aicore__ inline bool Locate(const DirectSendArgs& args, uint64_t rank, uint64_t /*source*/, uint64_t expert,
                                  uint64_t index, uint64_t& slot, uint64_t& stamp, uint64_t& scales) const {
        const uint64_t zone = args.zone;
        if (!args.slots.Contains(zone, index)) {
            return false;
        }
        const uint64_t place = static_cast<uint64_t>(starts->Of(rank, expert)) + index;
        slot = args.slots.At(zone, place);
        stamp = args.stamps.At(zone, place);
        scales = args.scale_slots.At(zone, place);
        return args.slots.Contains(zone, place) && args.stamps.Contains(zone, place);
    }
};

template <typename Args>
class SendPlan {
    using To = Destination<Args>;

public:
    __aicore__ inline void Init(const Args* args, AscendC::TPipe* pipe, Report* report, const Blocks& blocks,
                                const To& to = {}) {
        args_ = args;
        report_ = report;
        blocks_ = blocks;
        to_ = to;
        peers_.Init(args->peers, static_cast<int64_t>(To::NumRanks(*args)));
        if constexpr (To::HAS_SHARED) {
            num_shared_ = args->num_shared_ranks > 0 ? args->num_shared_experts : 0;
        }
        max_visit_ = args->rows_per_token == 1 ? static_cast<int64_t>(MAX_VISIT) : 1;
        ids_.Init(pipe, TABLE_ENTRIES);
        indices_.Init(pipe, TABLE_ENTRIES);
        weights_.Init(pipe, TABLE_ENTRIES);
        if constexpr (To::HAS_SHARED) {
            shared_ranks_.Init(pipe, TABLE_ENTRIES);
            shared_slots_.Init(pipe, TABLE_ENTRIES);
        }
        if constexpr (To::HAS_SCALES) {
            scales_.Init(pipe, TABLE_ENTRIES);
        }
    }

    // This block's share from its first row on, as often as need be.
    //
    // An even share of all results. Shared experts take every token and are few: their results come behind all
    // routed ones, so that they have blocks of their own, which keeps the traffic to them steady, and one block
    // at most has both kinds. A block that has everything reads a row once for all its results instead.
    __aicore__ inline void BeginShare() {
        const int64_t results = args_->topk + num_shared_;
        const Share share = blocks_.ShareOf(args_->num_tokens * results);
        if (num_shared_ == 0 || blocks_.number == 1) {
            Begin({0, results, share});
            return;
        }
        const int64_t routed = args_->num_tokens * args_->topk;
        Begin({0, args_->topk, {Smaller(share.first, routed), Smaller(share.last, routed)}});
        shared_task_ = {
            args_->topk, num_shared_, {Larger(share.first, routed) - routed, Larger(share.last, routed) - routed}};
    }

    // The next row of this block's share that has to go anywhere; false after the last one.
    __aicore__ inline bool Next(Visit& visit) {
        if (NextOfTask(visit)) {
            return true;
        }
        Begin(shared_task_);
        shared_task_ = {};
        return NextOfTask(visit);
    }

    // For slot i of the visit that `Next` filled last.
    __aicore__ inline void WriteStamp(const AscendC::LocalTensor<int32_t>& stamp, const Visit& visit,
                                      uint32_t i) const {
        const bool weighted = args_->topk_weights != 0 && visit.ks[i] < args_->topk;
        stamp.SetValue(Stamp::SOURCE, static_cast<int32_t>(args_->rank));
        stamp.SetValue(Stamp::TOKEN, static_cast<int32_t>(visit.token));
        stamp.SetValue(Stamp::K, static_cast<int32_t>(visit.ks[i]));
        stamp.SetValue(Stamp::WEIGHT, weighted ? weights_.At(visit.token * args_->topk + visit.ks[i]) : 0);
        if constexpr (To::HAS_SCALES) {
            stamp.SetValue(Stamp::SCALE, args_->scales != 0 ? scales_.At(visit.row_number) : 0);
        }
    }

private:
    static constexpr int64_t TABLE_ENTRIES = 1024;

    // Results (token, k) with k in [first_k, first_k + num_k), token-major, of which a block has some.
    struct Task {
        int64_t first_k;
        int64_t num_k;
        Share results;
    };

    // The tables of another task do not serve this one.
    __aicore__ inline void Begin(const Task& task) {
        task_ = task;
        next_ = task.results.first;
        tables_end_ = 0;
    }

    __aicore__ inline bool NextOfTask(Visit& visit) {
        while (next_ < task_.results.last) {
            const int64_t token = next_ / task_.num_k;
            if (token >= tables_end_) {
                LoadTables(token);
            }
            const int64_t k = next_ % task_.num_k;
            const int64_t count = Smaller(Smaller(task_.num_k - k, task_.results.last - next_), max_visit_);
            next_ += count;
            if (Fill(visit, args_->first_token + token, task_.first_k + k, count)) {
                return true;
            }
        }
        return false;
    }

    // As many tokens from this one on as fit, up to the last one of the task; of the tables, those that it needs.
    __aicore__ inline void LoadTables(int64_t token) {
        const int64_t per_token = Larger(args_->rows_per_token, Larger(args_->topk, num_shared_));
        const int64_t end = (task_.results.last - 1) / task_.num_k + 1;
        tables_end_ = Smaller(token + TABLE_ENTRIES / per_token, end);
        const int64_t first = args_->first_token + token;
        const int64_t count = tables_end_ - token;
        Order<AscendC::HardEvent::S_MTE2>();
        if (task_.first_k < args_->topk) {
            ids_.Load(args_->topk_idx, first * args_->topk, count * args_->topk);
            indices_.Load(args_->expand_idx, first * args_->topk, count * args_->topk);
            if (args_->topk_weights != 0) {
                weights_.Load(args_->topk_weights, first * args_->topk, count * args_->topk);
            }
        }
        if constexpr (To::HAS_SHARED) {
            if (task_.first_k + task_.num_k > args_->topk) {
                shared_ranks_.Load(args_->shared_ranks, first * num_shared_, count * num_shared_);
                shared_slots_.Load(args_->shared_slots, first, count);
            }
        }
        if constexpr (To::HAS_SCALES) {
            if (args_->scales != 0) {
                scales_.Load(args_->scales, first * args_->rows_per_token, count * args_->rows_per_token);
            }
        }
        Order<AscendC::HardEvent::MTE2_S>();
    }

    __aicore__ inline bool Fill(Visit& visit, int64_t token, int64_t first_k, int64_t count) {
        if (args_->rows_per_token != 1 && first_k >= args_->rows_per_token) {
            report_->Add(REPORT_BAD_ROW, ResultIndex(token, first_k), count);
            return false;
        }
        const int64_t row = args_->rows_per_token == 1 ? token : token * args_->rows_per_token + first_k;
        visit.row = args_->rows + static_cast<uint64_t>(row * args_->row_stride);
        visit.row_number = row;
        visit.token = token;
        visit.num_slots = 0;
        for (int64_t k = first_k; k < first_k + count; ++k) {
            if (k < args_->topk ? FindRouted(token, k, visit) : FindShared(token, k, visit)) {
                visit.ks[visit.num_slots] = k;
                ++visit.num_slots;
            }
        }
        return visit.num_slots > 0;
    }

    // The visit's next addresses, for a result; false when nothing is to be sent.
    __aicore__ inline bool FindRouted(int64_t token, int64_t k, Visit& visit) {
        const int32_t id = ids_.At(token * args_->topk + k);
        // Absent, masked, or an expert that needs no communication.
        if (id < 0 || id >= args_->num_experts) {
            return false;
        }
        const uint32_t local_experts = static_cast<uint32_t>(To::LocalExperts(*args_));
        const uint64_t routed_rank = static_cast<uint32_t>(id) / local_experts;
        const uint64_t rank = NumSharedRanks() + routed_rank;
        if (to_.IsKept(*args_, rank) || (rank < To::NumRanks(*args_) && peers_.IsMasked(rank))) {
            return false;
        }
        const uint64_t expert = static_cast<uint32_t>(id) % local_experts;
        const int32_t index = indices_.At(token * args_->topk + k);
        return rank < To::NumRanks(*args_) && Locate(rank, expert, index, visit) ? true : Refuse(token, k);
    }

    __aicore__ inline uint64_t NumSharedRanks() const {
        if constexpr (To::HAS_SHARED) {
            return static_cast<uint64_t>(args_->num_shared_ranks);
        } else {
            return 0;
        }
    }

    __aicore__ inline bool FindShared(int64_t token, int64_t k, Visit& visit) {
        const int64_t s = k - args_->topk;
        const int32_t rank = shared_ranks_.At(token * num_shared_ + s);
        if (rank == -1) {
            return false;
        }
        // One index serves all shared experts of a token: each of their ranks numbers tokens alike.
        const int32_t index = shared_slots_.At(token);
        const bool is_rank = rank >= 0 && static_cast<uint64_t>(rank) < NumSharedRanks();
        if (is_rank && peers_.IsMasked(rank)) {
            return false;
        }
        return is_rank && Locate(rank, 0, index, visit) ? true : Refuse(token, k);
    }

    __aicore__ inline bool Locate(uint64_t rank, uint64_t expert, int32_t index, Visit& visit) {
        uint64_t& slot = visit.slots[visit.num_slots];
        uint64_t& stamp = visit.stamps[visit.num_slots];
        // A negative index becomes a huge unsigned one, which no extent holds.
        const uint64_t at = static_cast<uint64_t>(static_cast<int64_t>(index));
        const Place place = PlaceFor(rank);
        if (!to_.Locate(*args_, rank, place.source, expert, at, slot, stamp, visit.scales[visit.num_slots])) {
            return false;
        }
        slot += place.window;
        stamp += place.window;
        if constexpr (To::HAS_SCALES) {
            visit.scales[visit.num_slots] += place.window;
        }
        return true;
    }

    __aicore__ inline Place PlaceFor(uint64_t rank) const {
        if constexpr (To::MAY_POST) {
            return peers_.PlaceFor(*args_, rank);
        } else {
            return {peers_.WindowOf(rank), static_cast<uint64_t>(args_->rank)};
        }
    }

    __aicore__ inline bool Refuse(int64_t token, int64_t k) {
        report_->Add(REPORT_BAD_ROW, ResultIndex(token, k));
        return false;
    }

    __aicore__ inline int64_t ResultIndex(int64_t token, int64_t k) const {
        if constexpr (To::HAS_SHARED) {
            return token * (args_->topk + args_->num_shared_experts) + k;
        } else {
            return token * args_->topk + k;
        }
    }

    const Args* args_ = nullptr;
    Report* report_ = nullptr;
    Blocks blocks_ = Blocks::OfLaunch();
    To to_;
    Peers peers_;
    Table ids_, indices_, weights_, shared_ranks_, shared_slots_, scales_;
    Task task_{};
    Task shared_task_{};  // that follows, with results of shared experts only
    int64_t num_shared_ = 0;
    int64_t max_visit_ = 1;
    int64_t next_ = 0;
    int64_t tables_end_ = 0;
};

}  // namespace moe
