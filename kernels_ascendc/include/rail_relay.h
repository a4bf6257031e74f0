// Dispatch by hierarchy, between steps 2 and 3: what came from the rail goes on to the ranks of this server that have
// the tokens' experts: a row for each expert, with its stamp, and behind the last one of a source its entries.
//
// Tokens come in messages, whose first head is their first piece and says how many each has. They are believed when the
// first head of the next message is there, or the end flag: these come behind all of it. Blocks share the (server,
// receiver) pairs, from the last block on, since the first ones post; a block relays what has come for any of its own,
// and waits only where there is nothing. Entries come behind the rows of the same block.
//
// Words come from a peer: an id, token or position out of bounds names no place. Its source counts as lost from there
// on, as one whose end flag does not come: its entries say so, lest receivers take this rank for the missing one.
#pragma once

#include "rails.h"
#include "row_copy.h"
#include "silent_ranks.h"
#include "status_entries.h"

namespace moe {

class RailRelay : Kernel<RailRelayArgs> {
public:
    __aicore__ inline void Init(const RailRelayArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        rail_.Init(args);
        peers_.Init(args.peers, args.num_servers * args.ranks_per_server);
        next_.Init(pipe, static_cast<uint32_t>(args.num_servers));
        believed_.Init(pipe, static_cast<uint32_t>(args.num_servers));
        runs_.Init(pipe, static_cast<uint32_t>(args.num_servers));
        totals_.Init(pipe, static_cast<uint32_t>(args.num_servers));
        counts_.Init(pipe, static_cast<uint32_t>(args.num_servers * NumNeighbourExperts()));
        heads_.Init(pipe, static_cast<uint32_t>(MAX_HEADS * RAIL_HEAD_WORDS));
        end_.Init(pipe, RAIL_END_WORDS);
        head_.Init(pipe, RAIL_HEAD_WORDS);
        route_.Init(pipe, static_cast<uint32_t>(RouteWords()));
        entries_.Init(pipe, ENTRIES_PER_COPY);
        pipe->InitBuffer(rows_, 2, static_cast<uint32_t>(args.row_bytes + ScaleBytes()));
        stamps_ = NewTensor<int32_t>(pipe, 2 * args.topk * STAMP_WORDS);
        total_.Init(pipe, UB_ALIGN / sizeof(int32_t));
        traffic_.Init(pipe, args.traffic);
        double_buffer_.Init(pipe);
        silent_.Init(args.peers, args.num_servers * args.ranks_per_server, args.changes);
    }

    __aicore__ inline void Process() {
        Begin();
        while (left_ > 0 && AwaitAny()) {
        }
        GiveUp();
        double_buffer_.Finish();
        traffic_.Write(true);  // to what this block has posted
        report_.Write();
    }

private:
    static constexpr int64_t MAX_HEADS = 9;  // loaded at a time: they say of the messages before each
    static constexpr int64_t TOKENS_PER_TURN = 8;  // of a source, before others have theirs
    static constexpr int64_t ENTRIES_PER_COPY = MAX_POLLED_BYTES / STATUS_ENTRY_BYTES;
    static constexpr int32_t UNKNOWN = -1;
    static constexpr int32_t DONE = -2;
    static constexpr int32_t NO_CHOICE = -1;

    __aicore__ inline int64_t ScaleBytes() const {
        return args_.slot_bytes - args_.scale_offset;
    }

    __aicore__ inline int64_t NumNeighbourExperts() const {
        return args_.ranks_per_server * args_.num_local_experts;
    }

    // Of a token: words and weights.
    __aicore__ inline int64_t RouteWords() const {
        return (args_.scale_offset - args_.words_offset) / static_cast<int64_t>(sizeof(int32_t));
    }

    __aicore__ inline int64_t MaxTokens() const {
        return static_cast<int64_t>(args_.rails.index_extent);
    }

    // Whether what a server's rank has for a receiver is this block's.
    __aicore__ inline bool IsOwn(int64_t server, int64_t receiver) const {
        const int64_t place = (server * args_.ranks_per_server + receiver) % AscendC::GetBlockNum();
        return AscendC::GetBlockNum() - 1 - place == AscendC::GetBlockIdx();
    }

    __aicore__ inline void Begin() {
        number_ = RoundNumber(args_);
        KeepNumber(args_, number_);
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        entries_.Clear();
        AscendC::Duplicate(stamps_, 0, static_cast<int32_t>(2 * args_.topk * STAMP_WORDS));
        Order<AscendC::HardEvent::V_S>();
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            bool has_own = false;
            for (int64_t receiver = 0; receiver < args_.ranks_per_server; ++receiver) {
                has_own = has_own || IsOwn(server, receiver);
            }
            next_.Set(server, 0);
            believed_.Set(server, 0);
            runs_.Set(server, 0);
            totals_.Set(server, has_own ? UNKNOWN : DONE);
            left_ += has_own ? 1 : 0;
        }
        for (int64_t i = 0; i < args_.num_servers * NumNeighbourExperts(); ++i) {
            counts_.Set(i, 0);
        }
    }

    // False after the deadline.
    __aicore__ inline bool AwaitAny() {
        for (PollLoop poll(deadline_, args_.window, 0, args_.num_servers); poll.Next();) {
            const int64_t left = left_;
            if (silent_.Look()) {
                FinishSilent();
            }
            const bool is_ready = args_.in_series == 0 || AllEndsAreThere();
            if ((is_ready && RelayWhatIsThere()) || left_ != left) {
                return true;
            }
            TraceStep(TRACE_POLL);
            poll.Miss(1);
        }
        return false;
    }

    // Where phases follow one another nothing is relayed before all of every server's has come.
    __aicore__ inline bool AllEndsAreThere() {
        bool are_there = true;
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            if (totals_.At(server) == UNKNOWN) {
                LookForEnd(server);
                are_there = are_there && totals_.At(server) != UNKNOWN;
            }
        }
        return are_there;
    }

    // Of every source some, so that none waits for another. Whether there was anything.
    __aicore__ inline bool RelayWhatIsThere() {
        bool has_moved = false;
        for (int64_t place = 0; place < args_.num_servers; ++place) {
            const int64_t server = rail_.ServerAt(place);
            if (totals_.At(server) == UNKNOWN) {
                LookForEnd(server);
            }
            if (totals_.At(server) == UNKNOWN) {
                LookForMessages(server);
            }
            const int32_t total = totals_.At(server);
            if (total == DONE) {
                continue;
            }
            const int64_t first = next_.At(server);
            const int64_t there = total == UNKNOWN ? believed_.At(server) : total;
            const int64_t number = Smaller(there - first, TOKENS_PER_TURN);
            has_moved = has_moved || number > 0 || first == total;
            Relay(server, first, number);
        }
        return has_moved;
    }

    __aicore__ inline void LookForEnd(int64_t server) {
        end_.Fetch(args_.window + args_.ends.At(args_.zone, server), 0, RAIL_END_WORDS);
        if (end_.At(RailEnd::NUMBER) != number_) {
            return;
        }
        const int32_t count = end_.At(RailEnd::COUNT);
        if (!IsCall(server, end_.At(RailEnd::CALL))) {
            return;
        }
        if (count < 0 || count > MaxTokens() || count < next_.At(server)) {
            Refuse(server);
            return;
        }
        totals_.Set(server, count);
        deadline_.TraceWaitEnds(rail_.RankOn(server));
    }

    // Which messages are there, by the first heads of those behind them.
    __aicore__ inline void LookForMessages(int64_t server) {
        const int64_t first = believed_.At(server);
        if (runs_.At(server) == 0 && !LearnRun(server)) {
            return;
        }
        const int64_t run = runs_.At(server);
        const int64_t heads = Smaller(MAX_HEADS, (MaxTokens() - first + run - 1) / run);
        if (heads < 2) {
            return;
        }
        FetchHeads(server, first, run, heads);
        int64_t there = 0;
        while (there < heads && heads_.At(there * RAIL_HEAD_WORDS + RailHead::NUMBER) == number_) {
            ++there;
        }
        if (there > 1) {
            believed_.Set(server, static_cast<int32_t>(first + (there - 1) * run));
        }
    }

    // How many tokens a source's messages have, once the first of them has begun to come.
    __aicore__ inline bool LearnRun(int64_t server) {
        FetchHeads(server, 0, 1, 1);
        if (heads_.At(RailHead::NUMBER) != number_) {
            return false;
        }
        const int32_t run = heads_.At(RailHead::TOKENS);
        if (run < 1) {
            Refuse(server);
            return false;
        }
        runs_.Set(server, run);
        return true;
    }

    // Heads of tokens, each so many behind the one before.
    __aicore__ inline void FetchHeads(int64_t server, int64_t first, int64_t step, int64_t number) {
        const uint64_t at = args_.window + args_.rails.At(args_.zone, rail_.PlaceOf(server), first);
        const uint32_t gap = static_cast<uint32_t>(step * args_.rails.index_stride - RAIL_HEAD_BYTES);
        Order<AscendC::HardEvent::S_MTE2>();
        AscendC::DataCopyPad(heads_.Entries(), GlobalAt<int32_t>(at),
                             {static_cast<uint16_t>(number), RAIL_HEAD_BYTES, gap, 0, 0}, NoPadding<int32_t>());
        Order<AscendC::HardEvent::MTE2_S>();
    }

    __aicore__ inline void Relay(int64_t server, int64_t first, int64_t number) {
        for (int64_t index = first; index < first + number; ++index) {
            if (!RelayToken(server, index)) {
                return;  // its source is lost
            }
            LetOthersRun();
        }
        next_.Set(server, static_cast<int32_t>(first + number));
        if (totals_.At(server) == first + number) {
            Finish(server, static_cast<int32_t>(first + number), static_cast<int32_t>(args_.call), false);
        }
    }

    __aicore__ inline bool RelayToken(int64_t server, int64_t index) {
        TraceStep(TRACE_WRITE);
        const uint64_t slot = args_.window + args_.rails.At(args_.zone, rail_.PlaceOf(server), index);
        Order<AscendC::HardEvent::S_MTE2>();
        head_.Load(slot, 0, RAIL_HEAD_WORDS);
        route_.Load(slot + static_cast<uint64_t>(args_.words_offset), 0, RouteWords());
        Order<AscendC::HardEvent::MTE2_S>();
        const int32_t token = head_.At(RailHead::TOKEN);
        if (!IsCall(server, head_.At(RailHead::CALL))) {
            return false;
        }
        if (head_.At(RailHead::NUMBER) != number_ || head_.At(RailHead::TOKENS) < 1 || token < 0 ||
            token >= MaxTokens()) {
            Refuse(server);
            return false;
        }
        int64_t copies = 0;
        for (int64_t k = 0; k < args_.topk; ++k) {
            if (route_.At(k) != NO_CHOICE && !Choose(server, k, route_.At(k), copies)) {
                Refuse(server);
                return false;
            }
        }
        if (copies > 0) {
            CopyRow(server, slot, token, copies);
        }
        return true;
    }

    // A choice of a token for this block is noted among its copies. False if it names no place.
    __aicore__ inline bool Choose(int64_t server, int64_t k, int32_t word, int64_t& copies) {
        const int64_t expert = word & ((1 << POSITION_SHIFT) - 1);
        const int64_t position = word >> POSITION_SHIFT;
        const int64_t rank = expert / args_.num_local_experts;
        if (rank >= args_.num_servers * args_.ranks_per_server || position < 0 || position >= MaxTokens()) {
            return false;
        }
        const int64_t receiver = rank - rail_.Neighbour(0);
        if (receiver < 0 || receiver >= args_.ranks_per_server || !IsOwn(server, receiver)) {
            return true;
        }
        const int64_t count = server * NumNeighbourExperts() + expert - rail_.Neighbour(0) * args_.num_local_experts;
        // A source numbers its tokens for an expert in their order.
        if (position != counts_.At(count)) {
            return false;
        }
        counts_.Set(count, static_cast<int32_t>(position + 1));
        if (peers_.IsMasked(rank)) {
            return true;
        }
        ks_[copies] = k;
        slots_[copies] = peers_.WindowOf(rank) +
                         args_.slots.At(args_.zone, rail_.RankOn(server), expert % args_.num_local_experts, position);
        if (receiver != rail_.Number()) {
            traffic_.Add(Traffic::PAYLOAD_INSIDE, args_.row_bytes);
        }
        ++copies;
        return true;
    }

    __aicore__ inline void CopyRow(int64_t server, uint64_t slot, int32_t token, int64_t copies) {
        const uint32_t bytes = static_cast<uint32_t>(args_.row_bytes);
        AscendC::LocalTensor<uint8_t> in = rows_.AllocTensor<uint8_t>();
        AscendC::DataCopy(in, GlobalAt<uint8_t>(slot + RAIL_HEAD_BYTES), bytes);
        if (args_.slot_scale != 0) {
            AscendC::DataCopy(in[bytes], GlobalAt<uint8_t>(slot + static_cast<uint64_t>(args_.scale_offset)),
                              static_cast<uint32_t>(ScaleBytes()));
        }
        rows_.EnQue(in);
        const uint32_t half = double_buffer_.Take() * static_cast<uint32_t>(args_.topk) * STAMP_WORDS;
        const AscendC::LocalTensor<int32_t> stamps = stamps_[half];
        for (int64_t i = 0; i < copies; ++i) {
            WriteStamp(stamps[static_cast<uint32_t>(i) * STAMP_WORDS], server, token, ks_[i]);
        }
        Order<AscendC::HardEvent::S_MTE3>();
        AscendC::LocalTensor<uint8_t> out = rows_.DeQue<uint8_t>();
        for (int64_t i = 0; i < copies; ++i) {
            AscendC::DataCopy(GlobalAt<uint8_t>(slots_[i]), out, bytes);
            if (args_.slot_scale != 0) {
                AscendC::DataCopy(GlobalAt<uint8_t>(slots_[i] + static_cast<uint64_t>(args_.slot_scale)), out[bytes],
                                  static_cast<uint32_t>(ScaleBytes()));
            }
            AscendC::DataCopy(GlobalAt<int32_t>(slots_[i] + static_cast<uint64_t>(args_.stamp_offset)),
                              stamps[static_cast<uint32_t>(i) * STAMP_WORDS], STAMP_WORDS);
        }
        double_buffer_.Give();
        rows_.FreeTensor(out);
    }

    __aicore__ inline void WriteStamp(const AscendC::LocalTensor<int32_t>& stamp, int64_t server, int32_t token,
                                      int64_t k) const {
        const int64_t weights = (args_.weights_offset - args_.words_offset) / static_cast<int64_t>(sizeof(int32_t));
        stamp.SetValue(Stamp::SOURCE, static_cast<int32_t>(rail_.RankOn(server)));
        stamp.SetValue(Stamp::TOKEN, token);
        stamp.SetValue(Stamp::K, static_cast<int32_t>(k));
        stamp.SetValue(Stamp::WEIGHT, route_.At(weights + k));
    }

    // Whether a source means the same call. If not, its entries have its word: receivers see it, too.
    __aicore__ inline bool IsCall(int64_t server, int32_t call) {
        if (call == static_cast<int32_t>(args_.call)) {
            return true;
        }
        report_.AddMismatch(rail_.RankOn(server), static_cast<int32_t>(args_.call), call);
        Finish(server, LOST_COUNT, call, true);
        return false;
    }

    __aicore__ inline void Refuse(int64_t server) {
        report_.Add(REPORT_BAD_ROW, rail_.RankOn(server));
        Finish(server, LOST_COUNT, static_cast<int32_t>(args_.call), true);
    }

    // What has not come by now does not count. Where all comes in one message, that of other servers has come.
    __aicore__ inline void GiveUp() {
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            while (totals_.At(server) >= 0) {
                const int64_t first = next_.At(server);
                Relay(server, first, Smaller(totals_.At(server) - first, TOKENS_PER_TURN));
            }
            if (totals_.At(server) == UNKNOWN) {
                report_.Add(REPORT_TIMEOUT, rail_.RankOn(server));
                deadline_.TraceWaitEnds(rail_.RankOn(server));
                // A rank whose waits were stopped is leaving: its source may still come, and others miss this rank.
                if (WaitsAreStopped()) {
                    KeepTotal(server, -1);
                } else {
                    Finish(server, LOST_COUNT, static_cast<int32_t>(args_.call), true);
                }
            }
        }
    }

    // A source that nothing is awaited from has no tokens, whatever has come of it.
    __aicore__ inline void FinishSilent() {
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            if (totals_.At(server) == DONE || !silent_.Has(rail_.RankOn(server))) {
                continue;
            }
            for (int64_t i = 0; i < NumNeighbourExperts(); ++i) {
                counts_.Set(server * NumNeighbourExperts() + i, 0);
            }
            Finish(server, 0, static_cast<int32_t>(args_.call), false);
        }
    }

    // Behind all rows: entries with their numbers, or what stands for none.
    __aicore__ inline void Finish(int64_t server, int32_t total, int32_t call, bool is_lost) {
        TraceStep(TRACE_FLAG);
        for (int64_t receiver = 0; receiver < args_.ranks_per_server; ++receiver) {
            if (IsOwn(server, receiver) && !peers_.IsMasked(rail_.Neighbour(receiver))) {
                SendEntries(server, receiver, call, is_lost);
            }
        }
        KeepTotal(server, is_lost ? -1 : total);
        totals_.Set(server, DONE);
        --left_;
    }

    // For launches that follow; -1: not all of them came.
    __aicore__ inline void KeepTotal(int64_t server, int32_t total) {
        if (IsOwn(server, 0)) {
            total_.Begin(rail_.PlaceOf(server));
            total_.Set(rail_.PlaceOf(server), total);
            total_.Store(args_.rail_counts, 1);
        }
    }

    // Entries are made when the rows are there, and those before them have left.
    __aicore__ inline void FinishRows() {
        Order<AscendC::HardEvent::MTE3_S>();
    }

    __aicore__ inline void SendEntries(int64_t server, int64_t receiver, int32_t call, bool is_lost) {
        const int64_t experts = args_.num_local_experts;
        const int64_t first_count = server * NumNeighbourExperts() + receiver * experts;
        const uint64_t to = peers_.WindowOf(rail_.Neighbour(receiver)) +
                            EntryAt(args_, static_cast<uint64_t>(rail_.RankOn(server)), experts);
        for (int64_t first = 0; first < experts; first += ENTRIES_PER_COPY) {
            const int64_t number = Smaller(ENTRIES_PER_COPY, experts - first);
            FinishRows();
            for (int64_t i = 0; i < number; ++i) {
                entries_.Set(i, is_lost ? LOST_COUNT : counts_.At(first_count + first + i), call);
            }
            Order<AscendC::HardEvent::S_MTE3>();
            entries_.Send(0, to + static_cast<uint64_t>(first) * STATUS_ENTRY_BYTES, number);
        }
    }

    // A token has at most as many experts.
    static constexpr int64_t MAX_TOPK = 32;

    Rail rail_;
    Peers peers_;
    SilentRanks silent_;
    Table next_;  // token of each server's rank
    Table believed_;  // of each: where its first message begins that may not all be there
    Table runs_;  // tokens of each of its messages; 0 before the first head
    Table totals_;  // of each; UNKNOWN before its end flag, DONE behind its entries
    Table counts_;  // (S, L * localE) rows of each for each expert of this server
    Table heads_, end_, head_, route_, total_;
    StatusEntries entries_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> rows_;
    AscendC::LocalTensor<int32_t> stamps_;
    DoubleBuffer double_buffer_;
    TrafficWords traffic_;
    Deadline deadline_;
    int32_t number_ = 0;
    int64_t left_ = 0;  // servers
    int64_t ks_[MAX_TOPK];
    uint64_t slots_[MAX_TOPK];
};

}  // namespace moe
