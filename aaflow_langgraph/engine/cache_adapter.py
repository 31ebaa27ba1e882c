"""The one place that knows transformers' cache classes. Everything version-dependent about them is here.

Two layers satisfy the layer contract of ``transformers.Cache``: ``FastLayer`` hands new keys and values to our attention
and returns only those; ``UniversalLayer`` keeps *all* tokens in one contiguous buffer and returns it, so the model's own
attention and masks work (windowed layers included: they window by mask, nothing is dropped).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from aaflow_langgraph.errors import ConfigError, UnsupportedModel


def cache_keyword(model: PreTrainedModel) -> str:
    """Name of the forward argument that takes a cache: ``cache`` (5.x) or ``past_key_values`` (earlier).

    Raises:
        UnsupportedModel: The model takes neither. Way out: fail.
    """
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise UnsupportedModel(
        f"{type(model).__name__}.forward takes neither cache= nor past_key_values=, so layer 0 keeps no keys "
        "and values (its state is recurrent or convolutional) and cannot be cut at a prefix; use a model whose "
        "layers are all attention"
    )


def layer_plan(model: PreTrainedModel) -> list[bool]:
    """For every layer: does it attend through a window? Refuses layers whose state is more than keys and values.

    Raises:
        UnsupportedModel: Names the layer, its class and why it cannot be carried. Way out: fail.
    """
    config = model.config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{type(model).__name__} is an encoder-decoder; only decoder models are supported")
    try:
        layers = list(DynamicCache(config=config).layers)
    except (KeyError, ValueError, AttributeError) as error:
        raise UnsupportedModel(f"transformers builds no cache for {type(model).__name__}: {error}") from error
    if not layers:
        layers = [DynamicLayer() for _ in range(config.num_hidden_layers)]
    for number, layer in enumerate(layers):
        # Exact classes: a subclass holds more than keys and values (indexer keys, quantised residuals, conv state).
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            kind = getattr(config, "layer_types", None)
            raise UnsupportedModel(
                f"layer {number} of {type(model).__name__} keeps its state in {type(layer).__name__}"
                f"{f' ({kind[number]})' if kind and number < len(kind) else ''}: a recurrent, convolutional, shared or indexed "
                "state is not a span of keys and values, so it can be neither cut at a prefix nor shared by forks; "
                "use a model whose layers are all attention"
            )
    return [type(layer) is DynamicSlidingWindowLayer for layer in layers]


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """For every layer of a model that ``layer_plan`` takes: how many tokens it attends to, None for all."""
    config = model.config.get_text_config(decoder=True)
    layers = list(DynamicCache(config=config).layers) or [DynamicLayer() for _ in range(config.num_hidden_layers)]
    return [int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]


def refuse_foreign_cache(value: Any) -> None:
    """Refuse a transformers cache object where a handle is expected, by name.

    Raises:
        ConfigError: ``value`` is a ``Cache``. Way out: fail; pass token ids or a handle.
    """
    if isinstance(value, Cache):
        raise ConfigError(
            f"got a {type(value).__name__}: caches made elsewhere (quantised, offloaded and static ones included) carry no "
            "token ids and cannot be checked; pass the token ids to broker.materialize() and use the handle it returns"
        )


class _Layer(CacheLayerMixin):
    """Shared part: lengths are ours, positions are absolute, nothing is ever cropped."""

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, seen: Callable[[], int], *, is_sliding: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen
        self.is_sliding = is_sliding
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to initialise: memory belongs to the run."""

    def get_seq_length(self) -> int:
        return self._seen()

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._seen() + _as_length(query_length), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """Name of ``get_max_length`` in earlier releases."""
        return -1


def _as_length(query_length: Any) -> int:
    """Query length as an int; early releases passed the positions instead."""
    return int(query_length.shape[0]) if isinstance(query_length, torch.Tensor) else int(query_length)


class FastLayer(_Layer):
    """Writes new keys and values behind the run's tail and returns only them: attention reads the rest in place."""

    def __init__(
        self, layer: int, write: Callable[[int, torch.Tensor, torch.Tensor], None], seen: Callable[[], int]
    ) -> None:
        super().__init__(seen)
        self._layer = layer
        self._write = write

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._write(self._layer, key_states, value_states)
        return key_states, value_states


class UniversalLayer(_Layer):
    """Writes through to the run and returns everything seen so far, contiguous, ``[1, H, T, D]``."""

    def __init__(
        self,
        layer: int,
        update: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        seen: Callable[[], int],
        *,
        is_sliding: bool,
    ) -> None:
        super().__init__(seen, is_sliding=is_sliding)
        self._layer = layer
        self._update = update

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._update(self._layer, key_states, value_states)


def as_cache(layers: list[Any]) -> Cache:
    """A ``transformers.Cache`` over our layers."""
    return Cache(layers=layers)
