// Sums of four products of 8-bit numbers in each of 16 lanes, exact in 32 bits.
//
// Weights of 4 bits are taken as they are stored, without a sign, and so are those of 8 bits where the machine's instruction
// wants them so (VNNI): they have an offset, which a block's sum starts without: sum (w + offset) q = sum w q + offset * sum
// q. With VNNI, weights of 4 bits that lie in the upper half of a byte stay there, 16 times themselves, as whole numbers and
// then as float32 that are as exact.
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

constexpr int64_t offset_of(int64_t kind) { return kind == Q8 ? 128 : kind == Q4_0 ? 8 : 0; }
template <int64_t KIND>
constexpr int SHIFT = KIND == Q8 ? 0 : 4;  // bits that the right half's weights are shifted by
inline vbytes weights_q8(vbytes stored) { return stored ^ 0x80; }
inline void weights_q4(vbytes both, vbytes& left, vbytes& right) { left = both & 0x0f, right = both & 0xf0; }
template <int64_t KIND>
inline vint dot4(vint sum, vbytes weights, int32_t four) {
    return (vint)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
}

#else

constexpr int64_t offset_of(int64_t kind) { return kind == Q4_0 ? 8 : 0; }
template <int64_t KIND>
constexpr int SHIFT = 0;
inline vbytes weights_q8(vbytes stored) { return stored; }
inline void weights_q4(vbytes both, vbytes& left, vbytes& right) {
    left = both & 15, right = (vbytes)((vuint)both >> 4) & 15;
}

#if defined(__AVX512BW__)
template <int64_t KIND>
constexpr bool PAIRS = KIND != Q8;  // sums of two products in 16 bits, which those of SHARE inputs and 4-bit weights fit
template <int64_t KIND>
inline vint dot4(vint sum, vbytes weights, int32_t four) {
    __m512i w = (__m512i)weights, q = _mm512_set1_epi32(four);
    if (PAIRS<KIND>) return (vint)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16(w, q));
    // |w| <= 128 and |q| <= 127: two products fit 16 bits.
    q = _mm512_mask_sub_epi8(q, _mm512_movepi8_mask(w), _mm512_setzero_si512(), q), w = _mm512_abs_epi8(w);
    return sum + (vint)_mm512_madd_epi16(_mm512_maddubs_epi16(w, q), _mm512_set1_epi16(1));
}
#elif defined(__AVX2__)
inline __m256i dot4_half(__m256i weights, __m256i four) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(four, weights));  // as above
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#elif defined(__ARM_FEATURE_DOTPROD)
template <int64_t KIND>
inline vint dot4(vint sum, vbytes weights, int32_t four) {
    int32x4_t sums[4];
    int8x16_t parts[4], q = vreinterpretq_s8_s32(vdupq_n_s32(four));
    std::memcpy(sums, &sum, sizeof sums), std::memcpy(parts, &weights, sizeof parts);
    for (int i = 0; i < 4; i++) sums[i] = vdotq_s32(sums[i], parts[i], q);
    std::memcpy(&sum, sums, sizeof sums);
    return sum;
}
#else
template <int64_t KIND>
inline vint dot4(vint sum, vbytes weights, int32_t four) {
    int8_t w[64], q[4];
    std::memcpy(w, &weights, sizeof w), std::memcpy(q, &four, sizeof q);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) sum[i] += w[4 * i + j] * q[j];
    return sum;
}
#endif

#endif

// What a block's sum starts with, and what it is after its products. `start` is what the offset adds, with its sign turned.
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
template <int64_t KIND>
inline vint before(int32_t start) { return PAIRS<KIND> ? vint{} : vint{} + start; }
template <int64_t KIND>
inline vint after(vint sum, int32_t start) {
    return PAIRS<KIND> ? (vint)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)) + start : sum;
}
#else
template <int64_t KIND>
inline vint before(int32_t start) { return vint{} + start; }
template <int64_t KIND>
inline vint after(vint sum, int32_t) { return sum; }
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
    weights_q4(load_bytes(p + group * 64), left, right);
}

}  // namespace specserve
