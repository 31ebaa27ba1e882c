"""The picture of ``bench compose``: what a rung costs against how far it is from dense, and what deviation tells of that."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aaflow_langgraph.bench.permutations import Seen
from aaflow_langgraph.errors import ConfigError

_FLOOR = 1e-5
_COLOURS = {"legolink": "#c05621", "blend": "#2b6cb0", "suffix": "#2f855a"}


def check_plot(path: Path) -> None:
    """Refuse before anything is measured what could not be drawn.

    Raises:
        ConfigError: matplotlib is not installed, or the folder does not exist. Way out: as the message says.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--svg draws with matplotlib: pip install matplotlib")
    if not path.parent.is_dir():
        raise ConfigError(f"--svg {path}: there is no folder {path.parent}; make it, or name another")


def draw(document: dict[str, Any], seen: Sequence[Seen], path: Path) -> None:
    """Write the picture as SVG, the same bytes for the same numbers."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "compose", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name in ("legolink", "blend"):
            rows = [row for row in document["rows"] if row["rung"] == name]
            costs, kls = [row["cost_of_dense"] for row in rows], [max(_FLOOR, row["kl"]) for row in rows]
            left.plot(costs, kls, "o-", color=_COLOURS[name], label=f"{name}-{'k' if name == 'legolink' else 'r'}")
            for row, cost, kl in zip(rows, costs, kls, strict=True):
                text = f"{row['k'] if row['k'] is not None else row['r']:g}"
                left.annotate(text, (cost, kl), xytext=(4, 4), textcoords="offset points", color=_COLOURS[name])
            points = [one for one in seen if one.rung.name == name and one.deviation is not None]
            right.plot(
                [one.deviation for one in points],
                [max(_FLOOR, one.kl) for one in points],
                ".",
                color=_COLOURS[name],
                label=name,
                alpha=0.5,
            )
        left.set(xlabel="CPU seconds, share of dense", ylabel="KL to dense, nats (mean)", yscale="log")
        right.set(xlabel="mean deviation at the check layer", ylabel="KL to dense, nats", yscale="log")
        for axes in (left, right):
            axes.legend(frameon=False)
            axes.grid(visible=True, alpha=0.2)
        figure.savefig(path, format="svg", metadata={"Date": None})
