// Rows of weights, in the order in which files hold them, into panels; and float rows into quantised rows.
//
// Quantised rows are GGUF's: Q8 blocks { float16 scale; int8[block] }, Q4_0 blocks { float16 scale; nibbles[16] } and
// Q4_1 blocks { float16 scale, least; nibbles[16] }, where byte i holds input i low and input i + 16 high.
#include <cmath>

#include "half.h"
#include "packed.h"
#include "pool.h"

namespace specserve {

namespace {

// Of one row in a file.
int64_t row_bytes(const Linear& w) {
    switch (w.kind) {
        case F32: return w.k * 4;
        case BF16: return w.k * 2;
        case Q8: return w.k / w.block * (2 + w.block);
        case Q4_0: return w.k / Q4_BLOCK * 18;
        default: return w.k / Q4_BLOCK * 20;
    }
}

void pack_f32(const uint8_t* row, uint8_t* panel, int64_t column, const Linear& w) {
    for (int64_t i = 0; i < w.k; i++) std::memcpy(panel + (i * PANEL + column) * 4, row + i * 4, 4);
}

void pack_bf16(const uint8_t* row, uint8_t* panel, int64_t column, const Linear& w) {
    for (int64_t i = 0; i < w.k; i += 2) {
        int64_t pair = i / 32 * 32 + column / HALF * 16 + i % 32 / 2;
        std::memcpy(panel + (pair * HALF + column % HALF) * 4, row + i * 2, 4);
    }
}

void pack_q8(const uint8_t* row, uint8_t* panel, int64_t column, const Linear& w) {
    for (int64_t b = 0; b < w.k / w.block; b++) {
        const uint8_t* from = row + b * (2 + w.block);
        uint8_t* to = panel + b * w.block_bytes();
        std::memcpy(to + column * 2, from, 2);
        uint8_t* half = to + SCALE_BYTES + column / HALF * w.block * HALF;
        for (int64_t i = 0; i < w.block; i += 4) std::memcpy(half + (i / 4 * HALF + column % HALF) * 4, from + 2 + i, 4);
    }
}

void pack_q4(const uint8_t* row, uint8_t* panel, int64_t column, const Linear& w) {
    const int64_t numbers = w.kind == Q4_1 ? 2 : 1;  // float16 ahead of a block's nibbles
    for (int64_t b = 0; b < w.k / Q4_BLOCK; b++) {
        const uint8_t* from = row + b * (2 * numbers + 16);
        uint8_t* to = panel + b * w.block_bytes();
        for (int64_t i = 0; i < numbers; i++) std::memcpy(to + i * SCALE_BYTES + column * 2, from + 2 * i, 2);
        for (int64_t i = 0; i < Q4_BLOCK; i++) {
            int q = i < 16 ? from[2 * numbers + i] & 15 : from[2 * numbers + i - 16] >> 4;
            uint8_t& byte = to[numbers * SCALE_BYTES + (i / 4 * HALF + column % HALF) * 4 + i % 4];
            byte = (uint8_t)(column < HALF ? (byte & 0xf0) | q : (byte & 0x0f) | q << 4);
        }
    }
}

void pack_panel(const uint8_t* rows, uint8_t* packed, int64_t p, const Linear& w) {
    uint8_t* panel = packed + p * w.panel_bytes();
    std::memset(panel, 0, w.panel_bytes());
    auto pack = w.kind == F32 ? pack_f32 : w.kind == BF16 ? pack_bf16 : w.kind == Q8 ? pack_q8 : pack_q4;
    for (int64_t c = 0; c < PANEL && p * PANEL + c < w.n; c++)
        pack(rows + (p * PANEL + c) * row_bytes(w), panel, c, w);
}

// Scale of the greatest magnitude to 127, as in GGUF's Q8_0.
void quantise_q8(const float* x, uint8_t* out, int64_t block) {
    float most = 0.0f;
    for (int64_t i = 0; i < block; i++) most = std::fmax(most, std::fabs(x[i]));
    uint16_t half = half_of(most / 127.0f);
    float scale = float_of(half), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    std::memcpy(out, &half, 2);
    for (int64_t i = 0; i < block; i++) {
        float q = std::nearbyint(x[i] * inverse);
        out[2 + i] = (uint8_t)(int8_t)(q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q);
    }
}

// The error of 32 values on the grid scale * (0..15) + least, and their places on it.
float place_q4(const float* x, float scale, float least, int* q) {
    float inverse = scale > 0.0f ? 1.0f / scale : 0.0f, error = 0.0f;
    for (int64_t i = 0; i < Q4_BLOCK; i++) {
        float place = std::nearbyint((x[i] - least) * inverse);
        q[i] = place < 0.0f ? 0 : place > 15.0f ? 15 : (int)place;
        float e = scale * (float)q[i] + least - x[i];
        error += e * e;
    }
    return error;
}

// Of the grids from slightly within to slightly beyond the range of the values, the one of the least squared error.
void quantise_q4_1(const float* x, uint8_t* out) {
    float low = x[0], high = x[0], best = INFINITY;
    for (int64_t i = 1; i < Q4_BLOCK; i++) low = std::fmin(low, x[i]), high = std::fmax(high, x[i]);
    int chosen[Q4_BLOCK] = {}, q[Q4_BLOCK];
    uint16_t numbers[2] = {};
    for (int step = 0; step <= 8; step++) {
        float inset = 0.02f * (float)step * (high - low);
        uint16_t scale = half_of((high - low - inset) / 15.0f), least = half_of(low + inset / 2);
        float error = place_q4(x, float_of(scale), float_of(least), q);
        if (!(error < best)) continue;
        best = error, numbers[0] = scale, numbers[1] = least;
        std::memcpy(chosen, q, sizeof q);
    }
    std::memcpy(out, numbers, 4);
    for (int64_t i = 0; i < 16; i++) out[4 + i] = (uint8_t)(chosen[i] | chosen[i + 16] << 4);
}

}  // namespace

}  // namespace specserve

using namespace specserve;

extern "C" {
// Bytes of a packed layer; 0 where the kernels do not take the shape.
int64_t ss_packed_bytes(int64_t kind, int64_t n, int64_t k, int64_t block) {
    Linear w{kind, n, k, block, nullptr, nullptr};
    bool known = kind == F32 || kind == BF16 || (kind == Q8 && (block == 32 || block == 64)) ||
                 ((kind == Q4_0 || kind == Q4_1) && block == Q4_BLOCK);
    if (!known || n <= 0 || k <= 0 || k % w.inputs_per_block() || k % 32) return 0;
    return w.panels() * w.panel_bytes();
}
// rows: n rows of the kind as files hold them -> packed.
void ss_pack(int64_t kind, int64_t n, int64_t k, int64_t block, const uint8_t* rows, uint8_t* packed, int threads) {
    Linear w{kind, n, k, block, nullptr, nullptr};
    parallel_for(w.panels(), 1, threads, [&](int64_t p) { pack_panel(rows, packed, p, w); });
}
// float32 rows [n, k] -> rows of kind Q8 (block 32 or 64) or Q4_1.
void ss_quantise_rows(int64_t kind, int64_t n, int64_t k, int64_t block, const float* x, uint8_t* rows, int threads) {
    Linear w{kind, n, k, block, nullptr, nullptr};
    int64_t bytes = row_bytes(w) / (k / block);
    parallel_for(n, 4, threads, [&](int64_t r) {
        for (int64_t b = 0; b < k / block; b++) {
            uint8_t* out = rows + r * row_bytes(w) + b * bytes;
            kind == Q8 ? quantise_q8(x + r * k + b * block, out, block) : quantise_q4_1(x + r * k + b * block, out);
        }
    });
}
}
