// Rotary positions (Su et al. 2021, halves layout) on merged rows [q | k | v], the optional per-head RMSNorm before it,
// and the store of k and v into the paged cache.
#include <cmath>

#include "pool.h"
#include "vec.h"

namespace specserve {

struct RopeArgs {
    int64_t rows, q_heads, kv_heads, dim;
    int64_t row_stride;        // elements between rows of q_k_v
    const int64_t* positions;  // [rows]
    const int64_t* slots;      // [rows]
    const float* cos;          // [max_position, dim / 2]
    const float* sin;
    float eps;
    int threads;
};

template <typename T>
void head_norm(T* x, const T* weight, int64_t dim, float eps) {
    vfloat squares = {};
    for (int64_t i = 0; i < dim; i += W) {
        vfloat v = load_some(x + i, dim - i);
        squares += v * v;
    }
    vfloat scale = splat(1.0f / std::sqrt(sum(squares) / (float)dim + eps));
    for (int64_t i = 0; i < dim; i += W)
        store_some(x + i, load_some(x + i, dim - i) * scale * load_some(weight + i, dim - i), dim - i);
}

template <typename T>
void rotate(T* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += W) {
        int64_t left = half - i;
        vfloat c = load_some(cos + i, left), s = load_some(sin + i, left);
        vfloat low = load_some(x + i, left), high = load_some(x + half + i, left);
        store_some(x + i, low * c - high * s, left);
        store_some(x + half + i, high * c + low * s, left);
    }
}

template <typename T>
void rope_store(T* qkv, const T* q_norm, const T* k_norm, T* key_cache, T* value_cache, const RopeArgs& a) {
    int64_t half = a.dim / 2, kv_width = a.kv_heads * a.dim;
    parallel_for(a.rows, 7, a.threads, [&](int64_t r) {
        T* row = qkv + r * a.row_stride;
        T* k = row + a.q_heads * a.dim;
        const float* cos = a.cos + a.positions[r] * half;
        const float* sin = a.sin + a.positions[r] * half;
        for (int64_t h = 0; h < a.q_heads + a.kv_heads; h++) {
            const T* norm = h < a.q_heads ? q_norm : k_norm;
            if (norm) head_norm(row + h * a.dim, norm, a.dim, a.eps);
            rotate(row + h * a.dim, cos, sin, half);
        }
        std::memcpy(key_cache + a.slots[r] * kv_width, k, kv_width * sizeof(T));
        std::memcpy(value_cache + a.slots[r] * kv_width, k + kv_width, kv_width * sizeof(T));
    });
}

}  // namespace specserve

using namespace specserve;

extern "C" {
#define ROPE(NAME, T)                                                                                               \
    void NAME(T* qkv, const T* q_norm, const T* k_norm, T* key_cache, T* value_cache, const float* cos,             \
              const float* sin, const int64_t* positions, const int64_t* slots, int64_t rows, int64_t row_stride,   \
              int64_t q_heads, int64_t kv_heads, int64_t dim, float eps, int threads) {                             \
        rope_store(qkv, q_norm, k_norm, key_cache, value_cache,                                                     \
                   RopeArgs{rows, q_heads, kv_heads, dim, row_stride, positions, slots, cos, sin, eps, threads});   \
    }
ROPE(ss_rope_store_f32, float)
ROPE(ss_rope_store_bf16, bf16)
}
