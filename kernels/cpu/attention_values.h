// The weighted sum of values of one tile, for up to 16 columns on tile registers, for few on vectors: the same bits.
#pragma once
#include "attention_group.h"

#ifdef __AMX_BF16__

namespace specserve {

inline void rescale(Group& g, vfloat keep, int64_t dim) {
    const uint32_t changed = _mm512_cmp_ps_mask((__m512)keep, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
    if (!changed) return;
    for (int64_t column = 0; column < g.columns; column++) {
        if (!(changed >> column & 1)) continue;
        for (int64_t i = 0; i < dim; i += W) {
            float* p = g.piece().out + column * dim + i;
            store(p, load(p) * keep[column]);
        }
    }
}

// The part of P V that is N times 16 dims from 16 * n on.
template <int N>
inline void add_dims(const Work& w, Group& g, int64_t n, int64_t to, Fetch& fetch, int64_t stride) {
    float* out = g.piece().out + n * 16;
    const int64_t tiles = stride / 64;
    _tile_loadd(0, out, stride);
    _tile_loadd(1, out + 16, stride);
    if (N == 4) _tile_loadd(2, out + 32, stride);
    if (N == 4) _tile_loadd(3, out + 48, stride);
    for (int64_t step = 0; step * STEP < to; step++) {
        const Pairs* values = w.values + step * tiles + n;
        _tile_loadd(4, w.weights[step], 64);
        _tile_loadd(5, values[0], 64);
        _tile_loadd(6, values[1], 64);
        fetch.steps(4 * N);
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
        if (N == 2) continue;
        _tile_loadd(7, values[2], 64);
        _tile_loadd(5, values[3], 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, out, stride);
    _tile_stored(1, out + 16, stride);
    if (N == 4) _tile_stored(2, out + 32, stride);
    if (N == 4) _tile_stored(3, out + 48, stride);
}

// out = out * keep + P V
inline void add_values(const Work& w, Group& g, vfloat keep, int64_t to, Fetch& fetch, int64_t dim) {
    rescale(g, keep, dim);
    const int64_t stride = dim * (int64_t)sizeof(float), tiles = dim / 16;
    for (int64_t n = 0; n < tiles; n += 4)
        (n + 4 <= tiles ? add_dims<4> : add_dims<2>)(w, g, n, to, fetch, stride);
}

// The sums of one TDPBF16PS over up to 32 keys for C columns, bit for bit, from values as they lie in the cache: keys at
// even places and at odd ones are summed up apart, each by fused steps from the first on, then together, then onto what
// was there. Numbers below the normal ones are zero, as the caller's MXCSR must say. rows: [keys filled up to 2].
template <int C>
__attribute__((noinline)) void add_keys(const float (*even)[PAIRS], const float (*odd)[PAIRS], const bf16* values,
                                        const int64_t* rows, int64_t keys, float* out, int64_t dim, Fetch& fetch) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    const __m512i front = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
    for (int64_t i = 0; i < dim; i += STEP) {
        __m512 first[C][2] = {}, second[C][2] = {};  // of dims at even places, at odd ones
        for (int64_t pair = 0; 2 * pair < keys; pair++) {
            const __m512i x = _mm512_loadu_si512(values + rows[2 * pair] + i);
            const __m512i y = _mm512_loadu_si512(values + rows[2 * pair + 1] + i);
            const __m512 x0 = (__m512)_mm512_slli_epi32(x, 16), x1 = (__m512)_mm512_and_si512(x, upper);
            const __m512 y0 = (__m512)_mm512_slli_epi32(y, 16), y1 = (__m512)_mm512_and_si512(y, upper);
            fetch.steps(2);
            for (int c = 0; c < C; c++) {
                const __m512 p = _mm512_set1_ps(even[c][pair]), q = _mm512_set1_ps(odd[c][pair]);
                first[c][0] = _mm512_fmadd_ps(p, x0, first[c][0]);
                first[c][1] = _mm512_fmadd_ps(p, x1, first[c][1]);
                second[c][0] = _mm512_fmadd_ps(q, y0, second[c][0]);
                second[c][1] = _mm512_fmadd_ps(q, y1, second[c][1]);
            }
        }
        for (int c = 0; c < C; c++) {
            float* to = out + c * dim + i;
            const __m512 low = _mm512_add_ps(first[c][0], second[c][0]), high = _mm512_add_ps(first[c][1], second[c][1]);
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_permutex2var_ps(low, front, high)));
            to += W;
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_permutex2var_ps(low, back, high)));
        }
    }
}

// out = out * keep + P V for at most FEW columns, whose tiles would be empty for the most part.
inline void add_values_few(const Work& w, Group& g, vfloat keep, const bf16* values, const int64_t* rows, int64_t to,
                           Fetch& fetch, int64_t dim) {
    static constexpr decltype(&add_keys<1>) ways[FEW] = {add_keys<1>, add_keys<2>, add_keys<3>, add_keys<4>};
    rescale(g, keep, dim);
    const uint32_t before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  // denormals are zero, going in and coming out
    for (int64_t step = 0; step * STEP < to; step++) {
        alignas(64) float even[FEW][PAIRS], odd[FEW][PAIRS];
        for (int64_t c = 0; c < g.columns; c++) {
            const __m512i pairs = _mm512_load_si512(w.weights[step][c]);
            _mm512_store_si512(even[c], _mm512_slli_epi32(pairs, 16));
            _mm512_store_si512(odd[c], _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
        }
        const int64_t keys = to - step * STEP < STEP ? to - step * STEP : STEP;
        ways[g.columns - 1](even, odd, values, rows + step * STEP, keys, g.piece().out, dim, fetch);
    }
    _mm_setcsr(before);
}

}  // namespace specserve

#endif
