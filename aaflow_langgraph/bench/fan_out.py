"""The handles' side of ``bench agents``: a real LangGraph graph, one prefill node, then ``Send`` to one node per agent.

    START -> read --Send x N--> ask -> END

``read`` is a ``prefill_node``, ``ask`` a ``generate_node``. ``read`` runs once; what is timed starts with its handle in the
state, as every other side starts with the context's token ids or cache. LangGraph's ``max_concurrency`` says how many agents run
at once. Without it LangGraph takes ``min(32, cores + 4)`` threads, so wide fan-outs must set it.
"""

from __future__ import annotations

import operator
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypedDict

import torch
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from aaflow_langgraph.bench.sides import NotRun, Outcome, Task
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.graph.channels import KVChannel
from aaflow_langgraph.graph.nodes import generate_node, prefill_node
from aaflow_langgraph.handle import KVHandle


class _Answer(TypedDict):
    agent: int
    handle: KVHandle
    first_at: float
    num_prefilled: int


class _State(TypedDict, total=False):
    context: str
    questions: list[str]
    docs: Annotated[KVHandle, KVChannel]
    answers: Annotated[list[_Answer], operator.add]


class Handles:
    """Every agent gets the handle of the shared context and a question of its own.

    A broker of its own, so that the peak of its pool is this side's. Between runs everything but the context is evicted.
    """

    def __init__(self, engine: TransformersEngine, task: Task, most_agents: int, *, batched: bool) -> None:
        self.name = "handles-batched" if batched else "handles-serial"
        self.is_serial = not batched
        self.note = f"LangGraph Send, max_concurrency={'agents' if batched else 1}"
        self.computed: tuple[str, ...] = ()
        self._task = task
        self._is_batched = batched
        # Twice the context, and a block of its own for every agent: nothing is ever evicted for lack of room.
        room = 2 * (len(task.context_ids) + 4096) + most_agents * 2 * (task.new + task.output + 256)
        self.broker = KVBroker.open(engine, pool_bytes=engine.layout.num_bytes(room))
        self._graph = _graph(self.broker, task.output)
        self._first: dict[int, torch.Tensor] = {}
        self._num_agents = 1
        started, cpu = time.perf_counter(), time.process_time()
        self._docs = self._invoke([])["docs"]
        self.prefill_cpu_s, self.prefill_s = time.process_time() - cpu, time.perf_counter() - started

    def run(self, num_agents: int) -> Outcome:
        """One run of the graph with this many agents."""
        questions = list(self._task.questions[:num_agents])
        if num_agents != self._num_agents:
            self._num_agents, self._first = num_agents, {}
        started, cpu = time.perf_counter(), time.process_time()
        answers: list[_Answer] = sorted(self._invoke(questions)["answers"], key=lambda answer: answer["agent"])
        total_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        num_output = self._task.output
        token_ids = tuple(self.broker.recipe(answer["handle"]).token_ids[-num_output:] for answer in answers)
        prefilled = {answer["num_prefilled"] for answer in answers}
        if prefilled != {self._task.new}:
            raise RuntimeError(f"agents prefilled {sorted(prefilled)} tokens, each has {self._task.new} new ones")
        self._forget([answer["handle"] for answer in answers])
        return Outcome(token_ids, tuple(answer["first_at"] - started for answer in answers), total_s, cpu_s)

    def kv_bytes(self, num_agents: int) -> int:
        """Peak of the pool up to now: right when the numbers of agents are measured in ascending order."""
        return self.broker.stats().pool_peak_bytes

    def first_logprobs(self, number: int) -> torch.Tensor | None:
        """Of the questions of the last run, asked one by one, or all at once where this side batches."""
        if not self._first:
            ask = partial(self.broker.first_logits, self._docs)
            asked = self._task.question_ids[: self._num_agents]
            with ThreadPoolExecutor(len(asked) if self._is_batched else 1) as pool:
                self._first = dict(enumerate(pool.map(ask, asked)))
        logits = self._first.get(number)
        return None if logits is None else logits.float().cpu().log_softmax(-1)

    def single_stream(self, num_tokens: int) -> float:
        """See ``Streaming``. Without a graph around it: the rate is one of steps."""
        if num_tokens < 2:
            raise NotRun("one token has no decode step behind it")
        times: list[float] = []
        made = self.broker.generate(
            self._task.questions[0],
            parent=self._docs,
            raw=True,
            sampling=Sampling(max_tokens=num_tokens),
            on_token=lambda _: times.append(time.perf_counter()),
        )
        self._forget([made.handle])
        return (num_tokens - 1) / (times[-1] - times[0])

    def close(self) -> None:
        """Give the pool back."""
        self.broker.close()

    def _invoke(self, questions: list[str]) -> dict[str, Any]:
        config = RunnableConfig(max_concurrency=len(questions) if self._is_batched and questions else 1)
        given = {"docs": self._docs} if questions else {"context": self._task.context}
        state: dict[str, Any] = self._graph.invoke({**given, "questions": questions}, config)
        return state

    def _forget(self, answers: list[KVHandle]) -> None:
        """Drop what the agents added; the lease keeps the context, which nobody else builds on at that moment."""
        receipt = self.broker.lease(self._docs)
        for handle in answers:
            self.broker.evict(handle)
        self.broker.release(receipt)


def _graph(broker: KVBroker, num_output: int) -> Any:
    read = prefill_node(broker, "{context}", writes="docs", raw=True)
    generate = generate_node(
        broker,
        "{question}",
        reads="docs",
        writes="answer",
        raw=True,
        usage_to="usage",
        sampling=Sampling(max_tokens=num_output),
    )

    def fan_out(state: _State) -> list[Send] | str:
        if "docs" not in state:
            return "read"
        sends = [
            Send("ask", {"docs": state["docs"], "question": question, "agent": number})
            for number, question in enumerate(state["questions"])
        ]
        return sends or END

    def ask(state: dict[str, Any], config: RunnableConfig) -> dict[str, list[_Answer]]:
        called = time.perf_counter()
        update = generate.invoke(state, config)
        usage = update["usage"]
        first_at = called + usage["ttft_ms"] / 1e3
        answer = _Answer(
            agent=state["agent"], handle=update["answer"], first_at=first_at, num_prefilled=usage["num_prefilled"]
        )
        return {"answers": [answer]}

    builder: Any = StateGraph(_State)
    builder.add_node("read", read)
    builder.add_node("ask", ask)
    for done in (START, "read"):
        builder.add_conditional_edges(done, fan_out, ["read", "ask", END])
    builder.add_edge("ask", END)
    return builder.compile()
