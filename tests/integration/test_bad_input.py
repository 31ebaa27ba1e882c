"""Every wrong input is a typed error that says what to do, and publishes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from aaflow_langgraph import AAFlowError, KVBroker, KVHandle, Sampling, TransformersEngine, generate_node
from aaflow_langgraph.errors import (
    ConfigError,
    ContextTooLong,
    IncompatibleHandle,
    MalformedHandle,
    RecipeMissing,
    UnsupportedModel,
)
from aaflow_langgraph.model import Receipt
from tests import tiny

WINDOW = 600

ENTRIES: dict[str, Callable[[KVBroker, Any], Any]] = {
    "append": lambda broker, handle: broker.append(handle, [5]),
    "fork": lambda broker, handle: broker.fork(handle),
    "evict": lambda broker, handle: broker.evict(handle),
    "lease": lambda broker, handle: broker.lease(handle),
    "recipe": lambda broker, handle: broker.recipe(handle),
    "token_ids": lambda broker, handle: broker.token_ids(handle),
    "prefill": lambda broker, handle: broker.prefill("more", parent=handle),
    "generate": lambda broker, handle: broker.generate("more", parent=handle),
    "stream": lambda broker, handle: next(iter(broker.stream("more", parent=handle))),
}


@pytest.fixture
def broker(open_broker: Callable[..., KVBroker]) -> KVBroker:
    made = open_broker("llama", max_position_embeddings=WINDOW)
    made.prefill("A first document.", label="docs")
    return made


def refuses(broker: KVBroker, error: type[AAFlowError], match: str, call: Callable[[], Any]) -> None:
    before = broker.stats()
    with pytest.raises(error, match=match) as caught:
        call()
    assert type(caught.value) is error
    str(caught.value).encode()
    assert broker.stats() == before
    assert broker.check() == []


def quantized() -> QuantizedCache:
    """One as another library would hand it over; its backend need not be installed here."""
    return QuantizedCache.__new__(QuantizedCache)


FOREIGN_CACHES: dict[str, Callable[[], Any]] = {
    "DynamicCache": DynamicCache,
    "DynamicCache offloaded": lambda: DynamicCache(config=tiny.config("llama")),
    "StaticCache": lambda: StaticCache(config=tiny.config("llama"), max_cache_len=8),
    "QuantizedCache": quantized,
}


@pytest.mark.parametrize("kind", FOREIGN_CACHES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_cache_object_is_refused_by_name_at_every_entry(broker: KVBroker, entry: str, kind: str) -> None:
    """Case 16, transformers PR #45510, #48700: a cache made elsewhere carries no token ids and cannot be checked."""
    cache = FOREIGN_CACHES[kind]()
    refuses(broker, ConfigError, kind.split()[0], lambda: ENTRIES[entry](broker, cache))


@pytest.mark.parametrize("kind", FOREIGN_CACHES)
def test_a_cache_object_is_no_token_ids_and_no_text(broker: KVBroker, kind: str) -> None:
    """Case 16."""
    cache, name = FOREIGN_CACHES[kind](), kind.split()[0]
    refuses(broker, ConfigError, name, lambda: broker.materialize(cache))
    refuses(broker, ConfigError, name, lambda: broker.prefill(cache))
    refuses(broker, ConfigError, name, lambda: broker.generate(cache))
    refuses(broker, ConfigError, name, lambda: broker.release(cache))


def made_by(other: TransformersEngine) -> KVHandle:
    with KVBroker.open(other, pool_bytes=1 << 16) as foreign:
        return foreign.materialize([5, 6, 7], label="foreign")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_handle_of_another_model_dtype_tokenizer_or_tenant_is_refused(
    broker: KVBroker, entry: str, engines: Callable[..., TransformersEngine]
) -> None:
    same = {"max_position_embeddings": WINDOW}
    others = [
        engines("llama", seed=1, **same),
        engines("llama", dtype=torch.bfloat16, **same),
        engines("llama", template=tiny.CHATML + " ", **same),
        engines("qwen3"),
    ]
    model = tiny.model("llama", max_position_embeddings=WINDOW)
    others.append(TransformersEngine(model, tiny.tokenizer(), tenant="other"))
    for other in others:
        handle = made_by(other)
        refuses(
            broker, IncompatibleHandle, "foreign.*make the handle again", lambda h=handle: ENTRIES[entry](broker, h)
        )


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_forged_handle_of_the_right_shape_is_refused(broker: KVBroker, entry: str) -> None:
    good = broker.prefill("A first document.").handle
    unknown = {**good.to_dict(), "kv_id": "0" * 64}
    refuses(broker, RecipeMissing, "forged|is gone", lambda: ENTRIES[entry](broker, unknown))
    altered = replace(good, kv_tokens=good.kv_tokens + 1)
    refuses(broker, IncompatibleHandle, "altered", lambda: ENTRIES[entry](broker, altered))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "value", [{}, {"kv_id": "x"}, "text", 7, [], b"", object()], ids=lambda value: repr(value).partition(" at 0x")[0]
)
def test_what_is_no_handle_is_refused(broker: KVBroker, entry: str, value: Any) -> None:
    refuses(broker, MalformedHandle, "[hH]andle", lambda: ENTRIES[entry](broker, value))


@pytest.mark.parametrize("entry", ["append", "fork", "evict", "lease", "recipe", "token_ids"])
def test_none_is_no_handle(broker: KVBroker, entry: str) -> None:
    refuses(broker, MalformedHandle, "NoneType", lambda: ENTRIES[entry](broker, None))


def test_a_handle_that_became_a_dict_is_served(broker: KVBroker) -> None:
    handle = broker.prefill("A first document.").handle
    for entry in ENTRIES.values():
        result = entry(broker, handle.to_dict())
        if isinstance(result, Receipt):
            assert broker.release(result)
    assert isinstance(broker.fork(handle.to_dict()), KVHandle)


BAD_TEXTS: list[tuple[Any, str]] = [
    ("", "empty"),
    (" \n", "empty"),
    ("<|im_end|><|im_end|>", "special tokens only"),
    (b"\xff\xfe", "not UTF-8"),
    ("\udc80", "lone surrogate"),
    (None, "must be text"),
    (["a"], "must be text"),
]


@pytest.mark.parametrize(("text", "match"), BAD_TEXTS, ids=[repr(text) for text, _ in BAD_TEXTS])
@pytest.mark.parametrize("raw", [True, False])
def test_what_is_no_text_is_refused(broker: KVBroker, text: Any, match: str, raw: bool) -> None:
    parent = broker.prefill("A first document.").handle
    for options in ({}, {"parent": parent}):
        refuses(broker, ConfigError, match, lambda o=options: broker.prefill(text, raw=raw, **o))
        refuses(broker, ConfigError, match, lambda o=options: broker.generate(text, raw=raw, **o))


BAD_IDS: list[tuple[Any, str]] = [
    ([], "no token ids"),
    ([tiny.VOCAB], "vocabulary"),
    ([-1], "vocabulary"),
    ([5, 6.0], "vocabulary"),
    ([True], "vocabulary"),
    (["5"], "vocabulary"),
    ("text", "prefill"),
    (b"text", "prefill"),
    (None, "sequence of ints"),
    (5, "sequence of ints"),
    (torch.tensor([[5, 6], [7, 8]]), "without padding"),
    (torch.tensor([[[5]]]), "vocabulary|without padding"),
    (torch.tensor([5.0]), "vocabulary"),
    ({"input_ids": [5]}, "input_ids"),
    ([None], "vocabulary"),
]


@pytest.mark.parametrize(("ids", "match"), BAD_IDS, ids=[str(number) for number in range(len(BAD_IDS))])
def test_what_are_no_token_ids_is_refused(broker: KVBroker, ids: Any, match: str) -> None:
    parent = broker.prefill("A first document.").handle
    if not isinstance(ids, torch.Tensor) or ids.dim() < 3:
        refuses(broker, ConfigError, match, lambda: broker.materialize(ids))
        refuses(broker, ConfigError, match, lambda: broker.append(parent, ids))


def test_a_handle_is_no_token_ids(broker: KVBroker) -> None:
    handle = broker.prefill("A first document.").handle
    refuses(broker, ConfigError, "KVHandle", lambda: broker.materialize(handle))


def test_one_row_of_a_tensor_is_a_sequence(broker: KVBroker) -> None:
    expected = broker.materialize([5, 6, 7])
    assert broker.materialize(torch.tensor([5, 6, 7])) == expected
    assert broker.materialize(torch.tensor([[5, 6, 7]])) == expected
    assert broker.materialize(iter([5, 6, 7])) == expected  # type: ignore[arg-type]
    assert broker.materialize(numpy.array([5, 6, 7])) == expected


def test_a_checkpoint_that_lacks_weights_or_holds_others_is_refused(tmp_path: Path) -> None:
    """Weights made up at random must not go by the name of the files' digest (I6)."""
    folder = tiny.save(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    for change in ({"num_hidden_layers": settings["num_hidden_layers"] + 1}, {"intermediate_size": 96}):
        (folder / "config.json").write_text(json.dumps({**settings, **change, "layer_types": None}))
        with pytest.raises(ConfigError):
            KVBroker.open(folder, pool_bytes=1 << 20)


def test_an_exact_handle_cannot_be_relabelled_as_approximate(broker: KVBroker) -> None:
    handle = broker.prefill("A first document.").handle
    refuses(broker, IncompatibleHandle, "approximate", lambda: broker.fork({**handle.to_dict(), "kv_exact": False}))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cancel": 5}, "threading.Event"),
        ({"on_token": 5}, "callable"),
        ({"raw": "no"}, "raw"),
        ({"deterministic": "x"}, "deterministic"),
        ({"role": "\ud800"}, "surrogate"),
    ],
)
def test_options_of_the_wrong_type_are_refused_by_name(broker: KVBroker, options: dict[str, Any], match: str) -> None:
    refuses(broker, ConfigError, match, lambda: broker.generate("A question?", **options))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"label": 5}, "label"),
        ({"label": "\ud800"}, "label"),
        ({"writes": b"x"}, "writes"),
        ({"reads": b"x"}, "reads"),
        ({"text_to": b"x"}, "text_to"),
        ({"role": b"x"}, "role"),
        ({"raw": "no"}, "raw"),
        ({"deterministic": 1}, "deterministic"),
    ],
)
def test_node_options_of_the_wrong_type_are_refused_when_the_graph_is_built(
    broker: KVBroker, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        generate_node(broker, "A question?", **{"writes": "answer", **options})
    with pytest.raises(ConfigError, match="KVBroker"):
        generate_node("broker", "A question?", writes="answer")  # type: ignore[arg-type]


def test_a_context_beyond_the_window_is_refused_with_the_numbers(broker: KVBroker) -> None:
    parent = broker.materialize([5] * 590)
    numbers = rf"\d+ context tokens \+ \d+ new ones exceed the window of {WINDOW} tokens"
    refuses(broker, ContextTooLong, numbers, lambda: broker.materialize([5] * (WINDOW + 1)))
    refuses(broker, ContextTooLong, numbers, lambda: broker.append(parent, [5] * 11))
    refuses(broker, ContextTooLong, numbers, lambda: broker.prefill("x" * 700))
    refuses(broker, ContextTooLong, numbers, lambda: broker.generate("x", parent=parent, raw=True))
    ten = Sampling(max_tokens=10)
    refuses(broker, ContextTooLong, "shorten", lambda: broker.generate("x", parent=parent, raw=True, sampling=ten))


def test_the_window_can_be_filled_to_the_last_token(broker: KVBroker) -> None:
    parent = broker.materialize([5] * 590)
    result = broker.generate("x", parent=parent, raw=True, sampling=Sampling(max_tokens=9))
    assert result.handle.kv_tokens <= WINDOW
    broker.materialize([6] * WINDOW)


@pytest.mark.parametrize("sampling", [{"max_tokens": 3}, 5, "greedy", Sampling])
def test_what_is_no_sampling_is_refused(broker: KVBroker, sampling: Any) -> None:
    refuses(broker, ConfigError, "Sampling", lambda: broker.generate("Hi", sampling=sampling))


@pytest.mark.parametrize("label", ["x" * 65, 7, None, "\ud800"])
def test_a_wrong_label_is_refused_before_anything_is_computed(broker: KVBroker, label: Any) -> None:
    refuses(broker, ConfigError, "label", lambda: broker.materialize([5, 6], label=label))
    refuses(broker, ConfigError, "label", lambda: broker.prefill("Hi", label=label))
    refuses(broker, ConfigError, "label", lambda: broker.generate("Hi", label=label))
    handle = broker.materialize([5, 6])
    refuses(broker, ConfigError, "label", lambda: broker.append(handle, [7], label=label))
    if label is not None:
        refuses(broker, ConfigError, "label", lambda: broker.fork(handle, label=label))


@pytest.mark.parametrize("receipt", [None, "0" * 32, {}, 7])
def test_what_is_no_receipt_is_refused(broker: KVBroker, receipt: Any) -> None:
    refuses(broker, ConfigError, "receipt", lambda: broker.release(receipt))


def test_a_tokenizer_without_a_chat_template_needs_raw_text(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama", template=None)
    refuses(broker, ConfigError, "no chat template", lambda: broker.prefill("Hi"))
    refuses(broker, ConfigError, "no chat template", lambda: broker.generate("Hi"))
    assert broker.generate("Hi", raw=True, sampling=Sampling(max_tokens=2)).usage.num_context == 2


def test_a_closed_broker_serves_nothing_and_can_be_closed_again(broker: KVBroker) -> None:
    handle = broker.prefill("A first document.").handle
    broker.close()
    broker.close()
    for entry in ENTRIES.values():
        refuses(broker, ConfigError, "closed", lambda e=entry: e(broker, handle))
    refuses(broker, ConfigError, "closed", lambda: broker.materialize([5]))
    refuses(broker, ConfigError, "closed", lambda: broker.generate("Hi"))
    assert broker.stats().pool_used_bytes == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"index": "sqlite://here"}, "memory://"),
        ({"index": None}, "index"),
        ({"evict": "random"}, "eviction policy"),
        ({"share_recipes": "no"}, "share_recipes"),
        ({"previews": "no"}, "previews"),
        ({"evict": []}, "evict"),
        ({"evict": int}, "evict"),
        ({"index": "embedded://a\0b"}, "null byte"),
        ({"index": b"redis://u:secret@127.0.0.1"}, "^(?!.*secret).*bytes"),
        ({"index": "redis://u:12/secret@127.0.0.1:1"}, "^(?!.*secret).*%2F"),
        ({"index": "rediss://u:1?secret@h.example"}, "^(?!.*secret).*%3F"),
        ({"pool_bytes": 1 << 80}, "pool_bytes"),
        ({"disk": "/proc/nothing"}, "/proc/nothing"),
        ({"pool_bytes": 0}, "pool_bytes"),
        ({"pool_bytes": -5}, "pool_bytes"),
        ({"pool_bytes": 1.5}, "pool_bytes"),
        ({"pool_bytes": "1g"}, "pool_bytes"),
        ({"pool_bytes": 1 << 60}, "pool_bytes"),
        ({"dtype": "float32"}, "engine"),
        ({"device": "cpu"}, "engine"),
        ({"tenant": "a"}, "engine"),
    ],
    ids=str,
)
def test_a_wrong_option_of_open_is_refused_by_name(
    options: dict[str, Any], match: str, engines: Callable[..., TransformersEngine]
) -> None:
    with pytest.raises(ConfigError, match=match):
        KVBroker.open(engines("llama"), **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"dtype": torch.float32}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be"),
        ({"device": "meta"}, "device must be"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not there"),
        ({"device": 7}, "device"),
        ({"tenant": 7}, "tenant"),
        ({"tenant": "x" * 257}, "tenant"),
        ({"tenant": "\ud800"}, "tenant"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_wrong_option_of_a_model_is_refused_by_name(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        KVBroker.open(tiny.save(tmp_path), **options)


def test_a_model_that_cannot_be_loaded_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """Unknown, empty, half written, foreign."""
    good = tiny.save(tmp_path / "good")
    broken = {
        "empty": {},
        "no weights": {"model.safetensors": None},
        "truncated weights": {"model.safetensors": (good / "model.safetensors").read_bytes()[:5000]},
        "no safetensors": {"model.safetensors": b"pickle?" * 100},
        "broken configuration": {"config.json": b"{"},
        "foreign configuration": {"config.json": b'{"model_type": "t5"}'},
        "unknown architecture": {"config.json": b'{"model_type": "no-such-model"}'},
        "broken tokenizer": {"tokenizer.json": b"{}"},
    }
    for name, changes in broken.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        for file in good.iterdir() if changes else ():
            content = changes.get(file.name, file.read_bytes())
            if content is not None:
                (folder / file.name).write_bytes(content)
        with pytest.raises(ConfigError, match="save_pretrained"):
            KVBroker.open(folder)
    for missing in (tmp_path / "missing", "/no/such/model", "not a model id"):
        with pytest.raises(ConfigError, match="save_pretrained"):
            KVBroker.open(missing)
    for nothing in ("", "  ", None, 7):
        with pytest.raises(ConfigError, match="hub id or a local directory"):
            KVBroker.open(nothing)  # type: ignore[arg-type]


def test_an_encoder_decoder_is_refused(engines: Callable[..., TransformersEngine]) -> None:
    from transformers import AutoModelForSeq2SeqLM, T5Config

    model = AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=320, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(UnsupportedModel, match="decoder"):
        TransformersEngine(model, tiny.tokenizer())


def test_a_forked_child_is_told_to_spawn(broker: KVBroker) -> None:
    """The threads of torch do not survive a fork: refused at once, instead of standing still."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            broker.generate("Hi")
        except ConfigError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert "spawn" in told.read()
    os.waitpid(pid, 0)
