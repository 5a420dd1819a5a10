// What the ways of computing attention share: the arguments, what a row sees, and where keys and values are.
//
// A row sees the positions [begin, end) of its own sequence. They are taken in tiles of 64 and pieces of 512, counted
// from position 0: the online softmax runs over the tiles of a piece, and pieces are added up in their order. So the
// order of every sum is fixed by the row's own position, and pieces may be computed side by side.
#pragma once
#include "cache.h"

namespace specserve {

constexpr int64_t TILE = 64;     // keys taken at once
constexpr int64_t PIECE = 512;   // keys whose softmax stands alone
constexpr int64_t MAX_DIM = 256;

struct AttentionArgs {
    int64_t rows, q_heads, kv_heads, dim, block_size;
    int64_t q_stride, table_stride;  // elements between rows
    const int32_t* tables;           // [sequences, table_stride]
    const int32_t* row_sequence;     // [rows]
    const int64_t* positions;        // [rows]
    float scale;
    int64_t window;  // positions a row sees, itself included; 0 for all
    int threads;
    // Rows of draft trees, or null. A row with some bit set in its mask sees the first context[row] positions of its
    // table, then those at context[row] + i for each bit i, as if these followed: its ancestors and itself. Its own
    // position counts them. A row without a bit sees its table up to its position, as all do where there is no mask.
    const int32_t* context = nullptr;  // [rows]
    const uint64_t* masks = nullptr;   // [rows, mask_words]
    int64_t mask_words = 0;

    CacheShape cache() const { return {kv_heads, block_size, dim}; }
};

// What one row sees. Positions below `context` are those of its table; then come the bits of its mask, if it has one.
struct Row {
    const int32_t* table;
    const uint64_t* mask;
    int64_t begin, end, context;
};

inline Row row_of(int64_t row, const AttentionArgs& a) {
    int64_t end = a.positions[row] + 1, begin = a.window && end > a.window ? end - a.window : 0;
    const uint64_t* mask = a.masks ? a.masks + row * a.mask_words : nullptr;
    bool in_tree = false;
    for (int64_t i = 0; mask && i < a.mask_words; i++) in_tree |= mask[i] != 0;
    const int32_t* table = a.tables + a.row_sequence[row] * a.table_stride;
    return {table, in_tree ? mask : nullptr, begin, end, in_tree ? a.context[row] : INT64_MAX};
}

// Offsets, in elements, of the first KV head's keys [from, to) of one tile and, in int8, of their scales in bytes;
// values lie at the same places in a cache of their own. Others are those of the first, so that prefetching is harmless.
struct Tile {
    int64_t at[TILE], scale_at[TILE];

    template <typename T>
    void find(const Row& row, int64_t tile, int64_t from, int64_t to, const AttentionArgs& a) {
        int64_t straight = row.context - tile < to ? row.context - tile : to;  // keys before it: the table's own
        int64_t block = (tile + from) / a.block_size, in_block = (tile + from) % a.block_size;
        for (int64_t j = from; j < straight; j++) {
            put<T>(j, row.table[block], in_block, a);
            if (++in_block == a.block_size) block++, in_block = 0;
        }
        if (straight < to) branch<T>(row, tile, from > straight ? from : straight, to, a);
        for (int64_t j = 0; j < from; j++) at[j] = at[from], scale_at[j] = scale_at[from];
        for (int64_t j = to; j < TILE; j++) at[j] = at[from], scale_at[j] = scale_at[from];
    }

  private:
    template <typename T>
    void put(int64_t j, int64_t block, int64_t in_block, const AttentionArgs& a) {
        int64_t head = block * a.kv_heads * head_elements<T>(a.cache());
        at[j] = head + in_block * a.dim;
        scale_at[j] = head + a.block_size * a.dim + in_block * (int64_t)sizeof(float);
    }

    // Keys of the tree: the (p - context)-th bit of the mask is position p.
    template <typename T>
    void branch(const Row& row, int64_t tile, int64_t from, int64_t to, const AttentionArgs& a) {
        int64_t skip = tile + from - row.context, j = from;
        for (int64_t word = 0; word < a.mask_words && j < to; word++)
            for (uint64_t bits = row.mask[word]; bits && j < to; bits &= bits - 1) {
                if (skip-- > 0) continue;
                int64_t position = row.context + word * 64 + __builtin_ctzll(bits);
                put<T>(j++, row.table[position / a.block_size], position % a.block_size, a);
            }
        for (; j < to; j++) at[j] = at[from], scale_at[j] = scale_at[from];  // a mask with too few bits
    }
};

// Lines of the next tile, fetched a few at a time while this one is computed: two of every block of keys and of values
// in turn. Blocks are short, and the hardware takes some lines of each to see that it is a stream, which it then fetches
// ahead, many lines at once; block after block, there would be one such stream at a time.
class Fetch {
  public:
    // Blocks of keys and values that begin in a tile that was found; heads [first, first + heads).
    template <typename T>
    void start(const T* keys, const T* values, const Tile& tile, int64_t position, int64_t to, int64_t first,
               int64_t heads, const AttentionArgs& a) {
        const int64_t head = head_elements<T>(a.cache());
        const bool small = a.block_size <= TILE;
        bytes_ = (small ? heads * head : TILE * a.dim) * (int64_t)sizeof(T);
        count_ = index_ = at_ = 0;
        auto add = [&](int64_t offset) {
            segments_[count_++] = (const char*)(keys + offset);
            segments_[count_++] = (const char*)(values + offset);
        };
        if (small) {
            for (int64_t j = (a.block_size - position % a.block_size) % a.block_size; j < to; j += a.block_size)
                add(tile.at[j] + first * head);
        } else {
            for (int64_t h = 0; h < heads && h < TILE; h++) add(tile.at[0] + (first + h) * head);
        }
        if (count_ == 0) bytes_ = 0;
    }

    // `lines` more of them, an even number.
    void steps(int lines) {
        if (at_ >= bytes_) return;
        for (int i = 0; i < lines; i += 2) {
            const char* p = segments_[index_] + at_;
            __builtin_prefetch(p, 0, 2);
            __builtin_prefetch(p + 64, 0, 2);
            if (++index_ == count_) index_ = 0, at_ += 128;
        }
    }

  private:
    const char* segments_[2 * TILE];
    int64_t count_ = 0, index_ = 0, at_ = 0, bytes_ = 0;
};

// q, out: [rows, q_heads * dim]; caches as cache.h says.
void attention_f32(const float* q, const float* keys, const float* values, float* out, const AttentionArgs& a);
void attention_bf16(const bf16* q, const bf16* keys, const bf16* values, bf16* out, const AttentionArgs& a);
void attention_f32_int8(const float* q, const int8_t* keys, const int8_t* values, float* out, const AttentionArgs& a);
void attention_bf16_int8(const bf16* q, const int8_t* keys, const int8_t* values, bf16* out, const AttentionArgs& a);

// False, and nothing is done, where there are no tile registers or they do not take the shape. T is bf16 or int8_t.
template <typename T>
bool attention_on_tiles(const bf16* q, const T* keys, const T* values, bf16* out, const AttentionArgs& a);

}  // namespace specserve
