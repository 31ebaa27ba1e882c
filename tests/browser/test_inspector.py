"""The inspector's page in a real browser. ``AAFLOW_SCREENSHOTS=1`` writes what it sees to docs/images, over the demo model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from aaflow_langgraph import KVBroker, KVCheckpointSaver, TransformersEngine
from aaflow_langgraph.graph.rejected import RejectedWrite
from aaflow_langgraph.journal import Entry
from aaflow_langgraph.model import Recipe, Span, Turn
from aaflow_langgraph.movements import Movement
from aaflow_langgraph.studio import inspector_app
from aaflow_langgraph.studio.app import make_app
from aaflow_langgraph.studio.facts import Facts
from aaflow_langgraph.studio.threads import Threads
from aaflow_langgraph.studio.view import View
from tests.browser.scene import playing, serving

CHROMIUM = Path("/usr/bin/chromium")
IMAGES = Path(__file__).parents[2] / "docs/images"
WANTED = os.environ.get("AAFLOW_SCREENSHOTS") == "1"

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Pages that must not complain, run nothing foreign and ask nobody but their own server."""
    complaints: list[str] = []
    pages: list[Page] = []

    def open_one(url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: complaints.append(f"error {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        page.on("request", lambda asked: None if asked.url.startswith(url) else complaints.append(asked.url))
        page.on(
            "console",
            lambda said: (
                complaints.append(said.text)
                if said.type in ("error", "warning") and "Failed to load resource" not in said.text
                else None
            ),
        )
        page.goto(f"{url}/kv/")
        page.wait_for_selector("body[data-drawn]")
        pages.append(page)
        return page

    yield open_one
    for page in pages:
        page.context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def played(
    engines: Callable[..., TransformersEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[KVBroker, KVCheckpointSaver]]:
    if WANTED:
        os.environ["XDG_CACHE_HOME"], ours = os.environ["AAFLOW_REAL_CACHE"], os.environ["XDG_CACHE_HOME"]
        from aaflow_langgraph.assets import demo_model

        engine = TransformersEngine.load(demo_model(), dtype="float32", device="cpu")
        os.environ["XDG_CACHE_HOME"] = ours
        with KVBroker.open(engine, pool_bytes=64 << 20) as broker:  # what a first compose measures is not to be seen
            broker.compose([broker.prefill(text).handle for text in ("One.", "Two.")], rung="legolink")
    else:
        engine = engines("llama")
    with playing(engine, tmp_path_factory.mktemp("scene")) as left:
        yield left


@pytest.fixture(scope="module")
def url(played: tuple[KVBroker, KVCheckpointSaver]) -> Iterator[str]:
    with serving(inspector_app(*played)) as (address, _):
        yield address


def photograph(page: Page, name: str, **options: Any) -> None:
    if WANTED:
        IMAGES.mkdir(exist_ok=True)
        if not options:
            page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(600)
        path = IMAGES / f"{name}.png"
        page.screenshot(path=path, **options)
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def node(page: Page, label: str) -> Any:
    return page.locator(f'.node[aria-label^="{label}, "]').first


def is_within(page: Page) -> bool:
    """Does nothing stick out of the window sideways?"""
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def test_a_look_at_an_app(played: tuple[KVBroker, KVCheckpointSaver], url: str, open_page: Callable[..., Page]) -> None:
    broker, _ = played
    page = open_page(url)
    stats = broker.stats()
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#who")).to_contain_text(broker.namespace.model.rpartition("/")[2])
    first = page.locator(".sum").first
    expect(first).to_contain_text(f"{stats.num_reused_tokens:,} of ")
    expect(page.locator("#graph .node")).to_have_count(len(broker.recipes()))
    expect(page.locator("#timeline li")).to_have_count(len(broker.journal.entries()))
    for tab, words in (
        ("Requests", "greet"),
        ("Misses", "greet"),
        ("Handles", "docs"),
        ("Evictions and transfers", "spilled to disk"),
        ("Nodes and edges", "plan_node → draft_node"),
    ):
        page.get_by_role("tab", name=tab).click()
        expect(page.get_by_role("tab", name=tab)).to_have_attribute("aria-selected", "true")
        expect(page.locator("#panel")).to_contain_text(words)
    expect(page.locator("#pool-note")).to_contain_text("taken")
    expect(page.locator("#plot canvas")).to_be_visible()
    photograph(page, "inspector")
    photograph(page, "inspector-tokens", full_page=True, clip=clip_of(page, "#panel", above=70))
    page.locator('.node[aria-label^="greeting, "]').last.click()
    expect(page.locator(".cells i.picked").first).to_be_attached()


def clip_of(page: Page, selector: str, *, above: int = 0) -> Any:
    box = page.locator(selector).bounding_box()
    assert box is not None
    top = box["y"] + page.evaluate("scrollY") - above
    return {"x": box["x"] - 16, "y": top, "width": box["width"] + 32, "height": box["height"] + above + 12}


def test_a_handle_shows_its_recipe_and_two_show_where_they_part(url: str, open_page: Callable[..., Page]) -> None:
    page = open_page(url)
    node(page, "draft").click()
    detail = page.locator("#detail")
    expect(detail.locator("h2")).to_have_text("draft")
    expect(detail).to_contain_text("The museum ship lies in the harbour")
    expect(detail).to_contain_text("Write it as a letter.")
    expect(detail.locator(".path")).to_contain_text("docs")
    photograph(page, "inspector-handle")
    detail.get_by_role("button", name="Compare with").click()
    node(page, "critique").click()
    expect(detail.locator("h2")).to_have_text("Two handles compared")
    expect(detail.locator(".said.a pre")).to_contain_text("rite it as a letter.")
    expect(detail.locator(".said.b pre")).to_contain_text("hat is missing in this plan?")
    photograph(page, "inspector-diff")
    page.keyboard.press("Escape")
    expect(detail).to_have_class(re.compile("idle"))


def test_a_miss_and_a_compose_say_how_it_came(url: str, open_page: Callable[..., Page]) -> None:
    page = open_page(url)
    page.get_by_role("tab", name="Requests").click()
    page.locator("#panel tr", has_text="greet").first.get_by_role("button", name="Why request").click()
    detail = page.locator("#detail")
    expect(detail.locator("h2")).to_contain_text("Why request")
    expect(detail).to_contain_text("timestamp or id early in the prompt")
    expect(detail.locator(".said ins").first).not_to_be_empty()
    photograph(page, "inspector-miss", full_page=False)
    node(page, "cabins + meals").click()
    expect(detail).to_contain_text("approximate")
    expect(detail).to_contain_text("Compose report")
    expect(detail).to_contain_text("legolink predicted")
    expect(page.locator(".link.composes")).to_have_count(2)


def test_the_checkpoints_of_a_thread_are_a_timeline(url: str, open_page: Callable[..., Page]) -> None:
    page = open_page(url)
    page.get_by_label("Thread").select_option("trip to Oslo")
    expect(page.locator("#timeline-note")).to_contain_text("checkpoints with KV")
    expect(page.locator("#timeline")).to_contain_text("draft_node")
    expect(page.locator("#timeline")).to_contain_text("critique_node")
    page.locator("#timeline .chip", has_text="docs").last.click()
    expect(page.locator("#detail h2")).to_have_text("docs")
    expect(page.locator("#graph .node.picked")).to_have_count(1)


def test_the_keyboard_is_enough(url: str, open_page: Callable[..., Page]) -> None:
    page = open_page(url)
    page.keyboard.press("/")
    expect(page.locator("#find")).to_be_focused()
    page.keyboard.type("draft")
    expect(page.get_by_role("tab", name="Handles")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#panel")).not_to_contain_text("critique")
    page.locator("#graph .node").first.focus()
    page.keyboard.press("ArrowRight")
    plan = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert plan.startswith("plan, generate")
    page.keyboard.press("Enter")
    expect(page.locator("#detail h2")).to_have_text("plan")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == plan, "the focus stays where it was"
    outline = page.evaluate("getComputedStyle(document.activeElement.querySelector('rect.box')).strokeWidth")
    assert float(outline.removesuffix("px")) > 2
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_have_class(re.compile("idle"))
    page.get_by_role("tab", name="Handles").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tab", name="Misses")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#panel")).to_be_focused()
    names = page.evaluate(
        "[...document.querySelectorAll('button, select, input, [role=button], [role=tab]')]"
        ".filter((one) => one.offsetParent !== null || one instanceof SVGElement)"
        ".filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length)).length"
    )
    assert names == 0, "everything that can be used has a name"


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)], ids=["390-light", "1280-dark"])
def test_it_is_readable_in_a_small_and_a_large_window(
    url: str, open_page: Callable[..., Page], width: int, dark: bool
) -> None:
    page = open_page(url, width=width, height=844, dark=dark)
    assert is_within(page)
    pale = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] > 128")
    assert pale is not dark
    photograph(page, f"inspector-{width}-{'dark' if dark else 'light'}")
    node(page, "plan").click()
    expect(page.locator("#detail h2")).to_have_text("plan")
    expect(page.locator("#detail .facts")).to_be_visible()
    assert is_within(page)
    if width == 390:
        photograph(page, f"inspector-{width}-{'dark' if dark else 'light'}-handle")
        page.get_by_role("button", name="Close details").click()
    for tab in ("Requests", "Handles", "Evictions and transfers"):
        page.get_by_role("tab", name=tab).click()
        expect(page.locator("#panel table")).to_have_count(1)
        assert is_within(page), tab


def test_before_the_first_request_it_says_so(
    open_broker: Callable[..., KVBroker], open_page: Callable[..., Page]
) -> None:
    broker = open_broker()
    with serving(inspector_app(broker)) as (address, _):
        page = open_page(address)
        expect(page.locator("#graph")).to_contain_text("No handle yet")
        expect(page.locator("#timeline")).to_contain_text("Nothing yet")
        expect(page.locator("#panel")).to_contain_text("No request")
        broker.prefill("Now there is one.", label="first")
        expect(node(page, "first")).to_be_visible()
        page.goto("about:blank")


def test_a_closed_broker_and_a_server_that_is_gone_are_said_and_the_page_stays(
    engines: Callable[..., TransformersEngine], open_page: Callable[..., Page]
) -> None:
    broker = KVBroker.open(engines("llama"), pool_bytes=4 << 20)
    broker.prefill("What is known stays known.", label="kept")
    with serving(inspector_app(broker)) as (address, _):
        page = open_page(address)
        broker.close()
        expect(page.locator("#state")).to_have_text("broker closed")
        expect(page.locator("#alert")).to_contain_text("The broker was closed")
        expect(page.locator("#pool")).to_contain_text("was given back")
        expect(node(page, "kept")).to_be_visible()
    expect(page.locator("#state")).to_have_text("no answer")
    expect(page.locator("#alert")).to_contain_text("it is tried again")
    expect(node(page, "kept")).to_be_visible()


def test_with_metadata_only_the_page_says_that_text_is_not_shown(
    played: tuple[KVBroker, KVCheckpointSaver], open_page: Callable[..., Page]
) -> None:
    with serving(inspector_app(*played, metadata_only=True)) as (address, _):
        page = open_page(address)
        expect(page.locator("#who")).to_contain_text("metadata only")
        node(page, "plan").click()
        expect(page.locator("#detail")).to_contain_text("Text is not shown here.")
        page.locator("#detail").get_by_role("button", name="Compare with").click()
        node(page, "draft").click()
        expect(page.locator("#detail h2")).to_have_text("Two handles compared")
        assert "museum" not in page.content()
        page.goto("about:blank")


HOSTILE = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
TURNED = "\u202egnp.exe\u2066 שלום"


class Told:
    """A source that says what it was told to: what no broker would let through."""

    def __init__(self, facts: Facts, text: str) -> None:
        self._facts = facts
        self._text = text

    def facts(self) -> Facts:
        return self._facts

    def overview(self) -> dict[str, Any]:
        return {
            "kind": "broker",
            "state": "open",
            "model": HOSTILE,
            "dtype": TURNED,
            "device": "cpu",
            "namespace": "0" * 64,
            "kv": True,
            "num_handles": len(self._facts.recipes),
            "num_requests": len(self._facts.entries),
            "num_movements": 0,
            "num_rejected": 1,
            "threads": [HOSTILE, TURNED],
            "stats": None,
            "pool": None,
        }

    def names_of(self, recipe: Recipe) -> Sequence[str]:
        return ()

    def decode(self, token_ids: Sequence[int]) -> str | None:
        return self._text

    def spell(self, token_ids: Sequence[int]) -> str | None:
        return self._text

    def rejected(self) -> Sequence[RejectedWrite]:
        return [RejectedWrite(HOSTILE, TURNED, "")]

    def why_missed(self, number: int, *, with_text: bool) -> dict[str, Any] | None:
        where = {"position": 1, "role": TURNED, "known_kv_id": "", "known_node": TURNED}
        said = dict.fromkeys(("before", "asked", "known"), f"{TURNED}\nsecond line")
        return {
            "cause": "volatile",
            "cause_words": TURNED,
            "source": TURNED,
            "node": TURNED,
            "why": TURNED,
            "mend": TURNED,
            "num_context": 4,
            "num_reused": 0,
            "num_reusable": 4,
            "num_lost": 4,
            "difference": {**where, **said},
        }


def told(labels: Sequence[str]) -> Facts:
    recipes, entries = {}, []
    for number, label in enumerate(labels):
        kv_id = f"{number:064x}"
        turns = (Turn(HOSTILE[:64], Span(0, 4), True),)
        recipes[kv_id] = Recipe(kv_id, "0" * 64, None, 0, (number, 2, 3, 4), 0, turns, "materialize")
        name = label if len(label) > 64 else f"{label} node"
        entries.append(
            Entry(
                number + 1, 0.0, "materialize", name, label, label[:64], kv_id, None, 4, 0, 4, 0, 0, 0.1, 0.1, None, 0
            )
        )
    return Facts(recipes, (), tuple(entries))


def obeyed(page: Page) -> list[str]:
    """Characters of the page that turn the direction of what is behind them."""
    return re.findall("[\u202a-\u202e\u2066-\u2069]", str(page.evaluate(SHOWN)))


SHOWN = """[document.documentElement.textContent, ...[...document.querySelectorAll('[title], [aria-label]')]
  .flatMap((one) => [one.getAttribute('title'), one.getAttribute('aria-label')])].join('')"""


def test_hostile_names_and_texts_are_shown_and_do_nothing(open_page: Callable[..., Page]) -> None:
    megabyte = f"{HOSTILE}{TURNED}" * 13_000
    assert len(megabyte) > 1 << 20
    source = Told(told([HOSTILE, TURNED, megabyte]), megabyte)
    with serving(make_app(View(source), Threads(None), prefix="/kv")) as (address, _):
        for width in (390, 1280):
            page = open_page(address, width=width)
            expect(page.locator("#who")).to_contain_text("<script>window.hacke")
            for tab in ("Requests", "Handles", "Rejected edits", "Nodes and edges"):
                page.get_by_role("tab", name=tab).click()
                expect(page.locator("#panel")).to_contain_text('<img src=x onerror="window.hacked=1">')
            assert is_within(page)
            page.locator("#graph .node").nth(2).click()
            expect(page.locator("#detail .turn pre")).to_contain_text("window.hacked=1")
            page.locator("#detail").get_by_role("button", name="Compare with").click()
            # On a narrow page the panel takes the focus when it is drawn anew; keys pressed before that would go there.
            expect(page.locator("#detail").get_by_role("button", name="now choose the other one")).to_be_visible()
            page.locator("#graph .node").nth(1).focus()
            page.keyboard.press("Enter")
            expect(page.locator("#detail h2")).to_have_text("Two handles compared")
            assert page.evaluate("window.hacked") is None
            assert page.locator("main img, aside img, main script, aside script").count() == 0
            assert len(page.content()) < 1 << 19, "what is long is cut on its way"
            assert not obeyed(page), "names, turns and what differs"
            assert is_within(page)
            if width == 390:
                page.get_by_role("button", name="Close details").click()
            page.get_by_role("tab", name="Requests").click()
            page.get_by_role("button", name="Why request").first.click()
            expect(page.locator("#detail .said pre").first).to_have_text(re.compile("second line"))
            assert "\n" in page.locator("#detail .said pre").first.inner_text(), "lines stay lines"
            assert page.locator("#detail .said pre", has_text="\u25a1gnp.exe\u25a1 שלום").count() == 3
            assert not obeyed(page), "why it missed"
            page.goto("about:blank")


def test_long_unbroken_names_stay_in_their_card_and_columns_stay_readable(open_page: Callable[..., Page]) -> None:
    long = told(["W" * 64, "x" * 64, "y" * 64])
    kv_ids = list(long.recipes)
    recipes = {
        kv_id: replace(one, parent=kv_ids[at - 1] if at else None, start=4 * at)
        for at, (kv_id, one) in enumerate(long.recipes.items())
    }
    entries = tuple(replace(one, node=one.label, num_context=40, num_reusable=40) for one in long.entries)
    moved = tuple(
        Movement(at + 1, 0.0, "evict", 0, 4, kv_id, 1 << 20, one.label, one.label)
        for at, (kv_id, one) in enumerate(zip(kv_ids, entries, strict=True))
    )
    source = Told(Facts(recipes, (), entries, moved), "text")
    with serving(make_app(View(source), Threads(None), prefix="/kv")) as (address, _):
        for width in (390, 1280):
            page = open_page(address, width=width)
            for tab in ("Requests", "Misses", "Handles", "Evictions and transfers"):
                page.get_by_role("tab", name=tab).click()
                expect(page.locator("#panel table tbody tr")).to_have_count(3)
                assert is_within(page), tab
                card = page.locator("#panel").bounding_box()
                region = page.locator("#panel .scroll").bounding_box()
                assert card is not None
                assert region is not None
                assert region["width"] <= card["width"] + 1, tab
                if width == 390:
                    assert page.evaluate(OUTSIDE) == 0, tab
            page.locator("#graph .node").last.click()
            expect(page.locator("#detail .path li")).not_to_have_count(0)
            assert page.evaluate(
                "document.querySelector('#detail').scrollWidth <= document.querySelector('#detail').clientWidth"
            )
            if width == 1280:
                page.get_by_role("tab", name="Misses").click()
                cell = page.locator('#panel td[data-name="node"]').first.bounding_box()
                assert cell is not None
                assert cell["width"] > 100
            page.goto("about:blank")


OUTSIDE = """(() => {
  const right = document.querySelector('#panel').getBoundingClientRect().right + 1;
  return [...document.querySelectorAll('#panel td *')].filter((one) => one.getBoundingClientRect().right > right).length;
})()"""
