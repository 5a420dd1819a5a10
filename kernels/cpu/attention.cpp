// Attention over a paged KV cache with the online softmax (Milakov and Gimelshein 2018); what any machine can do. Queries
// are float32 or bfloat16, keys and values the same or int8.
#include "attention_lanes.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace specserve {

namespace {

constexpr int MOST_HEADS = 4;      // query heads of one row and KV head that are computed together
constexpr int64_t MOST_UNITS = 8;  // of one item

// Rows of one sequence, at positions that follow each other.
struct Run {
    int64_t row, rows;
};

// What one thread computes at once: units [first, first + count) of a run, over all pieces or, where `piece` is not -1,
// over that one alone. A unit is a KV head with some of its query heads.
struct Item {
    Run run;
    int64_t first, count, piece;
};

// The columns of a unit: `heads` query heads from `head` on, of each row of the run.
struct Unit {
    Column columns[MOST_COLUMNS];
    int64_t kv_head, head;
    int heads;
};

struct Scratch {
    Unit units[MOST_UNITS];
    LaneWork work;
};

// One call's arguments, and how its work is cut up.
template <typename Q, typename T>
struct Call {
    const Q* q;
    const T *keys, *values;
    Q* out;
    const AttentionArgs& a;
    const std::vector<Run>& runs;
    int64_t shared, heads, sets;  // query heads of a KV head, at most of a unit; units of a KV head
    int64_t most;                 // units of an item
    int64_t pieces = 1;           // of the longest row, where pieces are computed apart
    ColumnSums* sums = nullptr;   // [rows, q_heads, pieces] then

    int64_t units() const { return a.kv_heads * sets; }
    int64_t items() const { return (units() + most - 1) / most; }  // of a run and a piece
    int64_t count() const { return (int64_t)runs.size() * items() * pieces; }
    // Neighbours in memory follow each other.
    Item item(int64_t i) const {
        const int64_t first = i / pieces % items() * most;
        return {runs[i / pieces / items()], first, std::min(most, units() - first), sums ? i % pieces : -1};
    }
    ColumnSums& sums_of(int64_t row, int64_t head, int64_t piece) const {
        return sums[(row * a.q_heads + head) * pieces + piece];
    }
};

template <typename T, int DIM>
constexpr decltype(&attend_tile<T, 1, DIM>) WAYS[MOST_COLUMNS] = {
    attend_tile<T, 1, DIM>, attend_tile<T, 2, DIM>, attend_tile<T, 3, DIM>, attend_tile<T, 4, DIM>,
    attend_tile<T, 5, DIM>, attend_tile<T, 6, DIM>, attend_tile<T, 7, DIM>, attend_tile<T, 8, DIM>};

template <typename Q>
inline void write(const ColumnSums& whole, Q* out, int64_t dim) {
    for (int64_t i = 0; i < dim; i += W) store(out + i, load(whole.out + i) / whole.total);
}

// The tiles of one item, one after the other for all of its units.
template <typename Q, typename T>
class Attend {
  public:
    // `next` is the item that the thread most likely takes then, or null.
    Attend(const Call<Q, T>& call, const Item& item, const Item* next)
        : c_(call), a_(call.a), item_(item), next_(next), ways_(ways(call.a.dim)) {
        for (int64_t r = 0; r < item.run.rows; r++) rows_[r] = row_of(item.run.row + r, a_);
        for (int64_t i = 0; i < item.count; i++) begin(s_.units[i], item.first + i);
    }

    void run() {
        const int64_t first = from(item_, rows_[0]), end = to(item_, rows_[item_.run.rows - 1]);
        Tile tiles[2], *here = tiles, *next = tiles + 1;  // `next` is fetched while `here` is computed
        if (first < end) find(*here, first);
        for (int64_t at = first; at < end; at += TILE) {
            if (at % PIECE == 0 && at > first) end_piece();
            Fetch fetch;
            if (at + TILE < end) {
                find(*next, at + TILE);
                fetch_tile(fetch, *next, item_, at + TILE, size(last(), at + TILE));
            } else if (next_) {
                look_ahead(fetch, *next);
            }
            for (int64_t i = 0; i < item_.count; i++) tile_of(s_.units[i], *here, at, fetch);
            std::swap(here, next);
        }
        end_piece();
        give();
    }

  private:
    static auto ways(int64_t dim) { return dim == 64 ? WAYS<T, 64> : dim == 128 ? WAYS<T, 128> : WAYS<T, 0>; }

    void begin(Unit& u, int64_t unit) {
        const int64_t set = unit % c_.sets * c_.heads;
        u.kv_head = unit / c_.sets, u.head = u.kv_head * c_.shared + set;
        u.heads = (int)std::min(c_.heads, c_.shared - set);
        for (int64_t r = 0; r < item_.run.rows; r++)
            for (int h = 0; h < u.heads; h++) {
                Column& column = u.columns[r * u.heads + h];
                const Q* q = c_.q + (item_.run.row + r) * a_.q_stride + (u.head + h) * a_.dim;
                for (int64_t i = 0; i < a_.dim; i += W) store(column.q + i, load(q + i) * a_.scale);
                column.whole.clear(a_.dim), column.piece.clear(a_.dim);
            }
    }

    const Row& last() const { return rows_[item_.run.rows - 1]; }

    // Keys that a row sees of the tile at a position.
    static int64_t start(const Row& row, int64_t at) { return std::clamp<int64_t>(row.begin - at, 0, TILE); }
    static int64_t size(const Row& row, int64_t at) { return std::clamp<int64_t>(row.end - at, 0, TILE); }

    // The first position of an item's tiles, and the one behind the last.
    static int64_t from(const Item& item, const Row& row) { return std::max(row.begin, item.piece * PIECE) / TILE * TILE; }
    static int64_t to(const Item& item, const Row& row) {
        return item.piece < 0 ? row.end : std::min(row.end, (item.piece + 1) * PIECE);
    }

    // Of keys that some row of the run sees: the last row's table has them all.
    void find(Tile& tile, int64_t at) { tile.find<T>(last(), at, start(rows_[0], at), size(last(), at), a_); }

    void fetch_tile(Fetch& fetch, const Tile& tile, const Item& item, int64_t at, int64_t size) {
        const int64_t first = item.first / c_.sets, end = (item.first + item.count - 1) / c_.sets + 1;
        fetch.start(c_.keys, c_.values, tile, at, size, first, end - first, a_);
    }

    // Fetches the first tile of what comes next, which nobody would fetch otherwise.
    void look_ahead(Fetch& fetch, Tile& tile) {
        const Row row = row_of(next_->run.row, a_);
        const int64_t at = from(*next_, row);
        if (at >= to(*next_, row)) return;
        tile.find<T>(row, at, start(row, at), size(row, at), a_);
        fetch_tile(fetch, tile, *next_, at, size(row, at));
    }

    // All columns together where they see the same keys of the tile; else row by row, as alone.
    void tile_of(Unit& u, const Tile& tile, int64_t at, Fetch& fetch) {
        const int64_t head = u.kv_head * head_elements<T>(a_.cache());
        auto attend = [&](int64_t r, int64_t rows) {
            const int64_t from = start(rows_[r], at), to = size(rows_[r], at);
            if (from >= to) return;
            ways_[rows * u.heads - 1](s_.work, u.columns + r * u.heads, c_.keys + head, c_.values + head, tile, from, to,
                                      fetch, a_.dim);
        };
        const int64_t rows = item_.run.rows;
        if (start(last(), at) == start(rows_[0], at) && size(last(), at) == size(rows_[0], at)) return attend(0, rows);
        for (int64_t r = 0; r < rows; r++) attend(r, 1);
    }

    template <typename F>
    void each_column(const F& f) {
        for (int64_t i = 0; i < item_.count; i++)
            for (int64_t r = 0; r < item_.run.rows; r++)
                for (int h = 0; h < s_.units[i].heads; h++)
                    f(s_.units[i].columns[r * s_.units[i].heads + h], item_.run.row + r, s_.units[i].head + h);
    }

    void end_piece() {
        each_column([&](Column& column, int64_t, int64_t) {
            add_piece(column.whole, column.piece, a_.dim);
            column.piece.clear(a_.dim);
        });
    }

    void give() {
        each_column([&](const Column& column, int64_t row, int64_t head) {
            if (item_.piece < 0)
                write(column.whole, c_.out + (row * a_.q_heads + head) * a_.dim, a_.dim);
            else
                c_.sums_of(row, head, item_.piece) = column.whole;
        });
    }

    static Scratch& scratch() {
        static thread_local Scratch s;
        return s;
    }

    const Call<Q, T>& c_;
    const AttentionArgs& a_;
    const Item& item_;
    const Item* next_;
    const decltype(&attend_tile<T, 1, 0>)* ways_;
    Row rows_[MOST_COLUMNS];
    Scratch& s_ = scratch();
};

// Adds up pieces that were computed apart.
template <typename Q, typename T>
void join_pieces(const Call<Q, T>& c) {
    ColumnSums whole;
    for (int64_t row = 0; row < c.a.rows; row++) {
        const Row seen = row_of(row, c.a);
        for (int64_t head = 0; head < c.a.q_heads; head++) {
            whole.clear(c.a.dim);
            for (int64_t piece = seen.begin / PIECE; piece * PIECE < seen.end; piece++)
                add_piece(whole, c.sums_of(row, head, piece), c.a.dim);
            write(whole, c.out + (row * c.a.q_heads + head) * c.a.dim, c.a.dim);
        }
    }
}

// Rows that share a reading, at most `most` of them. Those of a draft tree have keys of their own.
void find_runs(std::vector<Run>& runs, int64_t most, const AttentionArgs& a) {
    runs.clear();
    Row before{};
    for (int64_t r = 0; r < a.rows; r++) {
        const Row row = row_of(r, a);
        const bool joins = r > 0 && runs.back().rows < most && a.row_sequence[r] == a.row_sequence[r - 1] && !row.mask &&
                           !before.mask && row.end == before.end + 1;
        if (!joins) runs.push_back({r, 0});
        runs.back().rows++;
        before = row;
    }
}

// All pieces and KV heads of a run together, or pieces alone, or KV heads alone too, until there are enough.
template <typename Q, typename T>
void cut(Call<Q, T>& c, std::vector<ColumnSums>& kept) {
    const AttentionArgs& a = c.a;
    const int64_t enough = 2 * a.threads;
    if (a.threads <= 1 || c.count() >= 2 * enough) return;
    for (int64_t row = 0; row < a.rows; row++) c.pieces = std::max(c.pieces, a.positions[row] / PIECE + 1);
    if (c.count() < enough) c.most = 1;
    const size_t sums = (size_t)(a.rows * a.q_heads * c.pieces);
    if (kept.size() < sums) kept.resize(sums);
    c.sums = kept.data();
}

template <typename Q, typename T>
void attention(const Q* q, const T* keys, const T* values, Q* out, const AttentionArgs& a) {
    static thread_local std::vector<ColumnSums> kept;
    static thread_local std::vector<Run> runs;
    const int64_t shared = a.q_heads / a.kv_heads, heads = std::min<int64_t>(shared, MOST_HEADS);
    const int64_t sets = (shared + heads - 1) / heads;
    find_runs(runs, MOST_COLUMNS / heads, a);
    Call<Q, T> c{q, keys, values, out, a, runs, shared, heads, sets, std::min(MOST_UNITS, a.kv_heads * sets)};
    cut(c, kept);
    const int64_t count = c.count();
    ShardedClaims claims(count, 1, a.threads);
    run_slots(count > 1 ? a.threads : 1, [&](int slot) {
        for (int64_t i, end; claims.next(slot, i, end);) {
            const Item item = c.item(i), next = c.item(i + 1 < count ? i + 1 : i);
            Attend<Q, T>(c, item, i + 1 < count ? &next : nullptr).run();
        }
    });
    if (c.sums) join_pieces(c);
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
