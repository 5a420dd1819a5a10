// Products with packed weights. Each output is one sum in an order that k alone fixes: whatever the rows beside it, their
// number or the threads, the bits are the same.
#pragma once
#include "packed.h"
#include "pool.h"
#include "vec.h"

namespace specserve {

// Rows of inputs as a kind of weights takes them: bfloat16, or whole numbers q with input = scale * q.
struct Operand {
    const bf16* x = nullptr;         // row r, inputs from k on: see `at`
    int64_t row_bytes = 0, step_bytes = 0, tile_bytes = 0;
    const int8_t* q = nullptr;       // blocks: [rows, k]; limbs: see operand.h
    const float* scale = nullptr;    // blocks: [rows, k / SHARE]; limbs: [rows]
    const float* sum = nullptr;      // [rows, k / 32]: scale * sum of q
    const int32_t* start = nullptr;  // as `scale` of blocks: what sums of products begin with, see dot.h
    int64_t lower = 0;               // bytes from x to what its rounding left, in bfloat16 too; 0 where that is nothing

    // Rows one after the other.
    static Operand of(const bf16* x, int64_t k) { return {x, 2 * k, 64, 32 * k}; }
    // Blocks of 16 rows by 32 inputs, as tile registers take them.
    static Operand tiles(const bf16* x, int64_t k) { return {x, 64, 1024, 32 * k}; }

    const bf16* at(int64_t row, int64_t step) const {
        return (const bf16*)((const char*)x + row / 16 * tile_bytes + row % 16 * row_bytes + step * step_bytes);
    }
};
constexpr int64_t ROWS = 32;        // most rows that a sink gets at once
constexpr int64_t MOST_ROWS = 512;  // and a panel

// Takes sums [rows][32] of the outputs column..column + 31 (those from n on are meaningless) of some rows.
typedef void (*Sink)(const void* context, int slot, const float* sums, int64_t row, int64_t rows, int64_t column);

struct Product {
    const Linear& w;
    Operand x;
    int64_t rows;
    Sink sink;
    const void* context;
    const int64_t* panels;  // those that are computed, one after the other in the result; null for all
    int64_t num_panels;

    int64_t count() const { return panels ? num_panels : w.panels(); }
    const uint8_t* weights(int64_t panel) const { return w.panel(chosen(panel)); }
    const float* units(int64_t panel) const { return w.units(chosen(panel)); }
    int64_t chosen(int64_t panel) const { return panels ? panels[panel] : panel; }
    // Hand a piece of sums on.
    void give(int slot, const float* sums, int64_t row, int64_t count, int64_t panel) const {
        sink(context, slot, sums, row, count, panel * PANEL);
    }
};

// y = x W^T, without the bias: each piece goes to the sink of the thread that made it.
void gemm(const Product& p, int threads);

// Sums of rows [first, first + rows) for one panel. `first` is a multiple of 32.
void panel_on_tiles(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot);
void panel_bf16(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot);
// The whole product, where it has few rows of limbs; else nothing and false.
bool few_limbs(const Product& p, int threads);
void panel_limbs(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot);
void panel_dots(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot);

}  // namespace specserve
