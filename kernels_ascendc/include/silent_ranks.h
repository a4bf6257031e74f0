// The ranks that nothing is awaited from: those that are gone, and where words are relayed those whose words would come
// through one for which nobody stands in.
//
// The host may mask a rank while others are waited for. So each look reads the word behind the table of peers, which
// says how many ranks are masked and how often that has changed, and the table only where that word says so.
// Where blocks must not differ in whom they leave out, it is whom the call has known of from its beginning.
#pragma once

#include "flags.h"

namespace moe {

// Whose words are awaited: those of ranks themselves, those that relays pass on, or those of relays.
enum class Senders : uint8_t { RANKS, RELAYED, RELAYS };

class SilentRanks {
public:
    // `changes`: where that word stands; null where no rank can be masked. Nobody is silent before the first look: each
    // goes to memory, and costs as much as all else that a core does in a wait that finds everything there.
    __aicore__ inline void Init(uint64_t peers, int64_t num_ranks, uint64_t changes, Senders awaited = Senders::RANKS) {
        peers_ = peers;
        num_ranks_ = num_ranks;
        changes_ = changes;
        awaited_ = awaited;
    }

    // `known`: where it stands what the call knows of that word.
    __aicore__ inline void InitKnown(uint64_t peers, int64_t num_ranks, uint64_t known) {
        Init(peers, num_ranks, known);
        is_known_ = true;
    }

    // Before each look at what has come, or beside the copy of it. Whether there are any.
    __aicore__ inline bool Look() {
        if (changes_ == 0) {
            return false;
        }
        const uint64_t word = ReadFresh<uint64_t>(changes_);
        if (word != word_) {
            word_ = word;
            words_.Init(peers_, num_ranks_);
        }
        return HasAny();
    }

    // As of the last look.
    __aicore__ inline bool HasAny() const {
        return static_cast<uint32_t>(word_) != 0;
    }

    __aicore__ inline bool Has(int64_t rank) const {
        const uint64_t number = static_cast<uint64_t>(rank);
        if (is_known_) {
            return HasAny() && words_.IsKnownSilent(number);
        }
        if (awaited_ == Senders::RANKS) {
            return HasAny() && words_.IsGone(number);
        }
        return HasAny() && (awaited_ == Senders::RELAYED ? words_.IsSilent(number) : words_.IsMasked(number));
    }

private:
    Peers words_;
    uint64_t peers_ = 0;
    uint64_t changes_ = 0;
    uint64_t word_ = 0;
    int64_t num_ranks_ = 0;
    Senders awaited_ = Senders::RANKS;
    bool is_known_ = false;
};

}  // namespace moe
