// RMSNorm (Zhang and Sennrich 2019), alone and fused with the residual addition before it.
#include <cmath>

#include "pool.h"
#include "vec.h"

namespace specserve {

// ADD: residual += x, and the norm is of the residual; else of x. Squares are summed in four fixed chains of vectors.
template <typename X, typename T, bool ADD>
void norm_row(const X* x, float* residual, const T* weight, T* out, int64_t width, float eps) {
    vfloat squares[4] = {};
    for (int64_t i = 0; i < width; i += W) {
        vfloat v = load_some(x + i, width - i);
        if (ADD) {
            v += load_some(residual + i, width - i);
            store_some(residual + i, v, width - i);
        }
        squares[(i / W) % 4] += v * v;
    }
    float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)width;
    vfloat scale = splat(1.0f / std::sqrt(mean + eps));
    for (int64_t i = 0; i < width; i += W) {
        vfloat v = ADD ? load_some(residual + i, width - i) : load_some(x + i, width - i);
        store_some(out + i, v * scale * load_some(weight + i, width - i), width - i);
    }
}

template <typename X, typename T>
void norm_rows(const X* x, float* residual, const T* weight, T* out, int64_t rows, int64_t width, float eps,
               int threads) {
    parallel_for(rows, 16384 / width + 1, threads, [&](int64_t r) {
        if (residual)
            norm_row<X, T, true>(x + r * width, residual + r * width, weight, out + r * width, width, eps);
        else
            norm_row<X, T, false>(x + r * width, nullptr, weight, out + r * width, width, eps);
    });
}

}  // namespace specserve

using namespace specserve;

extern "C" {
// x [rows, width] -> out; with residual (float32, changed in place) the norm is of residual + x. The names say the
// types of x and of weight and out.
#define NORM(NAME, X, T)                                                                                              \
    void NAME(const X* x, float* residual, const T* weight, T* out, int64_t rows, int64_t width, float eps,           \
              int threads) {                                                                                          \
        norm_rows(x, residual, weight, out, rows, width, eps, threads);                                               \
    }
NORM(ss_norm_f32_f32, float, float)
NORM(ss_norm_bf16_bf16, bf16, bf16)
NORM(ss_norm_f32_bf16, float, bf16)
}
