import pytest

from specserve.core.tree import EMPTY_TREE, NO_NODE, TokenTree
from specserve.spec.verify import NO_TOKEN, verify


def chain(*tokens):
    return TokenTree.chain(tokens, "suffix")


@pytest.mark.parametrize(
    ("draft", "sampled", "tokens", "accepted"),
    [
        ((), (5,), (5,), 0),
        ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4), 3),
        ((1, 2, 3), (1, 9, 3, 4), (1, 9), 1),
        ((1, 2, 3), (9, 2, 3, 4), (9,), 0),
        ((1,), (1, 7), (1, 7), 1),
    ],
)
def test_the_accepted_prefix_and_the_next_token(draft, sampled, tokens, accepted):
    result = verify(chain(*draft), sampled)
    assert (result.token_ids, result.num_accepted) == (tokens, accepted)
    assert result.rows == tuple(range(accepted + 1))


def test_trap_a19_the_correction_comes_from_the_rejected_row():
    assert verify(chain(1), (8, 99)).token_ids == (8,)


def test_a_row_without_a_token_ends_before_it():
    assert verify(chain(1, 2), (NO_TOKEN, 2, 3)).token_ids == ()
    result = verify(chain(1, 2), (1, 2, NO_TOKEN))
    assert (result.token_ids, result.num_accepted) == ((1, 2), 1), "one known token is left to compute"
    assert verify(chain(1, 2), (9, NO_TOKEN, NO_TOKEN)).token_ids == (9,)


def test_a_tree_is_walked_along_the_samples():
    #   root -> 0 (token 1) -> 2 (token 3)
    #        -> 1 (token 2) -> 3 (token 4), 4 (token 5)
    tree = TokenTree(
        (1, 2, 3, 4, 5),
        (2, 3, NO_NODE, NO_NODE, NO_NODE),
        (1, NO_NODE, NO_NODE, 4, NO_NODE),
        (1.0,) * 5,
        ("eagle",) * 5,
    )
    tree.check()
    result = verify(tree, (2, 0, 5, 0, 0, 6))
    assert (result.token_ids, result.num_accepted, result.rows) == ((2, 5, 6), 2, (0, 2, 5))
    assert verify(tree, (1, 9, 5, 0, 0, 6)).token_ids == (1, 9)


def test_samples_must_match_the_draft():
    with pytest.raises(ValueError, match="2 sampled"):
        verify(chain(1), (1,))
    assert verify(EMPTY_TREE, (3,)).num_accepted == 0
