"""The picture of ``bench agents``: what N agents take by every side, a row of panels for every context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PANELS = (
    ("total_s", "all answers, seconds"),
    ("ttft_max_s", "last agent's first token, seconds"),
    ("cpu_s", "CPU seconds"),
    ("kv_bytes", "KV, MiB"),
)
_COLOURS = {
    "text": "#9b2c2c",
    "deepcopy": "#c05621",
    "hf-continuous": "#b7791f",
    "vllm": "#2f855a",
    "llama.cpp": "#6b46c1",
    "handles": "#2b6cb0",
}


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture as SVG, the same bytes for the same numbers. ``compose_plot.check_plot`` says what that needs."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    contexts = [facts["context"] for facts in document["contexts"]]
    rows = [row for row in document["rows"] if row["total_s"] is not None]
    counts = sorted({row["agents"] for row in rows})
    with matplotlib.rc_context({"svg.hashsalt": "agents", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(13, 3.4 * len(contexts) + 0.4), layout="constrained")
        grid = figure.subplots(len(contexts), len(_PANELS), squeeze=False)
        for line, context in zip(grid, contexts, strict=True):
            for axes, (key, label) in zip(line, _PANELS, strict=True):
                here = [row for row in rows if row["context"] == context]
                if len(counts) == 1:
                    _bars(axes, here, key)
                    axes.set(xlabel=f"{label} (log)")
                    axes.tick_params(labelleft=axes is line[0])
                    if axes is line[0]:
                        title = f"{counts[0]} agents on {context:,} tokens; pale: computed from some of them, or from shapes"
                        axes.set_title(title, loc="left")
                    continue
                _lines(axes, here, key)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_xticks(counts, [str(count) for count in counts])
                axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.minorticks_off()
                axes.set(xlabel=f"agents on {context:,} tokens", ylabel=label)
                axes.grid(visible=True, alpha=0.2)
        if len(counts) > 1:
            handles, labels = grid[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _lines(axes: Any, rows: list[dict[str, Any]], key: str) -> None:
    """A line for every side over the number of agents."""
    for name in dict.fromkeys(row["side"] for row in rows):
        points = [row for row in rows if row["side"] == name]
        axes.plot(
            [row["agents"] for row in points],
            [_value(row, key) for row in points],
            # Hollow: computed from some of the agents, or from shapes.
            marker="o",
            fillstyle="none" if any(key in row["computed"] for row in points) else "full",
            linestyle=":" if name.endswith("-serial") else "-",
            color=_colour(name),
            label=name,
        )


def _bars(axes: Any, rows: list[dict[str, Any]], key: str) -> None:
    """A bar for every side, the first one on top, with its number behind it."""
    bars = axes.barh(
        [row["side"] for row in rows],
        [_value(row, key) for row in rows],
        # Pale: computed from some of the agents, or from shapes.
        color=[(_colour(row["side"]), 0.4 if key in row["computed"] else 1.0) for row in rows],
    )
    axes.bar_label(bars, [_number(_value(row, key)) for row in rows], padding=3)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xticks([])
    axes.minorticks_off()
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _value(row: dict[str, Any], key: str) -> float:
    return float(row[key]) / (1 << 20 if key == "kv_bytes" else 1)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _colour(name: str) -> str:
    return next(colour for start, colour in _COLOURS.items() if name.startswith(start))
