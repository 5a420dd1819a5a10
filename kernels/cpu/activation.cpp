// SwiGLU's activation: silu(gate) * up over merged rows [gate | up].
#include "pool.h"
#include "exp.h"

namespace specserve {

template <typename T>
void silu_mul_rows(const T* gate_up, T* out, int64_t rows, int64_t width, int threads) {
    parallel_for(rows, 8192 / width + 1, threads, [&](int64_t r) {
        const T* gate = gate_up + r * 2 * width;
        const T* up = gate + width;
        T* to = out + r * width;
        for (int64_t i = 0; i < width; i += W) {
            vfloat g = load_some(gate + i, width - i), u = load_some(up + i, width - i);
            store_some(to + i, g * sigmoid(g) * u, width - i);
        }
    });
}

}  // namespace specserve

using namespace specserve;

extern "C" {
void ss_silu_mul_f32(const float* gate_up, float* out, int64_t rows, int64_t width, int threads) {
    silu_mul_rows(gate_up, out, rows, width, threads);
}
void ss_silu_mul_bf16(const bf16* gate_up, bf16* out, int64_t rows, int64_t width, int threads) {
    silu_mul_rows(gate_up, out, rows, width, threads);
}
}
