// Draws with Gumbel noise, without the noise of tokens that cannot win. The bits are those of ss_gumbel.
#pragma once
#include <cstdint>

namespace specserve {

struct Draw {
    float value;
    int32_t id;
};

// The best of `best` and of (x[t] + noise of t, t) for every token t; of equal values the lowest id. No x is NaN.
void draw_all(uint64_t seed, uint64_t position, const float* x, int64_t vocab, Draw& best);

// The same for the tokens ids[i] with x[i], i in 0..count.
void draw_some(uint64_t seed, uint64_t position, const float* x, const int32_t* ids, int64_t count, Draw& best);

}  // namespace specserve
