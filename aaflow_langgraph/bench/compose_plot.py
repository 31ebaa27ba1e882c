"""The picture of ``bench compose``: what a rung costs against how far it is from dense, and what deviation tells of that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aaflow_langgraph.bench.permutations import DENSE, Seen
from aaflow_langgraph.errors import ConfigError

_COLOURS = {"legolink": "#c05621", "blend": "#2b6cb0"}


def check_plot(path: Path) -> None:
    """Refuse before anything is measured what could not be drawn.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written. Way out: as the message says.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--svg draws with matplotlib: pip install matplotlib")
    check_output("--svg", path)


def check_output(option: str, path: Path) -> None:
    """Refuse before anything is measured a file that could not be written.

    Raises:
        ConfigError: There is no such folder, the path is one, or it must not be written. Way out: name another.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it, or name another")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: it must not be written; name another file")


def draw(document: dict[str, Any], seen: Sequence[Seen], path: Path) -> None:
    """Write the picture as SVG, the same bytes for the same numbers."""
    import matplotlib
    from matplotlib.figure import Figure

    dense = {(one.question, one.order): one.nll for one in seen if one.rung == DENSE}
    with matplotlib.rc_context({"svg.hashsalt": "compose", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        panels = figure.subplots(1, 3)
        for name, colour in _COLOURS.items():
            rows = [row for row in document["rows"] if row["rung"] == name]
            costs = [row["cost_of_dense"] for row in rows]
            letter = "k" if name == "legolink" else "r"
            for axes, key in zip(panels[:2], ("kl", "nll_excess"), strict=True):
                axes.plot(costs, [row[key] for row in rows], "o-", color=colour, label=f"{name}, by {letter}")
                for row, cost in zip(rows, costs, strict=True):
                    axes.annotate(
                        f"{row[letter]:g}", (cost, row[key]), xytext=(4, 4), textcoords="offset points", color=colour
                    )
            points = [one for one in seen if one.rung.name == name and one.deviation is not None]
            panels[2].plot(
                [one.deviation for one in points],
                [one.nll - dense[one.question, one.order] for one in points],
                ".",
                color=colour,
                label=name,
                alpha=0.4,
            )
        panels[0].set(xlabel="CPU seconds, share of dense", ylabel="KL of the first token to dense, nats")
        panels[1].set(xlabel="CPU seconds, share of dense", ylabel="NLL of dense's answer, over dense's own")
        panels[2].set(xlabel="mean deviation at the check layer", ylabel="the same, every composite")
        for axes in panels:
            axes.legend(frameon=False)
            axes.grid(visible=True, alpha=0.2)
        figure.savefig(path, format="svg", metadata={"Date": None})
