// Rotary positions (Su et al. 2021, halves layout) on merged rows [q | k | v], the optional per-head RMSNorm before it,
// and the store of k and v into the paged cache. All arithmetic is float32; what is stored is rounded once.
#pragma once
#include "cache.h"

namespace specserve {

constexpr int64_t MAX_ROPE_DIM = 512;

struct RopeArgs {
    int64_t q_heads;
    CacheShape cache;
    int64_t qkv_stride, q_stride;  // elements between rows of qkv and of what q is written to
    const int64_t* positions;      // [rows]
    const int64_t* slots;          // [rows]
    const float* cos;              // [max_position, dim / 2]
    const float* sin;
    float eps;
};

template <typename N>
inline void head_norm(float* x, const N* weight, int64_t dim, float eps) {
    vfloat squares = {};
    for (int64_t i = 0; i < dim; i += W) {
        vfloat v = load_some(x + i, dim - i);
        squares += v * v;
    }
    vfloat scale = splat(1.0f / std::sqrt(sum(squares) / (float)dim + eps));
    for (int64_t i = 0; i < dim; i += W)
        store_some(x + i, load_some(x + i, dim - i) * scale * load_some(weight + i, dim - i), dim - i);
}

inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += W) {
        int64_t left = half - i;
        vfloat c = load_some(cos + i, left), s = load_some(sin + i, left);
        vfloat low = load_some(x + i, left), high = load_some(x + half + i, left);
        store_some(x + i, low * c - high * s, left);
        store_some(x + half + i, high * c + low * s, left);
    }
}

// Rows [begin, end), in the calling thread. X is the type of qkv [rows, (q_heads + 2 kv_heads) * dim], Q of q_out
// [rows, q_heads * dim], N of the norms [dim], T of the caches: float, bf16, or int8_t for the caches. q_out may be qkv
// itself; q_norm and k_norm may be null. dim is even and at most MAX_ROPE_DIM.
template <typename X, typename Q, typename N, typename T>
void rope_store_rows(const X* qkv, Q* q_out, const N* q_norm, const N* k_norm, T* key_cache, T* value_cache,
                     const RopeArgs& a, int64_t begin, int64_t end) {
    const int64_t dim = a.cache.dim, half = dim / 2;
    alignas(64) float x[MAX_ROPE_DIM];
    auto read = [&](const X* source) {
        for (int64_t i = 0; i < dim; i += W) store_some(x + i, load_some(source + i, dim - i), dim - i);
    };
    for (int64_t r = begin; r < end; r++) {
        const X* row = qkv + r * a.qkv_stride;
        const float *cos = a.cos + a.positions[r] * half, *sin = a.sin + a.positions[r] * half;
        for (int64_t h = 0; h < a.q_heads; h++) {
            read(row + h * dim);
            if (q_norm) head_norm(x, q_norm, dim, a.eps);
            rotate(x, cos, sin, half);
            store_head(x, CacheRow<Q>{q_out + r * a.q_stride + h * dim, nullptr}, dim);
        }
        const X *k = row + a.q_heads * dim, *v = k + a.cache.kv_heads * dim;
        for (int64_t h = 0; h < a.cache.kv_heads; h++) {
            read(k + h * dim);
            if (k_norm) head_norm(x, k_norm, dim, a.eps);
            rotate(x, cos, sin, half);
            store_head(x, cache_row(key_cache, a.slots[r], h, a.cache), dim);
            read(v + h * dim);
            store_head(x, cache_row(value_cache, a.slots[r], h, a.cache), dim);
        }
    }
}

}  // namespace specserve
