// From rows of logits to token ids.
#pragma once
#include <cstdint>

namespace specserve {

// As sample.py packs it.
struct SampleRow {
    const float* logits;
    const uint32_t* mask;  // bit t % 32 of word t / 32: t is legal; null for all
    int64_t words;         // of the mask; tokens past it are not legal
    float* processed;      // what the token is drawn from, [vocab]; or null
    uint64_t position;
    uint64_t seed;
    const uint8_t* forbidden;  // [vocab], or null
    const int64_t* bias_ids;   // distinct
    const float* bias;
    int64_t num_bias;
    int64_t top_k;      // 0 for all
    double top_p;       // 1 for all
    double log_min_p;   // -inf for all
    float temperature;  // 1 for greedy
    int32_t noisy;      // 0 for greedy
};

// out[i]: the token of row i, NO_TOKEN (-1) or UNDECIDED (-2); see sample.cpp. Where `logits` is given, the rows' own
// are `stride` floats apart from there on.
void sample_rows(const SampleRow* rows, int64_t* out, int64_t count, int64_t vocab, int threads, const float* logits,
                 int64_t stride);

// Draws with Gumbel noise, without the noise of tokens that cannot win. The bits are those of ss_gumbel.
struct Draw {
    float value;
    int32_t id;
};

// The best of `best` and of (x[t] + noise of t, t) for every token t; of equal values the lowest id. No x is NaN.
void draw_all(uint64_t seed, uint64_t position, const float* x, int64_t vocab, Draw& best);

// The same for the tokens ids[i] with x[i], i in 0..count.
void draw_some(uint64_t seed, uint64_t position, const float* x, const int32_t* ids, int64_t count, Draw& best);

}  // namespace specserve
