// Flags that are made of a round's number: no round ends by a flag of another one, whatever that one left behind, and
// nothing has to be cleared.
#ifndef MOE_ROUND_NUMBERS_H
#define MOE_ROUND_NUMBERS_H

#include "flags.h"

namespace moe {

// The number of the round that this launch belongs to: one more than that of the round before. It is not zero, as
// fresh memory is.
template <typename Args>
__aicore__ inline int32_t RoundNumber(const Args& args) {
    const int32_t before = ReadFresh<int32_t>(args.numbers, args.zone);
    return before >= INT32_MAX || before < 0 ? 1 : before + 1;
}

// Kept by the wait: the next round, in the other zone, goes on from it. No block of this round reads that word.
class KeptNumber {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe) {
        word_.Init(pipe);
    }

    template <typename Args>
    __aicore__ inline void Keep(const Args& args, int32_t number) {
        word_.Keep(args.numbers + (1 - args.zone) * sizeof(int32_t), number);
    }

private:
    KeptWord word_;
};

}  // namespace moe

#endif  // MOE_ROUND_NUMBERS_H
