// What the ways of computing attention share: the arguments, and where keys and values are.
#pragma once
#include <cmath>
#include <vector>

#include "cache.h"

namespace specserve {

constexpr int64_t TILE = 64;     // keys taken at once, counted from position 0
constexpr int MAX_VECTORS = 16;  // head_dim up to 256

struct AttentionArgs {
    int64_t rows, q_heads, kv_heads, dim, block_size;
    int64_t q_stride, table_stride;  // elements between rows
    const int32_t* tables;           // [sequences, table_stride]
    const int32_t* row_sequence;     // [rows]
    const int64_t* positions;        // [rows]
    float scale;
    int64_t window;  // positions a row sees, itself included; 0 for all
    int threads;
};

// Lines of `vectors` vectors from p. The hardware does not see the pattern: one head's part of each token's line-up.
template <typename T>
inline void prefetch(const T* p, int vectors) {
    for (int i = 0; i < vectors; i += 64 / (int)(W * sizeof(T))) __builtin_prefetch(p + i * W);
}

// Where keys [from, to) of one tile and their values are. Others point at the first, so that prefetching is harmless.
template <typename T>
struct Tile {
    const T* keys[TILE];
    const T* values[TILE];

    void find(const T* key_cache, const T* value_cache, const int32_t* table, int64_t tile, int64_t from, int64_t to,
              int64_t kv_head, const AttentionArgs& a) {
        int64_t block = (tile + from) / a.block_size, in_block = (tile + from) % a.block_size;
        for (int64_t j = from; j < to; j++) {
            int64_t offset = ((table[block] * a.kv_heads + kv_head) * a.block_size + in_block) * a.dim;
            keys[j] = key_cache + offset, values[j] = value_cache + offset;
            if (++in_block == a.block_size) block++, in_block = 0;
        }
        for (int64_t j = 0; j < TILE; j++)
            if (j < from || j >= to) keys[j] = key_cache, values[j] = value_cache;
    }
};

// False, and nothing is done, where there are no tile registers or they do not take the shape.
bool attention_on_tiles(const bf16* q, const bf16* key_cache, const bf16* value_cache, bf16* out,
                        const AttentionArgs& a);

}  // namespace specserve
