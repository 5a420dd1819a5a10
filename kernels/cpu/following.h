// Fetches what follows a panel in memory to the second cache while the panel is at work, a little at each of `steps` steps:
// two lines of each of its pages in turn, as the hardware then goes ahead in all of them.
#pragma once
#include "gemm.h"

namespace specserve {

class Following {
  public:
    Following(const Product& p, int64_t panel, int64_t steps)
        : at_(p.weights(panel) + p.w.panel_bytes()), turns_((p.w.panel_bytes() / steps + PAIR - 1) / PAIR) {
        const int64_t pages = (p.w.panel_bytes() + PAGE - 1) / PAGE;
        stride_ = (p.w.panel_bytes() / pages + PAIR - 1) / PAIR * PAIR;
        end_ = at_ + stride_ * pages;
        back_ = stride_ * pages - PAIR;
    }

    // No branch but the loop's: a guess that goes wrong keeps the tiles waiting. It may go past the next panel.
    void step() {
        for (int64_t i = 0; i < turns_; i++) {
            __builtin_prefetch(at_, 0, 2);
            __builtin_prefetch(at_ + 64, 0, 2);
            at_ += stride_;
            const bool over = at_ >= end_;
            at_ -= over ? back_ : 0;
            end_ += over ? PAIR : 0;
        }
    }

  private:
    static constexpr int64_t PAGE = 4096, PAIR = 128;
    const uint8_t *at_, *end_;
    int64_t turns_, stride_, back_;
};

}  // namespace specserve
