"""Sampling: refused when it makes no sense, greedy by default, repeatable by seed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aaflow_langgraph.engine.sampling import Sampling, choose, log_probability
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.generation import derive_seed, make_generator

LOGITS = torch.tensor([0.0, 2.0, 1.0, -3.0, 1.5])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(sampling: Sampling, count: int = 400, logits: torch.Tensor = LOGITS) -> Counter[int]:
    source = generator(0)
    return Counter(choose(logits, sampling, source) for _ in range(count))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("max_tokens", None),
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_k", False),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_p", "most"),
        ("top_p", None),
        ("seed", -1),
        ("seed", 1 << 63),
        ("seed", 1.0),
        ("seed", True),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop", None),
        ("stop", 5),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Sampling(**{name: value})


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="max_new_tokens"):
        Sampling(max_new_tokens=3)  # type: ignore[call-arg]


def test_stop_strings_may_come_as_a_list_and_are_kept_as_a_tuple() -> None:
    sampling = Sampling(stop=["a", "b"])  # type: ignore[arg-type]
    assert sampling.stop == ("a", "b")
    assert hash(sampling) == hash(Sampling(stop=("a", "b")))


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert choose(LOGITS, Sampling(), None) == 1
    assert choose(torch.tensor([3.0, 3.0]), Sampling(), None) == 0
    assert make_generator(Sampling(), lambda: pytest.fail("greedy needs no seed")) is None


@pytest.mark.parametrize("sampling", [Sampling(temperature=5.0, top_k=1), Sampling(temperature=5.0, top_p=1e-9)])
def test_the_narrowest_sampling_is_greedy(sampling: Sampling) -> None:
    assert set(drawn(sampling, 50)) == {1}


def test_top_k_keeps_exactly_the_k_most_likely() -> None:
    assert set(drawn(Sampling(temperature=10.0, top_k=3))) == {1, 4, 2}
    assert set(drawn(Sampling(temperature=10.0, top_k=99))) == set(range(5))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(drawn(Sampling(temperature=1.0, top_p=0.5), logits=logits)) == {0}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.51), logits=logits)) == {0, 1}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.94), logits=logits)) == {0, 1, 2}
    assert set(drawn(Sampling(temperature=1.0, top_p=1.0), logits=logits)) == {0, 1, 2, 3}


def test_draws_follow_the_tempered_distribution() -> None:
    count = 4000
    for temperature in (0.5, 1.0, 3.0):
        found = drawn(Sampling(temperature=temperature), count)
        for token_id, expected in enumerate((LOGITS.double() / temperature).softmax(-1).tolist()):
            assert abs(found[token_id] / count - expected) < 4 * math.sqrt(expected * (1 - expected) / count) + 1e-3


@given(st.integers(0, 2**63 - 1))
def test_the_same_seed_draws_the_same_tokens(seed: int) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.95)
    a, b = generator(seed), generator(seed)
    assert [choose(LOGITS, sampling, a) for _ in range(5)] == [choose(LOGITS, sampling, b) for _ in range(5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_dtype_are_taken_and_left_alone(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    before = logits.clone()
    assert choose(logits, Sampling(temperature=1.0, top_k=2), generator(1)) in (1, 4)
    assert torch.equal(logits, before)


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((50,), float("-inf"))
    logits[[7, 9]] = 0.0
    assert set(drawn(Sampling(temperature=100.0), 60, logits)) == {7, 9}


def test_log_probability_is_of_the_untempered_distribution() -> None:
    expected = LOGITS.log_softmax(-1)
    for token_id in range(5):
        assert log_probability(LOGITS, token_id) == pytest.approx(float(expected[token_id]), abs=1e-6)
    assert sum(math.exp(log_probability(LOGITS, token_id)) for token_id in range(5)) == pytest.approx(1.0)


def test_a_given_seed_is_used_and_a_missing_one_is_asked_for() -> None:
    given_seed = make_generator(Sampling(temperature=1.0, seed=3), lambda: pytest.fail("a seed was given"))
    derived = make_generator(Sampling(temperature=1.0), lambda: 3)
    assert given_seed is not None
    assert derived is not None
    assert given_seed.initial_seed() == derived.initial_seed() == 3


def test_a_derived_seed_repeats_and_differs_with_everything_it_is_derived_from() -> None:
    base = ("p" * 64, (1, 2, 3), Sampling(temperature=1.0), "graph:node")
    seeds = [
        derive_seed(*base),
        derive_seed("q" * 64, *base[1:]),
        derive_seed(base[0], (1, 2, 4), *base[2:]),
        derive_seed(*base[:2], Sampling(temperature=0.9), base[3]),
        derive_seed(*base[:3], "graph:sibling"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(*base) == seeds[0]
    assert all(0 <= seed < 1 << 63 for seed in seeds)
