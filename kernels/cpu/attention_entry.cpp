// Attention timed without whoever calls it: one layer after the other, as a forward has them.
#include <chrono>
#include <cmath>

#include "attention.h"

using namespace specserve;

// Seconds for `layers` layers whose keys, and values, are `layer_stride` elements apart. q and out are
// [rows, q_heads, dim], tables [sequences, table_stride].
extern "C" double ss_bench_attention(const bf16* q, const bf16* key_cache, const bf16* value_cache, bf16* out,
                                     const int32_t* tables, const int32_t* row_sequence, const int64_t* positions,
                                     int64_t layers, int64_t layer_stride, int64_t rows, int64_t table_stride,
                                     int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t block_size, int threads) {
    AttentionArgs a{};
    a.rows = rows, a.q_heads = q_heads, a.kv_heads = kv_heads, a.dim = dim, a.block_size = block_size;
    a.q_stride = q_heads * dim, a.table_stride = table_stride, a.tables = tables, a.row_sequence = row_sequence;
    a.positions = positions, a.scale = 1.0f / std::sqrt((float)dim), a.threads = threads;
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < layers; i++)
        attention_bf16(q, key_cache + i * layer_stride, value_cache + i * layer_stride, out, a);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
