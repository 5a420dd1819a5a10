// How one layer's keys (or values) lie in the paged cache: [blocks, kv_heads, block_size, dim], so that what one head of a
// block holds is contiguous. In int8 a head of a block is its numbers [block_size, dim] and then one float32 scale for
// each of its tokens [block_size].
#pragma once
#include <cmath>

#include "lanes.h"

namespace specserve {

struct CacheShape {
    int64_t kv_heads, block_size, dim;
};

inline vfloat load(const int8_t* p) {
#ifdef __AVX512F__
    return load_lanes(p);
#else
    typedef int8_t vbyte __attribute__((vector_size(16)));
    vbyte v;
    std::memcpy(&v, p, sizeof v);
    return __builtin_convertvector(__builtin_convertvector(v, vint), vfloat);
#endif
}

template <typename T>
struct CacheRow {
    T* numbers;    // [dim]
    float* scale;  // of int8 alone
};

// Elements of one head of a block.
template <typename T>
inline int64_t head_elements(const CacheShape& c) {
    return c.block_size * (c.dim + (sizeof(T) == 1 ? (int64_t)sizeof(float) : 0));
}

// Where one head of the token in `slot` (block * block_size + offset) is kept. T may be const.
template <typename T>
inline CacheRow<T> cache_row(T* cache, int64_t slot, int64_t kv_head, const CacheShape& c) {
    int64_t block = slot / c.block_size, in_block = slot % c.block_size;
    T* head = cache + (block * c.kv_heads + kv_head) * head_elements<T>(c);
    float* scales = sizeof(T) == 1 ? (float*)(head + c.block_size * c.dim) + in_block : nullptr;
    return {head + in_block * c.dim, scales};
}

// Keep one head of a token, x [dim].
template <typename T>
inline void store_head(const float* x, CacheRow<T> row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += W) store_some(row.numbers + i, load_some(x + i, dim - i), dim - i);
}

// In int8: the greatest magnitude becomes 127, ties are rounded to even. A head that is not finite has a scale that is
// not. Magnitudes are compared as whole numbers, which have the order of the numbers themselves, but NaN above all.
inline void store_head(const float* x, CacheRow<int8_t> row, int64_t dim) {
    uint32_t most = 0;
    for (int64_t i = 0; i < dim; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    float top;
    std::memcpy(&top, &most, sizeof top);
    const float unit = top > 0.0f ? 127.0f / top : 0.0f;
    *row.scale = top / 127.0f;
    for (int64_t i = 0; i < dim; i++) row.numbers[i] = (int8_t)std::lrintf(x[i] * unit);
}

}  // namespace specserve
