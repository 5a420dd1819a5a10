// Vectors of 16 floats (gcc vector extensions, so that any instruction set will do) and the scalar types of storage.
//
// Every reduction here has an order that is fixed by the length of the row alone. Nothing depends on the number of rows,
// on threads or on the alignment of memory.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace specserve {

typedef float vfloat __attribute__((vector_size(64)));
typedef int32_t vint __attribute__((vector_size(64)));
typedef uint32_t vuint __attribute__((vector_size(64)));
typedef uint16_t vhalf __attribute__((vector_size(32)));
typedef float vfloat8 __attribute__((vector_size(32)));
typedef float vfloat4 __attribute__((vector_size(16)));

constexpr int64_t W = 16;

struct bf16 {
    uint16_t bits;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// gcc makes scalars of comparisons and choices between vectors wider than the machine's.
struct Halves {
    __m256 low, high;
    explicit Halves(vfloat v) { std::memcpy(this, &v, sizeof v); }
    Halves(__m256 a, __m256 b) : low(a), high(b) {}
    vfloat whole() const {
        vfloat v;
        std::memcpy(&v, this, sizeof v);
        return v;
    }
};

// All ones where a < b.
inline vint less(vfloat a, vfloat b) {
    Halves x(a), y(b);
    return (vint)Halves(_mm256_cmp_ps(x.low, y.low, _CMP_LT_OQ), _mm256_cmp_ps(x.high, y.high, _CMP_LT_OQ)).whole();
}
inline vint is_nan(vfloat v) {
    Halves x(v);
    return (vint)Halves(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q), _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q)).whole();
}
inline vfloat select(vint mask, vfloat a, vfloat b) {
    Halves m((vfloat)mask), x(a), y(b);
    return Halves(_mm256_blendv_ps(y.low, x.low, m.low), _mm256_blendv_ps(y.high, x.high, m.high)).whole();
}
// All ones where from <= v < to.
inline vint within(vint v, int32_t from, int32_t to) {
    __m256i part[2], low = _mm256_set1_epi32(from - 1), high = _mm256_set1_epi32(to);
    std::memcpy(part, &v, sizeof part);
    for (__m256i& p : part) p = _mm256_and_si256(_mm256_cmpgt_epi32(p, low), _mm256_cmpgt_epi32(high, p));
    std::memcpy(&v, part, sizeof part);
    return v;
}
#else
inline vint within(vint v, int32_t from, int32_t to) { return (v >= from) & (v < to); }
inline vint less(vfloat a, vfloat b) { return a < b; }
inline vint is_nan(vfloat v) { return v != v; }
inline vfloat select(vint mask, vfloat a, vfloat b) { return mask ? a : b; }
#endif

inline vfloat splat(float x) { return x - vfloat{}; }  // 0 + x would be an addition: it makes 0 of -0

inline vfloat load(const float* p) {
    vfloat v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline vfloat load(const bf16* p) {
#ifdef __AVX512F__  // the compiler makes four shuffles of the general form
    return (vfloat)((vuint)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#else
    vhalf h;
    std::memcpy(&h, p, sizeof h);
    return (vfloat)(__builtin_convertvector(h, vuint) << 16);
#endif
}

// One number as float.
inline float scalar(const float* x) { return *x; }
inline float scalar(const bf16* x) {
    uint32_t bits = (uint32_t)x->bits << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof v); }

inline void store(uint32_t* p, vuint v) { std::memcpy(p, &v, sizeof v); }

// Round to nearest, ties to even, as torch does; NaN stays NaN.
inline void store(bf16* p, vfloat v) {
    vuint u = (vuint)v;
    vuint rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vint nan = is_nan(v);
    rounded = (rounded & ~(vuint)nan) | ((vuint)nan & 0x7fc0u);
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded));
#else
    vhalf h = __builtin_convertvector(rounded, vhalf);
    std::memcpy(p, &h, sizeof h);
#endif
}

// The first `count` (< 16) elements; the rest is `fill`. The same arithmetic then serves whole vectors and tails.
template <typename T>
inline vfloat load_tail(const T* p, int64_t count, float fill = 0.0f) {
    T padded[W];
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, p, count * sizeof(T));
    vfloat v = load(padded);
    for (int64_t i = count; i < W; i++) v[i] = fill;
    return v;
}

template <typename T>
inline void store_tail(T* p, vfloat v, int64_t count) {
    T padded[W];
    store(padded, v);
    std::memcpy(p, padded, count * sizeof(T));
}

// Whole vectors where at least 16 elements are left, else what is left.
template <typename T>
inline vfloat load_some(const T* p, int64_t left, float fill = 0.0f) {
    return left < W ? load_tail(p, left, fill) : load(p);
}

template <typename T>
inline void store_some(T* p, vfloat v, int64_t left) {
    left < W ? store_tail(p, v, left) : store(p, v);
}

inline float sum(vfloat v) {
    vfloat8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    vfloat4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// a * b + c, rounded once where the machine can.
inline vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

// b where either is NaN.
inline vfloat max(vfloat a, vfloat b) {
#ifdef __AVX512F__
    return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(less(b, a), a, b);
#endif
}

inline float max(vfloat v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    Halves h(v);
    __m256 a = _mm256_max_ps(h.low, h.high);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
#else
    v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return v[0] > v[1] ? v[0] : v[1];
#endif
}

}  // namespace specserve
