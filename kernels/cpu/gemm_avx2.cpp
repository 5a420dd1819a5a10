// The products of gemm_bf16.cpp and gemm_dots.cpp for AVX2 alone: a panel is four registers of 8 outputs. The compiler makes
// scalars of wider vectors than the machine's. Each output is the same chain of the same sums for any number of rows.
#include "dot.h"
#include "float_rows.h"
#include "following.h"
#include "gemm.h"

namespace specserve {

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace {

constexpr int64_t EIGHT = 8, QUARTERS = PANEL / EIGHT;
constexpr int64_t AHEAD = 1024;  // bytes of weights brought to the first cache ahead of their turn

template <int R>
void give_sums(const Product& p, __m256 (*total)[QUARTERS], int64_t panel, int64_t row, int slot) {
    float sums[R * PANEL];
    for (int r = 0; r < R; r++)
        for (int64_t c = 0; c < QUARTERS; c++) _mm256_storeu_ps(sums + r * PANEL + c * EIGHT, total[r][c]);
    p.give(slot, sums, row, R, panel);
}

// N quarters of the outputs from number `from` on.
template <int R, int N>
inline void add_bf16(const Product& p, const uint8_t* weights, int64_t row, __m256 (*total)[QUARTERS], int64_t from,
                     Following& following) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    alignas(32) float x[R][SPAN];
    __m256 sum[R][N];
    for (auto& some : sum)
        for (__m256& one : some) one = _mm256_setzero_ps();
    for (int64_t i = 0; i < p.w.k; i += 32, weights += 2048) {
        const int64_t at = i % SPAN;
        if (at == 0) float_rows<R>(p, row, i, std::min(SPAN, p.w.k - i), x);
        following.step();
        for (int64_t pair = 0; pair < 16; pair++) {
            __m256 even[N], odd[N];
            auto add = [&](int r, int64_t c) __attribute__((always_inline)) {
                const float* both = x[r] + at + 2 * pair;
                sum[r][c] = _mm256_fmadd_ps(even[c], _mm256_broadcast_ss(both), sum[r][c]);
                sum[r][c] = _mm256_fmadd_ps(odd[c], _mm256_broadcast_ss(both + 1), sum[r][c]);
            };
            for (int64_t c = 0; c < N; c++) {
                const uint8_t* line = weights + (from + c) / 2 * 1024 + pair * 64 + c % 2 * 32;
                if (c % 2 == 0) __builtin_prefetch(line + AHEAD);
                __m256i w = _mm256_loadu_si256((const __m256i*)line);
                even[c] = (__m256)_mm256_slli_epi32(w, 16), odd[c] = (__m256)_mm256_and_si256(w, high);
                for (int r = 0; N == QUARTERS && r < R; r++) add(r, c);  // no registers for weights then
            }
            for (int r = 0; N < QUARTERS && r < R; r++)
                for (int64_t c = 0; c < N; c++) add(r, c);
        }
    }
    for (int r = 0; r < R; r++)
        for (int64_t c = 0; c < N; c++) total[r][from + c] = sum[r][c];
}

// Many rows by half of the outputs at a time: more of their sums fit the registers.
template <int R>
void rows_bf16(const Product& p, int64_t panel, int64_t row, int slot, Following& following) {
    constexpr int N = R > 2 ? 2 : 4;
    __m256 total[R][QUARTERS];
    for (int64_t from = 0; from < QUARTERS; from += N) add_bf16<R, N>(p, p.weights(panel), row, total, from, following);
    give_sums<R>(p, total, panel, row, slot);
}

// The weights of 8 outputs, number `c` of four, for four inputs.
template <int64_t KIND>
inline __m256i weights_of(const uint8_t* p, int64_t group, int64_t c) {
    if (KIND == Q8)
        return _mm256_loadu_si256((const __m256i*)(p + c / 2 * (Q8_BYTES / 2) + group * 64 + c % 2 * 32));
    __m256i both = _mm256_loadu_si256((const __m256i*)(p + group * 64 + c % 2 * 32));
    return _mm256_and_si256(c < 2 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
}

// Adds the products of one group of four inputs: of weights of 4 bits two by two, as those of SHARE inputs fit 16 bits.
template <int64_t KIND>
inline __m256i add_group(__m256i sums, __m256i weights, int32_t four) {
    const __m256i q = _mm256_set1_epi32(four);
    if (KIND == Q8) return _mm256_add_epi32(sums, dot4_half(weights, q));
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, q));
}

// The sums of four products in each lane, from what add_group has added up.
template <int64_t KIND>
inline __m256i sums_of(__m256i sums, int32_t start) {
    if (KIND != Q8) sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
    return KIND == Q4_0 ? _mm256_add_epi32(sums, _mm256_set1_epi32(start)) : sums;
}

inline __m256 halves_at(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

template <int64_t KIND, int R>
void rows_dots(const Product& p, int64_t panel, int64_t row, int slot, Following& following) {
    constexpr int64_t numbers = KIND == Q4_1 ? 2 * SCALE_BYTES : SCALE_BYTES;
    const uint8_t* block = p.weights(panel);
    const int64_t blocks = p.w.blocks(), bytes = p.w.block_bytes();
    __m256 total[R][QUARTERS];
    for (auto& sums : total)
        for (__m256& sum : sums) sum = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, block += bytes) {
        following.step();
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + AHEAD + i);
        for (int64_t c = 0; c < QUARTERS; c++) {
            const __m256 scale = halves_at(block + 16 * c);
            for (int64_t share = 0; share < SHARES; share++) {
                __m256i products[R];
                for (__m256i& sum : products) sum = _mm256_setzero_si256();
                for (int64_t group = share * SHARE / 4; group < (share + 1) * SHARE / 4; group++) {
                    __m256i w = weights_of<KIND>(block + numbers, group, c);
                    for (int r = 0; r < R; r++) {
                        int32_t four;
                        std::memcpy(&four, p.x.q + ((row + r) * blocks + b) * BLOCK + 4 * group, sizeof four);
                        products[r] = add_group<KIND>(products[r], w, four);
                    }
                }
                for (int r = 0; r < R; r++) {
                    const int64_t i = ((row + r) * blocks + b) * SHARES + share;
                    const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(p.x.scale[i]));
                    const __m256 exact = _mm256_cvtepi32_ps(sums_of<KIND>(products[r], p.x.start[i]));
                    total[r][c] = _mm256_fmadd_ps(exact, factor, total[r][c]);
                }
            }
            if (KIND != Q4_1) continue;
            const __m256 least = halves_at(block + SCALE_BYTES + 16 * c);
            for (int r = 0; r < R; r++) {
                const __m256 sum = _mm256_set1_ps(p.x.sum[(row + r) * blocks + b]);
                total[r][c] = _mm256_fmadd_ps(least, sum, total[r][c]);
            }
        }
    }
    give_sums<R>(p, total, panel, row, slot);
}

template <int64_t KIND>
void panel_of(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    int64_t r = first, end = first + rows;
    Following following(p, panel, p.w.blocks() * (rows / 4 + rows % 4));
    for (; r + 4 <= end; r += 4) rows_dots<KIND, 4>(p, panel, r, slot, following);
    for (; r < end; r++) rows_dots<KIND, 1>(p, panel, r, slot, following);
}

}  // namespace

void panel_bf16(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    int64_t r = first, end = first + rows;
    Following following(p, panel, p.w.blocks() * (rows / 4 * 2 + (rows % 4 + 1) / 2));
    for (; r + 4 <= end; r += 4) rows_bf16<4>(p, panel, r, slot, following);
    if (r + 2 <= end) rows_bf16<2>(p, panel, r, slot, following), r += 2;
    if (r < end) rows_bf16<1>(p, panel, r, slot, following);
}

void panel_dots(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    if (p.w.kind == Q8) return panel_of<Q8>(p, panel, first, rows, slot);
    if (p.w.kind == Q4_0) return panel_of<Q4_0>(p, panel, first, rows, slot);
    panel_of<Q4_1>(p, panel, first, rows, slot);
}

#endif

}  // namespace specserve
