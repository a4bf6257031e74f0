// Looks at a call's ids, (T, K): copies and checks them, and says what stands for them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

namespace {

constexpr size_t LANES = 4;
using Ids = int32_t __attribute__((vector_size(LANES * sizeof(int32_t))));  // g++'s and clang's, on every processor

// The ids of a token; lanes behind them are -1.
template <size_t PARTS>
struct Row {
    Row(const int32_t* ids, uint64_t topk) {
        if (topk == PARTS * LANES) {
            std::memcpy(parts, ids, sizeof(parts));
            return;
        }
        int32_t padded[PARTS * LANES];
        std::fill(std::begin(padded), std::end(padded), -1);
        std::memcpy(padded, ids, topk * sizeof(int32_t));
        std::memcpy(parts, padded, sizeof(parts));
    }

    Ids parts[PARTS];
};

// Whether every id is at least -1 and below a number, and those of a token that are not -1 are distinct. Without a
// branch for each of them: nearly all calls' are, and each call of an operator asks.
template <size_t PARTS>
bool AreGood(const int32_t* ids, uint64_t num_tokens, uint64_t topk, int32_t num_experts) {
    Ids bad{};
    for (uint64_t token = 0; token < num_tokens; ++token) {
        const Row<PARTS> row(ids + token * topk, topk);
        Ids equal[PARTS] = {};  // how many ids of the token equal that of a lane, itself too; -1 for each
        for (size_t k = 0; k < PARTS * LANES; ++k) {
            const int32_t id = row.parts[k / LANES][k % LANES];
            for (size_t part = 0; part < PARTS; ++part) equal[part] += row.parts[part] == id;
        }
        for (size_t part = 0; part < PARTS; ++part) {
            const Ids& each = row.parts[part];
            bad |= (each < -1) | (each >= num_experts) | ((equal[part] != -1) & (each >= 0));
        }
    }
    bool is_bad = false;
    for (size_t lane = 0; lane < LANES; ++lane) is_bad = is_bad || bad[lane] != 0;
    return !is_bad;
}

}  // namespace

extern "C" {

// Position of the first id outside [-1, num_experts) (`*rule` = 1) or equal to an earlier one of its
// token (`*rule` = 2); -1 when every id is good.
int64_t moe_first_bad_id(const int32_t* ids, uint64_t num_tokens, uint64_t topk, int64_t num_experts, int32_t* rule) {
    const auto limit = static_cast<int32_t>(std::clamp<int64_t>(num_experts, 0, INT32_MAX));
    const auto are_good = topk <= 2 * LANES ? AreGood<2> : topk <= 4 * LANES ? AreGood<4> : AreGood<8>;
    if (topk <= 8 * LANES && are_good(ids, num_tokens, topk, limit)) return -1;
    for (uint64_t token = 0; token < num_tokens; ++token) {
        const int32_t* row = ids + token * topk;
        for (uint64_t k = 0; k < topk; ++k) {
            const int64_t id = row[k];
            if (id < -1 || id >= num_experts) {
                *rule = 1;
                return static_cast<int64_t>(token * topk + k);
            }
            for (uint64_t earlier = 0; id >= 0 && earlier < k; ++earlier) {
                if (row[earlier] == id) {
                    *rule = 2;
                    return static_cast<int64_t>(token * topk + k);
                }
            }
        }
    }
    return -1;
}

// Copies ids to 32 bits and checks them like `moe_first_bad_id`, so that a call reads its ids once. Wide ids are
// clamped, so that an invalid one stays invalid. Of a mask's entries only active ones are looked at: it has a flag for
// each token if `by_token`, and those behind the first that is not set have to be like it (`*rule` = 3); or for each
// id. It may be null.
int64_t moe_take_ids(const void* ids, uint32_t id_bytes, int32_t* taken, uint64_t num_tokens, uint64_t topk,
                     int64_t num_experts, const uint8_t* mask, uint32_t by_token, int32_t* rule) {
    const uint64_t count = num_tokens * topk;
    if (id_bytes == sizeof(int32_t)) {
        std::memcpy(taken, ids, count * sizeof(int32_t));
    } else {
        const auto* wide = static_cast<const int64_t*>(ids);
        for (uint64_t i = 0; i < count; ++i) {
            taken[i] = static_cast<int32_t>(std::clamp<int64_t>(wide[i], INT32_MIN, INT32_MAX));
        }
    }
    if (mask == nullptr) return moe_first_bad_id(taken, num_tokens, topk, num_experts, rule);
    if (by_token != 0) {
        const uint8_t* const end = mask + num_tokens;
        const uint8_t* const first = std::find(mask, end, uint8_t{0});
        const uint8_t* const again = std::find_if(first, end, [](uint8_t flag) { return flag != 0; });
        if (again != end) {
            *rule = 3;
            return (again - mask) * static_cast<int64_t>(topk);
        }
        return moe_first_bad_id(taken, static_cast<uint64_t>(first - mask), topk, num_experts, rule);
    }
    std::vector<int32_t> row(topk);
    for (uint64_t token = 0; token < num_tokens; ++token) {
        for (uint64_t k = 0; k < topk; ++k) {
            row[k] = mask[token * topk + k] != 0 ? taken[token * topk + k] : -1;
        }
        const int64_t bad = moe_first_bad_id(row.data(), 1, topk, num_experts, rule);
        if (bad >= 0) return static_cast<int64_t>(token * topk) + bad;
    }
    return -1;
}

// What stands for ids where a dispatch's are compared with those of its combine: a sum, with a factor for each place.
// An entry of -1 adds nothing, nor does one that a mask leaves out: it has a flag for every `per_flag` entries, or is
// null.
int64_t moe_digest_ids(const int32_t* ids, uint64_t count, const uint8_t* mask, uint64_t per_flag) {
    uint64_t digest = 0;
    for (uint64_t i = 0; i < count; ++i) {
        auto factor = static_cast<uint32_t>(i) * 0x9E3779B1U;  // 2^32 over the golden ratio
        factor = (factor ^ (factor >> 15)) * 0x85EBCA6BU;
        factor = (factor ^ (factor >> 13)) | 1U;
        const bool counts = mask == nullptr || mask[i / per_flag] != 0;
        digest += counts ? static_cast<uint64_t>(static_cast<uint32_t>(ids[i]) + 1U) * factor : 0;
    }
    return static_cast<int64_t>(digest);
}

}  // extern "C"
