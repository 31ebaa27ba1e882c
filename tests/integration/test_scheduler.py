"""Requests that meet in the scheduler: whoever is cut, cancelled, queued, suspended or in front, each gets what it gets alone."""

from __future__ import annotations

import asyncio
import itertools
import operator
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langgraph.graph import START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVHandle, Sampling, TransformersEngine, admission, generate_node, inflight
from aaflow_langgraph.admission import MOST_RUNNING, Admission
from aaflow_langgraph.engine.batch import MIXED_ROWS, SHORT_ROWS, Step
from aaflow_langgraph.engine.line import PATIENCE
from aaflow_langgraph.errors import AAFlowError, Cancelled, ConfigError, ContextTooLong
from aaflow_langgraph.results import Generation, Prefilled, TokenDelta
from tests import tiny
from tests.crowd import Crowd, together, until
from tests.oracle import prose, stock_of


def is_cold(broker: KVBroker, result: Any) -> bool:
    """Are a generation's tokens those of the stock model behind the same context?"""
    if not isinstance(result, Generation):
        raise AssertionError(f"no generation: {result!r}") from (result if isinstance(result, Exception) else None)
    context = broker.token_ids(result.handle)[: result.usage.num_context]
    return result.token_ids == stock_of(broker.engine).greedy(context, len(result.token_ids))


def is_at_rest(broker: KVBroker) -> bool:
    """Does nothing run, wait or hold anything?"""
    stats, line = broker.stats(), broker.engine.batcher
    held = (stats.num_running_requests, stats.num_waiting_requests, stats.num_leases, stats.overflow_bytes)
    return held == (0, 0, 0, 0) and not line._line and not line.is_busy


class Forwards:
    """What runs, in order: tokens of each request of a shared forward, or ``"alone"``."""

    def __init__(self, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[list[int] | str] = []
        self.before_alone: Callable[[], None] = lambda: None
        shared, alone = engine.batcher._run, engine.forward_step

        is_shared = False

        def note_shared(steps: Sequence[Step]) -> Any:
            nonlocal is_shared
            self.seen.append(sorted(len(step.token_ids) for step in steps))
            is_shared = True
            try:
                return shared(steps)
            finally:
                is_shared = False

        def note_alone(step: Step) -> Any:
            if not is_shared:  # nor one of one request, which nobody happened to share
                self.before_alone()
                self.seen.append("alone")
            return alone(step)

        monkeypatch.setattr(engine.batcher, "_run", note_shared)
        monkeypatch.setattr(engine, "forward_step", note_alone)


class Streams:
    """Generations that stop at their first token until told to go on, and count what they get while something else runs."""

    def __init__(self, broker: KVBroker, parent: KVHandle, count: int, num_tokens: int) -> None:
        self.go_on, self.is_counting = threading.Event(), False
        self.counts = [0] * count
        self._begun = threading.Semaphore(0)
        self.crowd = Crowd()
        self.crowd.add(
            lambda n=n: broker.generate(  # type: ignore[misc]
                f"question {n}",
                parent=parent,
                raw=True,
                sampling=Sampling(max_tokens=num_tokens),
                on_token=lambda _: self._token(n),
            )
            for n in range(count)
        )
        for _ in range(count):
            assert self._begun.acquire(timeout=60)

    def _token(self, number: int) -> None:
        if not self.go_on.is_set():
            self._begun.release()
            assert self.go_on.wait(60)
        self.counts[number] += self.is_counting


def test_streams_go_on_while_a_long_prefill_runs_behind_a_shared_prefix(
    open_broker: Callable[..., KVBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fills what they leave of every forward; all equal a run alone."""
    broker = open_broker()
    docs = broker.materialize(tiny.words(130))
    streams = Streams(broker, docs, 3, 24)
    forwards = Forwards(broker.engine, monkeypatch)
    streams.is_counting = True
    long = Crowd()
    long.add([lambda: broker.generate(prose(1300), parent=docs, raw=True, sampling=Sampling(max_tokens=3))])
    until(lambda: broker.stats().num_running_requests == 4)
    streams.go_on.set()
    (answered,) = long.join()
    streams.is_counting = False
    assert is_cold(broker, answered)
    assert all(is_cold(broker, result) for result in streams.crowd.join())
    mixed = [rows for rows in forwards.seen if rows != "alone" and rows[0] == 1 and rows[-1] > SHORT_ROWS]
    assert len(mixed) >= 3
    assert all(sum(rows) <= MIXED_ROWS for rows in mixed)
    assert all(count >= 3 for count in streams.counts), streams.counts
    assert broker.engine.batcher.num_repeated == 0


def test_streams_go_on_between_the_chunks_of_a_cold_prefill_whose_bits_stay_those_of_a_run_alone(
    open_broker: Callable[..., KVBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, alone = open_broker(), open_broker()
    docs = broker.materialize(tiny.words(130))
    streams = Streams(broker, docs, 3, 24)
    forwards, line = Forwards(broker.engine, monkeypatch), broker.engine.batcher
    long = Crowd()
    # Every chunk meets a stream that waits for its turn.
    forwards.before_alone = lambda: until(lambda: any(work.step is not None for work in line._line))
    long.add([lambda: broker.prefill(prose(1300), raw=True).handle])
    until(lambda: broker.stats().num_running_requests == 4)
    streams.go_on.set()
    (handle,) = long.join()
    assert isinstance(handle, KVHandle)
    assert all(is_cold(broker, result) for result in streams.crowd.join())
    chunks = [at for at, what in enumerate(forwards.seen) if what == "alone"]
    assert len(chunks) == 6
    assert all(b - a > 1 for a, b in itertools.pairwise(chunks)), forwards.seen
    forwards.before_alone = lambda: None
    exact = [
        one.generate(
            "so",
            parent=one.prefill(prose(1300), raw=True).handle,
            raw=True,
            sampling=Sampling(max_tokens=8, logprobs=True),
            deterministic=True,
        )
        for one in (broker, alone)
    ]
    assert exact[0].usage.num_reused == 1280  # of what was computed among the streams
    assert (exact[0].token_ids, exact[0].logprobs) == (exact[1].token_ids, exact[1].logprobs)


Request = tuple[str, int, int, int, int, str]
PROMPTS = [1, 7, 40, 70, 300, 530]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["generate", "generate", "generate", "deterministic", "prefill", "append"]),
            st.integers(0, 3),  # which parent
            st.sampled_from(PROMPTS),  # words
            st.integers(1, 6),  # tokens
            st.integers(-2, 2),  # priority
            st.sampled_from(["go on", "go on", "cancel before", "cancel amid", "fork", "evict"]),
        ),
        min_size=3,
        max_size=8,
    )
)
def test_cold_equals_warm_whatever_else_is_in_the_line(
    engines: Callable[..., TransformersEngine], requests: list[Request]
) -> None:
    """Prefills that are cut, calls that run alone, priorities, cancellation, forks and eviction, all at once."""
    engine = engines("llama")
    repeated = engine.batcher.num_repeated
    with KVBroker.open(engine, pool_bytes=3 << 20) as broker:
        docs = broker.materialize(tiny.words(400))
        parents: list[KVHandle | None] = [None, docs, broker.append(docs, tiny.words(30, seed=4)), broker.fork(docs)]

        def run(kind: str, at: int, size: int, count: int, priority: int, fate: str) -> Any:
            stop, parent, prompt = threading.Event(), parents[at], prose(size)
            options: dict[str, Any] = {"raw": True, "priority": priority, "cancel": stop}
            if fate == "cancel before":
                stop.set()
            if fate == "evict" and parent is not None:
                broker.evict(parent)
            if kind == "prefill":
                return broker.prefill(prompt, parent=parent, **options)
            if kind == "append" and parent is not None:
                child = broker.append(parent, tiny.words(size, seed=5))
                parent, prompt = child, "a"
            result = broker.generate(
                prompt,
                parent=parent,
                sampling=Sampling(max_tokens=count),
                deterministic=kind == "deterministic",
                on_token=(lambda _: stop.set()) if fate == "cancel amid" else None,
                **options,
            )
            if fate == "fork":
                fork = broker.fork(result.handle)
                return broker.generate("b", parent=fork, raw=True, sampling=Sampling(max_tokens=count))
            return result

        for request, result in zip(requests, together(lambda r=r: run(*r) for r in requests), strict=True):
            kind, *_, count, _, fate = request
            if fate == "cancel before" or (fate == "cancel amid" and count > 1 and kind != "prefill"):
                # An end of turn as the first token comes before the next look.
                assert isinstance(result, Cancelled) or (fate == "cancel amid" and is_cold(broker, result)), result
            elif kind == "prefill":
                assert isinstance(result, Prefilled), result
            else:
                assert is_cold(broker, result)
        assert is_at_rest(broker)
        assert broker.check() == []
        assert engine.batcher.num_repeated == repeated


def narrow(broker: KVBroker, most: int) -> Admission:
    """Let only so many requests of a broker run; nobody is let in because all stand still."""
    door = broker._requests.admission = Admission(lambda: None, most=most)
    return door


def queued(broker: KVBroker, door: Admission, priorities: Sequence[int], order: list[int]) -> Crowd:
    """One request that runs and holds the door shut, then some that queue up; ``order`` gets who had a token, in order."""
    crowd, gate = Crowd(), threading.Event()

    def ask(number: int) -> Callable[[], Generation]:
        def on_token(_: TokenDelta) -> None:
            order.append(number)
            if number == 0:
                assert gate.wait(60)

        return lambda: broker.generate(
            f"q{number}",
            raw=True,
            sampling=Sampling(max_tokens=1),
            priority=priorities[number],
            on_token=on_token,
        )

    for number in range(len(priorities)):
        crowd.add([ask(number)])
        until(lambda n=number: bool(order) and door.num_waiting == n)  # type: ignore[misc]
    gate.set()
    return crowd


def test_of_those_who_wait_to_run_a_smaller_priority_goes_first(open_broker: Callable[..., KVBroker]) -> None:
    broker, order = open_broker(), []
    crowd = queued(broker, narrow(broker, 1), [0, 1, 0, -1, 1, -1, 0], order)
    results = crowd.join()
    assert order == [0, 3, 5, 2, 6, 1, 4]
    assert all(is_cold(broker, result) for result in results)
    assert all(result.usage.queued_s > 0 for result in results[1:])
    assert all(result.usage.ttft_s >= result.usage.queued_s for result in results)


def test_nobody_waits_for_ever_behind_better_priorities(open_broker: Callable[..., KVBroker]) -> None:
    broker, order = open_broker(), []
    queued(broker, narrow(broker, 1), [0, 5, *[0] * 25], order).join()
    assert order.index(1) == 1 + PATIENCE


def small(broker: KVBroker, number: int, **options: Any) -> Generation:
    """One of forty short requests."""
    return broker.generate(f"q{number % 40}", raw=True, sampling=Sampling(max_tokens=2), **options)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, it does not stand still."""
    monkeypatch.setattr(admission, "STANDSTILL_S", 600.0)


@pytest.mark.usefixtures("patient")
def test_a_thousand_threads_wait_in_line_and_every_second_one_gives_up(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker()
    used = broker.stats().pool_used_bytes
    door, most = broker._requests.admission, 0

    def watched(_: TokenDelta) -> None:
        nonlocal most
        most = max(most, door.num_running)

    stops = [threading.Event() for _ in range(1000)]
    crowd = Crowd()

    def add(numbers: range) -> None:
        crowd.add(lambda n=n: small(broker, n, cancel=stops[n], on_token=watched) for n in numbers)  # type: ignore[misc]

    with broker.engine.lock:
        add(range(MOST_RUNNING))
        until(lambda: door.num_running == MOST_RUNNING)
        add(range(MOST_RUNNING, 1000))
        until(lambda: door.num_waiting == 1000 - MOST_RUNNING)
        for stop in stops[MOST_RUNNING::2]:
            stop.set()
        # Nothing runs meanwhile: giving up does not wait for those who run.
        until(lambda: door.num_waiting == (1000 - MOST_RUNNING) // 2)
    results = crowd.join()
    assert all(isinstance(result, Cancelled) for result in results[MOST_RUNNING::2])
    finished = results[:MOST_RUNNING] + results[MOST_RUNNING + 1 :: 2]
    assert all(is_cold(broker, result) for result in finished)
    assert most == MOST_RUNNING
    assert is_at_rest(broker)
    for result in finished:
        broker.evict(result.handle)
    assert broker.stats().pool_used_bytes == used


@pytest.mark.usefixtures("patient")
async def test_a_thousand_tasks_of_one_loop_wait_in_line(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker()
    door, most = broker._requests.admission, 0

    def watched(_: TokenDelta) -> None:
        nonlocal most
        most = max(most, door.num_running)

    def ask(number: int) -> Any:
        return broker.agenerate(
            f"q{number % 40}", raw=True, sampling=Sampling(max_tokens=2), priority=number % 3, on_token=watched
        )

    tasks = [asyncio.create_task(ask(number)) for number in range(1000)]
    while door.num_waiting == 0:
        await asyncio.sleep(0.001)
    for task in tasks[999::-10]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = [result for result in results if isinstance(result, asyncio.CancelledError)]
    assert len(cancelled) <= 100
    assert sum(is_cold(broker, result) for result in results if result not in cancelled) == 1000 - len(cancelled)
    assert most == MOST_RUNNING
    assert is_at_rest(broker)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "aaflow-request"])


@pytest.mark.usefixtures("patient")
def test_closing_a_broker_cancels_who_runs_and_who_waits(engines: Callable[..., TransformersEngine]) -> None:
    engine = engines()
    broker = KVBroker.open(engine, pool_bytes=8 << 20)
    door, crowd = broker._requests.admission, Crowd()
    with engine.lock:
        crowd.add(lambda n=n: small(broker, n) for n in range(3 * MOST_RUNNING))  # type: ignore[misc]
        until(lambda: door.num_waiting == 2 * MOST_RUNNING)
        broker.close()
    results = crowd.join()
    assert {type(result) for result in results} == {Cancelled}, results
    assert (door.num_running, door.num_waiting) == (0, 0)
    with pytest.raises(ConfigError, match="closed"):
        small(broker, 0)


def test_sixty_four_requests_in_flight_leave_nothing_but_their_extents(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker(pool_bytes=16 << 20)
    docs = broker.materialize(tiny.words(130))
    used, steps, forwards = broker.stats().pool_used_bytes, *counted(broker)
    with broker.engine.lock:
        crowd = Crowd()
        crowd.add(
            lambda n=n: broker.generate(f"q{n}", parent=docs, raw=True, sampling=Sampling(max_tokens=4))  # type: ignore[misc]
            for n in range(64)
        )
        until(lambda: broker.stats().num_running_requests == 64)
    results = crowd.join()
    assert all(is_cold(broker, result) for result in results)
    new_steps, new_forwards = counted(broker)
    assert (new_forwards - forwards) * 4 < new_steps - steps
    assert is_at_rest(broker)
    own = max(result.usage.num_context - 130 + result.usage.num_decoded for result in results) + 1
    assert broker.stats().pool_used_bytes - used <= 64 * own * broker.engine.layout.token_bytes
    for result in results:
        broker.evict(result.handle)
    broker.materialize(tiny.words(130))
    assert broker.stats().pool_used_bytes == used


def counted(broker: KVBroker) -> tuple[int, int]:
    """Steps and forwards so far."""
    return broker.engine.batcher.num_steps, broker.engine.batcher.num_forwards


def test_streams_that_nobody_reads_block_nobody_for_ever_and_go_on_in_another_thread(
    open_broker: Callable[..., KVBroker],
) -> None:
    broker = open_broker()
    streams = [broker.stream(f"q{number}", raw=True, sampling=Sampling(max_tokens=3)) for number in range(MOST_RUNNING)]
    first = together(lambda stream=stream: next(stream) for stream in streams)  # type: ignore[misc]
    assert all(isinstance(event, TokenDelta) for event in first)
    assert broker.stats().num_running_requests == MOST_RUNNING
    assert all(is_cold(broker, result) for result in together([lambda: small(broker, 1), lambda: small(broker, 2)]))
    for number, stream in enumerate(streams):
        if number % 3 == 0:
            stream.close()
        else:
            *_, last = stream
            assert is_cold(broker, last)
    assert is_at_rest(broker)


def test_a_callback_asks_the_broker_itself_while_nobody_else_may_run(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker()
    narrow(broker, 1)
    inner: list[Generation] = []
    outer = broker.generate(
        "outer",
        raw=True,
        sampling=Sampling(max_tokens=3),
        on_token=lambda _: inner.append(small(broker, len(inner))),
    )
    assert len(inner) == 3
    assert all(is_cold(broker, result) for result in (outer, *inner))
    assert is_at_rest(broker)


def test_a_prompt_that_found_no_room_keeps_nobody_waiting_for_its_answer(
    open_broker: Callable[..., KVBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is open and holds no claim any more: the next one computes the prompt for itself."""
    monkeypatch.setattr(inflight, "CLAIM_S", 600.0)
    broker = open_broker(pool_bytes=200 * 768)
    prompt, three = prose(300), Sampling(max_tokens=3)
    with closing(broker.stream(prompt, raw=True, sampling=three)) as stream:
        next(stream)
        assert broker.stats().overflow_bytes > 0
        (second,) = together([lambda: broker.generate(prompt, raw=True, sampling=three)])
    assert is_cold(broker, second)


class Fault(BaseException):
    """As a KeyboardInterrupt."""


def raising(error: BaseException) -> Callable[[object], None]:
    def on_token(_: object) -> None:
        raise error

    return on_token


async def no_callback(_: object) -> None:
    """A coroutine function: nobody would await it."""


def test_bad_requests_among_good_ones_fail_by_themselves(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker(max_position_embeddings=900)
    docs = broker.materialize(tiny.words(300))
    eight = Sampling(max_tokens=8)
    alone = list(broker.stream("about stops", parent=docs, raw=True, sampling=eight))
    texts = [event.text for event in alone if isinstance(event, TokenDelta)]
    at = next(n for n in range(1, len(texts) - 1) if texts[n] and texts[n + 1])
    stop = texts[at][-1] + texts[at + 1][0]  # begins in one token, ends in the next
    whole = "".join(texts)

    def ask(prompt: str, **options: Any) -> Callable[[], Generation]:
        return lambda: broker.generate(prompt, **{"parent": docs, "raw": True, "sampling": eight, **options})

    def in_loop(prompt: str, on_token: Any) -> Callable[[], Generation]:
        return lambda: asyncio.run(broker.agenerate(prompt, parent=docs, raw=True, sampling=eight, on_token=on_token))

    cancelled = threading.Event()
    bad: list[tuple[Callable[[], Any], type[BaseException]]] = [
        (ask("a", on_token=raising(KeyError("the user's own"))), KeyError),
        (ask("b", on_token=raising(Fault())), Fault),
        (ask("c", on_token=raising(KeyboardInterrupt())), KeyboardInterrupt),
        (ask("c", on_token=raising(StopIteration())), RuntimeError),
        (ask("c", on_token=raising(StopAsyncIteration())), RuntimeError),
        (in_loop("d", raising(KeyError("the user's own"))), KeyError),
        (in_loop("e", raising(StopIteration())), RuntimeError),
        (in_loop("e", raising(StopAsyncIteration())), RuntimeError),
        (in_loop("f", no_callback), ConfigError),
        (ask("f", on_token=no_callback), ConfigError),
        (ask("g", cancel=cancelled, on_token=lambda _: cancelled.set()), Cancelled),
        (lambda: Sampling(max_tokens=0), ConfigError),
        (ask(prose(700)), ContextTooLong),
        (ask("h", sampling=Sampling(max_tokens=700)), ContextTooLong),
        (ask("i", priority="high"), ConfigError),
        (ask("j", priority=True), ConfigError),
        (ask("k", priority=1.5), ConfigError),
        (lambda: broker.prefill("l", priority=None), ConfigError),  # type: ignore[arg-type]
    ]
    good = [ask(f"question {number}") for number in range(5)]
    stopped = ask("about stops", sampling=Sampling(max_tokens=8, stop=(stop,)))
    calls = [call for pair in zip(bad, [*good, stopped] * 3, strict=False) for call in (pair[0][0], pair[1])]
    with broker.engine.lock:  # they meet in the line
        crowd = Crowd()
        crowd.add(calls)
        until(lambda: broker.stats().num_running_requests >= len(bad))
    results = crowd.join()
    for result, (_, error) in zip(results[::2], bad, strict=True):
        assert type(result) is error, result
        assert issubclass(error, AAFlowError) or not isinstance(result, AAFlowError)
    for number, result in enumerate(results[1::2]):
        if number % 6 == 5:
            assert (result.text, result.finish_reason) == (whole[: whole.index(stop)], "stop")
        assert is_cold(broker, result)
    assert is_at_rest(broker)


async def test_sixteen_tasks_of_one_loop_share_their_forwards(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker()
    docs = (await broker.aprefill(prose(100), raw=True)).handle
    steps, forwards = counted(broker)
    twelve = Sampling(max_tokens=12)
    results = await asyncio.gather(
        *(broker.agenerate(f"question {n}", parent=docs, raw=True, sampling=twelve) for n in range(16))
    )
    new_steps, new_forwards = counted(broker)
    assert (new_forwards - forwards) * 2 < new_steps - steps
    assert all(is_cold(broker, result) for result in results)


class State(TypedDict):
    docs: KVHandle
    question: str
    answers: Annotated[list[str], operator.add]


async def test_a_fan_out_of_an_async_graph_shares_its_forwards(open_broker: Callable[..., KVBroker]) -> None:
    """``Send`` without ``max_concurrency``, on however few cores."""
    broker = open_broker()
    docs = broker.prefill(prose(100)).handle
    node = generate_node(broker, "{question}", reads="docs", text_to="answer", sampling=Sampling(max_tokens=12))

    async def ask(state: State) -> dict[str, Any]:
        return {"answers": [(await node.ainvoke(state))["answer"]]}

    def fan_out(state: State) -> list[Send]:
        return [Send("ask", {"docs": state["docs"], "question": f"question {n}"}) for n in range(16)]

    graph = StateGraph(State).add_node("ask", ask).add_conditional_edges(START, fan_out, ["ask"]).compile()
    steps, forwards = counted(broker)
    found = await graph.ainvoke({"docs": docs, "question": "", "answers": []})
    new_steps, new_forwards = counted(broker)
    assert (new_forwards - forwards) * 2 < new_steps - steps
    alone = [broker.generate(f"question {n}", parent=docs, sampling=Sampling(max_tokens=12)) for n in range(16)]
    assert all(is_cold(broker, result) for result in alone)
    assert found["answers"] == [result.text for result in alone]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi"])
def test_a_request_answers_alike_alone_and_among_up_to_fifteen_neighbours(
    kind: str, open_broker: Callable[..., KVBroker]
) -> None:
    """The tolerance of docs/explanation/exactness.md, in fp32."""
    broker = open_broker(kind)
    docs = broker.materialize(tiny.words(300))
    twelve = Sampling(max_tokens=12, logprobs=True)

    def ask(number: int) -> Generation:
        return broker.generate(f"question {number}", parent=docs, raw=True, sampling=twelve)

    alone = ask(0)
    assert is_cold(broker, alone)
    broker.evict(alone.handle)
    broker.materialize(tiny.words(300))
    for count in (2, 5, 16):
        crowd = Crowd()
        with broker.engine.lock:  # they meet in the line
            crowd.add(lambda n=n: ask(n) for n in range(count))  # type: ignore[misc]
            until(lambda n=count: broker.stats().num_running_requests == n)  # type: ignore[misc]
        among, *_ = crowd.join()
        assert among.token_ids == alone.token_ids
        assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        for one in crowd.results:
            broker.evict(one.handle)
        broker.materialize(tiny.words(300))


async def test_a_task_that_is_cancelled_stops_nobody_who_got_the_same_event(
    open_broker: Callable[..., KVBroker],
) -> None:
    broker = open_broker("llama")
    stop = threading.Event()
    begun = threading.Event()

    def ask(number: int) -> asyncio.Task[Generation]:
        sampling = Sampling(max_tokens=40)
        return asyncio.create_task(
            broker.agenerate(f"n{number}", sampling=sampling, raw=True, cancel=stop, on_token=lambda _: begun.set())
        )

    tasks = [ask(number) for number in range(4)]
    while not begun.is_set():
        await asyncio.sleep(0.001)
    tasks[0].cancel()
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert all(isinstance(other, Generation) for other in others)
    assert not stop.is_set()
    stop.set()
    with pytest.raises(Cancelled):
        await ask(9)


def test_an_engine_in_a_forked_child_is_refused_with_a_reason(engines: Callable[..., TransformersEngine]) -> None:
    """Also while its lock and the lead belong to a thread that the child does not have."""
    engine = engines("llama")
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        leave.wait(60)

    holder = threading.Thread(target=lambda: engine.batcher.alone(hold))
    holder.start()
    assert inside.wait(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of forks beside threads
        pid = os.fork()
    if pid == 0:
        try:
            engine.batcher.alone(lambda: None)
        except ConfigError as error:
            os._exit(0 if "forked child" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(pid, 0)
    leave.set()
    holder.join(20)
    assert os.waitstatus_to_exitcode(status) == 0


def test_closing_in_the_middle_of_requests_is_cancelled_to_each_of_them(open_broker: Callable[..., KVBroker]) -> None:
    """Between a forward and the publishing behind it, too."""
    for number in range(6):
        broker = open_broker("llama")
        ended: list[BaseException | Generation] = []
        begun = threading.Event()

        def ask(text: str, broker: KVBroker = broker, ended: list[Any] = ended, begun: threading.Event = begun) -> None:
            try:
                for turn in range(50):
                    options: Any = {"sampling": Sampling(max_tokens=2), "raw": True}
                    ended.append(broker.generate(f"{text}{turn}", on_token=lambda _: begun.set(), **options))
            except BaseException as error:
                ended.append(error)

        threads = [threading.Thread(target=ask, args=(prose(280, seed=n),)) for n in range(6)]
        for thread in threads:
            thread.start()
        assert begun.wait(30)
        broker.close()
        for thread in threads:
            thread.join(60)
        wrong = [end for end in ended if not isinstance(end, Generation | Cancelled | ConfigError)]
        assert wrong == [], (number, wrong)
