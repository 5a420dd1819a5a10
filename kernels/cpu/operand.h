// Rows of inputs made into what a kind of weights takes, 32 inputs at a time.
#pragma once
#include "gemm.h"

namespace specserve {

// Where the rows of one operand are written; `operand` is how a product reads them.
struct Inputs {
    bf16* x;         // [rows filled up to 16, k]
    int8_t* q;       // [rows, k]
    float *scale, *sum;
    int32_t* total;  // [rows, k / 32]

    Operand operand(const Linear& w) const {
        if (!w.takes_bf16()) return {nullptr, 0, 0, 0, q, scale, sum, total};
        return TILES ? Operand::tiles(x, w.k) : Operand::of(x, w.k);
    }
};

// Of magnitudes as whole numbers, which have the order of the numbers themselves, but NaN above all.
inline float greatest(vfloat low, vfloat high) {
    auto max = [](vint a, vint b) { return a > b ? a : b; };
    vint v = max((vint)low & 0x7fffffff, (vint)high & 0x7fffffff);
    v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return ((vfloat)max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)))[0];
}

// 32 inputs: the greatest magnitude becomes 127, ties are rounded to even. Where one is not finite no sum will be.
inline void quantise_block(const Inputs& to, int64_t block, vfloat low, vfloat high) {
    float most = greatest(low, high), unit = most > 0.0f ? 127.0f / most : 0.0f;
    vfloat shift = splat(12582912.0f);  // 1.5 * 2^23: the rounded integer is in the low bits
    vint a = (vint)(low * unit + shift) - 0x4b400000, b = (vint)(high * unit + shift) - 0x4b400000;
    int32_t total = 0;
    for (int i = 0; i < W; i++) {
        const int8_t first = (int8_t)a[i], second = (int8_t)b[i];
        to.q[block * BLOCK + i] = first, to.q[block * BLOCK + W + i] = second;
        total += first + second;
    }
    float scale = most / 127.0f;
    to.scale[block] = scale, to.total[block] = total, to.sum[block] = scale * (float)total;
}

// Row r of inputs for w; load(i) gives inputs i..i + 15.
template <typename Load>
inline void make_row(const Inputs& to, const Linear& w, int64_t r, const Load& load) {
    if (!w.takes_bf16()) {
        for (int64_t b = 0; b < w.blocks(); b++)
            quantise_block(to, r * w.blocks() + b, load(b * BLOCK), load(b * BLOCK + W));
        return;
    }
    const Operand o = to.operand(w);
    for (int64_t b = 0; b < w.blocks(); b++) {
        bf16* at = const_cast<bf16*>(o.at(r, b));
        store(at, load(b * BLOCK)), store(at + W, load(b * BLOCK + W));
    }
}

// RMSNorm (Zhang and Sennrich 2019) of a row of float32.
inline void norm_row(const Inputs& to, const Linear& w, int64_t r, const float* x, const float* weight, float eps) {
    vfloat squares[4] = {};
    for (int64_t i = 0; i < w.k; i += W) {
        vfloat v = load(x + i);
        squares[i / W % 4] = fma(v, v, squares[i / W % 4]);
    }
    float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)w.k;
    const float scale = 1.0f / std::sqrt(mean + eps);
    make_row(to, w, r, [&](int64_t i) { return load(x + i) * scale * load(weight + i); });
}

}  // namespace specserve
