// The body of Python's `OutputPool`: a buffer's memory for outputs, shared by Python's calls and whole calls.
#pragma once

#include <memory>

#include "memory.h"
#include "references.h"
#include "tensors.h"

namespace moe::calls {

struct OutputPool {
    std::shared_ptr<Pool> pool;
    std::shared_ptr<const Torch> torch;
    Ref codes;  // a `Dtype` for each dtype of torch's: a dict
};

extern PyTypeObject output_pool_type;

}  // namespace moe::calls
