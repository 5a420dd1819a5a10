// Attention over a paged KV cache, one (row, KV head) at a time, with the online softmax (Milakov and Gimelshein 2018);
// what any machine can do. Queries are float32 or bfloat16, keys and values the same or int8.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace specserve {

namespace {

// Row j of the result is the sum of v[j]'s 16 lanes: four rounds of pairwise sums, the same tree for every j.
inline vfloat sum_each(const vfloat* v) {
#if !defined(__AVX512F__)
    // Wider shuffles than the machine's would be made of scalars; the sums of one instruction set need only agree.
    float sums[W];
    for (int64_t i = 0; i < W; i++) sums[i] = sum(v[i]);
    return load(sums);
#else
    vfloat a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) {
        vfloat x = v[i], y = v[i + 8];
        a[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int i = 0; i < 4; i++) {
        vfloat x = a[i], y = a[i + 4];
        b[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        vfloat x = b[i], y = b[i + 2];
        c[i] = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    vfloat x = c[0], y = c[1];
    return __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#endif
}

// What the softmax has summed up of some keys for one query head.
struct Sums {
    vfloat out[MAX_VECTORS];
    float top, total;

    void clear(int vectors) {
        top = -INFINITY, total = 0.0f;
        for (int i = 0; i < vectors; i++) out[i] = vfloat{};
    }
};

// Running state of H query heads that share one KV head.
template <int H>
struct State {
    vfloat q[H][MAX_VECTORS];
    Sums sums[H];
    float p[H][TILE];
    float factors[TILE], shares[TILE];  // of int8: what scores and weights are multiplied by
};

// Where one tile's keys and values of one KV head are.
template <typename T>
struct Place {
    Tile tile;
    const T *keys, *values;  // of the first token of the cache
    int64_t from, to;

    void find(const Row& row, int64_t at, const AttentionArgs& a) {
        from = row.begin > at ? row.begin - at : 0, to = row.end - at < TILE ? row.end - at : TILE;
        tile.find<T>(row, at, from, to, a);
    }
};

// Lines of `vectors` vectors from p.
template <typename T>
inline void prefetch(const T* p, int vectors) {
    for (int i = 0; i < vectors; i += 64 / (int)(W * sizeof(T))) __builtin_prefetch(p + i * W);
}

// Scores of the keys of one tile into s.p; -inf for those that are not seen.
template <typename T, int H, int V>
inline void scores(State<H>& s, const Place<T>& here, const Place<T>& next, int dim_vectors) {
    const int vectors = V ? V : dim_vectors;
    const int64_t from = here.from, to = here.to;
    for (int64_t group = 0; group < TILE; group += W) {
        if (group + W <= from || group >= to) {
            for (int h = 0; h < H; h++) store(s.p[h] + group, splat(-INFINITY));
            continue;
        }
        vfloat dots[H][W];
        if (group < from || group + W > to) std::memset(dots, 0, sizeof dots);
        for (int64_t j = group < from ? from - group : 0; j < W && group + j < to; j++) {
            const T* k = here.keys + here.tile.at[group + j];
            prefetch(next.keys + next.tile.at[group + j], vectors);
            vfloat dot[H] = {};
            for (int i = 0; i < vectors; i++) {
                vfloat x = load(k + i * W);
                for (int h = 0; h < H; h++) dot[h] += s.q[h][i] * x;
            }
            for (int h = 0; h < H; h++) dots[h][j] = dot[h];
        }
        for (int h = 0; h < H; h++) {
            vfloat x = sum_each(dots[h]);
            if (sizeof(T) == 1) x *= load(s.factors + group);
            vint key = vint{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)group;
            vint seen = within(key, (int32_t)from, (int32_t)to);
            store(s.p[h] + group, select(seen, x, splat(-INFINITY)));
        }
    }
}

// One tile's part of the online softmax: rescale what was summed so far, turn scores into weights.
template <typename T, int H>
inline void rescale(State<H>& s, int vectors) {
    for (int h = 0; h < H; h++) {
        Sums& sums = s.sums[h];
        vfloat x[4];
        for (int i = 0; i < 4; i++) x[i] = load(s.p[h] + i * W);
        float top = max(max(max(x[0], x[1]), max(x[2], x[3])));
        top = sums.top > top ? sums.top : top;
        float keep = exp(splat(sums.top - top))[0];
        vfloat total = {};
        for (int i = 0; i < 4; i++) {
            x[i] = exp(x[i] - top);
            store(s.p[h] + i * W, sizeof(T) == 1 ? x[i] * load(s.shares + i * W) : x[i]);
            total += x[i];
        }
        sums.total = sums.total * keep + sum(total);
        sums.top = top;
        for (int i = 0; i < vectors; i++) sums.out[i] *= keep;
    }
}

// out += weights * V, N vectors of the head at a time so that the sums stay in registers.
template <typename T, int H, int N>
inline void add_values(State<H>& s, const Place<T>& here, const Place<T>& next, int first) {
    vfloat out[H][N];
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) out[h][i] = s.sums[h].out[first + i];
    for (int64_t j = here.from; j < here.to; j++) {
        const T* v = here.values + here.tile.at[j] + first * W;
        prefetch(next.values + next.tile.at[j] + first * W, N);
        vfloat x[N];
        for (int i = 0; i < N; i++) x[i] = load(v + i * W);
        for (int h = 0; h < H; h++)
            for (int i = 0; i < N; i++) out[h][i] += s.p[h][j] * x[i];
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) s.sums[h].out[first + i] = out[h][i];
}

inline void find_scales(float*, float*, const Place<float>&) {}
inline void find_scales(float*, float*, const Place<bf16>&) {}

inline void find_scales(float* factors, float* shares, const Place<int8_t>& p) {
    for (int64_t j = 0; j < TILE; j++) {
        factors[j] = shares[j] = 0.0f;
        if (j < p.from || j >= p.to) continue;
        std::memcpy(factors + j, p.keys + p.tile.scale_at[j], sizeof(float));
        std::memcpy(shares + j, p.values + p.tile.scale_at[j], sizeof(float));
    }
}

// Adds the sums of a later piece; the first is taken as it is. Never inlined: all callers have the same instructions, and so the same roundings.
__attribute__((noinline)) void add_piece(Sums& whole, const Sums& piece, int vectors) {
    if (piece.top == -INFINITY) return;
    if (whole.top == -INFINITY) {
        whole = piece;
        return;
    }
    float top = whole.top > piece.top ? whole.top : piece.top;
    vfloat before = exp(splat(whole.top - top)), after = exp(splat(piece.top - top));
    whole.total = whole.total * before[0] + piece.total * after[0];
    whole.top = top;
    for (int i = 0; i < vectors; i++) whole.out[i] = whole.out[i] * before + piece.out[i] * after;
}

template <typename Q>
inline void write(const Sums& whole, Q* out, int vectors) {
    for (int i = 0; i < vectors; i++) store(out + i * W, whole.out[i] / whole.total);
}

// One call's arguments.
template <typename Q, typename T>
struct Call {
    const Q* q;
    const T *keys, *values;
    Q* out;
    const AttentionArgs& a;
    Sums* sums;      // [rows, q_heads, pieces] where pieces are computed apart, else null
    int64_t pieces;  // of the longest row
};

// The sums of one piece into s.sums.
template <typename T, int H, int V>
void attend_piece(State<H>& s, const T* keys, const T* values, const Row& row, int64_t piece, int dim_vectors,
                  const AttentionArgs& a) {
    const int vectors = V ? V : dim_vectors;
    for (int h = 0; h < H; h++) s.sums[h].clear(vectors);
    int64_t at = piece * PIECE, end = row.end - at < PIECE ? row.end : at + PIECE;
    if (at < row.begin / TILE * TILE) at = row.begin / TILE * TILE;
    Place<T> places[2] = {{{}, keys, values, 0, 0}, {{}, keys, values, 0, 0}};
    Place<T>*here = places, *next = places + 1;  // `next` is fetched while `here` is computed
    if (at < end) here->find(row, at, a);
    for (; at < end; at += TILE) {
        if (at + TILE < end) next->find(row, at + TILE, a);
        const Place<T>& fetched = at + TILE < end ? *next : *here;
        find_scales(s.factors, s.shares, *here);
        scores<T, H, V>(s, *here, fetched, vectors);
        rescale<T, H>(s, vectors);
        int i = 0;
        for (; i + 4 <= vectors; i += 4) add_values<T, H, 4>(s, *here, fetched, i);
        for (; i < vectors; i++) add_values<T, H, 1>(s, *here, fetched, i);
        std::swap(here, next);
    }
}

// H query heads of one row from `head` on: one piece, or all of them where `piece` is -1.
template <typename Q, typename T, int H, int V>
void attend(const Call<Q, T>& c, int64_t row, int64_t kv_head, int64_t head, int64_t piece) {
    const AttentionArgs& a = c.a;
    const int vectors = V ? V : (int)(a.dim / W);
    State<H> s;
    for (int h = 0; h < H; h++)
        for (int i = 0; i < vectors; i++)
            s.q[h][i] = load(c.q + row * a.q_stride + (head + h) * a.dim + i * W) * a.scale;
    const Row seen = row_of(row, a);
    const int64_t offset = kv_head * head_elements<T>(a.cache());
    const T *keys = c.keys + offset, *values = c.values + offset;
    if (piece >= 0) {
        if (piece * PIECE >= seen.end || (piece + 1) * PIECE <= seen.begin) return;
        attend_piece<T, H, V>(s, keys, values, seen, piece, vectors, a);
        for (int h = 0; h < H; h++) c.sums[(row * a.q_heads + head + h) * c.pieces + piece] = s.sums[h];
        return;
    }
    Sums whole[H];
    for (int h = 0; h < H; h++) whole[h].clear(vectors);
    for (piece = seen.begin / PIECE; piece * PIECE < seen.end; piece++) {
        attend_piece<T, H, V>(s, keys, values, seen, piece, vectors, a);
        for (int h = 0; h < H; h++) add_piece(whole[h], s.sums[h], vectors);
    }
    for (int h = 0; h < H; h++) write(whole[h], c.out + (row * a.q_heads + head + h) * a.dim, vectors);
}

// The heads of one KV head, at most four together: K and V are read once for all of them.
template <typename Q, typename T, int V>
void attend_group(const Call<Q, T>& c, int64_t row, int64_t kv_head, int64_t piece) {
    int64_t group = c.a.q_heads / c.a.kv_heads, head = kv_head * group;
    while (group > 0) {
        int64_t n = group > 4 ? 4 : group;
        if (n == 4)
            attend<Q, T, 4, V>(c, row, kv_head, head, piece);
        else if (n == 3)
            attend<Q, T, 3, V>(c, row, kv_head, head, piece);
        else if (n == 2)
            attend<Q, T, 2, V>(c, row, kv_head, head, piece);
        else
            attend<Q, T, 1, V>(c, row, kv_head, head, piece);
        head += n, group -= n;
    }
}

// Adds up pieces that were computed apart.
template <typename Q, typename T>
void join_pieces(const Call<Q, T>& c) {
    const int vectors = (int)(c.a.dim / W);
    for (int64_t row = 0; row < c.a.rows; row++) {
        const Row seen = row_of(row, c.a);
        for (int64_t head = row * c.a.q_heads; head < (row + 1) * c.a.q_heads; head++) {
            Sums whole;
            whole.clear(vectors);
            for (int64_t piece = seen.begin / PIECE; piece * PIECE < seen.end; piece++)
                add_piece(whole, c.sums[head * c.pieces + piece], vectors);
            write(whole, c.out + head * c.a.dim, vectors);
        }
    }
}

template <typename Q, typename T>
void attention(const Q* q, const T* keys, const T* values, Q* out, const AttentionArgs& a) {
    static thread_local std::vector<Sums> kept;
    Call<Q, T> c{q, keys, values, out, a, nullptr, 1};
    const int64_t heads = a.rows * a.kv_heads;
    const bool apart = a.threads > 1 && heads < 4 * a.threads;
    if (apart) {
        for (int64_t row = 0; row < a.rows; row++) c.pieces = std::max(c.pieces, a.positions[row] / PIECE + 1);
        const size_t sums = a.rows * a.q_heads * c.pieces;
        if (kept.size() < sums) kept.resize(sums);
        c.sums = kept.data();
    }
    parallel_for(heads * c.pieces, 1, a.threads, [&](int64_t i) {
        // Neighbours in memory follow each other.
        int64_t row = i / c.pieces / a.kv_heads, kv_head = i / c.pieces % a.kv_heads, piece = apart ? i % c.pieces : -1;
        if (a.dim == 64)
            attend_group<Q, T, 4>(c, row, kv_head, piece);
        else if (a.dim == 128)
            attend_group<Q, T, 8>(c, row, kv_head, piece);
        else
            attend_group<Q, T, 0>(c, row, kv_head, piece);
    });
    if (apart) join_pieces(c);
}

}  // namespace

void attention_f32(const float* q, const float* keys, const float* values, float* out, const AttentionArgs& a) {
    attention(q, keys, values, out, a);
}

void attention_f32_int8(const float* q, const int8_t* keys, const int8_t* values, float* out, const AttentionArgs& a) {
    attention(q, keys, values, out, a);
}

void attention_bf16(const bf16* q, const bf16* keys, const bf16* values, bf16* out, const AttentionArgs& a) {
    if (!attention_on_tiles(q, keys, values, out, a)) attention(q, keys, values, out, a);
}

void attention_bf16_int8(const bf16* q, const int8_t* keys, const int8_t* values, bf16* out, const AttentionArgs& a) {
    if (!attention_on_tiles(q, keys, values, out, a)) attention(q, keys, values, out, a);
}

}  // namespace specserve

using namespace specserve;

extern "C" {
#define ATTENTION(NAME, Q, T)                                                                                         \
    void ss_##NAME(const Q* q, const T* keys, const T* values, Q* out, const int32_t* tables,                         \
                   const int32_t* row_sequence, const int64_t* positions, const int32_t* context,                     \
                   const uint64_t* masks, int64_t rows, int64_t q_stride, int64_t table_stride, int64_t q_heads,      \
                   int64_t kv_heads, int64_t dim, int64_t block_size, int64_t mask_words, float scale,                \
                   int64_t window, int threads) {                                                                     \
        NAME(q, keys, values, out,                                                                                    \
             AttentionArgs{rows, q_heads, kv_heads, dim, block_size, q_stride, table_stride, tables, row_sequence,    \
                           positions, scale, window, threads, context, masks, mask_words});                           \
    }
ATTENTION(attention_f32, float, float)
ATTENTION(attention_bf16, bf16, bf16)
ATTENTION(attention_f32_int8, float, int8_t)
ATTENTION(attention_bf16_int8, bf16, int8_t)
}
