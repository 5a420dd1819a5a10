// The products of gemm_bf16.cpp and gemm_dots.cpp for AVX2 alone: a panel is four registers of 8 outputs. The compiler makes
// scalars of wider vectors than the machine's. Each output is the same chain of the same sums for any number of rows.
#include "dot.h"
#include "gemm.h"

namespace specserve {

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace {

constexpr int64_t EIGHT = 8, LANES = PANEL / EIGHT;
constexpr int64_t AHEAD = 2048;  // bytes of weights fetched ahead

// One input, with what its rounding left `apart` numbers on.
inline __m256 float_at(const bf16* x, int64_t apart) {
    return _mm256_set1_ps(scalar(x) + (apart ? scalar(x + apart) : 0.0f));
}

template <int R>
void give_sums(const Product& p, __m256 (*total)[LANES], int64_t panel, int64_t row, int slot) {
    float sums[R * PANEL];
    for (int r = 0; r < R; r++)
        for (int64_t c = 0; c < LANES; c++) _mm256_storeu_ps(sums + r * PANEL + c * EIGHT, total[r][c]);
    p.give(slot, sums, row, R, panel);
}

template <int R>
void rows_bf16(const Product& p, int64_t panel, int64_t row, int slot) {
    const uint8_t* weights = p.weights(panel);
    const bf16* x = p.x.at(row, 0);  // rows one after the other
    const int64_t apart = p.x.lower / (int64_t)sizeof(bf16);
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    __m256 total[R][LANES];
    for (auto& sums : total)
        for (__m256& sum : sums) sum = _mm256_setzero_ps();
    for (int64_t i = 0; i < p.w.k; i += 32, weights += 2048)
        for (int64_t pair = 0; pair < 16; pair++) {
            __m256 first[R], second[R];
            for (int r = 0; r < R; r++) {
                const bf16* both = x + r * p.w.k + i + 2 * pair;
                first[r] = float_at(both, apart), second[r] = float_at(both + 1, apart);
            }
            for (int64_t c = 0; c < LANES; c++) {
                const uint8_t* at = weights + c / 2 * 1024 + pair * 64 + c % 2 * 32;
                if (c % 2 == 0) __builtin_prefetch(at + AHEAD);
                __m256i w = _mm256_loadu_si256((const __m256i*)at);
                __m256 even = (__m256)_mm256_slli_epi32(w, 16), odd = (__m256)_mm256_and_si256(w, high);
                for (int r = 0; r < R; r++) {
                    total[r][c] = _mm256_fmadd_ps(even, first[r], total[r][c]);
                    total[r][c] = _mm256_fmadd_ps(odd, second[r], total[r][c]);
                }
            }
        }
    give_sums<R>(p, total, panel, row, slot);
}

// The weights of 8 outputs, number `c` of four, for four inputs.
template <int64_t KIND>
inline __m256i weights_of(const uint8_t* p, int64_t group, int64_t c) {
    if (KIND == Q8)
        return _mm256_loadu_si256((const __m256i*)(p + c / 2 * (Q8_BYTES / 2) + group * 64 + c % 2 * 32));
    __m256i both = _mm256_loadu_si256((const __m256i*)(p + group * 64 + c % 2 * 32));
    __m256i q = _mm256_and_si256(c < 2 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
    return KIND == Q4_0 ? _mm256_sub_epi8(q, _mm256_set1_epi8(8)) : q;
}

inline __m256 halves_at(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

template <int64_t KIND, int R>
void rows_dots(const Product& p, int64_t panel, int64_t row, int slot) {
    constexpr int64_t numbers = KIND == Q4_1 ? 2 * SCALE_BYTES : SCALE_BYTES;
    const uint8_t* block = p.weights(panel);
    const int64_t blocks = p.w.blocks(), bytes = p.w.block_bytes();
    __m256 total[R][LANES];
    for (auto& sums : total)
        for (__m256& sum : sums) sum = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, block += bytes) {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + AHEAD + i);
        for (int64_t c = 0; c < LANES; c++) {
            __m256i products[R];
            for (__m256i& sum : products) sum = _mm256_setzero_si256();
            for (int64_t group = 0; group < BLOCK / 4; group++) {
                __m256i w = weights_of<KIND>(block + numbers, group, c);
                for (int r = 0; r < R; r++) {
                    int32_t four;
                    std::memcpy(&four, p.x.q + ((row + r) * blocks + b) * BLOCK + 4 * group, sizeof four);
                    products[r] = _mm256_add_epi32(products[r], dot4_half(w, _mm256_set1_epi32(four)));
                }
            }
            __m256 scale = halves_at(block + 16 * c);
            for (int r = 0; r < R; r++) {
                const int64_t i = (row + r) * blocks + b;
                __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(p.x.scale[i]));
                total[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[r]), factor, total[r][c]);
                if (KIND == Q4_1)
                    total[r][c] = _mm256_fmadd_ps(halves_at(block + SCALE_BYTES + 16 * c), _mm256_set1_ps(p.x.sum[i]),
                                                  total[r][c]);
            }
        }
    }
    give_sums<R>(p, total, panel, row, slot);
}

template <int64_t KIND>
void panel_of(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    int64_t r = first, end = first + rows;
    for (; r + 4 <= end; r += 4) rows_dots<KIND, 4>(p, panel, r, slot);
    for (; r < end; r++) rows_dots<KIND, 1>(p, panel, r, slot);
}

}  // namespace

void panel_bf16(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    int64_t r = first, end = first + rows;
    for (; r + 2 <= end; r += 2) rows_bf16<2>(p, panel, r, slot);
    if (r < end) rows_bf16<1>(p, panel, r, slot);
}

void panel_dots(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    if (p.w.kind == Q8) return panel_of<Q8>(p, panel, first, rows, slot);
    if (p.w.kind == Q4_0) return panel_of<Q4_0>(p, panel, first, rows, slot);
    panel_of<Q4_1>(p, panel, first, rows, slot);
}

#endif

}  // namespace specserve
