// A KV head's part of attention for one row, up to four query heads together, in the widest registers that the machine
// has: scores, the online softmax and the weighted sum of values of one tile. K and V are read once for all of the heads.
#pragma once
#include "attention.h"
#include "exp.h"

namespace specserve {

constexpr int MOST_HEADS = 4;

// What the softmax has summed up of some keys for one query head.
struct HeadSums {
    float out[MAX_DIM];
    float top, total;

    void clear(int64_t dim) {
        top = -INFINITY, total = 0.0f;
        std::memset(out, 0, dim * sizeof(float));
    }
};

// Query heads [head, head + heads) of one row, which share a KV head.
struct alignas(64) Unit {
    float q[MOST_HEADS][MAX_DIM];
    HeadSums piece[MOST_HEADS], whole[MOST_HEADS];  // of the piece at hand, of those before it
    int64_t kv_head, head;
    int heads;
};

// What one tile needs besides: used by one unit after the other.
struct alignas(64) LaneWork {
    float p[MOST_HEADS][TILE];          // scores, then weights
    float factors[TILE], shares[TILE];  // of int8: what scores and weights are multiplied by
};

// Keys [from, to) of one tile of one row.
struct Place {
    Tile tile;
    int64_t from, to;

    template <typename T>
    void find(const Row& row, int64_t at, const AttentionArgs& a) {
        from = row.begin > at ? row.begin - at : 0, to = row.end - at < TILE ? row.end - at : TILE;
        tile.find<T>(row, at, from, to, a);
    }
};

// Lines of `numbers` numbers, as `Fetch` takes them.
template <typename T>
constexpr int lines(int64_t numbers) {
    return (int)(numbers * (int64_t)sizeof(T) + 127) / 128 * 2;
}

// Scores of the keys of one tile into w.p; -inf for those that are not seen. DIM is the heads' or 0.
template <typename T, int H, int DIM>
inline void find_scores(LaneWork& w, const Unit& u, const T* keys, const Place& here, Fetch& fetch, int64_t any_dim) {
    const int64_t dim = DIM ? DIM : any_dim, from = here.from, to = here.to;
    for (int64_t group = 0; group < TILE; group += LANES) {
        if (group + LANES <= from || group >= to) continue;
        lanes dots[H][LANES];
        if (group < from || group + LANES > to) std::memset(dots, 0, sizeof dots);
        for (int64_t j = group < from ? from - group : 0; j < LANES && group + j < to; j++) {
            const T* k = keys + here.tile.at[group + j];
            lanes dot[H] = {};
            for (int64_t i = 0; i < dim; i += LANES) {
                const lanes x = load_lanes(k + i);
                for (int h = 0; h < H; h++) dot[h] += load_lanes(u.q[h] + i) * x;
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
template <typename T>
inline void weigh(LaneWork& w, Unit& u, int64_t dim) {
    for (int h = 0; h < u.heads; h++) {
        HeadSums& sums = u.piece[h];
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
inline void add_dims(const LaneWork& w, Unit& u, const T* values, const Place& here, Fetch& fetch, int64_t first) {
    lanes out[H][N];
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) out[h][i] = load_lanes(u.piece[h].out + first + i * LANES);
    for (int64_t j = here.from; j < here.to; j++) {
        const T* v = values + here.tile.at[j] + first;
        lanes x[N];
        for (int i = 0; i < N; i++) x[i] = load_lanes(v + i * LANES);
        for (int h = 0; h < H; h++)
            for (int i = 0; i < N; i++) out[h][i] += w.p[h][j] * x[i];
        fetch.steps(lines<T>(N * LANES));
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) store_lanes(u.piece[h].out + first + i * LANES, out[h][i]);
}

inline void find_scales(LaneWork&, const float*, const float*, const Place&) {}
inline void find_scales(LaneWork&, const bf16*, const bf16*, const Place&) {}

// keys, values: of the unit's KV head in the first block, as in all of these.
inline void find_scales(LaneWork& w, const int8_t* keys, const int8_t* values, const Place& p) {
    for (int64_t j = 0; j < TILE; j++) {
        w.factors[j] = w.shares[j] = 0.0f;
        if (j < p.from || j >= p.to) continue;
        std::memcpy(w.factors + j, keys + p.tile.scale_at[j], sizeof(float));
        std::memcpy(w.shares + j, values + p.tile.scale_at[j], sizeof(float));
    }
}

// One tile of one unit.
template <typename T, int H, int DIM>
void attend_tile(LaneWork& w, Unit& u, const T* keys, const T* values, const Place& here, Fetch& fetch, int64_t any_dim) {
    constexpr int AT_ONCE = LANES == 16 || H < 4 ? 4 : 2;  // registers of dims whose sums the machine has registers for
    const int64_t dim = DIM ? DIM : any_dim;
    find_scales(w, keys, values, here);
    find_scores<T, H, DIM>(w, u, keys, here, fetch, dim);
    weigh<T>(w, u, dim);
    int64_t i = 0;
    for (; i + AT_ONCE * LANES <= dim; i += AT_ONCE * LANES) add_dims<T, H, AT_ONCE>(w, u, values, here, fetch, i);
    for (; i < dim; i += LANES) add_dims<T, H, 1>(w, u, values, here, fetch, i);
}

// Adds the sums of a later piece; the first is taken as it is. Never inlined: all callers have the same instructions,
// and so the same roundings.
__attribute__((noinline)) inline void add_piece(HeadSums& whole, const HeadSums& piece, int64_t dim) {
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
