"""LangGraph's own conformance suite, through both colours, around every saver that it ships, without and with handles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability
from langgraph.checkpoint.conformance.report import CapabilityReport

from aaflow_langgraph import KVBroker, KVCheckpointSaver
from tests.savers import KINDS, Bystander, SyncFace, WithHandles, inner_saver, numbered_handles, rows_of

BASE = {"put", "put_writes", "get_tuple", "list", "delete_thread"}
ALL = {capability.value for capability in Capability}


async def report_on(factory: Callable[[], AsyncIterator[BaseCheckpointSaver[Any]]]) -> CapabilityReport:
    return await validate(checkpointer_test(name="KVCheckpointSaver")(factory))


def assert_passed(report: CapabilityReport, capabilities: set[str]) -> None:
    """Every one of these was found, ran and passed: ``passed_all`` would be content with what is absent."""
    for name in sorted(capabilities):
        result = report.results[name]
        assert result.detected, name
        assert result.tests_passed > 0
        assert result.passed, result.failures


@pytest.mark.parametrize("handles", [False, True], ids=["plain", "handles"])
@pytest.mark.parametrize("colour", ["async", "sync"])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_suite_passes_and_nothing_is_left(
    kind: str, colour: str, handles: bool, open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    broker = open_broker(pool_bytes=16 << 20)
    num_factories = num_seen = 0

    async def factory() -> AsyncIterator[BaseCheckpointSaver[Any]]:
        nonlocal num_factories, num_seen
        num_factories += 1
        folder = tmp_path / str(num_factories)
        folder.mkdir()
        async with inner_saver(kind, folder) as inner:
            saver = KVCheckpointSaver(inner, broker, durability="sync", directory=folder / "kv")
            face: BaseCheckpointSaver[Any] = SyncFace(saver) if colour == "sync" else saver
            wrapped = WithHandles(face, numbered_handles(broker)) if handles else None
            yield wrapped or face
            if handles:
                assert saver.stats().manifest.num_references > 0
            num_seen += wrapped.num_seen if wrapped else 0
            for thread_id in {found.config["configurable"]["thread_id"] async for found in face.alist(None)}:
                await face.adelete_thread(thread_id)
            await saver.asweep(grace_s=0)
            left = saver.stats()
            assert (left.manifest.num_references, left.manifest.num_recipes, left.manifest.num_names) == (0, 0, 0)
            assert left.tensor_bytes == 0
            assert await rows_of(inner) == 0
            await saver.aclose()

    assert_passed(await report_on(factory), ALL)
    assert num_factories == len(ALL)
    assert (num_seen > 0) == handles


@pytest.mark.parametrize("colour", ["async", "sync"])
async def test_around_a_saver_with_the_base_contract_only_what_can_be_provided_is(
    colour: str, open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    broker = open_broker()
    folder = iter(range(100))

    async def factory() -> AsyncIterator[BaseCheckpointSaver[Any]]:
        async with inner_saver("memory", tmp_path) as memory:
            saver = KVCheckpointSaver(Bystander(memory), broker, directory=tmp_path / str(next(folder)))
            yield WithHandles(SyncFace(saver) if colour == "sync" else saver, numbered_handles(broker))
            await saver.aclose()

    report = await report_on(factory)
    assert_passed(report, BASE | {"copy_thread"})
    for name in ("prune", "delete_for_runs"):
        assert not report.results[name].passed
    assert all(
        "has no prune" in failure or "test_prune_keep" not in failure for failure in report.results["prune"].failures
    )
