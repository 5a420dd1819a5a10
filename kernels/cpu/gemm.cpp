// y = x W^T + b for weights packed once at load. The order of each output's sum over k is fixed, whatever the number of
// rows, their place or the threads: the independence of the batch holds by construction.
//
// bfloat16 runs on AMX tiles where the compiler has them (16 x 16 outputs, 32 of k at a time, float32 sums), everything
// else on vectors.
#include "pool.h"
#include "tiles.h"
#include "vec.h"

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

inline float scalar(const float* x) { return *x; }
inline float scalar(const bf16* x) {
    uint32_t bits = (uint32_t)x->bits << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
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

#ifdef __AMX_BF16__

constexpr int64_t STEP = 32, TILE_ELEMENTS = 512;

// Tiles 0..3 are sums, 4 and 5 are rows of x (upper and lower half), 6 and 7 are weights.
TileConfig config_of(int64_t upper, int64_t lower) {
    TileConfig config;
    uint8_t u = (uint8_t)upper, l = (uint8_t)(lower ? lower : 1);
    config.rows[0] = config.rows[1] = config.rows[4] = u;
    config.rows[2] = config.rows[3] = config.rows[5] = l;
    return config;
}

// Packed as [block][k / 32][2 tiles][16 pairs of k][16 outputs][2].
void pack_tiles(const bf16* weight, bf16* packed, int64_t n, int64_t k) {
    for (int64_t block = 0; block * COLUMNS < n; block++)
        for (int64_t i = 0; i < k; i++)
            for (int64_t c = 0; c < COLUMNS; c++) {
                int64_t row = block * COLUMNS + c;
                bf16* tile = packed + block * COLUMNS * k + (i / STEP * 2 + c / 16) * TILE_ELEMENTS;
                tile[i % STEP / 2 * 32 + c % 16 * 2 + i % 2] = row < n ? weight[row * k + i] : bf16{};
            }
}

// Sums of up to 32 rows: `both` when the lower half has any.
inline void tile_rows(const bf16* x, const bf16* weights, float* sums, int64_t k, bool both) {
    const int64_t stride = k * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < k; i += STEP, weights += 2 * TILE_ELEMENTS) {
        _tile_loadd(4, x + i, stride);
        _tile_loadd(6, weights, 64);
        _tile_loadd(7, weights + TILE_ELEMENTS, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, x + 16 * k + i, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, COLUMNS * 4);
    _tile_stored(1, sums + 16, COLUMNS * 4);
    if (both) {
        _tile_stored(2, sums + 16 * COLUMNS, COLUMNS * 4);
        _tile_stored(3, sums + 16 * COLUMNS + 16, COLUMNS * 4);
    }
}

template <typename O>
void gemm_tiles(const bf16* x, const bf16* packed, const bf16* bias, O* out, const GemmArgs& a) {
    if (a.rows == 0) return;  // tiles of no rows are a fault
    int64_t k = a.in_features, tail = a.rows % 32, whole = a.rows - tail;
    const TileConfig full, rest = config_of(tail > 16 ? 16 : tail, tail > 16 ? tail - 16 : 0);
    Claims claims(a.blocks(), a.chunk());
    run_shared(a.threads, [&] {
        alignas(64) float sums[32 * COLUMNS];
        load_config(whole ? full : rest);
        for (int64_t begin, end; claims.next(begin, end);)
            for (int64_t block = begin; block < end; block++) {
                const bf16* weights = packed + block * k * COLUMNS;
                for (int64_t r = 0; r < whole; r += 32) {
                    tile_rows(x + r * k, weights, sums, k, true);
                    write_block(sums, 32, out + r * a.out_features, bias, block * COLUMNS, a);
                }
                if (tail) {
                    if (whole) load_config(rest);
                    tile_rows(x + whole * k, weights, sums, k, tail > 16);
                    write_block(sums, tail, out + whole * a.out_features, bias, block * COLUMNS, a);
                    if (whole) load_config(full);
                }
            }
        _tile_release();
    });
}

#endif

template <typename O>
void gemm_bf16(const bf16* x, const bf16* packed, const bf16* bias, O* out, const GemmArgs& a) {
#ifdef __AMX_BF16__
    if (a.in_features % STEP == 0 && have_tiles()) return gemm_tiles(x, packed, bias, out, a);
#endif
    gemm_vector(x, packed, bias, out, a);
}

}  // namespace specserve

using namespace specserve;

extern "C" {
// weight [n, k] -> packed [ceil(n / 32) * 32 * k] elements.
void ss_pack_f32(const float* weight, float* packed, int64_t n, int64_t k) { pack_vector(weight, packed, n, k); }
void ss_pack_bf16(const bf16* weight, bf16* packed, int64_t n, int64_t k) {
#ifdef __AMX_BF16__
    if (k % STEP == 0 && have_tiles()) return pack_tiles(weight, packed, n, k);
#endif
    pack_vector(weight, packed, n, k);
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
