// Attention in bfloat16 on AMX tiles, with the online softmax (Milakov and Gimelshein 2018).
//
// A column is one query head of one row; 16 columns of one sequence and one KV head go together. Scores of 16 keys by 16
// columns are one tile, so that the softmax runs over columns side by side, each in an order of its own: keys in tiles
// of 64 from position 0, sums within them in one fixed order. A column's bits depend on nothing beside it. Weights are
// rounded to bfloat16 before they meet the values, as in every attention on such units; sums are float32.
#include "attention.h"
#include "pool.h"
#include "tiles.h"

namespace specserve {

#ifdef __AMX_BF16__

namespace {

constexpr int64_t COLUMNS = 16, STEP = 32;  // of one tile; of dims or keys that one product takes
constexpr int64_t PAIRS = 16;               // of 16-bit numbers in one row of a tile
constexpr int64_t MAX_DIM = 256;
constexpr int64_t MAX_GROUPS = 4;  // groups of 16 columns that share one reading of K and V

typedef uint32_t Pairs[PAIRS][COLUMNS];

// Running state of 16 columns.
struct alignas(64) Group {
    Pairs q[MAX_DIM / STEP];      // [dim pair][column]: the right side of K Q^T
    float scores[TILE][COLUMNS];  // then weights
    Pairs weights[TILE / STEP];   // [column][key pair]: the left side of P V
    float out[COLUMNS * MAX_DIM];
    vfloat top, total;
    vint begin, end;  // keys that each column sees
    int64_t row, rows, columns;
};

inline vuint rounded(vfloat v) {  // to bfloat16, ties to even, in the upper half; v is not NaN
    vuint u = (vuint)v;
    return u + 0x7fffu + ((u >> 16) & 1u);
}

inline vuint load_u16(const bf16* p) { return (vuint)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }

// Rows become columns, 16 by 16.
inline void transpose(vuint* m) {
    vuint t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = __builtin_shufflevector(m[i], m[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        t[i + 1] = __builtin_shufflevector(m[i], m[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = i; j < i + 2; j++) {
            m[j] = __builtin_shufflevector(t[j], t[j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            m[j + 2] =
                __builtin_shufflevector(t[j], t[j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = i; j < i + 4; j++) {
            t[j] = __builtin_shufflevector(m[j], m[j + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            t[j + 4] =
                __builtin_shufflevector(m[j], m[j + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int j = 0; j < 8; j++) {
        m[j] = __builtin_shufflevector(t[j], t[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        m[j + 8] = __builtin_shufflevector(t[j], t[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

// `heads` query heads from `head` on, of `rows` rows from `row` on.
void begin_group(Group& g, const bf16* q, int64_t row, int64_t rows, int64_t head, int64_t heads,
                 const AttentionArgs& a) {
    g.row = row, g.rows = rows, g.columns = rows * heads;
    g.top = splat(-INFINITY), g.total = vfloat{};
    g.begin = g.end = vint{};
    std::memset(g.out, 0, COLUMNS * a.dim * sizeof(float));
    std::memset(g.q, 0, sizeof(Pairs) * (a.dim / STEP));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t column = r * heads + h, end = a.positions[row + r] + 1;
            g.end[column] = (int32_t)end;
            g.begin[column] = a.window && end > a.window ? (int32_t)(end - a.window) : 0;
            const bf16* source = q + (row + r) * a.q_stride + (head + h) * a.dim;
            for (int64_t pair = 0; pair < a.dim / 2; pair++)
                std::memcpy(&g.q[pair / PAIRS][pair % PAIRS][column], source + 2 * pair, sizeof(uint32_t));
        }
}

// K Q^T for the keys [0, to) of one tile, 16 keys a product.
void score(Group& g, const Tile<bf16>& tile, int64_t to, int64_t key_bytes, const AttentionArgs& a) {
    // Keys behind the sixteen that hold the last one are read as the first: they are masked, and memory ends somewhere.
    auto keys = [&](int64_t first, int64_t i) { return tile.keys[first < to ? first : 0] + i * STEP; };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < a.dim / STEP; i++) {
        _tile_loadd(7, g.q[i], 64);
        _tile_loadd(4, keys(0, i), key_bytes);
        _tile_dpbf16ps(0, 4, 7);
        _tile_loadd(5, keys(16, i), key_bytes);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(6, keys(32, i), key_bytes);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(4, keys(48, i), key_bytes);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, g.scores[0], 64);
    _tile_stored(1, g.scores[16], 64);
    _tile_stored(2, g.scores[32], 64);
    _tile_stored(3, g.scores[48], 64);
}

// The product is rounded before anything is added to it: no compiler's choice, so that all paths agree.
inline vfloat product(vfloat x, float y) {
    vfloat z = x * y;
    asm("" : "+v"(z));
    return z;
}

// A sum of 16 in the order of `sum`.
inline vfloat sum_of(const vfloat* v) {
    vfloat a[8], b[4];
    for (int i = 0; i < 8; i++) a[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; i++) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// What scores are taken from; a column that has seen nothing yet has no best one.
inline vfloat subtrahend(vfloat best) { return best == splat(-INFINITY) ? vfloat{} : best; }

// The online softmax of one tile, weights [column][key]. EDGE: some column does not see all of it. The keys of the next
// tile are fetched meanwhile, `lines` vectors of each. Returns what earlier sums are multiplied by.
template <bool EDGE>
vfloat weigh(Group& g, int64_t tile, const Tile<bf16>& next, int lines, float scale) {
    auto scaled = [&](int64_t j) {
        vfloat x = product(load(g.scores[j]), scale);
        if (!EDGE) return x;
        vint key = vint{} + (int32_t)(tile + j);
        return (key >= g.begin) & (key < g.end) ? x : splat(-INFINITY);
    };
    vfloat top[4] = {g.top, g.top, g.top, g.top}, total[16] = {};
    for (int64_t j = 0; j < TILE; j += 4)
        for (int64_t i = 0; i < 4; i++) top[i] = max(top[i], scaled(j + i));
    vfloat best = max(max(top[0], top[1]), max(top[2], top[3])), from = subtrahend(best);
    vfloat keep = exp_to_88(g.top - from);
    for (int64_t step = 0; step < TILE / STEP; step++) {
        vuint pairs[PAIRS];
        for (int64_t i = 0; i < PAIRS; i++) {
            int64_t j = step * STEP + 2 * i;
            vfloat x = exp_to_88(scaled(j) - from), y = exp_to_88(scaled(j + 1) - from);
            total[j % 16] += x, total[(j + 1) % 16] += y;
            pairs[i] = (rounded(x) >> 16) | (rounded(y) & 0xffff0000u);
            prefetch(next.keys[j], lines);
            prefetch(next.keys[j + 1], lines);
        }
        transpose(pairs);
        for (int64_t column = 0; column < COLUMNS; column++) store(g.weights[step][column], pairs[column]);
    }
    g.total = g.total * keep + sum_of(total);
    g.top = best;
    return keep;
}

constexpr int64_t FEW = 4;

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
template <bool EDGE>
vfloat weigh_few(Group& g, int64_t tile, const Tile<bf16>& next, int lines, float scale) {
    vfloat x[TILE / 16][FEW];
    vfloat best = g.top, total = {};
    for (int64_t s = 0; s < TILE / 16; s++) {
        columns(g.scores + 16 * s, x[s]);
        for (int c = 0; c < FEW; c++) {
            x[s][c] = product(x[s][c], scale);
            if (EDGE) {
                vint key = vint{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)(tile + 16 * s);
                x[s][c] = (key >= g.begin[c]) & (key < g.end[c]) ? x[s][c] : splat(-INFINITY);
            }
        }
        for (int64_t j = 16 * s; j < 16 * s + 16; j++) prefetch(next.keys[j], lines);
    }
    for (int c = 0; c < FEW; c++) {
        float top = max(max(max(x[0][c], x[1][c]), max(x[2][c], x[3][c])));
        best[c] = top > best[c] ? top : best[c];
    }
    vfloat from = subtrahend(best), keep = exp_to_88(g.top - from);
    for (int c = 0; c < FEW; c++) {
        vfloat sums = {};
        for (int64_t s = 0; s < TILE / 16; s++) {
            vfloat y = exp_to_88(x[s][c] - from[c]);
            sums += y;
            __m256i half = _mm512_cvtepi32_epi16((__m512i)(rounded(y) >> 16));
            _mm256_storeu_si256((__m256i*)(g.weights[s / 2][c] + s % 2 * 8), half);
        }
        total[c] = sum(sums);
    }
    g.total = g.total * keep + total;
    g.top = best;
    return keep;
}

// Values of the keys [0, to) of one tile as the right side of P V, zero behind them: [step][16 dims][key pair][dim].
// The next tile is fetched meanwhile, a little at a time.
void interleave(Pairs* values, const Tile<bf16>& tile, const Tile<bf16>& next, int64_t to, int64_t dim) {
    for (int64_t j = 0; j < TILE; j += 2) {
        prefetch(next.values[j], (int)(dim / W));
        prefetch(next.values[j + 1], (int)(dim / W));
        for (int64_t n = 0; n < dim / 16; n++) {
            vuint lower = j < to ? load_u16(tile.values[j] + n * 16) : vuint{};
            vuint upper = j + 1 < to ? load_u16(tile.values[j + 1] + n * 16) : vuint{};
            store(values[j / STEP * (dim / 16) + n][j % STEP / 2], lower | upper << 16);
        }
    }
}

// out = out * keep + P V
void add_values(Group& g, const Pairs* values, vfloat keep, int64_t to, int64_t dim) {
    for (int64_t column = 0; column < g.columns; column++) {
        if (keep[column] == 1.0f) continue;
        for (int64_t i = 0; i < dim; i += W) {
            float* p = g.out + column * dim + i;
            store(p, load(p) * keep[column]);
        }
    }
    const int64_t stride = dim * sizeof(float), tiles = dim / 16;
    const bool second = to > STEP;
    for (int64_t n = 0; n + 1 < tiles; n += 2) {
        float* out = g.out + n * 16;
        _tile_loadd(0, out, stride);
        _tile_loadd(1, out + 16, stride);
        _tile_loadd(4, g.weights[0], 64);
        _tile_loadd(5, values[n], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, values[n + 1], 64);
        _tile_dpbf16ps(1, 4, 6);
        if (second) {
            _tile_loadd(7, g.weights[1], 64);
            _tile_loadd(5, values[tiles + n], 64);
            _tile_dpbf16ps(0, 7, 5);
            _tile_loadd(6, values[tiles + n + 1], 64);
            _tile_dpbf16ps(1, 7, 6);
        }
        _tile_stored(0, out, stride);
        _tile_stored(1, out + 16, stride);
    }
}

void end_group(const Group& g, bf16* out, int64_t head, int64_t heads, const AttentionArgs& a) {
    for (int64_t r = 0; r < g.rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t column = r * heads + h;
            for (int64_t i = 0; i < a.dim; i += W)
                store(out + ((g.row + r) * a.q_heads + head + h) * a.dim + i,
                      load(g.out + column * a.dim + i) / g.total[column]);
        }
}

// The first key that all columns see.
inline int64_t begin_of(const Group& g, const AttentionArgs& a) {
    int64_t end = a.positions[g.row + g.rows - 1] + 1;
    return a.window && end > a.window ? end - a.window : 0;
}

// Rows of one sequence at positions that follow each other.
struct Run {
    int64_t row, rows;
};

struct alignas(64) Scratch {
    Group groups[MAX_GROUPS];
    Pairs values[TILE / STEP * (MAX_DIM / 16)];
    bf16 keys[TILE * MAX_DIM];  // where the cache's blocks are no multiples of 16 keys
};

// One run and at most 16 heads of one KV head; `per_group` rows go in one group.
void attend(const bf16* q, const bf16* key_cache, const bf16* value_cache, bf16* out, Run run, int64_t per_group,
            int64_t kv_head, int64_t head, int64_t heads, const AttentionArgs& a) {
    static thread_local Scratch s;
    int64_t groups = 0;
    for (int64_t r = 0; r < run.rows; r += per_group) {
        int64_t rows = run.rows - r < per_group ? run.rows - r : per_group;
        begin_group(s.groups[groups++], q, run.row + r, rows, head, heads, a);
    }
    const int32_t* table = a.tables + a.row_sequence[run.row] * a.table_stride;
    const int64_t last = a.positions[run.row + run.rows - 1] + 1, first = a.positions[run.row] + 1;
    const int64_t begin = a.window && first > a.window ? first - a.window : 0;
    const bool whole = a.block_size % 16 == 0;
    const int64_t key_bytes = a.dim * sizeof(bf16);
    Tile<bf16> tiles[2];
    auto size = [&](int64_t tile) { return last - tile < TILE ? last - tile : TILE; };
    int64_t at = begin / TILE * TILE;
    tiles[at / TILE % 2].find(key_cache, value_cache, table, at, 0, size(at), kv_head, a);
    for (; at < last; at += TILE) {
        Tile<bf16>& tile = tiles[at / TILE % 2];
        int64_t to = size(at);
        Tile<bf16>& next = tiles[(at / TILE + (at + TILE < last)) % 2];
        if (at + TILE < last) next.find(key_cache, value_cache, table, at + TILE, 0, size(at + TILE), kv_head, a);
        if (!whole)
            for (int64_t j = 0; j < to; j++) {
                std::memcpy(s.keys + j * a.dim, tile.keys[j], a.dim * sizeof(bf16));
                tile.keys[j] = s.keys + j * a.dim;
            }
        interleave(s.values, tile, next, to, a.dim);
        for (int64_t i = 0; i < groups; i++) {
            Group& g = s.groups[i];
            if (at > a.positions[g.row + g.rows - 1]) continue;  // all of it comes later
            score(g, tile, to, key_bytes, a);
            bool edge = at + TILE > a.positions[g.row] + 1 || at < begin_of(g, a);
            const int lines = i == groups - 1 ? (int)(a.dim / W) : 0;
            auto run = g.columns <= FEW ? (edge ? weigh_few<true> : weigh_few<false>) : (edge ? weigh<true> : weigh<false>);
            vfloat keep = run(g, at, next, lines, a.scale);
            add_values(g, s.values, keep, to, a.dim);
        }
    }
    for (int64_t i = 0; i < groups; i++) end_group(s.groups[i], out, head, heads, a);
}

}  // namespace

bool attention_on_tiles(const bf16* q, const bf16* key_cache, const bf16* value_cache, bf16* out,
                        const AttentionArgs& a) {
    if (a.dim % STEP != 0 || a.dim > MAX_DIM || !have_tiles()) return false;
    const int64_t shared = a.q_heads / a.kv_heads, heads = shared < COLUMNS ? shared : COLUMNS;
    const int64_t per_group = COLUMNS / heads;
    // Fewer groups share a reading where there would be too few pieces for the threads.
    int64_t groups = a.rows * a.kv_heads / (per_group * a.threads * 4);
    groups = groups < 1 ? 1 : groups > MAX_GROUPS ? MAX_GROUPS : groups;
    std::vector<Run> runs;
    for (int64_t row = 0; row < a.rows; row++) {
        bool goes_on = row > 0 && runs.back().rows < groups * per_group &&
                       a.row_sequence[row] == a.row_sequence[row - 1] && a.positions[row] == a.positions[row - 1] + 1;
        if (goes_on)
            runs.back().rows++;
        else
            runs.push_back({row, 1});
    }
    parallel_for((int64_t)runs.size() * a.kv_heads, 1, a.threads, [&](int64_t task) {
        static const TileConfig config;
        int64_t kv_head = task % a.kv_heads, end = (kv_head + 1) * shared;
        load_config(config);
        for (int64_t head = kv_head * shared; head < end; head += heads)
            attend(q, key_cache, value_cache, out, runs[task / a.kv_heads], per_group, kv_head, head,
                   end - head < heads ? end - head : heads, a);
        _tile_release();
    });
    return true;
}

#else

bool attention_on_tiles(const bf16*, const bf16*, const bf16*, bf16*, const AttentionArgs&) { return false; }

#endif

}  // namespace specserve
