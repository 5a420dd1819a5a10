// Rows of logits: grammar masks, log-softmax, argmax. All float32.
#include <cmath>

#include "pool.h"
#include "exp.h"

namespace specserve {

void log_softmax_row(const float* x, float* out, int64_t width) {
    vfloat best = splat(-INFINITY);
    for (int64_t i = 0; i < width; i += W) best = max(load_some(x + i, width - i, -INFINITY), best);
    float top = max(best);
    if (top == -INFINITY) {  // nothing is possible: every log probability is minus infinity
        for (int64_t i = 0; i < width; i++) out[i] = -INFINITY;
        return;
    }
    vfloat totals[4] = {};
    for (int64_t i = 0; i < width; i += W) totals[(i / W) % 4] += exp(load_some(x + i, width - i, -INFINITY) - top);
    float shift = top + (float)std::log((double)sum((totals[0] + totals[1]) + (totals[2] + totals[3])));
    for (int64_t i = 0; i < width; i += W) store_some(out + i, load_some(x + i, width - i) - shift, width - i);
}

int64_t argmax_row(const float* x, int64_t width) {
    vfloat best = splat(-INFINITY);
    vint lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vint where = lane * 0 + INT32_MAX;
    for (int64_t i = 0; i < width; i += W) {
        vfloat v = load_some(x + i, width - i, -INFINITY);
        vint better = v > best;
        best = better ? v : best;
        where = better ? lane + (int32_t)i : where;
    }
    float top = max(best);
    int32_t index = INT32_MAX;
    for (int i = 0; i < W; i++)
        if (best[i] == top && where[i] < index) index = where[i];
    return index == INT32_MAX ? 0 : index;
}

void mask_row(float* x, const uint32_t* mask, int64_t width) {
    vuint bit = {1u << 0, 1u << 1, 1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                 1u << 8, 1u << 9, 1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15};
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        uint32_t bits = mask[i / 32] >> (i % 32);
        if ((bits & 0xffffu) == 0xffffu) continue;
        vint legal = ((vuint{} + bits) & bit) != 0;
        store(x + i, legal ? load(x + i) : splat(-INFINITY));
    }
    for (; i < width; i++)
        if (!((mask[i / 32] >> (i % 32)) & 1u)) x[i] = -INFINITY;
}

}  // namespace specserve

using namespace specserve;

extern "C" {
void ss_log_softmax(const float* x, float* out, int64_t rows, int64_t width, int threads) {
    parallel_for(rows, 1, threads, [&](int64_t r) { log_softmax_row(x + r * width, out + r * width, width); });
}
void ss_argmax(const float* x, int64_t* out, int64_t rows, int64_t width, int threads) {
    parallel_for(rows, 1, threads, [&](int64_t r) { out[r] = argmax_row(x + r * width, width); });
}
// mask [rows, words] of 32 bits; logits beyond words * 32 are illegal.
void ss_apply_bitmask(float* x, const uint32_t* mask, int64_t rows, int64_t width, int64_t words, int threads) {
    parallel_for(rows, 1, threads, [&](int64_t r) {
        int64_t covered = words * 32 < width ? words * 32 : width;
        mask_row(x + r * width, mask + r * words, covered);
        for (int64_t i = covered; i < width; i++) x[r * width + i] = -INFINITY;
    });
}
}
