// Where a forward keeps what it computes: parts of one piece of memory that the caller keeps from step to step.
#pragma once
#include <algorithm>

#include "forward.h"
#include "operand.h"

namespace specserve {

struct Best {
    float value;
    int64_t id;
};

// Rows that go through a layer at once, 256 a thread: what is made of them stays in the threads' second caches.
inline int64_t part_rows(int64_t threads) { return 256 * threads; }

struct Scratch {
    float *residual, *narrow;  // [rows, hidden], [logits, hidden]
    Inputs inputs, inner;      // of the products from the residual and of attention; of `down`; of a part's rows
    float* qkv;                // [rows of a part, (q_heads + 2 kv_heads) dim]
    bf16 *q, *attended;        // [rows, q_heads dim]
    float* gated;              // [rows of a part, inner], where `down` does not take bfloat16
    int64_t* positions;        // [logits]
    int32_t* row_sequence;     // [logits]
    Best* best;                // [threads, logits]
    int64_t bytes = 0;

    // With base null only `bytes` means something.
    Scratch(const Model& m, int64_t rows, int64_t logits, int64_t threads, uint8_t* base) : base_(base) {
        const int64_t q_width = m.q_heads * m.dim, most = std::max(rows, logits), some = std::min(most, part_rows(threads));
        part(residual, most * m.hidden), part(narrow, most * m.hidden);
        part(inputs, std::max(some, logits), std::max(m.hidden, q_width), true), part(inner, some, m.inner, false);
        part(qkv, some * (q_width + 2 * m.kv_heads * m.dim));
        part(q, most * q_width), part(attended, most * q_width);
        part(gated, some * m.inner);
        part(positions, logits), part(row_sequence, logits), part(best, threads * logits);
    }

  private:
    template <typename T>
    void part(T*& pointer, int64_t count) {
        pointer = (T*)(base_ + bytes);
        bytes += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    }

    void part(Inputs& to, int64_t rows, int64_t k, bool exact) {
        const int64_t blocks = rows * k / BLOCK;
        part(to.x, (rows + 15) / 16 * 16 * k);
        to.lower = nullptr;
        if (exact) part(to.lower, (rows + 15) / 16 * 16 * k);
        part(to.q, TILES ? Limbs::bytes(rows, k) : rows * k);
        part(to.scale, TILES ? rows : blocks * SHARES);
        part(to.sum, TILES ? 0 : blocks), part(to.start, TILES ? 0 : blocks * SHARES);
    }

    uint8_t* base_;
};

}  // namespace specserve
