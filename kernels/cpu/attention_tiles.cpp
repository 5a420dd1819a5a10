// Attention in bfloat16 on AMX tiles, with the online softmax (Milakov and Gimelshein 2018); queries are bfloat16, keys
// and values bfloat16 or int8.
//
// Rows of one sequence share what they read. A thread takes a run of such rows, some KV heads and all pieces of the
// context, or one piece alone where there are too few runs for the threads; a piece's sums are the same either way.
#include "attention_values.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "pool.h"

namespace specserve {

#ifdef __AMX_BF16__

namespace {

constexpr int64_t MAX_GROUPS = 6;   // groups of one KV head that share one reading of K and V
constexpr int64_t MAX_STATES = 18;  // groups that one item computes together

// Rows of one sequence that read the same keys: at positions that follow each other, or of one draft tree.
struct Run {
    int64_t row, rows, begin, last;  // some row sees something between the last two
};

// What one thread computes at once: units [first, first + units) of a run. A unit is a KV head with at most 16 of its
// query heads. `piece` is -1 for all of them; else the sums go to `sums`, one for each group.
struct Item {
    int64_t run, first, units, piece, sums;
};

struct alignas(64) Scratch {
    Group groups[MAX_STATES], one;
    Work work;
};

// Of one call; its memory is kept for the next one.
struct Plan {
    AttentionArgs a;
    const bf16* q;
    bf16* out;
    int64_t heads, sets, per_group;  // query heads of a unit, units of a KV head, rows of a group
    float unit;                      // of scores: see `weight`
    std::vector<Run> runs;
    std::vector<Item> items;
    std::vector<Sums> sums;
    Group joined;

    int64_t groups(const Run& run) const { return (run.rows + per_group - 1) / per_group; }
};

// The index-th group of one unit of a run.
void begin_group(Group& g, const Plan& p, const Run& run, int64_t unit, int64_t index) {
    const int64_t shared = p.a.q_heads / p.a.kv_heads, kv_head = unit / p.sets, set = unit % p.sets * p.heads;
    const int64_t first = index * p.per_group;
    begin_group(g, p.q, run.row + first, std::min(run.rows - first, p.per_group), kv_head, kv_head * shared + set,
                std::min(shared - set, p.heads), p.a);
    g.unit = p.unit;
}

inline vuint load_pairs(const bf16* p) { return (vuint)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }

// bfloat16 in the upper halves; every int8 is one.
inline vuint load_pairs(const int8_t* p) { return (vuint)load(p) >> 16; }

// 32 dims of two keys as two rows of the right side of P V.
inline void interleave(const bf16* lower, const bf16* upper, uint32_t* low, uint32_t* high) {
    typedef short shorts __attribute__((vector_size(64)));
    static const shorts front = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i a = _mm512_loadu_si512(lower), b = _mm512_loadu_si512(upper);
    _mm512_store_si512(low, _mm512_permutex2var_epi16(a, (__m512i)front, b));
    _mm512_store_si512(high, _mm512_permutex2var_epi16(a, (__m512i)(front + 16), b));
}

inline void interleave(const int8_t* lower, const int8_t* upper, uint32_t* low, uint32_t* high) {
    store(low, load_pairs(lower) | load_pairs(upper) << 16);
    store(high, load_pairs(lower + 16) | load_pairs(upper + 16) << 16);
}

// Values of the keys [0, to) of one tile as the right side of P V, zero behind them: [step][16 dims][key pair][dim].
template <typename T>
void interleave(Pairs* values, const T* from, const Tile& tile, int64_t to, int64_t dim, Fetch& fetch) {
    alignas(64) static const T zeros[MAX_DIM] = {};
    for (int64_t j = 0; j < TILE; j += 2) {
        if (j >= STEP && to <= STEP) break;  // nobody reads it
        fetch.steps(2);
        const T *lower = j < to ? from + tile.at[j] : zeros, *upper = j + 1 < to ? from + tile.at[j + 1] : zeros;
        Pairs* rows = values + j / STEP * (dim / 16);
        for (int64_t n = 0; n < dim / 16; n += 2)
            interleave(lower + n * 16, upper + n * 16, rows[n][j % STEP / 2], rows[n + 1][j % STEP / 2]);
    }
}

// Where products find the keys: in the cache, if it has each sixteen in a row, else in `w`.
Keys find_keys(Work& w, const bf16* keys, const Tile& tile, int64_t position, int64_t to, bool whole, int64_t dim) {
    Keys k{{}, position, to, false};
    for (int64_t j = 0; j < TILE; j++) {
        if (!whole && j < to) std::memcpy(w.keys + j * dim, keys + tile.at[j], dim * sizeof(bf16));
        if (j % 16 == 0) k.keys[j / 16] = whole ? keys + tile.at[j] : w.keys + j * dim;
    }
    return k;
}

Keys find_keys(Work& w, const int8_t* keys, const Tile& tile, int64_t position, int64_t to, bool, int64_t dim) {
    Keys k{{}, position, to, true};
    for (int64_t j = 0; j < to; j++)
        for (int64_t i = 0; i < dim; i += W)
            _mm256_storeu_si256((__m256i*)(w.keys + j * dim + i),
                                _mm512_cvtepi32_epi16((__m512i)load_pairs(keys + tile.at[j] + i)));
    for (int64_t j = 0; j < TILE; j += 16) k.keys[j / 16] = w.keys + j * dim;
    return k;
}

inline void find_scales(Work&, const bf16*, const bf16*, const Tile&, int64_t, int64_t, bool, float) {}

// Scales of one KV head, whose bytes are `head` behind those of the first.
inline void find_scales(Work& w, const int8_t* keys, const int8_t* values, const Tile& tile, int64_t head, int64_t to,
                        bool whole, float scale) {
    for (int64_t j = 0; j < TILE; j += whole ? W : 1) {
        const int64_t at = tile.scale_at[j < to ? j : 0] + head, bytes = (whole ? W : 1) * sizeof(float);
        std::memcpy(w.factors + j, keys + at, bytes);
        std::memcpy(w.shares + j, values + at, bytes);
    }
    for (int64_t j = to; j < TILE; j++) w.shares[j] = 0.0f;
    for (int64_t j = 0; j < TILE; j += W) store(w.factors + j, product(load(w.factors + j), scale));
}

// The tiles of one piece for all groups of an item.
template <typename T>
class Attend {
  public:
    // `next` is the item that the thread most likely takes then, or null.
    Attend(const Plan& plan, const Item& item, const Item* next, const T* keys, const T* values)
        : p_(plan), a_(plan.a), item_(item), run_(plan.runs[item.run]), next_(next), keys_(keys), values_(values) {
        begin_groups();
    }

    // Positions [from, to) of the context. The item goes on with the position `then`, unless that is -1.
    void piece(int64_t from, int64_t to, int64_t then) {
        for (int64_t i = 0; i < count_; i++) s_.groups[i].piece().clear(a_.dim);
        const Row row = row_of(run_.row, a_);
        // Keys of a tree are each row's own.
        const int64_t common = row.mask ? row.context / TILE * TILE : to;
        from = std::max(from, run_.begin / TILE * TILE);
        Tile tiles[2], *tile = tiles, *next = tiles + 1;
        const int64_t end = common < to ? common : to;
        auto size = [&](int64_t at) { return end - at < TILE ? end - at : TILE; };
        if (from < end) tile->find<T>(row, from, 0, size(from), a_);
        for (int64_t at = from; at < end; at += TILE) {
            Fetch fetch;
            if (at + TILE < end) {
                next->find<T>(row, at + TILE, 0, size(at + TILE), a_);
                fetch_tile(fetch, *next, item_, at + TILE, size(at + TILE));
            } else if (then >= 0 || next_) {
                look_ahead(fetch, *next, then);
            }
            for (int64_t i = 0; i < count_; i += per_unit_)
                tile_of(*tile, at, size(at), s_.groups + i, per_unit_, a_.block_size % 16 == 0, fetch);
            std::swap(tile, next);
        }
        for (int64_t i = 0; end < to && i < count_; i++)
            for (int64_t r = 0; r < s_.groups[i].rows; r++) branch(s_.groups[i], r, end > from ? end : from, to);
    }

    Group* groups() { return s_.groups; }
    int64_t count() const { return count_; }

  private:
    void begin_groups() {
        for (int64_t u = 0; u < item_.units; u++)
            for (int64_t i = 0; i < per_unit_; i++) {
                Group& g = s_.groups[count_++];
                begin_group(g, p_, run_, item_.first + u, i);
            }
    }

    void fetch_tile(Fetch& fetch, const Tile& tile, const Item& item, int64_t at, int64_t size) {
        const int64_t first = item.first / p_.sets, last = (item.first + item.units - 1) / p_.sets;
        fetch.start(keys_, values_, tile, at, size, first, last - first + 1, a_);
    }

    // Fetches the first tile of what comes next, which nobody would fetch otherwise.
    void look_ahead(Fetch& fetch, Tile& tile, int64_t then) {
        const Item& item = then >= 0 ? item_ : *next_;
        const Run& run = p_.runs[item.run];
        const Row row = row_of(run.row, a_);
        int64_t at = then >= 0 ? then : std::max(run.begin, item.piece * PIECE) / TILE * TILE;
        const int64_t size = std::min({TILE, run.last - at, row.context - at});
        if (size <= 0) return;
        tile.find<T>(row, at, 0, size, a_);
        fetch_tile(fetch, tile, item, at, size);
    }

    // One tile of one KV head for the groups that share it.
    void tile_of(const Tile& tile, int64_t at, int64_t to, Group* groups, int64_t count, bool whole, Fetch& fetch) {
        Fetch none;
        const int64_t head = groups->kv_head * head_elements<T>(a_.cache());
        const Keys keys = find_keys(s_.work, keys_ + head, tile, at, to, whole, a_.dim);
        find_scales(s_.work, keys_, values_, tile, head, to, whole, a_.scale);
        bool interleaved = false;
        // Whose scores come after those of group i.
        auto next_of = [&](int64_t i) {
            do i++;
            while (i < count && at >= groups[i].last);
            return i;
        };
        auto fetch_of = [&](int64_t i) -> Fetch& { return i == count - 1 ? fetch : none; };
        int64_t i = next_of(-1), turn = 0;
        if (i < count) score(s_.work.scores[0], groups[i], keys, fetch_of(i), a_.dim);
        for (int64_t next; i < count; i = next, turn = 1 - turn) {
            next = next_of(i);
            if (next < count) score(s_.work.scores[1 - turn], groups[next], keys, fetch_of(next), a_.dim);
            const float(*scores)[COLUMNS] = s_.work.scores[turn];
            Fetch& some = fetch_of(i);
            if constexpr (std::is_same_v<T, bf16>) {
                if (groups[i].columns <= FEW) {
                    const vfloat keep = weigh_tile(s_.work, scores, groups[i], keys, some);
                    add_values_few(s_.work, groups[i], keep, values_ + head, tile.at, to, some, a_.dim);
                    continue;
                }
            }
            // While the products are under way.
            if (!interleaved) interleave(s_.work.values, values_ + head, tile, to, a_.dim, fetch);
            interleaved = true;
            const vfloat keep = weigh_tile(s_.work, scores, groups[i], keys, some);
            add_values(s_.work, groups[i], keep, to, some, a_.dim);
        }
    }

    // The tiles from `from` on as one row of a group sees them.
    void branch(Group& g, int64_t r, int64_t from, int64_t to) {
        Group& one = s_.one;
        const Row row = row_of(g.row + r, a_);
        begin_group(one, p_.q, g.row + r, 1, g.kv_head, g.head, g.heads, a_);
        one.piece().clear(a_.dim);
        one.unit = g.unit;
        Sums &mine = one.piece(), &all = g.piece();
        const int64_t first = r * g.heads;
        for (int64_t h = 0; h < g.heads; h++)
            mine.top[h] = all.top[first + h], mine.total[h] = all.total[first + h];
        std::memcpy(mine.out, all.out + first * a_.dim, g.heads * a_.dim * sizeof(float));
        if (to > row.end) to = row.end;
        for (int64_t at = from; at < to; at += TILE) {
            Tile tile;
            Fetch none;
            int64_t size = to - at < TILE ? to - at : TILE;
            tile.find<T>(row, at, 0, size, a_);
            tile_of(tile, at, size, &one, 1, false, none);
        }
        for (int64_t h = 0; h < g.heads; h++)
            all.top[first + h] = mine.top[h], all.total[first + h] = mine.total[h];
        std::memcpy(all.out + first * a_.dim, mine.out, g.heads * a_.dim * sizeof(float));
    }

    static Scratch& scratch() {
        static thread_local Scratch s;
        return s;
    }

    const Plan& p_;
    const AttentionArgs& a_;
    const Item& item_;
    const Run& run_;
    const Item* next_;
    const T *keys_, *values_;
    Scratch& s_ = scratch();
    const int64_t per_unit_ = p_.groups(run_);
    int64_t count_ = 0;
};

template <typename T>
void run_item(Plan& p, const Item& item, const Item* next, const T* keys, const T* values) {
    static const TileConfig config;
    const Run& run = p.runs[item.run];
    Attend<T> attend(p, item, next, keys, values);
    load_config(config);
    if (item.piece >= 0) {
        int64_t from = item.piece * PIECE;
        attend.piece(from, from + PIECE < run.last ? from + PIECE : run.last, -1);
        for (int64_t i = 0; i < attend.count(); i++)
            p.sums[item.sums + i].copy(attend.groups()[i].piece(), attend.groups()[i].columns * p.a.dim);
    } else {
        for (int64_t from = run.begin / PIECE * PIECE; from < run.last; from += PIECE) {
            const bool more = from + PIECE < run.last;
            attend.piece(from, more ? from + PIECE : run.last, more ? from + PIECE : -1);
            for (int64_t i = 0; i < attend.count(); i++) add_piece(attend.groups()[i], p.a.dim);
        }
        for (int64_t i = 0; i < attend.count(); i++) end_group(attend.groups()[i], p.out, p.a);
    }
    _tile_release();
}

// Rows that share a reading. All rows of one are in at most `groups` groups.
void find_runs(std::vector<Run>& runs, int64_t most, const AttentionArgs& a) {
    runs.clear();
    Row before{};
    for (int64_t r = 0; r < a.rows; r++) {
        Row row = row_of(r, a);
        bool joins = r > 0 && runs.back().rows < most && a.row_sequence[r] == a.row_sequence[r - 1] &&
                     !row.mask == !before.mask && (row.mask ? row.context == before.context : row.end == before.end + 1);
        if (!joins) runs.push_back({r, 0, row.begin, row.end});
        Run& run = runs.back();
        run.rows++;
        run.begin = std::min(run.begin, row.begin), run.last = std::max(run.last, row.end);
        before = row;
    }
}

// The runs' items: all pieces and KV heads together, or pieces alone, or KV heads alone too, until there are enough.
void find_items(Plan& p, int64_t units, bool pieces, bool heads) {
    p.items.clear();
    int64_t sums = 0;
    for (size_t i = 0; i < p.runs.size(); i++) {
        const Run& run = p.runs[i];
        const int64_t groups = p.groups(run), most = heads ? 1 : std::max<int64_t>(1, MAX_STATES / groups);
        const int64_t begin = pieces ? run.begin / PIECE : -1, end = pieces ? (run.last + PIECE - 1) / PIECE : 0;
        for (int64_t piece = begin; piece < end; piece++)
            for (int64_t first = 0; first < units; first += most) {
                int64_t count = std::min(most, units - first);
                p.items.push_back({(int64_t)i, first, count, piece, sums});
                sums += pieces ? count * groups : 0;
            }
    }
    if ((int64_t)p.sums.size() < sums) p.sums.resize(sums);
}

// Adds up the sums of items that computed one piece each.
void join_pieces(Plan& p) {
    for (size_t i = 0; i < p.items.size(); i++) {
        const Item& first = p.items[i];
        const Run& run = p.runs[first.run];
        if (first.piece != run.begin / PIECE) continue;
        for (int64_t s = 0; s < first.units * p.groups(run); s++) {
            Group& g = p.joined;
            begin_group(g, p, run, first.first + s / p.groups(run), s % p.groups(run));
            for (size_t k = i; k < p.items.size() && p.items[k].run == first.run; k++)
                if (p.items[k].first == first.first) {
                    g.piece().copy(p.sums[p.items[k].sums + s], g.columns * p.a.dim);
                    add_piece(g, p.a.dim);
                }
            end_group(g, p.out, p.a);
        }
    }
}

}  // namespace

template <typename T>
bool attention_on_tiles(const bf16* q, const T* keys, const T* values, bf16* out, const AttentionArgs& a) {
    if (a.dim % STEP != 0 || a.dim > MAX_DIM || !have_tiles()) return false;
    static thread_local Plan plan;
    Plan& p = plan;
    const int64_t shared = a.q_heads / a.kv_heads;
    p.a = a, p.q = q, p.out = out;
    // In int8 the scale is with those of the keys.
    p.unit = (sizeof(T) == 1 ? 1.0f : a.scale) * 1.44269504088896341f;
    p.heads = std::min(shared, COLUMNS), p.sets = (shared + p.heads - 1) / p.heads, p.per_group = COLUMNS / p.heads;
    find_runs(p.runs, MAX_GROUPS * p.per_group, a);
    const int64_t units = a.kv_heads * p.sets, enough = 2 * a.threads;
    find_items(p, units, false, false);
    const bool pieces = a.threads > 1 && (int64_t)p.items.size() < 2 * enough;
    if (pieces) find_items(p, units, true, false);
    if (pieces && (int64_t)p.items.size() < enough) find_items(p, units, true, true);
    const int64_t count = (int64_t)p.items.size();
    ShardedClaims claims(count, 1, a.threads);
    run_slots(count > 1 ? a.threads : 1, [&](int slot) {
        for (int64_t i, end; claims.next(slot, i, end);)
            run_item(p, p.items[i], i + 1 < count ? &p.items[i + 1] : nullptr, keys, values);
    });
    if (pieces) join_pieces(p);
    return true;
}

#else

template <typename T>
bool attention_on_tiles(const bf16*, const T*, const T*, bf16*, const AttentionArgs&) {
    return false;
}

#endif

template bool attention_on_tiles(const bf16*, const bf16*, const bf16*, bf16*, const AttentionArgs&);
template bool attention_on_tiles(const bf16*, const int8_t*, const int8_t*, bf16*, const AttentionArgs&);

}  // namespace specserve
