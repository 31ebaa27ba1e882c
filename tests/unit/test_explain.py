"""``explain_miss``: planted faults are found by name in real runs, and nothing is found where nothing is wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from rich.console import Console

from aaflow_langgraph import KVBroker, Sampling
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.explain import (
    CAUSES,
    Cause,
    MissReport,
    explain_miss,
    explain_request,
    misses_document,
    misses_table,
)
from aaflow_langgraph.journal import origin
from tests import planted
from tests.planted import PLANTED, App, Open, open_one  # noqa: F401

FEW = Sampling(max_tokens=2)


def run(app: App, **options: Any) -> tuple[MissReport, ...]:
    """Run an app for real; the reports of all of its brokers."""
    graph = app.graph.copy({"checkpointer": InMemorySaver()})
    for turn in app.turns:
        graph.invoke(turn, {"configurable": {"thread_id": "talk"}})
    return tuple(report for broker in app.brokers for report in explain_miss(broker, **options))


def ask(
    broker: KVBroker, system: str, question: str, *, node: str = "agent", thread: str = "t", kv: bool = True
) -> None:
    chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    render: Any = broker.engine.tokenizer.apply_chat_template
    with origin(node=node, thread=thread):
        ids = render(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
        broker.complete(ids, sampling=FEW, kv=kv)


def printed(reports: tuple[MissReport, ...]) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(misses_table(reports))
    return out.getvalue()


@pytest.mark.parametrize("cause", sorted(PLANTED))
def test_each_planted_cause_is_named_at_its_node_with_how_to_mend_it(cause: Cause, open_one: Open) -> None:
    make, node = PLANTED[cause]
    reports = run(make(open_one))
    missed = [report for report in reports if report.is_miss]
    assert {report.cause for report in missed} == {cause}
    assert node in {report.node for report in missed}
    assert all(report.why and report.mend and 0 < report.num_lost <= report.num_context for report in missed)
    assert {report.thread for report in reports if report.node} == {"talk"}
    shown = printed(reports)
    assert CAUSES[cause].split()[0] in shown
    assert missed[0].mend[:40] in shown


@pytest.mark.parametrize("make", [planted.reads_and_answers, planted.speaks, planted.uses_tools])
def test_a_clean_app_misses_nothing(make: Callable[[Open], App], open_one: Open) -> None:
    reports = run(make(open_one))
    assert len(reports) >= 2
    assert [report.why for report in reports if report.is_miss] == []
    assert [report.num_lost for report in reports] == [0] * len(reports)


def test_a_fresh_prompt_reuses_whole_blocks_and_its_report_says_so(open_one: Open) -> None:
    again = next(r for r in run(planted.reads_and_answers(open_one)) if r.node == "retrieve" and r.num_reused)
    assert (again.cause, again.num_reused) == ("none", 256)
    assert f"{again.num_reusable - 256:,} tokens" in again.why
    assert "256" in again.why


def test_a_prompt_that_went_on_from_a_handle_is_told_which_and_what_is_shared_behind_it(open_one: Open) -> None:
    broker = open_one(planted.engine())
    docs = broker.prefill(planted.DOCS).handle
    same = "The first words of both questions are the same, "
    for end in ("then comes this.", "and that is that."):
        broker.generate(same + end, parent=docs, sampling=FEW)
    asked = explain_miss(broker, last=1)[0]
    num_more = asked.num_reusable - asked.num_reused
    assert (asked.cause, asked.num_reused) == ("none", len(broker.token_ids(docs)))
    assert num_more > 0
    assert f"went on from handle {docs.kv_id[:10]}, all of which was reused" in asked.why
    assert f"{num_more:,} tokens more behind it" in asked.why
    assert "from no handle" not in asked.why


def test_a_report_names_the_edge_and_the_place_in_tokens_and_in_text(open_one: Open) -> None:
    app = planted.dated(open_one)
    hit, missed = run(app)
    assert (hit.cause, missed.cause) == ("none", "volatile")
    assert (missed.source, missed.node, missed.num_reused) == ("agent", "agent", missed.num_reusable)
    assert missed.num_prefilled == missed.num_context - missed.num_reused
    difference = missed.difference
    assert difference is not None
    assert difference.position == missed.num_reusable
    assert difference.known_kv_id == hit.kv_id
    assert (difference.role, difference.known_node) == ("system", "agent")
    assert difference.before.endswith("Now it is ")
    assert difference.asked[:4].isdigit()
    assert difference.known[:4].isdigit()
    (plan,) = [r for r in run(planted.reads_and_answers(open_one))[:3] if r.node == "reason"]
    assert (plan.source, plan.difference) == ("plan", None)


def test_without_text_a_report_quotes_nothing(open_one: Open) -> None:
    for make in (planted.dated, planted.tools_in_another_order, planted.encoded_again, planted.too_small_a_pool):
        document = json.dumps([report.to_dict() for report in run(make(open_one), text=False)])
        assert not [word for word in ("helpful", "Berlin", "capital", "search", "cities", "kind") if word in document]


def test_of_another_tenant_neither_text_nor_name_is_told(open_one: Open) -> None:
    reports = run(planted.another_tenant(open_one))
    (missed, *_more) = [report for report in reports if report.is_miss]
    assert missed.cause == "tenant"
    assert missed.difference is None
    assert "north" not in json.dumps([report.to_dict() for report in reports])


def test_a_date_in_the_question_itself_is_no_miss(open_one: Open) -> None:
    broker = open_one(planted.engine())
    for day in ("12 May 2021", "13 May 2021"):
        ask(broker, planted.SYSTEM, f"What happened on {day}?")
    assert [report.cause for report in explain_miss(broker)] == ["none", "none"]
    long = " What do the documents say about the cities of Germany, the rivers of France and the mountains?"
    for day in ("12 May 2021", "13 May 2021"):
        ask(broker, planted.SYSTEM, f"Today is {day}.{long}")
    assert [report.cause for report in explain_miss(broker, last=1)] == ["volatile"]


def test_kv_switched_off_is_no_eviction(open_one: Open) -> None:
    broker = open_one(planted.engine())
    for kv in (True, False):
        ask(broker, planted.SYSTEM, "Which city?", kv=kv)
    assert [report.cause for report in explain_miss(broker)] == ["none", "off"]


def test_an_eviction_names_the_node_that_took_the_room(open_one: Open) -> None:
    missed = [report for report in run(planted.too_small_a_pool(open_one)) if report.is_miss]
    assert [report.cause for report in missed] == ["evicted"]
    assert "second" in missed[0].why
    assert missed[0].num_recomputed > 0


def test_requests_are_chosen_by_thread_node_number_and_from_the_end(open_one: Open) -> None:
    broker = open_one(planted.engine())
    for node, thread in (("a", "1"), ("b", "1"), ("a", "2")):
        ask(broker, planted.SYSTEM, "Which city?", node=node, thread=thread)
    assert [(r.node, r.thread) for r in explain_miss(broker, node="a")] == [("a", "1"), ("a", "2")]
    assert [(r.node, r.thread) for r in explain_miss(broker, thread="1")] == [("a", "1"), ("b", "1")]
    assert [r.number for r in explain_miss(broker, last=2)] == [2, 3]
    assert explain_request(broker, 2) == explain_miss(broker)[1]
    assert explain_request(broker, 99) is None
    with pytest.raises(ConfigError, match="no request of thread '3'; it has '1', '2'"):
        explain_miss(broker, thread="3")
    with pytest.raises(ConfigError, match="no request of node 'c'"):
        explain_miss(broker, node="c")


def test_bad_input_is_refused_by_name(open_one: Open) -> None:
    broker = open_one(planted.engine())
    assert explain_miss(broker) == ()
    assert "nothing was asked" in printed(())
    with pytest.raises(ConfigError, match="it has no request at all"):
        explain_miss(broker, thread="t")
    for wrong in (0, -1, True, "3"):
        with pytest.raises(ConfigError, match="last must be"):
            explain_miss(broker, last=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="text must be"):
        explain_miss(broker, text=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a KVBroker, got str"):
        explain_miss("broker")  # type: ignore[arg-type]
    broker.close()
    for call in (explain_miss, lambda closed: explain_request(closed, 1)):
        with pytest.raises(ConfigError, match="closed"):
            call(broker)


def test_texts_and_names_from_outside_are_shown_inert(open_one: Open) -> None:
    broker = open_one(planted.engine())
    hostile = "\x1b[2J[bold red]<script>\u202e " + "x" * 100
    for moment in ("10:01", "10:02"):
        ask(broker, f"{hostile} At {moment}: {hostile}", "Which city?", node="no\x1b[2Jde[/]")
    shown = printed(explain_miss(broker))
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[/]" in shown


def test_the_document_is_plain_json(open_one: Open) -> None:
    reports = run(planted.dated(open_one))
    document = json.loads(json.dumps(misses_document(reports)))
    assert (document["schema"], document["name"], len(document["reports"])) == (1, "misses", len(reports))
    assert document["reports"][1]["difference"]["role"] == "system"
