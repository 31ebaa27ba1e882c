"""Generation: stop strings, limits, seeds, log-probabilities, streaming, chat turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aaflow_langgraph import Generation, KVBroker, Sampling, TransformersEngine
from aaflow_langgraph.results import TokenDelta
from tests import tiny
from tests.oracle import ALPHABET, prose, stock_of

PAIRS = [a + b for a in "aeiou" for b in "bcdfghjklmn"]


def paired_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with 55 tokens of two letters, so that a stop string may begin or end inside a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate((*tiny.SPECIAL, *alphabet, *PAIRS))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in PAIRS]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = tiny.CHATML
    return fast


@pytest.fixture(scope="module")
def paired_engine() -> TransformersEngine:
    """Every output is printable: only letters and pairs can win, so that texts are easy to cut."""
    tokenizer = paired_tokenizer()
    model = tiny.model("llama")
    letters = [tokenizer.convert_tokens_to_ids(token) for token in (*ALPHABET, *PAIRS)]
    head = model.get_output_embeddings().weight.data
    head[[n for n in range(head.shape[0]) if n not in letters]] = 0.0
    return TransformersEngine(model, tokenizer)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_stop_string_cuts_the_text_exactly_and_the_handle_names_what_was_shown(
    paired_engine: TransformersEngine, raw: bool, deterministic: bool
) -> None:
    stock = stock_of(paired_engine)
    with KVBroker.open(paired_engine, pool_bytes=4 << 20) as broker:
        free = broker.generate(prose(30), raw=raw, sampling=Sampling(max_tokens=24), deterministic=deterministic)
        assert len(free.text) > 12
        for at, size in ((0, 1), (1, 2), (2, 4), (3, 3), (5, 1), (8, 4)):
            stop = free.text[at : at + size]
            expected = free.text[: free.text.find(stop)]
            shown: list[str] = []
            cut = broker.generate(
                prose(30),
                raw=raw,
                sampling=Sampling(max_tokens=24, stop=("never", stop)),
                deterministic=deterministic,
                on_token=lambda delta, shown=shown: shown.append(delta.text),
            )
            assert cut.text == expected == "".join(shown)
            assert cut.finish_reason == "stop"
            assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
            # What the handle names decodes to what was shown, and whoever goes on reads exactly that.
            ids = broker.token_ids(cut.handle)
            turn = broker.recipe(cut.handle).turns[-1].content
            assert broker.engine.frame.decode(ids[turn.start : turn.stop]) == expected
            follow = broker.generate("ok", parent=cut.handle, raw=True, sampling=Sampling(max_tokens=6))
            prompt = broker.token_ids(follow.handle)[: follow.usage.num_context]
            assert prompt[: len(ids)] == ids
            assert follow.token_ids == stock.greedy(prompt, 6)
        assert broker.check() == []


def test_a_stop_string_that_never_comes_changes_nothing(paired_engine: TransformersEngine) -> None:
    with KVBroker.open(paired_engine, pool_bytes=4 << 20) as broker:
        plain = broker.generate(prose(30), sampling=Sampling(max_tokens=12))
        free = broker.generate(prose(30), sampling=Sampling(max_tokens=12, stop=("ZZZ",)))
        assert (free.text, free.token_ids, free.finish_reason) == (plain.text, plain.token_ids, plain.finish_reason)
        assert free.handle == plain.handle


@pytest.mark.parametrize("count", [1, 2, 300])
def test_max_tokens_is_exact(open_broker: Callable[..., KVBroker], count: int) -> None:
    broker = open_broker("llama")
    result = broker.generate(prose(20, seed=1), raw=True, sampling=Sampling(max_tokens=count))
    expected = stock_of(broker.engine).greedy(broker.engine.frame.encode_text(prose(20, seed=1), what="x"), count)
    assert result.token_ids == expected
    assert result.finish_reason == ("length" if len(expected) == count else "stop")
    assert result.usage.num_decoded == len(expected)


def test_a_turn_that_ends_by_itself_says_so_and_goes_on_right() -> None:
    """The end-of-turn token is not text and not counted; its id is the template's own in the handle."""
    model, tokenizer = tiny.model("llama"), tiny.tokenizer()
    model.get_output_embeddings().weight.data[tokenizer.eos_token_id] *= 3  # ends most of its turns by itself
    engine = TransformersEngine(model, tokenizer)
    found = 0
    with KVBroker.open(engine, pool_bytes=4 << 20) as broker:
        for seed in range(8):
            result = broker.generate(prose(8, seed=seed), sampling=Sampling(max_tokens=40))
            ids = broker.token_ids(result.handle)
            assert ids[-2:] == engine.frame.encode_text("<|im_end|>\n", what="x")
            prompt = ids[: result.usage.num_context]
            assert result.token_ids == stock_of(engine).greedy(prompt, 40)
            if result.finish_reason == "stop":
                found += 1
                assert tokenizer.eos_token_id not in result.token_ids
                follow = broker.generate("And?", parent=result.handle, sampling=Sampling(max_tokens=5))
                context = broker.token_ids(follow.handle)[: follow.usage.num_context]
                assert context[: len(ids)] == ids
                assert follow.token_ids == stock_of(engine).greedy(context, 5)
                assert follow.usage.reuse == "handle"
        assert broker.check() == []
    assert found > 3


def test_equal_seeds_draw_equal_tokens_whatever_is_cached(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(40)).handle
    drawn = {}
    for seed in (1, 2):
        sampling = Sampling(max_tokens=24, temperature=1.0, seed=seed)
        first = broker.generate("Hi", parent=docs, sampling=sampling)
        broker.evict(first.handle)
        broker.evict(docs)
        assert broker.generate("Hi", parent=docs, sampling=sampling).token_ids == first.token_ids
        drawn[seed] = first.token_ids
    assert drawn[1] != drawn[2]


def test_without_a_seed_a_repeat_repeats_and_siblings_differ(open_broker: Callable[..., KVBroker]) -> None:
    """A node that runs again after an interrupt gives the same tokens; parallel tasks of one node do not."""
    broker = open_broker("llama")
    docs = broker.prefill(prose(40)).handle
    other = broker.prefill(prose(41)).handle
    sampling = Sampling(max_tokens=24, temperature=1.0)

    def draw(**options: object) -> tuple[int, ...]:
        merged = {"parent": docs, "sampling": sampling, "seed_path": "a", **options}
        return broker.generate("Hi", **merged).token_ids  # type: ignore[arg-type]

    assert draw() == draw()
    different = [
        draw(),
        draw(seed_path="b"),
        draw(parent=other),
        draw(sampling=Sampling(max_tokens=24, temperature=1.1)),
    ]
    assert len(set(different)) == len(different)


def test_greedy_needs_no_seed(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    results = {broker.generate("Hi", seed_path=path, sampling=Sampling(max_tokens=8)).token_ids for path in "abc"}
    assert len(results) == 1


def test_log_probabilities_are_those_of_the_stock_model(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(60)).handle
    for sampling in (
        Sampling(max_tokens=8, logprobs=True),
        Sampling(max_tokens=8, logprobs=True, temperature=1.5, top_k=20, seed=5),
    ):
        deltas: list[TokenDelta] = []
        result = broker.generate("Hi", parent=docs, sampling=sampling, on_token=deltas.append)
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids)
        assert [d.logprob for d in deltas if d.token_id is not None] == list(result.logprobs)
        ids = list(broker.token_ids(result.handle)[: result.usage.num_context])
        for token_id, logprob in zip(result.token_ids, result.logprobs, strict=True):
            expected = stock_of(broker.engine).logits(ids).log_softmax(-1)[token_id]
            assert logprob == pytest.approx(float(expected), abs=1e-4)
            ids.append(token_id)
    assert broker.generate("Hi", parent=docs, sampling=Sampling(max_tokens=2)).logprobs is None


def test_a_stream_shows_every_token_once_and_ends_with_the_generation(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    *deltas, last = broker.stream("Hi", sampling=Sampling(max_tokens=12))
    assert isinstance(last, Generation)
    assert all(isinstance(delta, TokenDelta) for delta in deltas)
    assert tuple(d.token_id for d in deltas if d.token_id is not None) == last.token_ids  # type: ignore[union-attr]
    assert "".join(d.text for d in deltas) == last.text  # type: ignore[union-attr]
    assert broker.generate("Hi", sampling=Sampling(max_tokens=12)).text == last.text


def test_usage_adds_up(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    prefilled = broker.prefill(prose(300))
    cold = prefilled.usage
    assert (cold.num_reused, cold.num_prefilled, cold.num_decoded, cold.reuse) == (0, cold.num_context, 0, "none")
    warm = broker.generate("Hi", parent=prefilled.handle, sampling=Sampling(max_tokens=4)).usage
    assert warm.num_reused == cold.num_context
    assert warm.num_reused + warm.num_prefilled == warm.num_context
    assert warm.reuse == "handle"
    again = broker.prefill(prose(300)).usage
    assert (again.num_prefilled, again.reuse) == (0, "blocks")
    stats = broker.stats()
    assert stats.num_reused_tokens == warm.num_reused + again.num_reused
    assert stats.num_prefilled_tokens == cold.num_prefilled + warm.num_prefilled
    assert stats.num_decoded_tokens == warm.num_decoded


def test_previews_can_be_switched_off(engines: Callable[..., TransformersEngine]) -> None:
    with KVBroker.open(engines("llama"), pool_bytes=1 << 20) as shown:
        assert shown.prefill("the secret").handle.kv_preview == "the secret"
    with KVBroker.open(engines("llama"), pool_bytes=1 << 20, previews=False) as hidden:
        docs = hidden.prefill("the secret", label="docs").handle
        answer = hidden.generate("tell", parent=docs, sampling=Sampling(max_tokens=2)).handle
        assert (docs.kv_preview, answer.kv_preview, docs.kv_label) == ("", "", "docs")
