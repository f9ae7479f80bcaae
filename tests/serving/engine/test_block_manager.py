import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.core.manifest import read_manifest
from sharp.serving.engine.block_manager import BlockHashes, BlockManager, first_hash


def hashes(token_ids, salt=b""):
    return BlockHashes(salt, 4).up_to(list(token_ids), len(token_ids))


def hold(blocks, number, token_ids):
    """Share the cached blocks of a prompt, compute the rest, and return how many were shared, as the engine does."""
    chain = hashes(token_ids)
    shared = blocks.cached(chain)
    blocks.share(number, shared)
    blocks.grow(number, len(token_ids))
    blocks.register(number, len(shared), chain[len(shared) :])
    return len(shared)


def test_low_blocks_are_handed_out_first():
    blocks = BlockManager(4, 16)
    blocks.grow(1, 33)
    blocks.check_integrity()
    assert (blocks.table(1).tolist(), blocks.free, blocks.usage) == ([0, 1, 2], 1, 0.75)


def test_a_second_sequence_holds_the_same_full_blocks():
    blocks = BlockManager(8, 4)
    assert hold(blocks, 1, range(11)) == 0
    assert hold(blocks, 2, range(9)) == 2
    assert blocks.table(1)[:2].tolist() == blocks.table(2)[:2].tolist()
    assert blocks.table(1)[2] != blocks.table(2)[2]  # a block that is not full is never shared
    blocks.release(1)
    blocks.check_integrity()
    assert blocks.free == 5
    blocks.release(2)
    assert (blocks.free, hold(blocks, 3, range(8))) == (8, 2)


def test_the_least_recently_used_content_goes_first_and_the_end_of_a_sequence_before_its_start():
    blocks = BlockManager(4, 4)
    hold(blocks, 1, range(8))
    blocks.release(1)
    hold(blocks, 2, range(100, 108))
    blocks.release(2)
    blocks.grow(3, 4)  # the third sequence takes the older sequence's second block
    assert len(blocks.cached(hashes(range(8)))) == 1
    assert len(blocks.cached(hashes(range(100, 108)))) == 2
    blocks.check_integrity()


def test_blocks_without_content_are_taken_before_cached_ones():
    blocks = BlockManager(3, 4)
    hold(blocks, 1, range(4))
    blocks.grow(2, 4)
    blocks.release(1)
    blocks.release(2)
    blocks.grow(3, 8)
    assert len(blocks.cached(hashes(range(4)))) == 1


def test_a_hash_is_over_everything_before_it():
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes([9, 2, 3, 4, 5, 6, 7, 8])[1]
    assert hashes([1, 2, 3, 4]) != hashes([1, 2, 3, 4], b"salt")


def test_models_norms_and_salts_share_nothing(counting):
    manifest = read_manifest(counting)
    other_norm = manifest.model_copy(update={"norm": manifest.norm.model_copy(update={"alpha": 2.0})})
    other_model = manifest.model_copy(update={"name": "other"})
    starts = {first_hash(*each) for each in ((manifest, ""), (manifest, "salt"), (other_norm, ""), (other_model, ""))}
    assert len(starts) == 4


def test_what_is_forgotten_is_not_found():
    blocks = BlockManager(4, 4)
    hold(blocks, 1, range(8))
    blocks.unregister(1)
    blocks.check_integrity()
    assert blocks.cached(hashes(range(8))) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda blocks: blocks._free.update({0: None}), "free"),
        (lambda blocks: blocks._free.popitem(), "free"),
        (lambda blocks: blocks._references.__setitem__(1, 2), r"blocks \[1\] have wrong reference counts"),
        (lambda blocks: blocks._tables.pop(1), "wrong reference counts"),
        (lambda blocks: blocks._hash_of.clear(), "hashes and blocks"),
    ],
)
def test_broken_accounting_is_found(damage, message):
    blocks = BlockManager(4, 4)
    hold(blocks, 1, range(8))
    blocks.check_integrity()
    damage(blocks)
    with pytest.raises(RuntimeError, match=message):
        blocks.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(1, 12), st.integers(0, 3)), max_size=30))
def test_blocks_are_never_lost_and_never_hold_two_things(operations):
    blocks = BlockManager(6, 4)
    for number, start, length, end in operations:
        if number in blocks._tables:
            blocks.release(number)
        else:
            token_ids = [start] * (length - 1) + [end]
            shared = blocks.cached(hashes(token_ids))
            if blocks.missing(number, length) - len(shared) <= blocks.free_without(shared):
                hold(blocks, number, token_ids)
        blocks.check_integrity()
    for number in range(5):
        blocks.release(number)
    assert blocks.free == 6
