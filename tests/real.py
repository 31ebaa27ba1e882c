"""The real model and documents, from the user's own cache: tests otherwise see a private one (conftest.py)."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def real_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it into a test module to use it."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["AAFLOW_REAL_CACHE"])
    return
