// y = x W^T + b for weights packed once at load. The order of each output's sum over k is fixed, whatever the number of
// rows, their place or the threads: the independence of the batch holds by construction.
#include "gemm.h"

namespace specserve {

constexpr int64_t COLUMNS = 32;  // outputs of one block of packed weights

struct GemmArgs {
    int64_t rows, out_features, in_features;
    int threads;
    int64_t blocks() const { return (out_features + COLUMNS - 1) / COLUMNS; }
    // Enough pieces that a thread which is held up does not hold up the others for long.
    int64_t chunk() const { return blocks() / (threads * 8) + 1; }
};

// Rows of float sums [rows, 32] of one block -> out, with the bias.
template <typename O, typename T>
inline void write_block(const float* sums, int64_t rows, O* out, const T* bias, int64_t column, const GemmArgs& a) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < COLUMNS && column + i < a.out_features; i += W) {
            int64_t left = a.out_features - column - i;
            vfloat v = load(sums + r * COLUMNS + i);
            if (bias) v += load_some(bias + column + i, left);
            store_some(out + r * a.out_features + column + i, v, left);
        }
}

// Packed as [block][k][32].
template <typename T>
void pack_vector(const T* weight, T* packed, int64_t n, int64_t k) {
    for (int64_t block = 0; block * COLUMNS < n; block++)
        for (int64_t i = 0; i < k; i++)
            for (int64_t c = 0; c < COLUMNS; c++) {
                int64_t row = block * COLUMNS + c;
                packed[(block * k + i) * COLUMNS + c] = row < n ? weight[row * k + i] : T{};
            }
}

// Sums of R rows. In pieces of 64 of k, as the error of one long chain of float32 additions shows in the logits.
template <typename T, int R>
inline void vector_rows(const T* x, const T* packed, float* sums, int64_t k) {
    vfloat total[R][2] = {};
    for (int64_t piece = 0; piece < k; piece += 64) {
        int64_t end = piece + 64 < k ? piece + 64 : k;
        vfloat acc[R][2] = {};
        for (int64_t i = piece; i < end; i++) {
            vfloat b0 = load(packed + i * COLUMNS), b1 = load(packed + i * COLUMNS + W);
            for (int r = 0; r < R; r++) {
                vfloat value = splat(scalar(x + r * k + i));
                acc[r][0] += value * b0;
                acc[r][1] += value * b1;
            }
        }
        for (int r = 0; r < R; r++) total[r][0] += acc[r][0], total[r][1] += acc[r][1];
    }
    for (int r = 0; r < R; r++) store(sums + r * COLUMNS, total[r][0]), store(sums + r * COLUMNS + W, total[r][1]);
}

template <typename T, typename O>
void gemm_vector(const T* x, const T* packed, const T* bias, O* out, const GemmArgs& a) {
    int64_t k = a.in_features;
    parallel_for(a.blocks(), a.chunk(), a.threads, [&](int64_t block) {
        const T* weights = packed + block * k * COLUMNS;
        float sums[8 * COLUMNS];
        int64_t r = 0;
        for (; r + 8 <= a.rows; r += 8) {
            vector_rows<T, 8>(x + r * k, weights, sums, k);
            write_block(sums, 8, out + r * a.out_features, bias, block * COLUMNS, a);
        }
        for (; r + 4 <= a.rows; r += 4) {
            vector_rows<T, 4>(x + r * k, weights, sums, k);
            write_block(sums, 4, out + r * a.out_features, bias, block * COLUMNS, a);
        }
        for (; r < a.rows; r++) {
            vector_rows<T, 1>(x + r * k, weights, sums, k);
            write_block(sums, 1, out + r * a.out_features, bias, block * COLUMNS, a);
        }
    });
}

// bfloat16 in multiples of 32 inputs: the kernels of packed weights.
template <typename O>
struct Rows {
    O* out;
    const bf16* bias;
    GemmArgs a;
};

template <typename O>
void store_rows(const void* context, int, const float* sums, int64_t row, int64_t rows, int64_t column) {
    const Rows<O>& o = *(const Rows<O>*)context;
    write_block(sums, rows, o.out + row * o.a.out_features, o.bias, column, o.a);
}

template <typename O>
void gemm_bf16(const bf16* x, const bf16* packed, const bf16* bias, O* out, const GemmArgs& a) {
    if (a.in_features % BLOCK != 0) return gemm_vector(x, packed, bias, out, a);
    const Linear w{BF16, a.out_features, a.in_features, (const uint8_t*)packed, nullptr};
    const Rows<O> rows{out, bias, a};
    gemm(Product{w, Operand::of(x, a.in_features), a.rows, store_rows<O>, &rows, nullptr, 0}, a.threads);
}

}  // namespace specserve

using namespace specserve;

extern "C" {
void ss_pack(int64_t kind, int64_t n, int64_t k, int64_t block, const uint8_t* rows, uint8_t* packed, int threads);
// weight [n, k] -> packed [ceil(n / 32) * 32 * k] elements.
void ss_pack_f32(const float* weight, float* packed, int64_t n, int64_t k) { pack_vector(weight, packed, n, k); }
void ss_pack_bf16(const bf16* weight, bf16* packed, int64_t n, int64_t k) {
    if (k % BLOCK) return pack_vector(weight, packed, n, k);
    ss_pack(BF16, n, k, 0, (const uint8_t*)weight, (uint8_t*)packed, 1);
}
// x [rows, k] -> out [rows, n], contiguous; bias [n] or null.
#define GEMM(NAME, T, O, RUN)                                                                                         \
    void NAME(const T* x, const T* packed, const T* bias, O* out, int64_t rows, int64_t n, int64_t k, int threads) {  \
        RUN(x, packed, bias, out, GemmArgs{rows, n, k, threads});                                                     \
    }
GEMM(ss_gemm_f32_f32, float, float, gemm_vector)
GEMM(ss_gemm_bf16_bf16, bf16, bf16, gemm_bf16)
GEMM(ss_gemm_bf16_f32, bf16, float, gemm_bf16)
}
