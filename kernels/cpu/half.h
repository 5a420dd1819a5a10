// float16 <-> float32, exact in one direction, to nearest even in the other.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace specserve {

inline float float_of(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023u, bits;
    if (exponent == 31)
        bits = sign | 0x7f800000u | fraction << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    else {  // subnormal: fraction * 2^-24
        float tiny = (float)fraction * 0x1p-24f;
        return sign ? -tiny : tiny;
    }
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint16_t half_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);  // 65536 and more
    if (magnitude < 0x38800000u) {                                    // below 2^-14: in steps of 2^-24
        float scaled;
        std::memcpy(&scaled, &magnitude, sizeof scaled);
        return (uint16_t)(sign | (uint32_t)std::nearbyint(scaled * 0x1p24f));
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | ((magnitude >> 13) - (112u << 10)));
}

// 16 adjacent ones.
inline vfloat load_half(const void* p) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    vfloat8 low = (vfloat8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
    vfloat8 high = (vfloat8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    uint16_t h[W];
    std::memcpy(h, p, sizeof h);
    vfloat v;
    for (int i = 0; i < W; i++) v[i] = float_of(h[i]);
    return v;
#endif
}

}  // namespace specserve
