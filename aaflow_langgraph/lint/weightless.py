"""Opens an app's brokers without their models' weights: tokenizer, chat template and configuration are enough to render.

No index, no disk and no device of the app is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.hashing import digest
from aaflow_langgraph.lint.dry_engine import DryEngine
from aaflow_langgraph.lint.dry_run import DECLARED, Room
from aaflow_langgraph.model import KVLayout, Namespace
from aaflow_langgraph.tensors import DTYPES, dtype_name

_POOL_BYTES = 8 << 20


@contextmanager
def weightless() -> Iterator[None]:
    """Inside, ``KVBroker.open`` and ``TransformersEngine.load`` load no weights."""
    opened, loaded = KVBroker.__dict__["open"], TransformersEngine.__dict__["load"]
    KVBroker.open = classmethod(_open(opened.__func__))  # type: ignore[method-assign,assignment]
    TransformersEngine.load = classmethod(_load)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        KVBroker.open = opened  # type: ignore[method-assign]
        TransformersEngine.load = loaded  # type: ignore[method-assign]


def _open(really: Any) -> Any:
    def open_dry(
        cls: type[KVBroker],
        model: Any,
        *,
        index: str = "memory://",
        pool_bytes: int = 1 << 30,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int = 16 << 30,
        dtype: str = "auto",
        device: str = "auto",
        tenant: str = "",
        **options: Any,
    ) -> KVBroker:
        if isinstance(model, TransformersEngine):
            engine = model
        else:
            engine = _load(TransformersEngine, model, dtype=dtype, device=device, tenant=tenant)
        broker: KVBroker = really(cls, engine, pool_bytes=_POOL_BYTES, **options)
        vars(broker)[DECLARED] = Room(pool_bytes, _token_bytes(engine), disk is not None)
        return broker

    return open_dry


class _Weightless(DryEngine):
    """A dry engine that knows what a token of the model it stands for takes."""

    token_bytes = 0


def _load(
    cls: type[TransformersEngine],
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "auto",
    tenant: str = "",
) -> TransformersEngine:
    if not isinstance(dtype, str) or (dtype != "auto" and dtype not in DTYPES):
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    source = os.fspath(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        config = AutoConfig.from_pretrained(source).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the tokenizer or the configuration of {source!r} cannot be loaded: {reason}") from error
    named = dtype_name(config.dtype) if dtype == "auto" and config.dtype is not None else dtype
    name = os.path.basename(source) if os.path.isdir(source) else source
    engine = _Weightless(
        tokenizer,
        Namespace(digest("lint", source, named, tenant), name, named, tenant),
        window=int(getattr(config, "max_position_embeddings", None) or 1 << 20),
        vocab_size=int(config.vocab_size),
        stop_ids=_stop_ids(source, tokenizer),
    )
    heads = int(config.num_attention_heads)
    layout = KVLayout(
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        dtype=named,
        itemsize=DTYPES[named].itemsize if named in DTYPES else 2,
    )
    engine.token_bytes = layout.token_bytes
    return engine


def _token_bytes(engine: TransformersEngine) -> int:
    return engine.token_bytes if isinstance(engine, _Weightless) else engine.layout.token_bytes


def _stop_ids(source: str, tokenizer: Any) -> frozenset[int]:
    try:
        configured = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:
        configured = None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(one) for one in (*ids, tokenizer.eos_token_id) if one is not None)
