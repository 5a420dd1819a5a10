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

inline vfloat magnitude(vfloat v) { return (vfloat)((vuint)v & 0x7fffffffu); }

// 32 inputs: the greatest magnitude becomes 127, ties are rounded to even.
inline void quantise_block(const Inputs& to, int64_t block, vfloat low, vfloat high) {
    float most = max(max(magnitude(low), magnitude(high))), unit = most > 0.0f ? 127.0f / most : 0.0f;
    vfloat shift = splat(12582912.0f);  // 1.5 * 2^23: the rounded integer is in the low bits
    vint a = (vint)(low * unit + shift) - 0x4b400000, b = (vint)(high * unit + shift) - 0x4b400000;
    int32_t total = 0;
    for (int i = 0; i < W; i++) {
        to.q[block * BLOCK + i] = (int8_t)a[i];
        to.q[block * BLOCK + W + i] = (int8_t)b[i];
        total += a[i] + b[i];
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
