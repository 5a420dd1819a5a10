"""Contiguous KV memory as in Orca: a buddy allocator of token slots, and how many slots a request reserves.

Orca is not public; Kwon et al. 2023 (section 6.1) build it with the buddy algorithm and three rules for how much of the
output's length is known beforehand. This follows them.
"""

from __future__ import annotations

import heapq

RULES = ("max", "pow2", "oracle")


def power_above(number: int) -> int:
    """The smallest power of two that is at least `number` (>= 1)."""
    return 1 << (number - 1).bit_length()


def reservation(rule: str, prompt: int, output: int, max_tokens: int) -> int:
    """Slots that one request reserves when it starts.

    "max": the model's whole context. "pow2": the prompt and the output rounded up to a power of two, so at most twice
    the output. "oracle": prompt and output exactly, which no system can know.
    """
    if rule == "max":
        return max_tokens
    if rule == "pow2":
        return min(prompt + power_above(output), max_tokens)
    if rule == "oracle":
        return prompt + output
    raise ValueError(f"rule {rule!r} must be one of {', '.join(RULES)}")


class BuddyAllocator:
    """Contiguous regions of slots 0 .. total - 1; sizes are powers of two, each region is aligned to its size.

    A total that is no power of two is cut into regions of falling powers, which never merge with each other.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"{total} slots hold nothing")
        self.total = total
        self.held: dict[int, int] = {}  # start -> size
        self._free: dict[int, list[int]] = {1 << i: [] for i in range(total.bit_length())}  # size -> starts, a heap
        start = 0
        for size in sorted(self._free, reverse=True):
            if total & size:
                self._free[size].append(start)
                start += size

    @property
    def num_held(self) -> int:
        """Slots in held regions, the allocator's rounding included."""
        return sum(self.held.values())

    def allocate(self, slots: int) -> int | None:
        """The start of a region of at least `slots` slots, or None when no free region is large enough."""
        wanted = power_above(slots)
        size = wanted
        while size in self._free and not self._free[size]:
            size *= 2
        if size not in self._free:
            return None
        start = heapq.heappop(self._free[size])
        while size > wanted:
            size //= 2
            heapq.heappush(self._free[size], start + size)
        self.held[start] = wanted
        return start

    def free(self, start: int) -> None:
        """Give a region back; it merges with its buddy as often as that is free too.

        Raises:
            KeyError: no region is held at `start`.
        """
        size = self.held.pop(start)
        while (buddy := start ^ size) in self._free[size]:
            self._free[size].remove(buddy)
            heapq.heapify(self._free[size])
            start, size = min(start, buddy), size * 2
        heapq.heappush(self._free[size], start)

    def check(self) -> None:
        """Assert the invariants: held and free regions tile all slots, aligned, and no two free buddies are left."""
        regions = [*self.held.items(), *((start, size) for size, starts in self._free.items() for start in starts)]
        end = 0
        for start, size in sorted(regions):
            assert start == end, "regions neither overlap nor leave gaps"
            assert start % size == 0
            end = start + size
        assert end == self.total
        for size, starts in self._free.items():
            assert all(start ^ size not in starts for start in starts), "free buddies are merged"
