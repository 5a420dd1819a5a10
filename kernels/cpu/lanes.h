// As many floats as one register of the machine has. Vectors of 16 are taken apart in memory where registers are narrower,
// which costs too much in the innermost loops.
#pragma once
#include <utility>

#include "vec.h"

namespace specserve {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t lane_ints __attribute__((vector_size(LANES * 4)));

inline lanes load_lanes(const float* p) {
    lanes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store_lanes(float* p, lanes v) { std::memcpy(p, &v, sizeof v); }

#if defined(__AVX512F__)
inline lanes load_lanes(const bf16* p) { return load(p); }
inline lanes load_lanes(const int8_t* p) {
    return (lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#elif defined(__AVX2__)
inline lanes load_lanes(const bf16* p) {
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline lanes load_lanes(const int8_t* p) {
    return (lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#else
inline lanes load_lanes(const bf16* p) { return lanes{scalar(p), scalar(p + 1), scalar(p + 2), scalar(p + 3)}; }
inline lanes load_lanes(const int8_t* p) { return lanes{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
#endif

#if !defined(__AVX512F__)
// b where either is NaN.
inline lanes max(lanes a, lanes b) { return b < a ? a : b; }

inline float max(lanes v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

inline float sum(lanes v) {
    for (int s = LANES / 2; s; s /= 2)
        for (int i = 0; i < s; i++) v[i] += v[i + s];
    return v[0];
}

// f of each part of a wider vector.
template <typename F>
inline vfloat by_lanes(vfloat v, const F& f) {
    lanes part[W / LANES];
    std::memcpy(part, &v, sizeof v);
    for (lanes& p : part) p = f(p);
    std::memcpy(&v, part, sizeof v);
    return v;
}
#endif

// Runs of S lanes of x beside the same of y, each the sum of two that follow each other.
template <int S, int... I>
inline lanes add_runs(lanes x, lanes y, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, y, (I / S % 2 ? LANES + I - S : I)...) +
           __builtin_shufflevector(x, y, (I / S % 2 ? LANES + I : I + S)...);
}

// Lane j of the result is the sum of v[j]'s lanes, v [LANES]: rounds of pairwise sums, the same tree for every j. v is
// used up.
template <int S = LANES / 2>
inline lanes sum_each(lanes* v) {
    for (int i = 0; i < S; i++) v[i] = add_runs<S>(v[i], v[i + S], std::make_integer_sequence<int, LANES>());
    if constexpr (S > 1) return sum_each<S / 2>(v);
    return v[0];
}

}  // namespace specserve
