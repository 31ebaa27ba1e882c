"""How soon does the page show 5,000 handles? ``python -m tests.browser.first_paint``; a measurement, not a test.

A broker makes 5,000 handles in 100 threads; the server answers in the same process, as in ``langgraph dev``. Measured in
headless Chromium, each time in a new context with an empty cache: first contentful paint, as the browser says it, and the
moment at which every section has been drawn. The first round is apart: the server then looks at these handles for the first
time. The last line on stdout is one JSON document.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from playwright.sync_api import Browser, sync_playwright

from aaflow_langgraph import KVBroker, TransformersEngine
from aaflow_langgraph.journal import origin
from aaflow_langgraph.studio import inspector_app
from tests import tiny
from tests.browser.scene import serving

NUM_HANDLES = 5_000
ROUNDS = 7
NODES = ("read", "plan", "write", "check")
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"


def fill(broker: KVBroker) -> None:
    """A document in each thread, and appends to it or to the last one of the thread."""
    made = []
    for number in range(NUM_HANDLES):
        with origin(node=NODES[number % 4], thread=f"thread {number // 50}"):
            if number % 50 == 0:
                ids = [*range(6, 250), *range(6, 250), 6 + number // 50]
                made.append(broker.materialize(ids, label=f"document {number // 50}"))
            else:
                parent = made[number - number % 50] if number % 7 == 0 else made[-1]
                made.append(broker.append(parent, [7 + number % 200, 8 + number % 13, 9], label=f"step {number}"))


def look(browser: Browser, url: str) -> tuple[float, float]:
    """Seconds to the first contentful paint, and until everything is drawn."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        started = time.perf_counter()
        page.goto(url, wait_until="commit")
        page.wait_for_selector("body[data-drawn]")
        drawn_s = time.perf_counter() - started
        return page.evaluate(PAINTED) / 1000, drawn_s


def main() -> None:
    engine = TransformersEngine(tiny.model("llama", num_hidden_layers=1), tiny.tokenizer(), name="tiny-llama")
    with KVBroker.open(engine, pool_bytes=96 << 20) as broker:
        fill(broker)
        with serving(inspector_app(broker)) as (url, _), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            (first_paint_s, first_drawn_s), *later = [look(browser, f"{url}/kv/") for _ in range(ROUNDS)]
            browser.close()
    document = {
        "schema": 1,
        "name": "inspector first paint",
        "num_handles": NUM_HANDLES,
        "num_cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "first_round": {"paint_s": round(first_paint_s, 3), "drawn_s": round(first_drawn_s, 3)},
        "paint_s": [round(paint_s, 3) for paint_s, _ in later],
        "drawn_s": [round(drawn_s, 3) for _, drawn_s in later],
    }
    paint_s, drawn_s = (statistics.median(its) for its in zip(*later, strict=True))
    sys.stderr.write(
        f"{NUM_HANDLES:,} handles: first paint {paint_s:.2f} s, all drawn {drawn_s:.2f} s (medians of {len(later)}); "
        f"the first time {first_paint_s:.2f} s and {first_drawn_s:.2f} s\n"
    )
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
