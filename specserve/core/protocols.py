"""What a lower level needs from a higher one, as Protocols. Standard library only: arrays are Any, described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specserve.core.plan import BlockCopy, StepPlan, StepResult
from specserve.core.request import Request
from specserve.core.tree import TokenTree

# numpy int32 [rows, ceil(vocab_size / 32)]: bit t % 32 of word t // 32 is 1 where token t is legal. C-contiguous.
Bitmask = Any


class Matcher(Protocol):
    """The grammar state of one sequence. Knows token ids only; end tokens are part of what it allows."""

    def fill(self, mask: Bitmask, row: int) -> None:
        """Write the legal next tokens into mask[row]. After the grammar's end only end tokens are legal."""

    def accept(self, token: int) -> bool:
        """Advance by one token. False, and nothing changes, if it is illegal."""

    def rollback(self, n: int) -> None:
        """Undo the last n accepted tokens."""

    def fork(self) -> Matcher:
        """An independent copy at the same state."""

    @property
    def terminated(self) -> bool:
        """The value is complete and its end token was accepted."""

    @property
    def complete(self) -> bool:
        """Nothing but an end token may follow."""


@dataclass(slots=True)
class DraftContext:
    """What a drafter may know of one request.

    Attributes:
        budget: most tokens to draft this step (>= 1).
        matcher: the grammar state at the committed tokens, or None; a drafter that advances it rolls it back.
    """

    request: Request
    budget: int
    matcher: Matcher | None = None


class Drafter(Protocol):
    """Proposes tokens. Never changes which tokens come, only how fast (drafter-invariant verification)."""

    name: str

    def propose(self, contexts: Sequence[DraftContext]) -> list[TokenTree]:
        """A tree for each context, of at most its budget of nodes; the empty tree is a normal answer."""

    def forget(self, request_id: str) -> None:
        """Drop whatever is kept for a request that ended or was preempted. Unknown ids are ignored."""


@dataclass(slots=True)
class DraftRows:
    """Rows of one request in one forward of the draft model.

    Attributes:
        token_ids, start, block_ids: as in ScheduledRequest, on the draft's own pool.
        sample: whether the last row is sampled.
        drafted: tokens drafted so far this step (the history after the committed tokens, for penalties).
        mask: Bitmask of one row for the sampled position, or None.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: Sequence[int]
    sample: bool
    drafted: tuple[int, ...] = ()
    mask: Bitmask | None = None


class DraftBackend(Protocol):
    """The draft model as its drafter sees it."""

    def draft(self, rows: Sequence[DraftRows]) -> list[tuple[int, float]]:
        """Run one forward; for each entry (token, its probability), (-1, 0.0) where it is not sampled.

        Tokens are drawn with the same logits pipeline, seed and noise as the target's, which is what makes
        agreement likely.
        """

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of the draft's own pool (copy-on-write) before the next `draft`."""


class Executor(Protocol):
    """Runs plans. One call to `forward`, then one to `sample`, for each plan, in order."""

    def forward(self, plan: StepPlan) -> None:
        """KV moves, then the target's forward. May return before it is done."""

    def sample(self, plan: StepPlan, masks: Mapping[str, Bitmask]) -> StepResult:
        """Sample and verify the rows. `masks` has, for each guided request with logits, its [num_logits] rows."""

    def close(self) -> None:
        """Free everything; idempotent."""
