// Gumbel noise keyed by (seed, position, token id). Compiled without contraction: the reference in torch does the same
// IEEE operations one by one and gets the same bits.
//
// Random bits: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011), key = seed, counter = (c, position low, position high, 0).
// Token t uses word (t % 64) / 16 of counter c = t / 64 * 16 + t % 16, so that 16 counters give 64 adjacent tokens.
#include "pool.h"
#include <cstdint>
#include <cstring>

namespace specserve {

typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));

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

inline void philox(u64x8 c, uint64_t position, uint64_t seed, u64x8 out[4]) {
    u64x8 c0 = c, c1 = u64x8{} + (position & 0xffffffffu), c2 = u64x8{} + (position >> 32), c3 = {};
    uint64_t k0 = seed & 0xffffffffu, k1 = seed >> 32;
    for (int round = 0; round < 10; round++) {
        u64x8 a = c0 * 0xD2511F53ull, b = c2 * 0xCD9E8D57ull;
        c0 = (b >> 32) ^ c1 ^ k0;
        c1 = b & 0xffffffffull;
        c2 = (a >> 32) ^ c3 ^ k1;
        c3 = a & 0xffffffffull;
        k0 = (k0 + 0x9E3779B9ull) & 0xffffffffull;
        k1 = (k1 + 0xBB67AE85ull) & 0xffffffffull;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

void gumbel_row(uint64_t seed, uint64_t position, int64_t vocab, float* out) {
    for (int64_t base = 0; base < vocab; base += 64) {
        float block[64];
        for (int half = 0; half < 2; half++) {
            u64x8 words[4];
            philox(u64x8{0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(base / 4 + half * 8), position, seed, words);
            for (int i = 0; i < 4; i++) {
                f64x8 h = __builtin_convertvector(__builtin_convertvector(words[i], u32x8), f64x8);
                f64x8 u = 1.0 - (h + 0.5) * 0x1p-32;  // exact, in (0, 1)
                f64x8 g = -log_positive(-log_positive(u));
                f32x8 x = __builtin_convertvector(g, f32x8);
                std::memcpy(block + i * 16 + half * 8, &x, sizeof x);
            }
        }
        int64_t count = vocab - base < 64 ? vocab - base : 64;
        std::memcpy(out + base, block, count * sizeof(float));
    }
}

}  // namespace specserve

extern "C" void ss_gumbel(const int64_t* seeds, const int64_t* positions, float* out, int64_t rows, int64_t vocab,
                          int threads) {
    specserve::parallel_for(rows, 1, threads, [&](int64_t r) {
        specserve::gumbel_row((uint64_t)seeds[r], (uint64_t)positions[r], vocab, out + r * vocab);
    });
}
