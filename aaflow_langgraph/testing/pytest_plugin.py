"""The pytest plug-in: the fixture ``prefix_stable``. Light to import: every pytest run of the environment loads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def prefix_stable() -> Callable[..., None]:
    """``assert_prefix_stable(graph, inputs)`` of ``aaflow_langgraph.testing.prefix``."""
    from aaflow_langgraph.testing.prefix import assert_prefix_stable

    return assert_prefix_stable
