// rope.h behind the C interface: rows are rotated in place and shared by threads.
#include "rope.h"

#include "pool.h"

using namespace specserve;

namespace {

template <typename X, typename T>
void rope_store(X* qkv, const X* q_norm, const X* k_norm, T* key_cache, T* value_cache, int64_t rows,
                const RopeArgs& a, int threads) {
    parallel_for(rows, 7, threads, [&](int64_t r) {
        rope_store_rows(qkv, qkv, q_norm, k_norm, key_cache, value_cache, a, r, r + 1);
    });
}

}  // namespace

extern "C" {
#define ROPE(NAME, X, T)                                                                                            \
    void NAME(X* qkv, const X* q_norm, const X* k_norm, T* key_cache, T* value_cache, const float* cos,             \
              const float* sin, const int64_t* positions, const int64_t* slots, int64_t rows, int64_t qkv_stride,   \
              int64_t q_heads, int64_t kv_heads, int64_t block_size, int64_t dim, float eps, int threads) {         \
        rope_store(qkv, q_norm, k_norm, key_cache, value_cache, rows,                                               \
                   RopeArgs{q_heads, {kv_heads, block_size, dim}, qkv_stride, qkv_stride, positions, slots, cos,    \
                            sin, eps},                                                                              \
                   threads);                                                                                        \
    }
ROPE(ss_rope_store_f32, float, float)
ROPE(ss_rope_store_bf16, bf16, bf16)
ROPE(ss_rope_store_f32_int8, float, int8_t)
ROPE(ss_rope_store_bf16_int8, bf16, int8_t)
}
