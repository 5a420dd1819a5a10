// bfloat16 on vectors: AVX-512's products of pairs where there are any, else float32.
#include "float_rows.h"
#include "gemm.h"

namespace specserve {

#if !defined(__AVX2__) || defined(__AVX512F__)  // else gemm_avx2.cpp

namespace {

constexpr int64_t LINE = 64;                   // bytes of 16 pairs of weights
constexpr int64_t STEP_BYTES = 2 * 16 * LINE;  // of 32 inputs of one panel
constexpr int64_t AHEAD = 4096;                // bytes of weights fetched ahead

inline vuint load_line(const uint8_t* p) {
    vuint v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <int R>
inline void give_sums(const Product& p, const vfloat (*total)[2], int64_t panel, int64_t row, int slot) {
    float sums[R * PANEL];
    for (int r = 0; r < R; r++) store(sums + r * PANEL, total[r][0]), store(sums + r * PANEL + HALF, total[r][1]);
    p.give(slot, sums, row, R, panel);
}

// The lines of both halves for one pair of inputs.
struct Lines {
    vuint left, right;
    Lines(const uint8_t* weights, int64_t pair)
        : left(load_line(weights + pair * LINE)), right(load_line(weights + (16 + pair) * LINE)) {
        __builtin_prefetch(weights + AHEAD + pair * LINE);
        __builtin_prefetch(weights + AHEAD + (16 + pair) * LINE);
    }
};

#if defined(__AVX512BF16__)

inline __m512bh pair_at(const bf16* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

inline vfloat add_pair(vfloat total, vuint weights, __m512bh pair) {
    return (vfloat)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, pair);
}

// WIDE: with what the inputs' rounding left.
template <int R, bool WIDE>
void rows_of(const Product& p, int64_t panel, int64_t row, int slot) {
    const uint8_t* weights = p.weights(panel);
    const bf16* x = p.x.at(row, 0);  // rows one after the other
    const int64_t k = p.w.k, apart = p.x.lower / (int64_t)sizeof(bf16);
    vfloat total[R][2] = {};
    for (int64_t i = 0; i < k; i += 32, weights += STEP_BYTES)
        for (int64_t pair = 0; pair < 16; pair++) {
            const Lines lines(weights, pair);
            for (int r = 0; r < R; r++) {
                const bf16* both = x + r * k + i + 2 * pair;
                const __m512bh upper = pair_at(both);
                total[r][0] = add_pair(total[r][0], lines.left, upper);
                total[r][1] = add_pair(total[r][1], lines.right, upper);
                if (!WIDE) continue;
                const __m512bh lower = pair_at(both + apart);
                total[r][0] = add_pair(total[r][0], lines.left, lower);
                total[r][1] = add_pair(total[r][1], lines.right, lower);
            }
        }
    give_sums<R>(p, total, panel, row, slot);
}

#else

// The even or the odd inputs' weights.
inline vfloat even(vuint pairs) { return (vfloat)(pairs << 16); }
inline vfloat odd(vuint pairs) { return (vfloat)(pairs & 0xffff0000u); }

template <int R, bool WIDE>
void rows_of(const Product& p, int64_t panel, int64_t row, int slot) {
    const uint8_t* weights = p.weights(panel);
    alignas(64) float x[R][SPAN];
    vfloat total[R][2] = {};
    for (int64_t i = 0; i < p.w.k; i += 32, weights += STEP_BYTES) {
        const int64_t at = i % SPAN;
        if (at == 0) float_rows<R>(p, row, i, std::min(SPAN, p.w.k - i), x);
        for (int64_t pair = 0; pair < 16; pair++) {
            const Lines lines(weights, pair);
            const vfloat left[2] = {even(lines.left), odd(lines.left)}, right[2] = {even(lines.right), odd(lines.right)};
            for (int r = 0; r < R; r++) {
                const vfloat first = splat(x[r][at + 2 * pair]), second = splat(x[r][at + 2 * pair + 1]);
                total[r][0] = fma(left[1], second, fma(left[0], first, total[r][0]));
                total[r][1] = fma(right[1], second, fma(right[0], first, total[r][1]));
            }
        }
    }
    give_sums<R>(p, total, panel, row, slot);
}

#endif

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
