// Gumbel noise keyed by (seed, position, token id). Compiled without contraction: the reference in torch does the same
// IEEE operations one by one and gets the same bits.
//
// Random bits: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011), key = seed, counter = (c, position low, position high, 0).
// Token t uses word (t % 64) / 16 of counter c = t / 64 * 16 + t % 16, so that 16 counters give 64 adjacent tokens.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "sample.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace specserve {

namespace {  // vec.h is not for this file: its functions would lose their contraction here, and with luck elsewhere

typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef float f32x16 __attribute__((vector_size(64)));

// ln(x) for normal x > 0: x = 2^e * m with m in [sqrt(1/2), sqrt(2)), ln m = 2 atanh(s), s = (m - 1) / (m + 1).
inline f64x8 log_positive(f64x8 x) {
    i64x8 bits = (i64x8)x;
    i64x8 high = bits + (0x3ff0000000000000LL - 0x3fe6a09e667f3bcdLL);
    i64x8 e = (i64x8)((u64x8)high >> 52) - 1023;
    f64x8 m = (f64x8)(bits - (e << 52));
    f64x8 s = (m - 1.0) / (m + 1.0);
    f64x8 z = s * s;
    f64x8 p = z * (2.0 / 15.0) + (2.0 / 13.0);
    p = p * z + (2.0 / 11.0);
    p = p * z + (2.0 / 9.0);
    p = p * z + (2.0 / 7.0);
    p = p * z + (2.0 / 5.0);
    p = p * z + (2.0 / 3.0);
    p = p * z + 2.0;
    return p * s + __builtin_convertvector(e, f64x8) * 0.6931471805599453;
}

// Products of the low halves.
inline u64x8 multiply(u64x8 a, uint64_t b) {
#ifdef __AVX512F__
    return (u64x8)_mm512_maskz_mul_epu32(255, (__m512i)a, _mm512_set1_epi64((long long)b));
#else
    return (a & 0xffffffffull) * b;
#endif
}

inline void philox(u64x8 c, uint64_t position, uint64_t seed, u64x8 out[4]) {
    u64x8 c0 = c, c1 = u64x8{} + (position & 0xffffffffu), c2 = u64x8{} + (position >> 32), c3 = {};
    uint64_t k0 = seed & 0xffffffffu, k1 = seed >> 32;
    for (int round = 0; round < 10; round++) {
        // High halves of c1 and c3 hold what is left of products; only low halves count.
        u64x8 a = multiply(c0, 0xD2511F53ull), b = multiply(c2, 0xCD9E8D57ull);
        c0 = (b >> 32) ^ c1 ^ k0;
        c1 = b;
        c2 = (a >> 32) ^ c3 ^ k1;
        c3 = a;
        k0 = (k0 + 0x9E3779B9ull) & 0xffffffffull;
        k1 = (k1 + 0xBB67AE85ull) & 0xffffffffull;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

inline f32x8 noise(u64x8 words) {
    f64x8 h = __builtin_convertvector(__builtin_convertvector(words, u32x8), f64x8);
    f64x8 u = 1.0 - (h + 0.5) * 0x1p-32;  // exact, in (0, 1)
    return __builtin_convertvector(-log_positive(-log_positive(u)), f32x8);
}

// No noise of these words is larger: with h = word + 1/2, -ln(1 - h / 2^32) >= h / 2^32, and the bits of a float are a
// lower bound of its binary logarithm. The last term covers the roundings, here and in `noise`.
inline f32x16 noise_bound(u32x16 words) {
    f32x16 h = __builtin_convertvector(words, f32x16);
    return (159.0f - __builtin_convertvector((i32x16)h, f32x16) * 0x1p-23f) * 0.69314718f + 0.001f;
}

inline bool any(i32x16 v) {
    typedef int64_t lanes __attribute__((vector_size(64)));
    lanes l = (lanes)v;
    return ((l[0] | l[1]) | (l[2] | l[3]) | (l[4] | l[5]) | (l[6] | l[7])) != 0;
}

inline u32x16 join(u64x8 low, u64x8 high) {
    u32x8 a = __builtin_convertvector(low, u32x8), b = __builtin_convertvector(high, u32x8);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline void offer(float value, int32_t id, Draw& best) {
    if (value > best.value || (value == best.value && id < best.id)) best = {value, id};
}

void gumbel_row(uint64_t seed, uint64_t position, int64_t vocab, float* out) {
    for (int64_t base = 0; base < vocab; base += 64) {
        float block[64];
        for (int half = 0; half < 2; half++) {
            u64x8 words[4];
            philox(u64x8{0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(base / 4 + half * 8), position, seed, words);
            for (int i = 0; i < 4; i++) {
                f32x8 g = noise(words[i]);
                std::memcpy(block + i * 16 + half * 8, &g, sizeof g);
            }
        }
        int64_t count = vocab - base < 64 ? vocab - base : 64;
        std::memcpy(out + base, block, count * sizeof(float));
    }
}

// 16 adjacent tokens, of which one at least may win.
void offer_tokens(const float* x, int64_t first, int64_t count, u64x8 low, u64x8 high, Draw& best) {
    f32x8 g[2] = {noise(low), noise(high)};
    for (int64_t i = 0; i < count; i++) offer(x[first + i] + g[i / 8][i % 8], (int32_t)(first + i), best);
}

}  // namespace

void draw_all(uint64_t seed, uint64_t position, const float* x, int64_t vocab, Draw& best) {
    for (int64_t base = 0; base < vocab; base += 64) {
        u64x8 words[2][4];
        for (int half = 0; half < 2; half++)
            philox(u64x8{0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(base / 4 + half * 8), position, seed, words[half]);
        i32x16 may[4] = {};
        for (int i = 0; i < 4 && base + i * 16 < vocab; i++) {
            int64_t first = base + i * 16, count = vocab - first < 16 ? vocab - first : 16;
            f32x16 v = f32x16{} - INFINITY;
            std::memcpy(&v, x + first, count * sizeof(float));
            may[i] = v + noise_bound(join(words[0][i], words[1][i])) >= best.value;
        }
        if (!any((may[0] | may[1]) | (may[2] | may[3]))) continue;
        for (int i = 0; i < 4; i++)
            if (any(may[i])) {
                int64_t first = base + i * 16;
                offer_tokens(x, first, vocab - first < 16 ? vocab - first : 16, words[0][i], words[1][i], best);
            }
    }
}

void draw_some(uint64_t seed, uint64_t position, const float* x, const int32_t* ids, int64_t count, Draw& best) {
    for (int64_t base = 0; base < count; base += 8) {
        int64_t left = count - base < 8 ? count - base : 8;
        u64x8 counters = {}, words[4], chosen = {};
        for (int64_t i = 0; i < left; i++) counters[i] = (uint64_t)(ids[base + i] / 64 * 16 + ids[base + i] % 16);
        philox(counters, position, seed, words);
        for (int64_t i = 0; i < left; i++) chosen[i] = words[ids[base + i] % 64 / 16][i];
        f32x8 g = noise(chosen);
        for (int64_t i = 0; i < left; i++) offer(x[base + i] + g[i], ids[base + i], best);
    }
}

}  // namespace specserve

extern "C" void ss_gumbel(const int64_t* seeds, const int64_t* positions, float* out, int64_t rows, int64_t vocab,
                          int threads) {
    specserve::parallel_for(rows, 1, threads, [&](int64_t r) {
        specserve::gumbel_row((uint64_t)seeds[r], (uint64_t)positions[r], vocab, out + r * vocab);
    });
}
