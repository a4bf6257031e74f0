// One plan that the fast calls can run: for which call it is, and where its holes are filled from.
#ifndef MOE_CALLS_PREPARED_H
#define MOE_CALLS_PREPARED_H

#include <cstdint>
#include <vector>

#include "references.h"
#include "tensors.h"

namespace moe::calls {

// What a hole may ask for. The names are those of the plans' holes.
enum class Value : uint8_t {
    X,
    TOPK_IDX,
    TOPK_WEIGHTS,
    SMOOTH_SCALES,
    NUM_TOKENS,
    NUM_IDS,
    EXPAND_IDX,
    TOKENS_PER_EXPERT,
    RECV_OFFSETS,
    TRIPLES,
    SCALES,
    WEIGHTS,
    TOKENS,
    Y,
    NUM_ROWS,
    OUT,
    OWN_RESULTS,
    COUNT,
};

class Values {
public:
    uint64_t& operator[](Value value) { return values_[static_cast<size_t>(value)]; }
    uint64_t operator[](Value value) const { return values_[static_cast<size_t>(value)]; }

private:
    uint64_t values_[static_cast<size_t>(Value::COUNT)] = {};
};

// Which of an operator's plans a call needs.
struct Key {
    Dtype dtype{};
    bool quantize = false;
    bool smooth = false;
    bool weights = false;
    bool in_place = false;
    uint8_t zone = 0;
    uint32_t parts = 1;

    bool operator==(const Key& other) const {
        return dtype == other.dtype && quantize == other.quantize && smooth == other.smooth &&
               weights == other.weights && in_place == other.in_place && zone == other.zone && parts == other.parts;
    }
};

struct Prepared {
    PyObject_HEAD
    Key key;
    Ref executable;  // owns the plan
    Ref dtype;  // torch's, of the key
    Ref tokens;  // direct: where the rows arrive; otherwise none
    uint64_t tokens_address;
    uint64_t plan;
    std::vector<Value> holes;
};

extern PyTypeObject prepared_type;

// The one of a list for a key, or null.
Prepared* Find(PyObject* list, const Key& key);

}  // namespace moe::calls

#endif  // MOE_CALLS_PREPARED_H
