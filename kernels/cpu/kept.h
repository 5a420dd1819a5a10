// What truncation keeps of a row: entries with their ids, and the fewest of the largest that weigh so much together.
// Nothing is sorted: the edge is found by halving the range of values, each time with one pass over what is left.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "exp.h"

namespace specserve {

namespace {

constexpr int64_t BLOCK = 64;
constexpr float LEAST = -std::numeric_limits<float>::max();  // of what is finite
constexpr float FAR = 27.0f;  // entries so far under the largest weigh nothing: a million of them under 2e-6 of it

typedef double f64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

// Tokens that truncation has left, in order of id; arrays are padded to whole vectors.
struct Kept {
    std::vector<float> x;
    std::vector<int32_t> id;
    std::vector<double> weight;
    int64_t count = 0;

    void reserve(int64_t size) {
        if ((int64_t)x.size() >= size + 2 * W) return;
        x.resize(size + 2 * W);
        id.resize(size + 2 * W);
        weight.resize(size + 2 * W);
    }

    void pad() {
        for (int64_t i = count; i < count + W; i++) x[i] = -INFINITY, weight[i] = 0.0;
    }
};

bool any(vint v) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#else
    vint a = v | __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    a |= __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return (a[0] | a[1] | a[2] | a[3]) != 0;
#endif
}

// e^x for x <= 0 to a few units in the last place.
inline f64x8 exp_double(f64x8 x) {
    i64x8 tiny = x < -700.0;
    x = tiny ? f64x8{} - 700.0 : x;
    f64x8 shifted = x * 1.4426950408889634 + 0x1.8p52;
    f64x8 n = shifted - 0x1.8p52;
    f64x8 r = x - n * 0x1.62e42fefap-1 - n * 0x1.cf79abc9e3b39p-40;
    f64x8 p = f64x8{} + 1.0 / 479001600;
    for (double c : {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                     1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
        p = p * r + c;
    i64x8 e = ((i64x8)shifted << 52) + 0x3ff0000000000000LL;
    return tiny ? f64x8{} : p * (f64x8)e;
}

inline f64x8 load_double(const float* x) {
    vfloat8 v;
    std::memcpy(&v, x, sizeof v);
    return __builtin_convertvector(v, f64x8);
}

inline double add_up(f64x8 v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }

// Sum of e^(x - top) over whole blocks of 64.
double total_coarse(const float* x, int64_t count, float top) {
    double total = 0.0;
    for (int64_t i = 0; i < count; i += 4 * BLOCK) {
        vfloat sums[4] = {};
        for (int64_t j = i; j < i + 4 * BLOCK && j < count; j += 4 * W) {
            vfloat v[4] = {load(x + j), load(x + j + W), load(x + j + 2 * W), load(x + j + 3 * W)};
            if (!any(max(max(v[0], v[1]), max(v[2], v[3])) >= top - FAR)) continue;
            for (int k = 0; k < 4; k++) sums[k] += exp_near(v[k] - top);
        }
        total += sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return total;
}

// x - top is rounded to float, as in torch.
inline f64x8 weights_fine(const float* x, float top) {
    vfloat8 v;
    std::memcpy(&v, x, sizeof v);
    return exp_double(__builtin_convertvector(v - top, f64x8));
}

double total_fine(const float* x, int64_t count, float top) {
    f64x8 totals[2] = {};
    for (int64_t i = 0; i < count; i += W)
        for (int k = 0; k < 2; k++) totals[k] += weights_fine(x + i + k * 8, top);
    return add_up(totals[0] + totals[1]);
}

// Entries of at least `bound`, with their ids.
void collect(const float* x, int64_t count, float bound, Kept& kept) {
    int64_t n = 0;
    for (int64_t i = 0; i < count; i += W) {
        vfloat v = load(x + i);
#ifdef __AVX512F__
        __mmask16 m = _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GE_OQ);
        if (!m) continue;
        __m512i ids = _mm512_add_epi32(_mm512_set1_epi32((int)i),
                                       _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        _mm512_storeu_ps(kept.x.data() + n, _mm512_maskz_compress_ps(m, (__m512)v));
        _mm512_storeu_si512(kept.id.data() + n, _mm512_maskz_compress_epi32(m, ids));
        n += __builtin_popcount(m);
#else
        if (!any(v >= bound)) continue;
        for (int k = 0; k < W; k++) {
            kept.x[n] = v[k], kept.id[n] = (int32_t)i + k;
            n += v[k] >= bound;
        }
#endif
    }
    kept.count = n;
    kept.pad();
}

// Floats in their order as integers; its own inverse.
inline int32_t flip(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
inline int32_t key(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return flip(bits);
}
inline float value_of(int32_t key) {
    int32_t bits = flip(key);
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Weight of the entries of at least `bound`.
double mass(const Kept& kept, float bound) {
    f64x8 totals[2] = {};
    for (int64_t i = 0; i < kept.count; i += W)
        for (int k = 0; k < 2; k++) {
            vfloat8 x;
            f64x8 w;
            std::memcpy(&x, kept.x.data() + i + k * 8, sizeof x);
            std::memcpy(&w, kept.weight.data() + i + k * 8, sizeof w);
            i64x8 in = __builtin_convertvector((i32x8)(x >= bound), i64x8);
            totals[k] += (f64x8)(in & (i64x8)w);
        }
    return add_up(totals[0] + totals[1]);
}

// The largest value whose entries, and those above, weigh `goal` together; above: the weight of those above alone.
// False if all together do not. Entries lie between `least` and `top`.
bool find_edge(const Kept& all, Kept& some, double goal, float least, float top, float& edge, double& above) {
    const Kept* from = &all;
    int64_t low = key(least), high = (int64_t)key(top) + 1;
    double base = 0.0;  // weight of entries at `high` and above that were left behind
    if (!(mass(all, least) >= goal)) return false;
    above = 0.0;
    for (int turn = 1; high - low > 1; turn++) {
        int32_t middle = (int32_t)(low + (high - low) / 2);
        double weight = base + mass(*from, value_of(middle));
        if (weight >= goal) {
            low = middle;
        } else {
            high = middle;
            above = weight;
        }
        if (turn % 4 || from->count <= 4 * W) continue;
        // What lies between the two is soon few.
        float from_here = value_of((int32_t)low), to_here = value_of((int32_t)high);
        int64_t n = 0;
        for (int64_t i = 0; i < from->count; i++) {
            float x = from->x[i];
            double w = from->weight[i];
            some.x[n] = x, some.weight[n] = w;
            n += (x >= from_here) & (x < to_here);
        }
        base = above;
        some.count = n;
        some.pad();
        from = &some;
    }
    edge = value_of((int32_t)low);
    return true;
}

// Keeps the fewest of the largest entries that weigh `goal` together, ties by id. False if roundings of `slack` could
// change which these are.
bool keep_best(Kept& kept, Kept& some, double goal, double slack, float least, float top) {
    float edge;
    double above;
    if (!find_edge(kept, some, goal, least, top, edge, above)) return false;
    double each = 0.0;
    for (int64_t i = 0; i < kept.count && each == 0.0; i++)
        if (kept.x[i] == edge) each = kept.weight[i];
    if (!(each > 0.0)) return false;
    double ties = std::max(1.0, std::ceil((goal - above) / each));
    if (slack > 0.0 && !(above + (ties - 1) * each < goal - slack && above + ties * each > goal + slack)) return false;
    int64_t n = 0;
    for (int64_t i = 0; i < kept.count; i++) {
        float x = kept.x[i];
        bool tie = x == edge;
        kept.x[n] = x, kept.id[n] = kept.id[i];
        n += x > edge || (tie && ties > 0);
        ties -= tie;
    }
    kept.count = n;
    kept.pad();
    return true;
}

}  // namespace

}  // namespace specserve
