// A KV head's part of attention for some query heads ("columns"), in the widest registers that the machine has: scores,
// the online softmax and the weighted sum of values of one tile. K and V are read once for all of the columns.
#pragma once
#include "attention.h"
#include "exp.h"

namespace specserve {

constexpr int MOST_COLUMNS = 8;

// What the softmax has summed up of some keys for one column.
struct ColumnSums {
    float out[MAX_DIM];
    float top, total;

    void clear(int64_t dim) {
        top = -INFINITY, total = 0.0f;
        std::memset(out, 0, dim * sizeof(float));
    }
};

struct Column {
    alignas(64) float q[MAX_DIM];
    ColumnSums piece, whole;  // of the piece at hand, of those before it
};

// What one tile needs besides: used by one unit after the other.
struct alignas(64) LaneWork {
    float p[MOST_COLUMNS][TILE];         // scores, then weights
    float factors[TILE], shares[TILE];  // of int8: what scores and weights are multiplied by
};

// Lines of `numbers` numbers, as `Fetch` takes them.
template <typename T>
constexpr int lines(int64_t numbers) {
    return (int)(numbers * (int64_t)sizeof(T) + 127) / 128 * 2;
}

// Scores of the keys of one tile into w.p; -inf for those that are not seen. DIM is the heads' or 0.
template <typename T, int H, int DIM>
inline void find_scores(LaneWork& w, const Column* columns, const T* keys, const Tile& tile, int64_t from, int64_t to,
                        Fetch& fetch, int64_t any_dim) {
    const int64_t dim = DIM ? DIM : any_dim;
    for (int64_t group = 0; group < TILE; group += LANES) {
        if (group + LANES <= from || group >= to) continue;
        lanes dots[H][LANES];
        if (group < from || group + LANES > to) std::memset(dots, 0, sizeof dots);
        for (int64_t j = group < from ? from - group : 0; j < LANES && group + j < to; j++) {
            const T* k = keys + tile.at[group + j];
            lanes dot[H] = {};
            for (int64_t i = 0; i < dim; i += LANES) {
                const lanes x = load_lanes(k + i);
                for (int h = 0; h < H; h++) dot[h] += load_lanes(columns[h].q + i) * x;
            }
            for (int h = 0; h < H; h++) dots[h][j] = dot[h];
            fetch.steps(lines<T>(dim));
        }
        for (int h = 0; h < H; h++) store_lanes(w.p[h] + group, sum_each(dots[h]));
    }
    for (int h = 0; sizeof(T) == 1 && h < H; h++)
        for (int64_t j = 0; j < TILE; j += LANES)
            store_lanes(w.p[h] + j, load_lanes(w.p[h] + j) * load_lanes(w.factors + j));
    for (int h = 0; h < H && (from > 0 || to < TILE); h++)
        for (int64_t j = 0; j < TILE; j++)
            if (j < from || j >= to) w.p[h][j] = -INFINITY;
}

// One tile's part of the online softmax: rescale what was summed so far, turn scores into weights.
template <typename T, int H>
inline void weigh(LaneWork& w, Column* columns, int64_t dim) {
    for (int h = 0; h < H; h++) {
        ColumnSums& sums = columns[h].piece;
        lanes x[TILE / LANES], most = load_lanes(w.p[h]);
        for (int i = 0; i < TILE / LANES; i++) x[i] = load_lanes(w.p[h] + i * LANES), most = max(x[i], most);
        const float top = sums.top > max(most) ? sums.top : max(most), keep = exp(sums.top - top);
        lanes total = {};
        for (int i = 0; i < TILE / LANES; i++) {
            x[i] = exp(x[i] - top);
            total += x[i];
            store_lanes(w.p[h] + i * LANES, sizeof(T) == 1 ? x[i] * load_lanes(w.shares + i * LANES) : x[i]);
        }
        sums.total = sums.total * keep + sum(total);
        sums.top = top;
        for (int64_t i = 0; i < dim; i += LANES) store_lanes(sums.out + i, load_lanes(sums.out + i) * keep);
    }
}

// out += weights * V for N registers of dims from `first` on, whose sums stay in registers.
template <typename T, int H, int N>
inline void add_dims(const LaneWork& w, Column* columns, const T* values, const Tile& tile, int64_t from, int64_t to,
                     Fetch& fetch, int64_t first) {
    lanes out[H][N];
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) out[h][i] = load_lanes(columns[h].piece.out + first + i * LANES);
    for (int64_t j = from; j < to; j++) {
        const T* v = values + tile.at[j] + first;
        lanes x[N];
        for (int i = 0; i < N; i++) x[i] = load_lanes(v + i * LANES);
        for (int h = 0; h < H; h++)
            for (int i = 0; i < N; i++) out[h][i] += w.p[h][j] * x[i];
        fetch.steps(lines<T>(N * LANES));
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) store_lanes(columns[h].piece.out + first + i * LANES, out[h][i]);
}

inline void find_scales(LaneWork&, const float*, const float*, const Tile&, int64_t, int64_t) {}
inline void find_scales(LaneWork&, const bf16*, const bf16*, const Tile&, int64_t, int64_t) {}

inline void find_scales(LaneWork& w, const int8_t* keys, const int8_t* values, const Tile& tile, int64_t from, int64_t to) {
    for (int64_t j = 0; j < TILE; j++) {
        w.factors[j] = w.shares[j] = 0.0f;
        if (j < from || j >= to) continue;
        std::memcpy(w.factors + j, keys + tile.scale_at[j], sizeof(float));
        std::memcpy(w.shares + j, values + tile.scale_at[j], sizeof(float));
    }
}

// Keys [from, to) of one tile for H columns that see all of them. keys, values: of the KV head in the first block, as in
// all of these.
template <typename T, int H, int DIM>
void attend_tile(LaneWork& w, Column* columns, const T* keys, const T* values, const Tile& tile, int64_t from, int64_t to,
                 Fetch& fetch, int64_t any_dim) {
    // Registers of dims whose sums the machine has registers for.
    constexpr int AT_ONCE = LANES == 16 ? (H <= 6 ? 4 : 2) : H <= 3 ? 4 : H <= 6 ? 2 : 1;
    const int64_t dim = DIM ? DIM : any_dim;
    find_scales(w, keys, values, tile, from, to);
    find_scores<T, H, DIM>(w, columns, keys, tile, from, to, fetch, dim);
    weigh<T, H>(w, columns, dim);
    int64_t i = 0;
    for (; i + AT_ONCE * LANES <= dim; i += AT_ONCE * LANES)
        add_dims<T, H, AT_ONCE>(w, columns, values, tile, from, to, fetch, i);
    for (; i < dim; i += LANES) add_dims<T, H, 1>(w, columns, values, tile, from, to, fetch, i);
}

// Adds the sums of a later piece; the first is taken as it is. Never inlined: all callers have the same instructions,
// and so the same roundings.
__attribute__((noinline)) inline void add_piece(ColumnSums& whole, const ColumnSums& piece, int64_t dim) {
    if (piece.top == -INFINITY) return;
    if (whole.top == -INFINITY) {
        whole.top = piece.top, whole.total = piece.total;
        std::memcpy(whole.out, piece.out, dim * sizeof(float));
        return;
    }
    const float top = whole.top > piece.top ? whole.top : piece.top;
    const float before = exp(whole.top - top), after = exp(piece.top - top);
    whole.total = whole.total * before + piece.total * after;
    whole.top = top;
    for (int64_t i = 0; i < dim; i += LANES)
        store_lanes(whole.out + i, load_lanes(whole.out + i) * before + load_lanes(piece.out + i) * after);
}

}  // namespace specserve
