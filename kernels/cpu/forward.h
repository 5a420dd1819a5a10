// One forward of a model of the Llama family in one call. The structures are mirrored field by field in forward.py:
// pointers and 64-bit numbers only, but for the floats that say so.
#pragma once
#include "gemm.h"
#include "sample.h"

namespace specserve {

struct Layer {
    const float* input_norm;  // [hidden]
    Linear qkv;               // outputs q, k, v
    const float *q_norm, *k_norm;  // [dim] or null
    Linear output;
    const float* mlp_norm;
    Linear gate_up;  // outputs 16 of gate, 16 of up, and so on
    Linear down;
    int64_t window;  // positions a row sees, 0 for all
};

struct Model {
    int64_t num_layers, hidden, inner, q_heads, kv_heads, dim, vocab;
    int64_t embedding_kind;    // F32, BF16, or Q8 as rows of GGUF's Q8_0
    const uint8_t* embedding;  // [vocab, hidden], row after row
    const Layer* layers;
    const float* norm;
    Linear head;
    double eps, scale;  // of the norms; of the scores
};

// Rows of a sequence are in the order of their positions, and no sequence reads keys that another one computes in the
// same step: the many rows of a step go through a layer in parts.
struct Step {
    int64_t rows, logit_count;
    const int64_t *token_ids, *positions, *slots;  // [rows]
    const int32_t* row_sequence;                   // [rows]
    const int32_t* tables;                         // [sequences, table_stride]
    int64_t table_stride;
    const int64_t* logit_rows;  // [logit_count]
    bf16 *key_cache, *value_cache;
    int64_t layer_stride, block_size;  // elements from one layer's cache to the next; tokens of a block
    const float *cos, *sin;            // [positions, dim / 2]
    int64_t first_layer, last_layer;   // those from first_layer to before last_layer are run
    const float* hidden_in;            // [rows, hidden] to begin with in place of the embedding, or null
    float* hidden_out;                 // [rows, hidden] after the last layer, before the last norm, or null
    int64_t num_kept;                  // layers after which hidden states are kept
    const int64_t* kept_layers;        // [num_kept]
    int64_t num_kept_rows;
    const int64_t* kept_rows;  // [num_kept_rows]
    float* kept;               // [num_kept, num_kept_rows, hidden]
    int64_t num_panels;        // panels of the head that are computed, or 0 for all
    const int64_t* panels;     // [num_panels]
    float* logits;             // [logit_count, 32 * panels], or null
    int64_t logits_stride;
    int64_t* best;    // [logit_count]: id of the greatest logit below `choices`, -1 where it is not finite; or null
    int64_t choices;
    const SampleRow* sampled;  // [logit_count]: how `best` is drawn from the logits, which are wanted then; or null
    uint8_t* scratch;
    int64_t threads;
};

}  // namespace specserve
