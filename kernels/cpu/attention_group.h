// 16 columns of attention on AMX tiles: scores, the online softmax and the weighted sum of values.
//
// A column is one query head of one row; a group's columns are of one sequence and one KV head. Scores of 16 keys by 16
// columns are one tile, so that the softmax runs over columns side by side, each in an order of its own: keys in tiles
// of 64, sums within them in one fixed order. A column's bits depend on nothing beside it. Weights are rounded to
// bfloat16 before they meet the values, as in every attention on such units; sums are float32.
#pragma once
#include "attention.h"
#include "exp.h"
#include "tiles.h"
#include "transpose.h"

#ifdef __AMX_BF16__

namespace specserve {

constexpr int64_t COLUMNS = 16, STEP = 32;  // of one tile; of dims or keys that one product takes
constexpr int64_t PAIRS = 16;               // of 16-bit numbers in one row of a tile
constexpr int64_t FEW = 4;

typedef uint32_t Pairs[PAIRS][COLUMNS];

// What the softmax has summed up of some keys.
struct alignas(64) Sums {
    vfloat top, total;
    float out[COLUMNS * MAX_DIM];  // [column][dim]

    void clear(int64_t dim) {
        top = splat(-INFINITY), total = vfloat{};
        std::memset(out, 0, COLUMNS * dim * sizeof(float));
    }

    void copy(const Sums& other, int64_t numbers) {
        top = other.top, total = other.total;
        std::memcpy(out, other.out, numbers * sizeof(float));
    }
};

struct alignas(64) Group {
    Pairs q[MAX_DIM / STEP];    // [dim pair][column]: the right side of K Q^T
    Sums sums[2];               // of the piece at hand, and of those before it
    int at_hand = 0, seen = 0;  // which of them; whether there are any before it
    vint begin, end;          // keys that each column sees
    int64_t inner_begin, inner_end, last;  // all columns see the keys between the first two, none those from `last` on
    int64_t row, rows, kv_head, head, heads, columns;
    float unit;  // of scores: see `weight`

    Sums& piece() { return sums[at_hand]; }
    Sums& whole() { return sums[1 - at_hand]; }
};

// What one tile needs besides: reused by all groups.
struct alignas(64) Work {
    float scores[2][TILE][COLUMNS];              // of two groups: one's products are under way beside the other's softmax
    Pairs weights[TILE / STEP];                  // [column][key pair]: the left side of P V
    Pairs values[TILE / STEP * (MAX_DIM / 16)];  // [step][16 dims][key pair][dim]: the right side of P V
    bf16 keys[TILE * MAX_DIM];                   // where the cache has no 16 keys in a row, or int8
    float factors[TILE], shares[TILE];           // of int8: what scores and weights are multiplied by
};

// The keys of one tile and one KV head: 16 follow each other at each of `keys`, in bfloat16.
struct Keys {
    const bf16* keys[TILE / 16];
    int64_t tile, to;
    bool scaled;
};

// e^(score - best) of scaled scores: `unit` is the scale, in powers of two, and `from` the best one in units.
inline vfloat weight(vfloat score, vfloat unit, vfloat from) { return exp2(fma(score, unit, -from)); }

// The same of an earlier best one; exactly 1 where it still is.
inline vfloat weight_of(vfloat top, vfloat best, vfloat unit, vfloat from) {
    return top == best ? splat(1.0f) : weight(top, unit, from);
}

// The product is rounded before anything is added to it: no compiler's choice, so that all paths agree.
inline vfloat product(vfloat x, float y) {
    vfloat z = x * y;
    asm("" : "+v"(z));
    return z;
}

inline vfloat product(vfloat x, vfloat y) {
    vfloat z = x * y;
    asm("" : "+v"(z));
    return z;
}

// `heads` query heads from `head` on, of `rows` rows from `row` on.
inline void begin_group(Group& g, const bf16* q, int64_t row, int64_t rows, int64_t kv_head, int64_t head,
                        int64_t heads, const AttentionArgs& a) {
    g.row = row, g.rows = rows, g.kv_head = kv_head, g.head = head, g.heads = heads, g.columns = rows * heads;
    g.at_hand = g.seen = 0;
    g.begin = vint{}, g.end = vint{} + INT32_MAX;  // of columns that are none
    g.inner_begin = 0, g.inner_end = INT64_MAX, g.last = 0;
    const bf16* from[COLUMNS] = {};
    for (int64_t r = 0; r < rows; r++) {
        Row one = row_of(row + r, a);
        g.last = one.end > g.last ? one.end : g.last;
        g.inner_end = one.end < g.inner_end ? one.end : g.inner_end;
        g.inner_begin = one.begin > g.inner_begin ? one.begin : g.inner_begin;
        for (int64_t h = 0; h < heads; h++) {
            int64_t column = r * heads + h;
            g.begin[column] = (int32_t)one.begin, g.end[column] = (int32_t)one.end;
            from[column] = q + (row + r) * a.q_stride + (head + h) * a.dim;
        }
    }
    for (int64_t step = 0; step < a.dim / STEP; step++) {
        vuint pairs[COLUMNS] = {};
        for (int64_t column = 0; column < g.columns; column++)
            std::memcpy(&pairs[column], from[column] + step * STEP, sizeof(vuint));
        transpose(pairs);
        std::memcpy(g.q[step], pairs, sizeof pairs);
    }
}

// K Q^T, 16 keys a product. Keys behind the sixteen that hold the last one are read as the first: they are masked, and
// memory ends somewhere.
inline void score(float (*scores)[COLUMNS], const Group& g, const Keys& k, Fetch& fetch, int64_t dim) {
    const int64_t stride = dim * sizeof(bf16);
    const bf16* from[TILE / 16];
    for (int64_t i = 0; i < TILE / 16; i++) from[i] = k.keys[i * 16 < k.to ? i : 0];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < dim; i += STEP) {
        _tile_loadd(4, g.q[i / STEP], 64);
        _tile_loadd(5, from[0] + i, stride);
        _tile_loadd(6, from[1] + i, stride);
        fetch.steps(8);
        _tile_dpbf16ps(0, 5, 4);
        _tile_dpbf16ps(1, 6, 4);
        if (k.to <= STEP) continue;
        fetch.steps(8);
        _tile_loadd(7, from[2] + i, stride);
        _tile_loadd(5, from[3] + i, stride);
        fetch.steps(8);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 5, 4);
        fetch.steps(8);
    }
    _tile_stored(0, scores[0], 64);
    _tile_stored(1, scores[16], 64);
    if (k.to <= STEP) return;
    _tile_stored(2, scores[32], 64);
    _tile_stored(3, scores[48], 64);
}

// A sum of 16 in the order of `sum`.
inline vfloat sum_of(const vfloat* v) {
    vfloat a[8], b[4];
    for (int i = 0; i < 8; i++) a[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; i++) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// What scores are taken from; a column that has seen nothing yet has no best one.
inline vfloat subtrahend(vfloat best, vfloat unit) { return best == splat(-INFINITY) ? vfloat{} : best * unit; }

// What weights are relative to: the best score so far, or one before it that is less than 2^8 times as probable, as then
// nothing that was summed up needs another scale.
inline vfloat reference(vfloat before, vfloat best, vfloat unit) {
    const vint near = (best - before) * unit <= splat(8.0f);
    return near ? before : best;
}

// 16 columns of two keys in bfloat16, as pairs.
inline vuint pairs_of(vfloat x, vfloat y) {
    typedef short shorts __attribute__((vector_size(64)));
    static const shorts order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (vuint)_mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
}

// The online softmax of one tile, weights [column][key]. EDGE: some column does not see all of it. Returns what earlier
// sums are multiplied by.
template <bool EDGE, bool SCALED>
vfloat weigh(Work& w, const float (*scores)[COLUMNS], Group& g, const Keys& k, Fetch& fetch) {
    auto score = [&](int64_t j) {
        vfloat x = load(scores[j]);
        if (SCALED) x = product(x, w.factors[j]);
        if (!EDGE) return x;
        vint key = vint{} + (int32_t)(k.tile + j);
        return (key >= g.begin) & (key < g.end) ? x : splat(-INFINITY);
    };
    auto share = [&](vfloat x, int64_t j) { return SCALED ? product(x, w.shares[j]) : x; };
    const vfloat unit = splat(g.unit);
    Sums& s = g.piece();
    vfloat top[4] = {s.top, s.top, s.top, s.top}, total[16];
    for (int64_t j = 0; j < TILE; j += 4)
        for (int64_t i = 0; i < 4; i++) top[i] = max(top[i], score(j + i));
    const vfloat best = reference(s.top, max(max(top[0], top[1]), max(top[2], top[3])), unit), from = subtrahend(best, unit);
    const vfloat keep = weight_of(s.top, best, unit, from);
    vuint pairs[TILE / STEP][PAIRS];
    for (int64_t i = 0; i < 16; i += 2) {
        vfloat x = {}, y = {};
#pragma GCC unroll 4
        for (int64_t j = i; j < TILE; j += 16) {
            const vfloat a = weight(score(j), unit, from), b = weight(score(j + 1), unit, from);
            x += a, y += b;
            pairs[j / STEP][j % STEP / 2] = pairs_of(share(a, j), share(b, j + 1));
            fetch.steps(2);
        }
        total[i] = x, total[i + 1] = y;
    }
    for (int64_t step = 0; step < TILE / STEP; step++) {
        transpose(pairs[step]);
        for (int64_t column = 0; column < COLUMNS; column++) store(w.weights[step][column], pairs[step][column]);
    }
    s.total = s.total * keep + sum_of(total);
    s.top = best;
    return keep;
}

// Columns 0..3 of scores 16 by 16: each becomes a vector over keys.
inline void columns(const float (*scores)[COLUMNS], vfloat* x) {
    vfloat r[4];
    for (int i = 0; i < 4; i++) {
        __m512 v = _mm512_castps128_ps512(_mm_load_ps(scores[i]));
        v = _mm512_insertf32x4(v, _mm_load_ps(scores[4 + i]), 1);
        v = _mm512_insertf32x4(v, _mm_load_ps(scores[8 + i]), 2);
        r[i] = (vfloat)_mm512_insertf32x4(v, _mm_load_ps(scores[12 + i]), 3);
    }
    __m512 a = _mm512_unpacklo_ps((__m512)r[0], (__m512)r[1]), b = _mm512_unpacklo_ps((__m512)r[2], (__m512)r[3]);
    __m512 c = _mm512_unpackhi_ps((__m512)r[0], (__m512)r[1]), d = _mm512_unpackhi_ps((__m512)r[2], (__m512)r[3]);
    x[0] = (vfloat)_mm512_shuffle_ps(a, b, 0x44), x[1] = (vfloat)_mm512_shuffle_ps(a, b, 0xee);
    x[2] = (vfloat)_mm512_shuffle_ps(c, d, 0x44), x[3] = (vfloat)_mm512_shuffle_ps(c, d, 0xee);
}

// The same for at most four columns, over 16 keys at a time: the same sums in the same order.
template <bool EDGE, bool SCALED>
vfloat weigh_few(Work& w, const float (*scores)[COLUMNS], Group& g, const Keys& k, Fetch& fetch) {
    vfloat x[TILE / 16][FEW];
    const vfloat unit = splat(g.unit);
    Sums& s = g.piece();
    vfloat best = s.top, total = {};
    for (int64_t i = 0; i < TILE / 16; i++) {
        columns(scores + 16 * i, x[i]);
        for (int c = 0; c < FEW; c++) {
            if (SCALED) x[i][c] = product(x[i][c], load(w.factors + 16 * i));
            if (EDGE) {
                vint key = vint{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)(k.tile + 16 * i);
                x[i][c] = (key >= g.begin[c]) & (key < g.end[c]) ? x[i][c] : splat(-INFINITY);
            }
            fetch.steps(2);
        }
    }
    for (int c = 0; c < FEW; c++) {
        float top = max(max(max(x[0][c], x[1][c]), max(x[2][c], x[3][c])));
        best[c] = top > best[c] ? top : best[c];
    }
    best = reference(s.top, best, unit);
    vfloat from = subtrahend(best, unit), keep = weight_of(s.top, best, unit, from);
    for (int c = 0; c < FEW; c++) {
        vfloat sums = {};
        for (int64_t i = 0; i < TILE / 16; i++) {
            vfloat y = weight(x[i][c], unit, splat(from[c]));
            sums += y;
            if (SCALED) y = product(y, load(w.shares + 16 * i));
            _mm256_storeu_si256((__m256i*)(w.weights[i / 2][c] + i % 2 * 8), (__m256i)_mm512_cvtneps_pbh((__m512)y));
            fetch.steps(2);
        }
        total[c] = sum(sums);
    }
    s.total = s.total * keep + total;
    s.top = best;
    return keep;
}

// The softmax of one tile. Returns what earlier sums are multiplied by.
inline vfloat weigh_tile(Work& w, const float (*scores)[COLUMNS], Group& g, const Keys& k, Fetch& fetch) {
    const bool edge = k.tile < g.inner_begin || k.tile + TILE > g.inner_end;
    static constexpr decltype(&weigh<true, true>) ways[2][2][2] = {
        {{weigh<false, false>, weigh<false, true>}, {weigh<true, false>, weigh<true, true>}},
        {{weigh_few<false, false>, weigh_few<false, true>}, {weigh_few<true, false>, weigh_few<true, true>}}};
    return ways[g.columns <= FEW][edge][k.scaled](w, scores, g, k, fetch);
}

// Adds the sums of the piece at hand to those before. Of each column, the first that it saw something of is taken as it
// is, and one that it saw nothing of changes nothing, the sign of a zero included.
inline void add_piece(Group& g, int64_t dim) {
    Sums &whole = g.whole(), &piece = g.piece();
    if (!g.seen) {
        g.seen = 1, g.at_hand = 1 - g.at_hand;
        return;
    }
    const vfloat unit = splat(g.unit), top = max(whole.top, piece.top), from = subtrahend(top, unit);
    const vfloat before = weight_of(whole.top, top, unit, from), after = weight_of(piece.top, top, unit, from);
    vint first = whole.top == splat(-INFINITY), none = piece.top == splat(-INFINITY);
    vfloat total = product(whole.total, before) + product(piece.total, after);
    whole.total = none ? whole.total : first ? piece.total : total;
    whole.top = top;
    for (int64_t column = 0; column < g.columns; column++) {
        if (none[column]) continue;
        float *to = whole.out + column * dim, *more = piece.out + column * dim;
        if (first[column]) std::memcpy(to, more, dim * sizeof(float));
        for (int64_t i = 0; i < dim && !first[column]; i += W)
            store(to + i, product(load(to + i), before[column]) + product(load(more + i), after[column]));
    }
}

inline void end_group(Group& g, bf16* out, const AttentionArgs& a) {
    for (int64_t r = 0; r < g.rows; r++)
        for (int64_t h = 0; h < g.heads; h++) {
            int64_t column = r * g.heads + h;
            for (int64_t i = 0; i < a.dim; i += W)
                store(out + ((g.row + r) * a.q_heads + g.head + h) * a.dim + i,
                      load(g.whole().out + column * a.dim + i) / g.whole().total[column]);
        }
}

}  // namespace specserve

#endif
