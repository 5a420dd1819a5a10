// bfloat16 on vectors: AVX-512's products of pairs where there are any, else float32.
#include "gemm.h"

namespace specserve {

#if !defined(__AVX2__) || defined(__AVX512F__)  // else gemm_avx2.cpp

namespace {

constexpr int64_t LINE = 64;                   // bytes of 16 pairs of weights
constexpr int64_t STEP_BYTES = 2 * 16 * LINE;  // of 32 inputs of one panel
constexpr int64_t AHEAD = 4096;                // bytes of weights fetched ahead

inline uint32_t pair_at(const bf16* x) {
    uint32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return pair;
}

inline float float_at(const bf16* x, int64_t apart) { return scalar(x) + (apart ? scalar(x + apart) : 0.0f); }

// One pair of inputs, with what their rounding left where that is something (WIDE).
#if defined(__AVX512BF16__)
struct Pair {
    __m512bh upper, lower;
    Pair(const bf16* x, int64_t apart, bool wide)
        : upper((__m512bh)_mm512_set1_epi32((int)pair_at(x))),
          lower((__m512bh)_mm512_set1_epi32(wide ? (int)pair_at(x + apart) : 0)) {}
};
#else
struct Pair {
    vfloat first, second;
    Pair(const bf16* x, int64_t apart, bool wide)
        : first(splat(float_at(x, wide ? apart : 0))), second(splat(float_at(x + 1, wide ? apart : 0))) {}
};
#endif

// total + the products of 16 outputs with one pair of inputs.
template <bool WIDE>
inline vfloat add_pair(vfloat total, vuint weights, const Pair& pair) {
#if defined(__AVX512BF16__)
    total = (vfloat)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, pair.upper);
    return WIDE ? (vfloat)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, pair.lower) : total;
#else
    total = fma((vfloat)(weights << 16), pair.first, total);
    return fma((vfloat)(weights & 0xffff0000u), pair.second, total);
#endif
}

inline vuint load_line(const uint8_t* p) {
    vuint v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <int R, bool WIDE>
void rows_of(const Product& p, int64_t panel, int64_t row, int slot) {
    const uint8_t* weights = p.weights(panel);
    const bf16* x = p.x.at(row, 0);  // rows one after the other
    const int64_t k = p.w.k, apart = p.x.lower / (int64_t)sizeof(bf16);
    float sums[R * PANEL];
    vfloat total[R][2] = {};
    for (int64_t i = 0; i < k; i += 32, weights += STEP_BYTES)
        for (int64_t pair = 0; pair < 16; pair++) {
            __builtin_prefetch(weights + AHEAD + pair * LINE);
            __builtin_prefetch(weights + AHEAD + (16 + pair) * LINE);
            vuint left = load_line(weights + pair * LINE), right = load_line(weights + (16 + pair) * LINE);
            for (int r = 0; r < R; r++) {
                const Pair both(x + r * k + i + 2 * pair, apart, WIDE);
                total[r][0] = add_pair<WIDE>(total[r][0], left, both);
                total[r][1] = add_pair<WIDE>(total[r][1], right, both);
            }
        }
    for (int r = 0; r < R; r++) store(sums + r * PANEL, total[r][0]), store(sums + r * PANEL + HALF, total[r][1]);
    p.give(slot, sums, row, R, panel);
}

template <bool WIDE>
void panel_of(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    int64_t r = first, end = first + rows;
#if defined(__AVX512F__)
    for (; r + 8 <= end; r += 8) rows_of<8, WIDE>(p, panel, r, slot);
    for (; r + 4 <= end; r += 4) rows_of<4, WIDE>(p, panel, r, slot);
#endif
    for (; r + 2 <= end; r += 2) rows_of<2, WIDE>(p, panel, r, slot);
    for (; r < end; r++) rows_of<1, WIDE>(p, panel, r, slot);
}

}  // namespace

void panel_bf16(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    (p.x.lower ? panel_of<true> : panel_of<false>)(p, panel, first, rows, slot);
}

#endif

}  // namespace specserve
