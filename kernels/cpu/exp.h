// The exponential function and what is made of it.
#pragma once
#include "lanes.h"

namespace specserve {

// e^x for x <= 88, to about 2 units in the last place (Cephes' polynomial); 0 below -87.3.
inline lanes exp_to_88(lanes x) {
    const lane_ints tiny = x < -87.3f;
    x = tiny ? lanes{} - 87.3f : x;
    lanes shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the rounded integer is in the low bits
    lanes n = shifted - 12582912.0f;
    lanes r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    lane_ints e = ((lane_ints)shifted - 0x4b400000 + 127) << 23;
    lanes y = p * (lanes)e;
    return tiny ? lanes{} : y;
}

// The same for every x: +inf is not produced, x is clamped at 88.
inline lanes exp(lanes x) { return exp_to_88(x > 88.0f ? lanes{} + 88.0f : x); }
inline float exp(float x) { return exp(x - lanes{})[0]; }

#ifdef __AVX512F__

// 2^x to about 2 units in the last place (the minimax polynomial over [0, 1]); 0 where x is far below 0.
inline vfloat exp2(vfloat x) {
    const __m512 f = _mm512_reduce_ps((__m512)x, 1);  // what is beyond the next lower whole number
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.8775767e-3f), f, _mm512_set1_ps(8.9893397e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5826318e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4015371e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9315308e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return (vfloat)_mm512_scalef_ps(p, (__m512)x);
}

// e^x for x from -100 to 0, to 2^-24 * |x| and about 2 units in the last place.
inline vfloat exp_near(vfloat x) { return exp2(x * 1.44269504f); }

// 1 / (1 + e^-x), to about 2 units in the last place.
inline vfloat sigmoid(vfloat x) {
    const __m512 power = _mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_mul_ps((__m512)x, _mm512_set1_ps(-1.44269504f)));
    const vfloat y = 1.0f + exp2((vfloat)power), z = (vfloat)_mm512_rcp14_ps((__m512)y);
    return fma(z, fma(-y, z, splat(1.0f)), z);
}

#else

inline vfloat exp(vfloat x) {
    return by_lanes(x, [](lanes v) { return exp(v); });
}
inline vfloat exp_near(vfloat x) {
    return by_lanes(x, [](lanes v) { return exp_to_88(v); });
}
inline vfloat sigmoid(vfloat x) {
    return by_lanes(x, [](lanes v) { return 1.0f / (1.0f + exp(-v)); });
}

#endif

}  // namespace specserve
