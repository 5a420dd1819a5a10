// Sums of four products of 8-bit numbers in each of 16 lanes, exact in 32 bits.
//
// The machine's instruction takes unsigned weights where there is one (AVX-512 VNNI), so weights have an offset there,
// which a block's sum starts without: sum (w + offset) q = sum w q + offset * sum q.
#pragma once
#include "packed.h"
#include "vec.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace specserve {

typedef uint8_t vbytes __attribute__((vector_size(64)));

inline vbytes load_bytes(const uint8_t* p) {
    vbytes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

#if defined(__AVX512VNNI__)

inline int32_t offset_of(int64_t kind) { return kind == Q8 ? 128 : kind == Q4_0 ? 8 : 0; }
inline vbytes weights_q8(vbytes stored) { return stored ^ 0x80; }
template <int64_t KIND>
inline vbytes weights_q4(vbytes nibbles) {
    return nibbles;
}
inline vint dot4(vint sum, vbytes weights, int32_t four) {
    return (vint)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
}

#else

inline int32_t offset_of(int64_t) { return 0; }
inline vbytes weights_q8(vbytes stored) { return stored; }
template <int64_t KIND>
inline vbytes weights_q4(vbytes nibbles) {
    return KIND == Q4_0 ? nibbles - 8 : nibbles;
}

#if defined(__AVX2__)
inline __m256i dot4_half(__m256i weights, __m256i four) {
    // |w| <= 128 and |q| <= 127: two products fit 16 bits.
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(four, weights));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline vint dot4(vint sum, vbytes weights, int32_t four) {
    __m256i parts[2], q = _mm256_set1_epi32(four);
    std::memcpy(parts, &weights, sizeof parts);
    parts[0] = dot4_half(parts[0], q), parts[1] = dot4_half(parts[1], q);
    vint products;
    std::memcpy(&products, parts, sizeof parts);
    return sum + products;
}
#elif defined(__ARM_FEATURE_DOTPROD)
inline vint dot4(vint sum, vbytes weights, int32_t four) {
    int32x4_t sums[4];
    int8x16_t parts[4], q = vreinterpretq_s8_s32(vdupq_n_s32(four));
    std::memcpy(sums, &sum, sizeof sums), std::memcpy(parts, &weights, sizeof parts);
    for (int i = 0; i < 4; i++) sums[i] = vdotq_s32(sums[i], parts[i], q);
    std::memcpy(&sum, sums, sizeof sums);
    return sum;
}
#else
inline vint dot4(vint sum, vbytes weights, int32_t four) {
    int8_t w[64], q[4];
    std::memcpy(w, &weights, sizeof w), std::memcpy(q, &four, sizeof q);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) sum[i] += w[4 * i + j] * q[j];
    return sum;
}
#endif

#endif

template <int64_t KIND>
struct Block {
    static constexpr int64_t numbers = KIND == Q4_1 ? 2 * SCALE_BYTES : SCALE_BYTES;  // bytes ahead of the weights
    static constexpr int64_t bytes = numbers + (KIND == Q8 ? Q8_BYTES : Q4_BYTES);
};

// The lines of weights of both halves for four inputs.
template <int64_t KIND>
inline void weights_of(const uint8_t* p, int64_t group, vbytes& left, vbytes& right) {
    if (KIND == Q8) {
        left = weights_q8(load_bytes(p + group * 64)), right = weights_q8(load_bytes(p + Q8_BYTES / 2 + group * 64));
        return;
    }
    vbytes both = load_bytes(p + group * 64);
    left = weights_q4<KIND>(both & 15);
    right = weights_q4<KIND>((vbytes)((vuint)both >> 4) & 15);
}

}  // namespace specserve
