// Quantised weights by quantised inputs, where there are no tile registers. The integer products of one block are exact,
// then block after block, or half a block where inputs have a scale each,
//   sum = fma(products, scale of the weights * scale of the inputs, sum)      and for Q4_1
//   sum = fma(least of the weights, scaled sum of the inputs, sum)
#include "dot.h"
#include "following.h"
#include "gemm.h"
#include "half.h"

namespace specserve {

#if !defined(__AMX_BF16__) && (!defined(__AVX2__) || defined(__AVX512F__))  // else gemm_limbs.cpp, gemm_avx2.cpp

namespace {

constexpr int64_t AHEAD = 1024;  // bytes of weights brought to the first cache ahead of their turn
#if defined(__AVX512F__)
constexpr int64_t MOST = 6;  // rows at a time
#else
constexpr int64_t MOST = 2;
#endif

template <int64_t KIND, int R>
void rows_of(const Product& p, int64_t panel, int64_t row, int slot, Following& following) {
    const uint8_t* block = p.weights(panel);
    const int64_t blocks = p.w.blocks(), first = row * blocks;
    float sums[R * PANEL];
    vfloat sum[R][2] = {};
    for (int64_t b = 0; b < blocks; b++, block += Block<KIND>::bytes) {
        following.step();
        for (int64_t i = 0; i < Block<KIND>::bytes; i += 64) __builtin_prefetch(block + AHEAD + i);
        for (int64_t share = 0; share < SHARES; share++) {
            vint products[R][2];
            for (int r = 0; r < R; r++) {
                products[r][0] = before<KIND>(p.x.start[(first + r * blocks + b) * SHARES + share]);
                products[r][1] = products[r][0] << SHIFT<KIND>;
            }
            for (int64_t group = share * SHARE / 4; group < (share + 1) * SHARE / 4; group++) {
                vbytes left, right;
                weights_of<KIND>(block + Block<KIND>::numbers, group, left, right);
                for (int r = 0; r < R; r++) {
                    int32_t four;
                    std::memcpy(&four, p.x.q + (first + r * blocks + b) * BLOCK + 4 * group, sizeof four);
                    products[r][0] = dot4<KIND>(products[r][0], left, four);
                    products[r][1] = dot4<KIND>(products[r][1], right, four);
                }
            }
            for (int half = 0; half < 2; half++) {
                const vfloat stored = load_half(block + half * 32);
                const vfloat scale = half && SHIFT<KIND> ? stored * (1.0f / (1 << SHIFT<KIND>)) : stored;
                for (int r = 0; r < R; r++) {
                    const int64_t i = (first + r * blocks + b) * SHARES + share;
                    const vint exact = after<KIND>(products[r][half], p.x.start[i]);
                    sum[r][half] = fma(__builtin_convertvector(exact, vfloat), scale * p.x.scale[i], sum[r][half]);
                }
            }
        }
        for (int half = 0; KIND == Q4_1 && half < 2; half++) {
            const vfloat least = load_half(block + SCALE_BYTES + half * 32);
            for (int r = 0; r < R; r++)
                sum[r][half] = fma(least, splat(p.x.sum[first + r * blocks + b]), sum[r][half]);
        }
    }
    for (int r = 0; r < R; r++) store(sums + r * PANEL, sum[r][0]), store(sums + r * PANEL + HALF, sum[r][1]);
    p.give(slot, sums, row, R, panel);
}

template <int64_t KIND>
void panel_of(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    int64_t r = first, end = first + rows;
    Following following(p, panel, p.w.blocks() * ((rows + MOST - 1) / MOST));
#if defined(__AVX512F__)
    for (; r + 6 <= end; r += 6) rows_of<KIND, 6>(p, panel, r, slot, following);
    for (; r + 4 <= end; r += 4) rows_of<KIND, 4>(p, panel, r, slot, following);
#endif
    for (; r + 2 <= end; r += 2) rows_of<KIND, 2>(p, panel, r, slot, following);
    for (; r < end; r++) rows_of<KIND, 1>(p, panel, r, slot, following);
}

}  // namespace

void panel_dots(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    if (p.w.kind == Q8) return panel_of<Q8>(p, panel, first, rows, slot);
    if (p.w.kind == Q4_0) return panel_of<Q4_0>(p, panel, first, rows, slot);
    panel_of<Q4_1>(p, panel, first, rows, slot);
}

#endif

}  // namespace specserve
