// Rows to this rank's own window, from the last one to the first.
#pragma once

#include "row_copy.h"

namespace moe {

class KeepRows : Kernel<KeepRowsArgs> {
public:
    __aicore__ inline void Init(const KeepRowsArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        rows_.Init(pipe, args.row_bytes);
    }

    __aicore__ inline void Process() {
        const int64_t most = Smaller(args_.capacity, static_cast<int64_t>(args_.slots.index_extent));
        const int64_t number = ReadFresh<int32_t>(args_.num_rows);
        const bool fits = number >= 0 && number <= most;
        if (!fits && AscendC::GetBlockIdx() == 0) {
            report_.Add(REPORT_BAD_ROW, most, 1);
        }
        const Share share = blocks_.ShareOf(fits ? number : 0);
        for (int64_t row = share.last - 1; row >= share.first; --row) {
            const uint64_t slot = args_.window + args_.slots.At(args_.zone, row);
            rows_.Copy(args_.rows + row * args_.row_bytes, &slot, 1);
        }
        report_.Write();
    }

private:
    RowCopy rows_;
};

}  // namespace moe
