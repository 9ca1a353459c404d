"""The generated workload."""

from collections import Counter
from dataclasses import replace

from hicache_storage.replay.workload import Workload


def test_the_same_seed_makes_the_same_requests():
    assert list(Workload(seed=3, requests=300)) == list(Workload(seed=3, requests=300))


def test_another_seed_makes_other_requests_that_share_no_tokens():
    one, two = ({s for r in Workload(seed=seed, requests=50) for s, _ in r.segments} for seed in (1, 2))
    assert one.isdisjoint(two)


def test_the_stream_is_stable_across_versions():
    """Figures in documents were measured on it."""
    requests = list(Workload(seed=0, requests=40))
    assert requests[-1].arrival_ms == 9021
    assert sum(request.length for request in requests) == 116799


def test_a_longer_stream_begins_as_a_shorter_one():
    workload = Workload(requests=100)
    assert list(replace(workload, requests=200))[:100] == list(workload)


def test_requests_arrive_in_order_and_stay_within_bounds():
    workload = Workload(requests=1000)
    requests = list(workload)
    arrivals = [request.arrival_ms for request in requests]
    assert arrivals == sorted(arrivals)
    assert max(request.length for request in requests) <= workload.most_tokens
    assert all(len(request.segments) % 2 == 0 for request in requests)


def test_it_has_popular_prompts_long_conversations_and_branches():
    requests = list(Workload(requests=2000))
    prompts = Counter(request.segments[0] for request in requests)
    counts = [count for _, count in prompts.most_common()]
    assert counts[0] > 4 * counts[-1]
    assert max(len(request.segments) for request in requests) >= 10
    following = {}
    for request in requests:
        for end in range(3, len(request.segments), 2):
            following.setdefault(request.segments[:end], set()).add(request.segments[end])
    assert any(len(turns) > 1 for turns in following.values())
