"""Shared fixtures. Threads are told not to spin before torch is imported."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.transformers import TransformersEngine
from tests import tiny

# What else the machine does meanwhile is no finding.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files begin first and short ones last, each kind in random order: processes that share a run end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent.name == "unit"))


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Digests and probes of throw-away models do not belong into the user's cache."""
    real = os.environ.get("XDG_CACHE_HOME")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["AAFLOW_REAL_CACHE"] = real or str(Path.home() / ".cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    if real is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = real


@pytest.fixture(scope="session")
def engines() -> Callable[..., TransformersEngine]:
    """Tiny engines, one per (kind, dtype, ...) and test session."""
    made: dict[str, TransformersEngine] = {}

    def get(kind: str = "llama", **options: Any) -> TransformersEngine:
        key = repr((kind, sorted(options.items(), key=str)))
        if key not in made:
            template = options.pop("template", tiny.CHATML)
            made[key] = TransformersEngine(tiny.model(kind, **options), tiny.tokenizer(template), name=f"tiny-{kind}")
        return made[key]

    return get


@pytest.fixture
def open_broker(engines: Callable[..., TransformersEngine]) -> Iterator[Callable[..., KVBroker]]:
    """Brokers over tiny engines; every one is checked and must be clean when the test ends."""
    opened: list[KVBroker] = []

    def open_one(kind: str = "llama", *, pool_bytes: int = 8 << 20, **options: Any) -> KVBroker:
        broker = KVBroker.open(engines(kind, **options), pool_bytes=pool_bytes)
        opened.append(broker)
        return broker

    yield open_one
    for broker in opened:
        if not broker._closed:
            assert broker.check() == []
            assert broker.stats().num_leases == 0
            broker.close()
