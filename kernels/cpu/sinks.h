// Where the sums of a product go in a forward.
#pragma once
#include "exp.h"
#include "operand.h"

namespace specserve {

struct Output {
    const Linear& w;
    float* to;  // [rows, stride]
    int64_t stride;
    const Linear* next;  // of a gate: the product that takes what it gives
    Inputs inner;        // its rows, where it takes bfloat16
    float* gated;        // else what they are made of, [rows, next->k]
};

// Sums and the bias, if there is one, of 16 outputs.
inline vfloat with_bias(const float* sums, const Linear& w, int64_t column) {
    vfloat v = load(sums);
    return w.bias ? v + load_some(w.bias + column, w.n - column) : v;
}

inline void store_sums(const void* context, int, const float* sums, int64_t row, int64_t rows, int64_t column) {
    const Output& o = *(const Output*)context;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < PANEL && column + i < o.w.n; i += W)
            store_some(o.to + (row + r) * o.stride + column + i, with_bias(sums + r * PANEL + i, o.w, column + i),
                       o.w.n - column - i);
}

inline void add_sums(const void* context, int, const float* sums, int64_t row, int64_t rows, int64_t column) {
    const Output& o = *(const Output*)context;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < PANEL && column + i < o.w.n; i += W) {
            float* to = o.to + (row + r) * o.stride + column + i;
            const int64_t left = o.w.n - column - i;
            store_some(to, load_some(to, left) + with_bias(sums + r * PANEL + i, o.w, column + i), left);
        }
}

// silu(gate) * up: of each panel 16 inputs of the next product.
inline void gate_sums(const void* context, int, const float* sums, int64_t row, int64_t rows, int64_t column) {
    const Output& o = *(const Output*)context;
    const Linear& down = *o.next;
    const bool plain = down.takes() == Takes::BFLOAT16;
    const Operand inner = plain ? o.inner.operand(down) : Operand{};
    const int64_t at = column / 2;
    for (int64_t r = 0; r < rows; r++) {
        vfloat gate = with_bias(sums + r * PANEL, o.w, column), up = with_bias(sums + r * PANEL + W, o.w, column + W);
        vfloat y = gate * sigmoid(gate) * up;
        if (plain)
            store(const_cast<bf16*>(inner.at(row + r, at / 32)) + at % 32, y);
        else
            store(o.gated + (row + r) * down.k + at, y);
    }
}

}  // namespace specserve
