// The Llama family from token ids to logits: every row is one token of one sequence; see models/llama.py for the same in
// single operations. The residual stream is float32; what a product takes is made from it in one go with the norm, and
// what a product gives goes on where it is made: into the residual, through the gate, into the choice of the best token.
#include "forward.h"

#include <cmath>

#include "attention.h"
#include "half.h"
#include "operand.h"
#include "rope.h"
#include "scratch.h"
#include "sinks.h"

namespace specserve {

namespace {

constexpr int64_t ALONE = 8192;  // elements that one thread is done with sooner than another one wakes up

struct Run {
    const Model& m;
    const Step& s;
    Scratch b;
    int64_t rows;
    const int64_t* positions;
    const int32_t* row_sequence;
    int threads;
    const int64_t* slots = s.slots;
    bool narrowed = false;

    // Of some of its rows.
    Run part(int64_t first, int64_t count) const {
        const int64_t q = m.q_heads * m.dim;
        Run of = *this;
        of.b.residual += first * m.hidden, of.b.q += first * q, of.b.attended += first * q;
        of.positions += first, of.row_sequence += first, of.slots += first, of.rows = count;
        return of;
    }
    // body(part) for all rows, some after the others: as many as the caches hold what is made of them.
    template <typename Body>
    void parts(const Body& body) const {
        const int64_t most = part_rows(threads);
        for (int64_t r = 0; r < rows; r += most) body(part(r, std::min(most, rows - r)));
    }
    bf16* keys(int64_t layer) const { return s.key_cache + layer * s.layer_stride; }
    bf16* values(int64_t layer) const { return s.value_cache + layer * s.layer_stride; }
    // body(row) for all rows of `width` elements.
    template <typename Body>
    void each(int64_t width, const Body& body) const {
        if (rows * width <= ALONE || threads <= 1) {
            for (int64_t r = 0; r < rows; r++) body(r);
            return;
        }
        ShardedClaims claims(rows, ALONE / 4 / width + 1, threads);
        run_slots(threads, [&](int slot) {
            for (int64_t r, end; claims.next(slot, r, end);)
                for (; r < end; r++) body(r);
        });
    }
};

void product(const Run& run, const Linear& w, const Operand& x, Sink sink, float* to, int64_t stride,
             const Linear* next = nullptr) {
    const Output o{w, to, stride, next, run.b.inner, run.b.gated};
    gemm(Product{w, x, run.rows, sink, &o, nullptr, 0}, run.threads);
}

void embed(const Run& run) {
    const Model& m = run.m;
    run.each(m.hidden, [&](int64_t r) {
        float* to = run.b.residual + r * m.hidden;
        const int64_t token = run.s.token_ids[r];
        for (int64_t i = 0; i < m.hidden; i += W) {
            if (m.embedding_kind == F32) {
                store(to + i, load((const float*)m.embedding + token * m.hidden + i));
            } else if (m.embedding_kind == BF16) {
                store(to + i, load((const bf16*)m.embedding + token * m.hidden + i));
            } else {
                const uint8_t* block = m.embedding + (token * m.hidden + i) / BLOCK * 34;
                uint16_t scale;
                std::memcpy(&scale, block, 2);
                const int8_t* q = (const int8_t*)block + 2 + i % BLOCK;
                for (int64_t j = 0; j < W; j++) to[i + j] = float_of(scale) * (float)q[j];
            }
        }
    });
}

void norm(const Run& run, const Linear& w, const float* weight) {
    run.each(run.m.hidden, [&](int64_t r) {
        norm_row(run.b.inputs, w, r, run.b.residual + r * run.m.hidden, weight, (float)run.m.eps);
    });
}

AttentionArgs attention_args(const Run& run, const Layer& layer) {
    const Model& m = run.m;
    AttentionArgs a{};
    a.rows = run.rows, a.q_heads = m.q_heads, a.kv_heads = m.kv_heads, a.dim = m.dim;
    a.block_size = run.s.block_size, a.q_stride = m.q_heads * m.dim, a.table_stride = run.s.table_stride;
    a.tables = run.s.tables, a.row_sequence = run.row_sequence, a.positions = run.positions;
    a.scale = (float)m.scale, a.window = layer.window, a.threads = run.threads;
    return a;
}

// Only rows whose logits are wanted go through the rest of the last layer.
void narrow(Run& run) {
    const int64_t hidden = run.m.hidden, q = run.m.q_heads * run.m.dim, count = run.s.logit_count;
    const Scratch& b = run.b;
    for (int64_t i = 0; i < count; i++) {
        const int64_t r = run.s.logit_rows[i];
        b.positions[i] = run.positions[r], b.row_sequence[i] = run.row_sequence[r];
        std::memcpy(b.narrow + i * hidden, b.residual + r * hidden, hidden * sizeof(float));
        std::memcpy(b.attended + i * q, b.q + r * q, q * sizeof(bf16));
    }
    std::swap(run.b.residual, run.b.narrow);
    std::swap(run.b.attended, run.b.q);
    run.rows = count, run.positions = b.positions, run.row_sequence = b.row_sequence, run.narrowed = true;
}

// Queries, keys and values of a layer; the latter two into its caches.
void project(const Run& run, int64_t index) {
    const Model& m = run.m;
    const Layer& layer = m.layers[index];
    norm(run, layer.qkv, layer.input_norm);
    product(run, layer.qkv, run.b.inputs.operand(layer.qkv), store_sums, run.b.qkv, layer.qkv.n);
    RopeArgs rope{m.q_heads, {m.kv_heads, run.s.block_size, m.dim}, layer.qkv.n, m.q_heads * m.dim, run.positions, run.slots,
                  run.s.cos, run.s.sin, (float)m.eps};
    run.each(layer.qkv.n, [&](int64_t r) {
        rope_store_rows(run.b.qkv, run.b.q, layer.q_norm, layer.k_norm, run.keys(index), run.values(index), rope, r, r + 1);
    });
}

void attend(const Run& run, int64_t index) {
    const Layer& layer = run.m.layers[index];
    attention_bf16(run.b.q, run.keys(index), run.values(index), run.b.attended, attention_args(run, layer));
    Operand x = Operand::of(run.b.attended, layer.output.k);
    if (layer.output.takes() != Takes::BFLOAT16) {
        run.each(layer.output.k, [&](int64_t r) {
            make_row(run.b.inputs, layer.output, r,
                     [&](int64_t i) { return load(run.b.attended + r * layer.output.k + i); });
        });
        x = run.b.inputs.operand(layer.output);
    }
    product(run, layer.output, x, add_sums, run.b.residual, run.m.hidden);
}

void mlp(const Run& run, const Layer& layer) {
    norm(run, layer.gate_up, layer.mlp_norm);
    product(run, layer.gate_up, run.b.inputs.operand(layer.gate_up), gate_sums, nullptr, 0, &layer.down);
    if (layer.down.takes() != Takes::BFLOAT16)
        run.each(layer.down.k, [&](int64_t r) {
            make_row(run.b.inner, layer.down, r, [&](int64_t i) { return load(run.b.gated + r * layer.down.k + i); });
        });
    product(run, layer.down, run.b.inner.operand(layer.down), add_sums, run.b.residual, run.m.hidden);
}

void keep(const Run& run, int64_t index) {
    const int64_t hidden = run.m.hidden;
    for (int64_t i = 0; i < run.s.num_kept; i++) {
        if (run.s.kept_layers[i] != index) continue;
        float* to = run.s.kept + i * run.s.num_kept_rows * hidden;
        for (int64_t r = 0; r < run.s.num_kept_rows; r++)
            std::memcpy(to + r * hidden, run.b.residual + run.s.kept_rows[r] * hidden, hidden * sizeof(float));
    }
}

// The greatest logit that a thread has seen of each row.
struct Choice {
    const Linear& w;
    Best* best;  // [slots, rows]
    int64_t rows, choices;
};

void choose(const void* context, int slot, const float* sums, int64_t row, int64_t rows, int64_t column) {
    const Choice& c = *(const Choice*)context;
    const int64_t end = std::min(PANEL, c.choices - column);
    for (int64_t r = 0; r < rows; r++) {
        Best& best = c.best[slot * c.rows + row + r];
        vfloat low = with_bias(sums + r * PANEL, c.w, column), high = with_bias(sums + r * PANEL + W, c.w, column + W);
        const vint less = (low < best.value) & (high < best.value);  // of NaN nothing is
        if (end == PANEL && sum(less ? vfloat{} : splat(1.0f)) == 0.0f) continue;
        for (int64_t i = 0; i < end; i++) {
            float value = i < W ? low[i] : high[i - W];
            if (value != value) value = INFINITY;  // as little finite, and nothing is greater
            if (value > best.value || (value == best.value && column + i < best.id)) best = {value, column + i};
        }
    }
}

void pick(const Run& run) {
    const int64_t count = run.s.logit_count;
    for (int64_t i = 0; i < count * run.threads; i++) run.b.best[i] = {-INFINITY, INT64_MAX};
    Choice c{run.m.head, run.b.best, count, run.s.choices};
    gemm(Product{run.m.head, run.b.inputs.operand(run.m.head), count, choose, &c, nullptr, 0}, run.threads);
    for (int64_t r = 0; r < count; r++) {
        Best best = run.b.best[r];
        for (int64_t t = 1; t < run.threads; t++) {
            const Best& other = run.b.best[t * count + r];
            if (other.value > best.value || (other.value == best.value && other.id < best.id)) best = other;
        }
        run.s.best[r] = std::isfinite(best.value) ? best.id : -1;
    }
}

void finish(Run& run) {
    if (run.s.logit_count == 0) return;
    norm(run, run.m.head, run.m.norm);
    if (run.s.best && !run.s.sampled) pick(run);
    if (!run.s.logits) return;
    const Output o{run.m.head, run.s.logits, run.s.logits_stride, nullptr, {}, nullptr};
    gemm(Product{run.m.head, run.b.inputs.operand(run.m.head), run.rows, store_sums, &o, run.s.panels, run.s.num_panels},
         run.threads);
    if (run.s.sampled)
        sample_rows(run.s.sampled, run.s.best, run.s.logit_count, run.s.choices, run.threads, run.s.logits,
                    run.s.logits_stride);
}

}  // namespace

}  // namespace specserve

using namespace specserve;

extern "C" {
// Bytes of scratch for `rows` rows, of which `logits` have logits.
int64_t ss_forward_scratch(const Model* m, int64_t rows, int64_t logits, int64_t threads) {
    return Scratch(*m, rows, logits, threads, nullptr).bytes;
}

void ss_forward(const Model* m, const Step* s) {
    Run run{*m, *s, Scratch(*m, s->rows, s->logit_count, s->threads, s->scratch), s->rows, s->positions, s->row_sequence,
            (int)s->threads};
    if (s->hidden_in)
        std::memcpy(run.b.residual, s->hidden_in, s->rows * m->hidden * sizeof(float));
    else
        embed(run);
    const bool whole = s->last_layer == m->num_layers && !s->hidden_out;
    for (int64_t i = s->first_layer; i < s->last_layer; i++) {
        bool kept = false;
        for (int64_t j = 0; j < s->num_kept; j++) kept |= s->kept_layers[j] == i;
        const bool last = whole && !kept && i + 1 == s->last_layer;
        auto rest = [&](const Run& part) { attend(part, i), mlp(part, m->layers[i]); };
        run.parts([&](const Run& part) {
            project(part, i);
            if (!last) rest(part);  // keys of later rows are of no use to it
        });
        if (last) narrow(run), run.parts(rest);
        if (kept) keep(run, i);
    }
    if (s->hidden_out) std::memcpy(s->hidden_out, run.b.residual, s->rows * m->hidden * sizeof(float));
    if (s->last_layer < m->num_layers) return;
    if (!run.narrowed) narrow(run);
    finish(run);
}
}
