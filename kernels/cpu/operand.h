// Rows of inputs made into what a kind of weights takes, 32 inputs at a time.
#pragma once
#include "dot.h"
#include "gemm.h"

namespace specserve {

// Where the rows of one operand are written; `operand` is how a product reads them.
struct Inputs {
    bf16* x;         // [rows filled up to 16, k]
    bf16* lower;     // what their rounding leaves, likewise; null where it is dropped
    int8_t* q;       // blocks: [rows, k]; limbs: see Limbs
    float* scale;    // blocks: [rows, k / SHARE]; limbs: [rows]
    float* sum;      // blocks: [rows, k / 32]
    int32_t* start;  // blocks: [rows, k / SHARE]

    Operand operand(const Linear& w) const {
        if (w.takes() != Takes::BFLOAT16) return {nullptr, 0, 0, 0, q, scale, sum, start};
        Operand o = TILES ? Operand::tiles(x, w.k) : Operand::of(x, w.k);
        o.lower = lower ? (int64_t)((const char*)lower - (const char*)x) : 0;
        return o;
    }
};

// Where the limbs of 16-bit inputs lie, q = 256 * high + low: tiles of 16 rows by 64 inputs, high and then low, one step
// of 64 inputs after the other; inputs past k are zeros.
struct Limbs {
    static constexpr int64_t STEP = 64, LOW = 1024, STEP_BYTES = 2 * LOW;
    static int64_t steps(int64_t k) { return (k + STEP - 1) / STEP; }
    // Bytes of some rows.
    static int64_t bytes(int64_t rows, int64_t k) { return (rows + 15) / 16 * steps(k) * STEP_BYTES; }
    static int64_t row(int64_t r, int64_t k) { return r / 16 * steps(k) * STEP_BYTES + r % 16 * STEP; }
};

inline vint max(vint a, vint b) {
#ifdef __AVX512F__
    return (vint)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return a > b ? a : b;
#endif
}

// Of magnitudes as whole numbers, which have the order of the numbers themselves, but NaN above all.
inline float greatest(vfloat low, vfloat high) {
    vint v = max((vint)low & 0x7fffffff, (vint)high & 0x7fffffff);
    v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return ((vfloat)max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)))[0];
}

// The unit in which the greatest of some numbers becomes 127, and what undoes it.
struct Scale {
    float unit, scale;
    explicit Scale(float most) : unit(most > 0.0f ? 127.0f / most : 0.0f), scale(most / 127.0f) {}
};

// 32 inputs, ties rounded to even. Where one is not finite no sum will be.
inline void quantise_block(const Inputs& to, int64_t kind, int64_t block, vfloat low, vfloat high) {
    const Scale first(greatest(low, SHARES == 1 ? high : low)), second = SHARES == 1 ? first : Scale(greatest(high, high));
    const vfloat shift = splat(12582912.0f);  // 1.5 * 2^23: the rounded integer is in the low bits
    const vint a = (vint)(low * first.unit + shift) - 0x4b400000, b = (vint)(high * second.unit + shift) - 0x4b400000;
    int32_t total[2] = {};
    for (int i = 0; i < W; i++) {
        const int8_t lower = (int8_t)a[i], upper = (int8_t)b[i];
        to.q[block * BLOCK + i] = lower, to.q[block * BLOCK + W + i] = upper;
        total[0] += lower, total[1] += upper;
    }
    const int32_t offset = (int32_t)offset_of(kind);
    float sum = 0.0f;
    if (SHARES == 1) total[0] += total[1];
    for (int64_t i = 0; i < SHARES; i++) {
        const float scale = i ? second.scale : first.scale;
        to.scale[block * SHARES + i] = scale, to.start[block * SHARES + i] = -offset * total[i];
        sum += scale * (float)total[i];
    }
    to.sum[block] = sum;
}

#ifdef __AVX512F__

// 64 numbers in 16 bits, of 4 vectors 4 in each of 4 lanes in turn -> their order, from bytes.
inline __m512i in_order(__m512i bytes) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}

// 16 bits, the greatest magnitude of the row at 2^14 or more: limbs from -128 to 127. `most` is that magnitude or, by
// rounding, about it.
template <typename Load>
inline void make_limbs(const Inputs& to, const Linear& w, int64_t r, float most, const Load& load) {
    if (!std::isfinite(most)) return void(to.scale[r] = NAN);
    const int exponent = most > 0.0f ? std::max(std::ilogb(most * 1.0078125f) - 14, -110) : 0;
    const float unit = std::ldexp(1.0f, -exponent);
    to.scale[r] = std::ldexp(1.0f, exponent);
    int8_t* at = to.q + Limbs::row(r, w.k);
    auto four = [&](int64_t i) { return _mm512_cvtps_epi32((__m512)(load(i) * unit)); };
    const __m512i half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255), none = _mm512_setzero_si512();
    for (int64_t i = 0; i < w.k; i += Limbs::STEP, at += Limbs::STEP_BYTES) {
        const bool whole = i + BLOCK < w.k;
        __m512i a = _mm512_packs_epi32(four(i), four(i + W));
        __m512i b = whole ? _mm512_packs_epi32(four(i + 2 * W), four(i + 3 * W)) : none;
        __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
        __m512i high = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                          _mm512_srai_epi16(_mm512_add_epi16(b, half), 8));
        _mm512_storeu_si512(at, in_order(high));
        _mm512_storeu_si512(at + Limbs::LOW, in_order(low));
    }
}

#else

template <typename Load>
inline void make_limbs(const Inputs&, const Linear&, int64_t, float, const Load&) {}

#endif

// Row r of inputs for w; load(i) gives inputs i..i + 15.
template <typename Load>
inline void make_row(const Inputs& to, const Linear& w, int64_t r, const Load& load) {
    if (w.takes() == Takes::LIMBS) {
        vint most = {};
        for (int64_t i = 0; i < w.k; i += W) most = max(most, (vint)load(i) & 0x7fffffff);
        return make_limbs(to, w, r, greatest((vfloat)most, vfloat{}), load);
    }
    if (w.takes() == Takes::BLOCKS) {
        for (int64_t b = 0; b < w.blocks(); b++)
            quantise_block(to, w.kind, r * w.blocks() + b, load(b * BLOCK), load(b * BLOCK + W));
        return;
    }
    const Operand o = to.operand(w);
    for (int64_t b = 0; b < w.blocks(); b++) {
        bf16* at = const_cast<bf16*>(o.at(r, b));
        for (int64_t i = 0; i < BLOCK; i += W) {
            const vfloat v = load(b * BLOCK + i);
            store(at + i, v);
            if (o.lower) store((bf16*)((char*)(at + i) + o.lower), v - specserve::load(at + i));
        }
    }
}

// RMSNorm (Zhang and Sennrich 2019) of a row of float32.
inline void norm_row(const Inputs& to, const Linear& w, int64_t r, const float* x, const float* weight, float eps) {
    vfloat squares[4] = {};
    vint most = {};
    const bool limbs = w.takes() == Takes::LIMBS;
    for (int64_t i = 0; i < w.k; i += W) {
        vfloat v = load(x + i);
        squares[i / W % 4] = fma(v, v, squares[i / W % 4]);
        if (limbs) most = max(most, (vint)(v * load(weight + i)) & 0x7fffffff);
    }
    float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)w.k;
    const float scale = 1.0f / std::sqrt(mean + eps);
    auto normed = [&](int64_t i) { return load(x + i) * scale * load(weight + i); };
    limbs ? make_limbs(to, w, r, greatest((vfloat)most, vfloat{}) * scale, normed) : make_row(to, w, r, normed);
}

}  // namespace specserve
