// From logits to token ids, a whole step in one call. What a row gives is what worker/sampler.py gives in torch, bit for
// bit: the options, the temperature's division and the noise are the same IEEE operations, and truncation keeps the same
// set. That set is decided by sums whose rounding is bounded; where a sum comes so close to its goal that rounding could
// decide, or where a logit is not a number, the row is left to torch (UNDECIDED).
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kept.h"
#include "pool.h"
#include "vec.h"

namespace specserve {

namespace {

constexpr int64_t NO_TOKEN = -1, UNDECIDED = -2;
// Relative to the whole sum: of weights by the float exponential, added up in blocks of 256; of weights in double.
constexpr double COARSE = 5e-6, FINE = 1e-11;
constexpr float NEAR = 5.0f;  // under the largest: how far top-p looks first

// Kept from step to step.
struct Scratch {
    std::vector<float> x;  // the row, padded with -inf to whole blocks
    Kept kept, some;

    void reserve(int64_t vocab) {
        int64_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
        if ((int64_t)x.size() < padded) x.resize(padded);
        kept.reserve(padded);
        some.reserve(padded);
    }
};

struct Reader {
    const SampleRow& row;
    int64_t vocab, covered;  // by the mask

    bool edited() const { return row.mask || row.forbidden; }

    // Logits i .. i + 15 under mask and forbidden ids, -inf beyond the vocabulary.
    vfloat operator()(int64_t i) const {
        vfloat v = load_some(row.logits + i, vocab - i, -INFINITY);
        const vuint bit = {1u << 0, 1u << 1, 1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                           1u << 8, 1u << 9, 1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15};
        if (row.mask) {
            uint32_t bits = i < covered ? row.mask[i / 32] >> (i % 32) : 0;
            v = ((vuint{} + bits) & bit) != 0 ? v : splat(-INFINITY);
        }
        if (row.forbidden) {
            typedef uint8_t bytes __attribute__((vector_size(16)));
            bytes b = {};
            std::memcpy(&b, row.forbidden + i, vocab - i < W ? vocab - i : W);
            v = __builtin_convertvector(b, vint) != 0 ? splat(-INFINITY) : v;
        }
        return v;
    }
};

// Token of the largest entry, the lowest of equal ones; NaN never wins. NO_TOKEN if that entry is not finite.
template <typename Read>
int64_t best(const Read& read, int64_t vocab) {
    vfloat peak = splat(-INFINITY);
    vint lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vint where = lane * 0 + INT32_MAX;
    for (int64_t i = 0; i < vocab; i += W) {
        vfloat v = read(i);
        vint better = v > peak;
        peak = better ? v : peak;
        where = better ? lane + (int32_t)i : where;
    }
    float top = max(peak);
    if (!std::isfinite(top)) return NO_TOKEN;
    int32_t index = INT32_MAX;
    for (int i = 0; i < W; i++)
        if (peak[i] == top && where[i] < index) index = where[i];
    return index;
}

// Quotients by one divisor, rounded as a division rounds them, by products: y = x * r with r = 1 / divisor, corrected once
// by the remainder, is exact unless the divisor's fraction is all ones or the remainder loses bits (Markstein 1990,
// "Computation of elementary functions on the IBM RISC System/6000 processor").
class Divisor {
  public:
    explicit Divisor(float divisor) : divisor_(divisor), inverse_(1.0f / divisor) {
        uint32_t bits;
        std::memcpy(&bits, &divisor, sizeof bits);
        plain_ = !(divisor > 1e-10f && divisor < 1e10f) || (bits & 0x7fffff) == 0x7fffff;
    }

    vfloat operator()(vfloat x) const {
#ifdef __AVX512F__
        const __m512 magnitude = _mm512_abs_ps((__m512)x);
        // Zeros, infinities and NaN are themselves after the product.
        const __mmask16 small = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(1e-15f), _CMP_LT_OQ);
        const __mmask16 large = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(1e25f), _CMP_GT_OQ);
        const __mmask16 special = _mm512_fpclass_ps_mask((__m512)x, 0x9f);
        if (plain_ || ((small | large) & ~special)) return x / divisor_;
        const __m512 y = _mm512_mul_ps((__m512)x, _mm512_set1_ps(inverse_));
        const __m512 rest = _mm512_fnmadd_ps(y, _mm512_set1_ps(divisor_), (__m512)x);
        return (vfloat)_mm512_mask3_fmadd_ps(rest, _mm512_set1_ps(inverse_), y, _knot_mask16(special));
#else
        return x / divisor_;
#endif
    }

  private:
    float divisor_, inverse_;
    bool plain_;
};

// Options and temperature, into s.x. The largest entry; NaN if an entry is NaN.
float prepare(const SampleRow& row, const Reader& read, Scratch& s) {
    int64_t end = (read.vocab + BLOCK - 1) / BLOCK * BLOCK;
    float* x = s.x.data();
    vfloat peak = splat(-INFINITY);
    vint nan = {};
    const Divisor divide(row.temperature);
    if (row.num_bias) {
        for (int64_t i = 0; i < read.vocab; i += W) store(x + i, read(i));
        for (int64_t i = 0; i < row.num_bias; i++) x[row.bias_ids[i]] += row.bias[i];
    }
    for (int64_t i = 0; i < end; i += W) {
        vfloat v = i >= read.vocab ? splat(-INFINITY) : divide(row.num_bias ? load(x + i) : read(i));
        store(x + i, v);
        nan |= v != v;
        peak = max(v, peak);
    }
    return any(nan) ? NAN : max(peak);
}

bool top_k(Scratch& s, int64_t padded, int64_t k, float top) {
    float bound = LEAST;
    int64_t blocks = padded / BLOCK;
    if (k <= blocks) {  // each of the k blocks with the largest peaks has an entry as large as the k-th of these
        s.kept.count = blocks;
        for (int64_t b = 0; b < blocks; b++) {
            const float* x = s.x.data() + b * BLOCK;
            s.kept.x[b] = max(max(max(load(x), load(x + W)), max(load(x + 2 * W), load(x + 3 * W))));
            s.kept.weight[b] = 1.0;
        }
        s.kept.pad();
        double above;
        find_edge(s.kept, s.some, (double)k, LEAST, top, bound, above);
    }
    collect(s.x.data(), padded, bound, s.kept);
    if (s.kept.count <= k) return true;
    for (int64_t i = 0; i < s.kept.count; i++) s.kept.weight[i] = 1.0;
    s.kept.pad();
    return keep_best(s.kept, s.some, (double)k, 0.0, bound, top);
}

// Weights of those kept, relative to one at `top`.
void weigh(Kept& kept, float top, bool fine) {
    for (int64_t i = 0; i < kept.count; i += W) {
        f64x8 low, high;
        if (fine) {
            low = weights_fine(kept.x.data() + i, top), high = weights_fine(kept.x.data() + i + 8, top);
        } else {
            float e[W];
            store(e, exp_near(load(kept.x.data() + i) - top));
            low = load_double(e), high = load_double(e + 8);
        }
        std::memcpy(kept.weight.data() + i, &low, sizeof low);
        std::memcpy(kept.weight.data() + i + 8, &high, sizeof high);
    }
    kept.pad();
}

// Of those kept, or of the whole row.
bool top_p(Scratch& s, int64_t padded, int64_t vocab, double p, float top, bool whole) {
    for (bool fine : {false, true}) {
        if (!whole && !fine) continue;  // they are few
        const float* x = whole ? s.x.data() : s.kept.x.data();
        int64_t count = whole ? padded : (s.kept.count + W - 1) / W * W;
        const double total = fine ? total_fine(x, count, top) : total_coarse(x, count, top);
        // Entries under this bound weigh less than half of 1 - p together.
        float all = top + (float)std::log(total * (1.0 - p) / (double)vocab * 0.5) - 0.001f;
        all = std::max(whole ? all : LEAST, LEAST);
        const double goal = p * total, slack = (fine ? FINE : COARSE) * total;
        // What is kept is as a rule among the few entries near the top: then these are all that must be looked at.
        for (float near = NEAR;; near *= 1.5f) {
            const float bound = whole ? std::max(top - near, all) : all;
            if (whole) collect(x, padded, bound, s.kept);
            weigh(s.kept, top, fine);
            if (bound > all && !(mass(s.kept, bound) > goal + slack)) continue;
            if (keep_best(s.kept, s.some, goal, slack, bound, top)) return true;
            break;
        }
    }
    return false;
}

void min_p(Scratch& s, int64_t padded, double log_p, float top, bool whole) {
    float bound = top + (float)log_p;
    if (whole) return collect(s.x.data(), padded, std::max(bound, LEAST), s.kept);
    int64_t n = 0;
    for (int64_t i = 0; i < s.kept.count; i++) {
        float x = s.kept.x[i];
        s.kept.x[n] = x, s.kept.id[n] = s.kept.id[i];
        n += x >= bound;
    }
    s.kept.count = n;
}

// Whether a part is kept, in `cut`; false if it cannot be told which.
bool truncate(const SampleRow& row, Scratch& s, int64_t padded, int64_t vocab, float top, bool& cut) {
    cut = false;
    if (row.top_k > 0 && row.top_k < vocab) {
        if (!top_k(s, padded, row.top_k, top)) return false;
        cut = true;
    }
    if (row.top_p < 1.0) {
        if (!top_p(s, padded, vocab, row.top_p, top, !cut)) return false;
        cut = true;
    }
    if (row.log_min_p > -INFINITY) {
        min_p(s, padded, row.log_min_p, top, !cut);
        cut = true;
    }
    return true;
}

int64_t find(const float* x, float value) {
    int64_t i = 0;
    while (!any(load(x + i) == value)) i += W;
    while (x[i] != value) i++;
    return i;
}

int64_t sample_row(const SampleRow& row, int64_t vocab) {
    Reader read{row, vocab, row.words * 32};
    if (!row.noisy && !row.num_bias && !row.processed) {
        if (read.edited()) return best(read, vocab);
        return best([&](int64_t i) { return load_some(row.logits + i, vocab - i, -INFINITY); }, vocab);
    }
    thread_local Scratch s;
    s.reserve(vocab);
    int64_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
    float top = prepare(row, read, s);
    if (std::isnan(top) || top == INFINITY) return UNDECIDED;
    if (top == -INFINITY) {
        if (row.processed) std::memcpy(row.processed, s.x.data(), vocab * sizeof(float));
        return NO_TOKEN;
    }
    bool cut = false;
    if (row.noisy && !truncate(row, s, padded, vocab, top, cut)) return UNDECIDED;
    int64_t first = find(s.x.data(), top);
    Draw draw{-INFINITY, INT32_MAX};
    if (row.noisy) {
        int32_t id = (int32_t)first;
        draw_some(row.seed, row.position, &top, &id, 1, draw);
        if (cut && s.kept.count > vocab / 8) {  // so many take longer one by one
            std::fill(s.x.begin(), s.x.begin() + padded, -INFINITY);
            for (int64_t i = 0; i < s.kept.count; i++) s.x[s.kept.id[i]] = s.kept.x[i];
            cut = false;
        }
        if (cut)
            draw_some(row.seed, row.position, s.kept.x.data(), s.kept.id.data(), s.kept.count, draw);
        else
            draw_all(row.seed, row.position, s.x.data(), vocab, draw);
        first = draw.id;
    }
    if (row.processed && !cut) std::memcpy(row.processed, s.x.data(), vocab * sizeof(float));
    if (row.processed && cut) {
        for (int64_t i = 0; i < vocab; i++) row.processed[i] = -INFINITY;
        for (int64_t i = 0; i < s.kept.count; i++) row.processed[s.kept.id[i]] = s.kept.x[i];
    }
    return first;
}

}  // namespace

void sample_rows(const SampleRow* rows, int64_t* out, int64_t count, int64_t vocab, int threads, const float* logits,
                 int64_t stride) {
    parallel_for(count, 1, threads, [&](int64_t i) {
        SampleRow row = rows[i];
        if (logits) row.logits = logits + i * stride;
        out[i] = sample_row(row, vocab);
    });
}

}  // namespace specserve

using namespace specserve;

extern "C" {
// out[i]: the token of row i, NO_TOKEN (-1) or UNDECIDED (-2).
void ss_sample(const SampleRow* rows, int64_t* out, int64_t count, int64_t vocab, int threads) {
    sample_rows(rows, out, count, vocab, threads, nullptr, 0);
}
// Greedy tokens of rows that are `stride` floats apart; NO_TOKEN (-1) where the largest entry is not finite.
void ss_best(const float* x, int64_t* out, int64_t rows, int64_t width, int64_t stride, int threads) {
    parallel_for(rows, 1, threads, [&](int64_t r) {
        const float* row = x + r * stride;
        out[r] = best([&](int64_t i) { return load_some(row + i, width - i, -INFINITY); }, width);
    });
}
}
