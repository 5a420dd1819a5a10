// Attention over a paged KV cache, one (row, KV head) at a time, with the online softmax (Milakov and Gimelshein 2018).
//
// Keys are taken in tiles of 64 counted from position 0, whatever the cache's block size: the order of every sum is
// fixed by the row's own position, so a row's bits do not depend on the batch, the chunk, the layout or the block size.
#include "attention.h"
#include "pool.h"

namespace specserve {

// Row j of the result is the sum of v[j]'s 16 lanes: four rounds of pairwise sums, the same tree for every j.
inline vfloat sum_each(const vfloat* v) {
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
}

// Running state of H query heads that share one KV head.
template <int H>
struct State {
    vfloat q[H][MAX_VECTORS];
    vfloat out[H][MAX_VECTORS];
    float p[H][TILE];
    float top[H], total[H];
};

// Scores of keys [from, to) of one tile into s.p; others are -inf.
template <typename T, int H, int V>
inline void scores(State<H>& s, const T* const* keys, const T* const* next, int64_t from, int64_t to,
                   int dim_vectors) {
    const int vectors = V ? V : dim_vectors;
    for (int64_t group = 0; group < TILE; group += W) {
        if (group + W <= from || group >= to) {
            for (int h = 0; h < H; h++) store(s.p[h] + group, splat(-INFINITY));
            continue;
        }
        vfloat dots[H][W];
        if (group < from || group + W > to) std::memset(dots, 0, sizeof dots);
        for (int64_t j = group < from ? from - group : 0; j < W && group + j < to; j++) {
            const T* k = keys[group + j];
            prefetch(next[group + j], vectors);
            vfloat dot[H] = {};
            for (int i = 0; i < vectors; i++) {
                vfloat x = load(k + i * W);
                for (int h = 0; h < H; h++) dot[h] += s.q[h][i] * x;
            }
            for (int h = 0; h < H; h++) dots[h][j] = dot[h];
        }
        for (int h = 0; h < H; h++) {
            vfloat x = sum_each(dots[h]);
            vint key = vint{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)group;
            vint seen = (key >= (int32_t)from) & (key < (int32_t)to);
            store(s.p[h] + group, seen ? x : splat(-INFINITY));
        }
    }
}

// One tile's part of the online softmax: rescale what was summed so far, turn scores into weights.
template <int H>
inline void rescale(State<H>& s, int vectors) {
    for (int h = 0; h < H; h++) {
        vfloat x[4];
        for (int i = 0; i < 4; i++) x[i] = load(s.p[h] + i * W);
        float top = max(max(max(x[0], x[1]), max(x[2], x[3])));
        top = s.top[h] > top ? s.top[h] : top;
        float keep = exp(splat(s.top[h] - top))[0];
        vfloat total = {};
        for (int i = 0; i < 4; i++) {
            x[i] = exp(x[i] - top);
            store(s.p[h] + i * W, x[i]);
            total += x[i];
        }
        s.total[h] = s.total[h] * keep + sum(total);
        s.top[h] = top;
        for (int i = 0; i < vectors; i++) s.out[h][i] *= keep;
    }
}

// out += weights * V, N vectors of the head at a time so that the sums stay in registers.
template <typename T, int H, int N>
inline void add_values(State<H>& s, const T* const* values, const T* const* next, int64_t from, int64_t to,
                       int first) {
    vfloat out[H][N];
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) out[h][i] = s.out[h][first + i];
    for (int64_t j = from; j < to; j++) {
        const T* v = values[j] + first * W;
        prefetch(next[j] + first * W, N);
        vfloat x[N];
        for (int i = 0; i < N; i++) x[i] = load(v + i * W);
        for (int h = 0; h < H; h++)
            for (int i = 0; i < N; i++) out[h][i] += s.p[h][j] * x[i];
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) s.out[h][first + i] = out[h][i];
}

template <typename T, int H, int V>
void attend(const T* q, const T* key_cache, const T* value_cache, T* out, int64_t row, int64_t kv_head, int64_t head,
            const AttentionArgs& a) {
    const int vectors = V ? V : (int)(a.dim / W);
    State<H> s;
    for (int h = 0; h < H; h++) {
        s.top[h] = -INFINITY, s.total[h] = 0.0f;
        for (int i = 0; i < vectors; i++) {
            s.q[h][i] = load(q + row * a.q_stride + (head + h) * a.dim + i * W) * a.scale;
            s.out[h][i] = vfloat{};
        }
    }
    const int32_t* table = a.tables + a.row_sequence[row] * a.table_stride;
    int64_t end = a.positions[row] + 1, begin = a.window && end > a.window ? end - a.window : 0;
    Tile<T> tiles[2];  // this one and the next, which is fetched while this one is computed
    auto find = [&](int64_t tile) {
        int64_t from = begin > tile ? begin - tile : 0, to = end - tile < TILE ? end - tile : TILE;
        tiles[tile / TILE % 2].find(key_cache, value_cache, table, tile, from, to, kv_head, a);
    };
    int64_t first = begin / TILE * TILE;
    find(first);
    for (int64_t tile = first; tile < end; tile += TILE) {
        int64_t from = begin > tile ? begin - tile : 0, to = end - tile < TILE ? end - tile : TILE;
        if (tile + TILE < end) find(tile + TILE);
        const Tile<T>&here = tiles[tile / TILE % 2], &next = tiles[(tile / TILE + (tile + TILE < end)) % 2];
        scores<T, H, V>(s, here.keys, next.keys, from, to, vectors);
        rescale<H>(s, vectors);
        int i = 0;
        for (; i + 4 <= vectors; i += 4) add_values<T, H, 4>(s, here.values, next.values, from, to, i);
        for (; i < vectors; i++) add_values<T, H, 1>(s, here.values, next.values, from, to, i);
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < vectors; i++)
            store(out + (row * a.q_heads + head + h) * a.dim + i * W, s.out[h][i] / s.total[h]);
}

// The heads of one KV head, at most four together: K and V are read once for all of them.
template <typename T, int V>
void attend_group(const T* q, const T* k, const T* v, T* out, int64_t row, int64_t kv_head, const AttentionArgs& a) {
    int64_t group = a.q_heads / a.kv_heads, head = kv_head * group;
    while (group > 0) {
        int64_t n = group > 4 ? 4 : group;
        if (n == 4)
            attend<T, 4, V>(q, k, v, out, row, kv_head, head, a);
        else if (n == 3)
            attend<T, 3, V>(q, k, v, out, row, kv_head, head, a);
        else if (n == 2)
            attend<T, 2, V>(q, k, v, out, row, kv_head, head, a);
        else
            attend<T, 1, V>(q, k, v, out, row, kv_head, head, a);
        head += n, group -= n;
    }
}

template <typename T>
void attention(const T* q, const T* k, const T* v, T* out, const AttentionArgs& a) {
    int64_t tasks = a.rows * a.kv_heads;
    parallel_for(tasks, 1, a.threads, [&](int64_t task) {
        int64_t row = task / a.kv_heads, kv_head = task % a.kv_heads;  // neighbours in memory follow each other
        if (a.dim == 64)
            attend_group<T, 4>(q, k, v, out, row, kv_head, a);
        else if (a.dim == 128)
            attend_group<T, 8>(q, k, v, out, row, kv_head, a);
        else
            attend_group<T, 0>(q, k, v, out, row, kv_head, a);
    });
}

void attention_bf16(const bf16* q, const bf16* k, const bf16* v, bf16* out, const AttentionArgs& a) {
    if (attention_on_tiles(q, k, v, out, a)) return;
    attention(q, k, v, out, a);
}

}  // namespace specserve

using namespace specserve;

extern "C" {
#define ATTENTION(NAME, T, RUN)                                                                                      \
    void NAME(const T* q, const T* key_cache, const T* value_cache, T* out, const int32_t* tables,                   \
              const int32_t* row_sequence, const int64_t* positions, int64_t rows, int64_t q_stride,                 \
              int64_t table_stride, int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t block_size, float scale, \
              int64_t window, int threads) {                                                                         \
        RUN(q, key_cache, value_cache, out,                                                                          \
            AttentionArgs{rows, q_heads, kv_heads, dim, block_size, q_stride, table_stride, tables, row_sequence,    \
                          positions, scale, window, threads});                                                       \
    }
ATTENTION(ss_attention_f32, float, attention)
ATTENTION(ss_attention_bf16, bf16, attention_bf16)
}
