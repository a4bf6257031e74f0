// Ranks of the same number on each server, which exchange tokens and partial rows, and the end flags of both.
#pragma once

#include "posts.h"

namespace moe {

class Rail {
public:
    template <typename Args>
    __aicore__ inline void Init(const Args& args) {
        num_servers_ = args.num_servers;
        ranks_ = args.ranks_per_server;
        server_ = args.rank / ranks_;
        number_ = args.rank % ranks_;
    }

    // This rank's.
    __aicore__ inline int64_t Server() const {
        return server_;
    }

    // This rank's among those of its server.
    __aicore__ inline int64_t Number() const {
        return number_;
    }

    // Of this rail on a server.
    __aicore__ inline int64_t RankOn(int64_t server) const {
        return server * ranks_ + number_;
    }

    // Whether a rank is one of a server's. A relay waits for no others.
    __aicore__ inline bool IsOn(int64_t server, int64_t rank) const {
        return rank >= server * ranks_ && rank < (server + 1) * ranks_;
    }

    // Of this rank's server.
    __aicore__ inline int64_t Neighbour(int64_t number) const {
        return server_ * ranks_ + number;
    }

    // The servers in an order that begins with this rank's own and is another one on each.
    __aicore__ inline int64_t ServerAt(int64_t place) const {
        return (server_ + place) % num_servers_;
    }

    // The place of a server in that order.
    __aicore__ inline int64_t PlaceOf(int64_t server) const {
        return (server + num_servers_ - server_) % num_servers_;
    }

    // The place of this rank's server in the order of another one.
    __aicore__ inline int64_t PlaceFrom(int64_t server) const {
        return (server_ + num_servers_ - server) % num_servers_;
    }

    // Whether what goes to a server is this block's: one core for each queue.
    __aicore__ inline bool IsOwner(int64_t server) const {
        return PlaceOf(server) % AscendC::GetBlockNum() == AscendC::GetBlockIdx();
    }

    // Whether any of some servers is.
    __aicore__ inline bool OwnsAny(int64_t first_place, int64_t num_places) const {
        bool owns_any = false;
        for (int64_t i = 0; i < num_places; ++i) {
            owns_any = owns_any || IsOwner(ServerAt(first_place + i));
        }
        return owns_any;
    }

private:
    int64_t num_servers_ = 1, ranks_ = 1, server_ = 0, number_ = 0;
};

// {count, call word, 1 + the rank that is lost, its call word, round, ranks that are left out}: made in UB, one at a
// time. A flag to this rank itself is behind all that this block copied before; one that is posted, behind all that it
// posted there.
class EndFlags {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe) {
        words_ = NewTensor<int32_t>(pipe, RAIL_END_WORDS);
    }

    // Once, before any other work on it.
    __aicore__ inline void Begin(int32_t number, int64_t call) {
        AscendC::Duplicate(words_, 0, static_cast<int32_t>(RAIL_END_WORDS));
        Order<AscendC::HardEvent::V_S>();
        words_.SetValue(RailEnd::NUMBER, number);
        words_.SetValue(RailEnd::CALL, static_cast<int32_t>(call));
    }

    // False where the queue was full until the deadline.
    template <typename Args>
    __aicore__ inline bool Send(const Args& args, const Rail& rail, const Peers& peers, Poster& poster, int64_t server,
                                int64_t count, int32_t lost = 0, int32_t lost_call = 0, int32_t left_out = 0) {
        FinishRows();
        words_.SetValue(RailEnd::COUNT, static_cast<int32_t>(count));
        words_.SetValue(RailEnd::LOST, lost);
        words_.SetValue(RailEnd::LOST_CALL, lost_call);
        words_.SetValue(RailEnd::LEFT_OUT, left_out);
        Order<AscendC::HardEvent::S_MTE3>();
        const uint64_t at = args.ends.At(args.zone, rail.Server());
        if (server == rail.Server()) {
            RaiseFlags(GlobalAt<int32_t>(args.window + at), words_, RAIL_END_WORDS, 1);
            return true;
        }
        const uint64_t local = args.window + static_cast<uint64_t>(args.out_offset) + args.ends.At(args.zone, server);
        AscendC::DataCopy(GlobalAt<int32_t>(local), words_, RAIL_END_WORDS);
        Order<AscendC::HardEvent::MTE3_S>();
        const int64_t rank = rail.RankOn(server);
        constexpr int64_t END_BYTES = RAIL_END_BYTES;
        return poster.Put(static_cast<uint64_t>(rank), {local, peers.WindowOf(rank) + at, 0, END_BYTES, 1});
    }

private:
    // All that this block copied is there, and the flag before has been read.
    __aicore__ inline void FinishRows() {
        Order<AscendC::HardEvent::MTE3_S>();
    }

    AscendC::LocalTensor<int32_t> words_;
};

// What kernels have in common that send by rails.
template <typename Args>
class RailKernel : protected Kernel<Args> {
protected:
    __aicore__ inline void Init(const Args& args, AscendC::TPipe* pipe) {
        Kernel<Args>::Init(args, pipe);
        rail_.Init(args);
        peers_.Init(args.peers, args.num_servers * args.ranks_per_server);
        poster_.Init(pipe, &peers_, &this->report_, args.traffic, args.timeout_us);
        ends_.Init(pipe);
    }

    Rail rail_;
    Peers peers_;
    Poster poster_;
    EndFlags ends_;
};

}  // namespace moe
