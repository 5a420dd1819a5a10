// Fetches what follows a panel in memory while the panel is at work, a little at each of `steps` steps.
#pragma once
#include "gemm.h"

namespace specserve {

class Following {
  public:
    Following(const Product& p, int64_t panel, int64_t steps)
        : at_(p.weights(panel) + p.w.panel_bytes()), bytes_((p.w.panel_bytes() / steps + 63) / 64 * 64) {}

    // No branch but the loop's: a guess that goes wrong keeps the tiles waiting. It may go past the next panel.
    void step() {
        for (const uint8_t* end = at_ + bytes_; at_ < end; at_ += 64) __builtin_prefetch(at_, 0, 2);
    }

  private:
    const uint8_t* at_;
    int64_t bytes_;
};

}  // namespace specserve
