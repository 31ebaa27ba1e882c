"""Where files that can be made again are kept. Private."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``aaflow-langgraph`` under ``$XDG_CACHE_HOME`` if that is absolute (the standard says so), else under ``~/.cache``."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "aaflow-langgraph"
