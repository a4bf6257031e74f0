// Looks at what ranks have said of a call with places (moe_triton/runtime/said.py, which is asked wherever this finds
// anything but the usual).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// What Python writes, once for a buffer: `moe_triton.runtime.said.SaidTable`.
struct Table {
    int64_t num_ranks, own_rank, source_words, header_words;
    int64_t rounds, max_tokens, capacity, alignment, stride;  // words of a header
    int64_t padded;  // the stride of experts that have as many rows each
    int64_t most;  // rows that a count can say
    const int64_t* columns() const { return &most + 1; }  // of each rank its first expert's, and its number of experts
};

class Said {
public:
    Said(const int32_t* words, const Table& table) : words_(words), table_(table) {}

    int32_t Header(int64_t rank, int64_t word) const { return words_[rank * table_.source_words + word]; }

    int64_t FirstColumn(int64_t rank) const { return table_.columns()[2 * rank]; }
    int64_t NumExperts(int64_t rank) const { return table_.columns()[2 * rank + 1]; }

    // Rows of an expert, from all ranks.
    int64_t Rows(int64_t column) const {
        int64_t rows = 0;
        for (int64_t source = 0; source < table_.num_ranks; ++source) {
            const int64_t said = words_[source * table_.source_words + table_.header_words + column];
            rows += std::clamp<int64_t>(said, 0, table_.most);
        }
        return rows;
    }

    int64_t Alignment(int64_t rank) const { return std::max(1, Header(rank, table_.alignment)); }

    // Rows that a rank's outputs need with its gaps, and the most of one of its experts.
    void Needed(int64_t rank, int64_t* span, int64_t* most) const {
        const int64_t alignment = Alignment(rank);
        *span = *most = 0;
        for (int64_t expert = 0; expert < NumExperts(rank); ++expert) {
            const int64_t rows = Rows(FirstColumn(rank) + expert);
            *span += (rows + alignment - 1) / alignment * alignment;
            *most = std::max(*most, rows);
        }
    }

private:
    const int32_t* words_;
    const Table& table_;
};

}  // namespace

extern "C" {

// Whether a call has one round, every rank says the same, and has room for what it receives. `needed` is then how
// many rows this rank's outputs need, gaps included, and the most of one of its experts.
int64_t moe_calls_agree(const int32_t* words, const int64_t* table_words, int64_t* needed) {
    const auto& table = *reinterpret_cast<const Table*>(table_words);
    const Said said(words, table);
    for (int64_t rank = 0; rank < table.num_ranks; ++rank) {
        if (said.Header(rank, table.rounds) > 1) return 0;
        if (said.Header(rank, table.max_tokens) != said.Header(0, table.max_tokens)) return 0;
        const int64_t room = said.Header(rank, table.capacity);
        if (room <= 0) continue;
        int64_t span = 0, most = 0;
        said.Needed(rank, &span, &most);
        if (room < (said.Header(rank, table.stride) == table.padded ? most : span)) return 0;
    }
    said.Needed(table.own_rank, &needed[0], &needed[1]);
    return 1;
}

// Zeroes what lies between the experts' rows of `row_bytes` each, which begin `stride` rows apart, or at multiples of
// this rank's alignment where that is 0. There are `num_rows`, whatever peers say by now.
void moe_zero_gaps(const int32_t* words, const int64_t* table_words, int64_t rows, uint64_t row_bytes, int64_t stride,
                   int64_t num_rows) {
    const auto& table = *reinterpret_cast<const Table*>(table_words);
    const Said said(words, table);
    const int64_t alignment = stride != 0 ? stride : said.Alignment(table.own_rank);
    auto* const begin = reinterpret_cast<std::byte*>(rows);
    for (int64_t expert = 0, first = 0; expert < said.NumExperts(table.own_rank); ++expert) {
        const int64_t count = said.Rows(said.FirstColumn(table.own_rank) + expert);
        const int64_t span = stride != 0 ? stride : (count + alignment - 1) / alignment * alignment;
        const int64_t last = std::min(first + span, num_rows), used = std::min(first + count, last);
        std::memset(begin + static_cast<size_t>(used) * row_bytes, 0, static_cast<size_t>(last - used) * row_bytes);
        first = last;
    }
}

}  // extern "C"
