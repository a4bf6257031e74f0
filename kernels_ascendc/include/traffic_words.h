// What a block of a launch has moved, for the host: one of `Traffic` for each block.
#ifndef MOE_TRAFFIC_WORDS_H
#define MOE_TRAFFIC_WORDS_H

#include "waits.h"

namespace moe {

class TrafficWords {
public:
    // `at`: null, where nothing is counted.
    __aicore__ inline void Init(AscendC::TPipe* pipe, uint64_t at) {
        at_ = at;
        words_ = NewTensor<int64_t>(pipe, TRAFFIC_WORDS);
        for (uint32_t i = 0; i < TRAFFIC_WORDS; ++i) {
            numbers_[i] = 0;
        }
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
    int64_t numbers_[TRAFFIC_WORDS];
};

}  // namespace moe

#endif  // MOE_TRAFFIC_WORDS_H
