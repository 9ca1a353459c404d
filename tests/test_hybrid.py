"""A prefix is restorable exactly when every pool holds what that prefix needs."""

from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.hybrid import HitPolicy, PoolPresence, leading_run, restorable_prefixes

presence = st.lists(st.booleans(), max_size=12)


@st.composite
def pools(draw):
    policy = draw(st.sampled_from([HitPolicy.ALL_PAGES, HitPolicy.TRAILING_PAGES]))
    return PoolPresence(draw(st.sampled_from("abc")), policy, draw(presence), window=draw(st.integers(1, 4)))


def can_restore(pool, length):
    """What the policy says, word for word."""
    if pool.policy is HitPolicy.ALL_PAGES:
        needed = range(length)
    else:
        needed = range(max(0, length - pool.window), length)
    return all(i < len(pool.present) and pool.present[i] for i in needed)


@given(st.integers(0, 12), st.lists(pools(), max_size=4))
def test_restorable_prefixes_equal_brute_force(kv_pages, sidecars):
    found = restorable_prefixes(kv_pages, sidecars)
    expected = [n for n in range(1, kv_pages + 1) if all(can_restore(pool, n) for pool in sidecars)]
    assert list(found.prefixes) == expected
    assert found.longest == max(expected, default=0)


@given(st.integers(0, 12), pools())
def test_a_pools_boundary_is_the_longest_prefix_it_serves_alone(kv_pages, pool):
    served = [n for n in range(1, kv_pages + 1) if can_restore(pool, n)]
    assert restorable_prefixes(kv_pages, [pool]).boundaries[pool.name] == max(served, default=0)


@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 4), presence)
def test_block_groups_report_whole_groups_and_never_limit_the_prefix(kv_pages, group, block, present):
    pool = PoolPresence("groups", HitPolicy.BLOCK_GROUPS, present, block_pages=block, group_pages=group)
    found = restorable_prefixes(kv_pages, [pool])
    assert found.longest == kv_pages
    assert found.boundaries["groups"] == leading_run(present) // group * block


def test_a_window_pool_leaves_holes():
    pool = PoolPresence("swa", HitPolicy.TRAILING_PAGES, [False, True, True, False, True], window=2)
    assert restorable_prefixes(5, [pool]).prefixes == (3,)
    pool = PoolPresence("mamba", HitPolicy.TRAILING_PAGES, [False, True, False, True], window=1)
    assert restorable_prefixes(5, [pool]).prefixes == (2, 4)
