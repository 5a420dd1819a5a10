// Attention over a paged KV cache, one row at a time, with the online softmax (Milakov and Gimelshein 2018); what any
// machine can do. Queries are float32 or bfloat16, keys and values the same or int8.
#include "attention_lanes.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace specserve {

namespace {

constexpr int64_t MOST_UNITS = 8;  // of one item

// What one thread computes at once: units [first, first + count) of a row, over all pieces or, where `piece` is not -1,
// over that one alone.
struct Item {
    int64_t row, first, count, piece;
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
    int64_t shared, sets;     // query heads of a KV head, units of a KV head
    int64_t most;             // units of an item
    int64_t pieces;           // of the longest row, where pieces are computed apart
    HeadSums* sums = nullptr;  // [rows, q_heads, pieces] then

    Call(const Q* q, const T* keys, const T* values, Q* out, const AttentionArgs& a)
        : q(q), keys(keys), values(values), out(out), a(a), shared(a.q_heads / a.kv_heads),
          sets((shared + MOST_HEADS - 1) / MOST_HEADS), most(std::min(MOST_UNITS, units())), pieces(1) {}

    int64_t units() const { return a.kv_heads * sets; }
    int64_t runs() const { return (units() + most - 1) / most; }  // items of a row and a piece
    int64_t count() const { return a.rows * runs() * pieces; }
    // Neighbours in memory follow each other.
    Item item(int64_t i) const {
        const int64_t first = i / pieces % runs() * most;
        return {i / pieces / runs(), first, std::min(most, units() - first), sums ? i % pieces : -1};
    }
    HeadSums& sums_of(int64_t row, int64_t head, int64_t piece) const {
        return sums[(row * a.q_heads + head) * pieces + piece];
    }
};

template <typename Q>
void begin_unit(Unit& u, const Q* q, int64_t row, int64_t unit, int64_t sets, int64_t shared, const AttentionArgs& a) {
    const int64_t set = unit % sets * MOST_HEADS;
    u.kv_head = unit / sets, u.head = u.kv_head * shared + set, u.heads = (int)std::min<int64_t>(MOST_HEADS, shared - set);
    for (int h = 0; h < u.heads; h++) {
        for (int64_t i = 0; i < a.dim; i += W)
            store(u.q[h] + i, load(q + row * a.q_stride + (u.head + h) * a.dim + i) * a.scale);
        u.whole[h].clear(a.dim), u.piece[h].clear(a.dim);
    }
}

template <typename T, int DIM>
constexpr decltype(&attend_tile<T, 1, DIM>) WAYS[MOST_HEADS] = {attend_tile<T, 1, DIM>, attend_tile<T, 2, DIM>,
                                                                attend_tile<T, 3, DIM>, attend_tile<T, 4, DIM>};

// The tiles of one item, one after the other for all of its units.
template <typename Q, typename T>
class Attend {
  public:
    // `next` is the item that the thread most likely takes then, or null.
    Attend(const Call<Q, T>& call, const Item& item, const Item* next)
        : c_(call), a_(call.a), item_(item), next_(next), row_(row_of(item.row, call.a)) {
        for (int64_t i = 0; i < item.count; i++)
            begin_unit(s_.units[i], c_.q, item.row, item.first + i, c_.sets, c_.shared, a_);
    }

    void run() {
        const auto& ways = a_.dim == 64 ? WAYS<T, 64> : a_.dim == 128 ? WAYS<T, 128> : WAYS<T, 0>;
        const int64_t first = from(item_, row_), end = to(item_, row_);
        Place places[2], *here = places, *next = places + 1;  // `next` is fetched while `here` is computed
        if (first < end) here->find<T>(row_, first, a_);
        for (int64_t at = first; at < end; at += TILE) {
            if (at % PIECE == 0 && at > first) end_piece();
            Fetch fetch;
            if (at + TILE < end) {
                next->find<T>(row_, at + TILE, a_);
                start(fetch, *next, item_, at + TILE);
            } else if (next_) {
                look_ahead(fetch, *next);
            }
            for (int64_t i = 0; i < item_.count; i++) {
                Unit& u = s_.units[i];
                const int64_t head = u.kv_head * head_elements<T>(a_.cache());
                ways[u.heads - 1](s_.work, u, c_.keys + head, c_.values + head, *here, fetch, a_.dim);
            }
            std::swap(here, next);
        }
        end_piece();
        give();
    }

  private:
    // Where the first and behind the last tile of an item are.
    static int64_t from(const Item& item, const Row& row) { return std::max(row.begin, item.piece * PIECE) / TILE * TILE; }
    static int64_t to(const Item& item, const Row& row) {
        return item.piece < 0 ? row.end : std::min(row.end, (item.piece + 1) * PIECE);
    }

    void start(Fetch& fetch, const Place& place, const Item& item, int64_t at) {
        const int64_t first = item.first / c_.sets, last = (item.first + item.count - 1) / c_.sets;
        fetch.start(c_.keys, c_.values, place.tile, at, place.to, first, last - first + 1, a_);
    }

    // Fetches the first tile of what comes next, which nobody would fetch otherwise.
    void look_ahead(Fetch& fetch, Place& place) {
        const Row row = row_of(next_->row, a_);
        const int64_t at = from(*next_, row);
        if (at >= to(*next_, row)) return;
        place.find<T>(row, at, a_);
        start(fetch, place, *next_, at);
    }

    void end_piece() {
        for (int64_t i = 0; i < item_.count; i++)
            for (int h = 0; h < s_.units[i].heads; h++) {
                add_piece(s_.units[i].whole[h], s_.units[i].piece[h], a_.dim);
                s_.units[i].piece[h].clear(a_.dim);
            }
    }

    void give();

    static Scratch& scratch() {
        static thread_local Scratch s;
        return s;
    }

    const Call<Q, T>& c_;
    const AttentionArgs& a_;
    const Item& item_;
    const Item* next_;
    const Row row_;
    Scratch& s_ = scratch();
};

template <typename Q>
inline void write(const HeadSums& whole, Q* out, int64_t dim) {
    for (int64_t i = 0; i < dim; i += W) store(out + i, load(whole.out + i) / whole.total);
}

template <typename Q, typename T>
void Attend<Q, T>::give() {
    for (int64_t i = 0; i < item_.count; i++)
        for (int h = 0; h < s_.units[i].heads; h++) {
            const int64_t head = s_.units[i].head + h;
            const HeadSums& sums = s_.units[i].whole[h];
            if (item_.piece < 0)
                write(sums, c_.out + (item_.row * a_.q_heads + head) * a_.dim, a_.dim);
            else
                c_.sums_of(item_.row, head, item_.piece) = sums;
        }
}

// Adds up pieces that were computed apart.
template <typename Q, typename T>
void join_pieces(const Call<Q, T>& c) {
    HeadSums whole;
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

// All pieces and KV heads of a row together, or pieces alone, or KV heads alone too, until there are enough.
template <typename Q, typename T>
void cut(Call<Q, T>& c, std::vector<HeadSums>& kept) {
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
    static thread_local std::vector<HeadSums> kept;
    Call<Q, T> c(q, keys, values, out, a);
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
