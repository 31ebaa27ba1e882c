"""What several workers of one host pay for a context that all of them need.

Question. Four processes, each with a model of its own, get the same context at the same moment. How often is it prefilled,
what does a worker that did not compute it pay to reach it, how much memory do all of them hold, and do they answer alike?

Legs, in one run: every worker materialises the context at the same moment (``prefilled``: tokens that each computed; their
sum is one context when sharing works); then each generates 16 tokens behind it, with the time to first token; worker 0 also
generates them from an empty broker of its own (``answers_equal`` compares all with that).

``reach_ms`` is what a worker pays once for a pool that it has not seen: lookup in the index (a client that knows nothing
yet, connection open), descriptor from the owner, map, tensor; over rounds with a fresh client and a fresh ``Peers`` each,
against an owner that is idle. The first touch of the pages is reported apart: it is paid once in the life of a mapping, also
by whoever copies.

``held_ratio`` = bytes in use in all pools together, before anybody generates, over the bytes of one context, read from the
pools.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.index.opening import open_index
from aaflow_langgraph.pool.peers import Peers
from aaflow_langgraph.store import even

DECODED = 16


def run(model: str, dtype: str, workers: int, context: int, rounds: int, url: str | None = None) -> dict[str, Any]:
    """Measure on a private server, or on the index at ``url``. The result is a JSON-ready document."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="aaflow-") as folder:
        url = url or f"embedded://{folder}/index"
        pipes: list[Connection] = []
        processes = []
        for _ in range(workers):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(theirs, model, dtype, url, context), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            ready = [pipe.recv() for pipe in pipes]
            computed = _all(pipes, "materialize")
            touched = _all(pipes, "touch")
            reached = [pipe_answer for pipe_answer in (_ask(pipe, "reach", rounds) for pipe in pipes) if pipe_answer]
            answers = [_ask(pipe, "generate") for pipe in pipes]
            cold = _ask(pipes[0], "cold")
            for pipe in pipes:
                _ask(pipe, "close")
        finally:
            for process in processes:
                process.join(timeout=20)
                process.kill()
    one = ready[0]["context_bytes"]
    reach = sorted(ms for worker in reached for ms in worker)
    return {
        "name": "bench share",
        "model": model,
        "workers": workers,
        "context": ready[0]["context"],
        "prefilled": [answer["prefilled"] for answer in computed],
        "in_place": [answer["in_place"] for answer in computed],
        "held_ratio": sum(answer["used_bytes"] for answer in computed) / one,
        "context_bytes": one,
        "reach_ms": {
            "p50": statistics.median(reach),
            "p95": reach[int(0.95 * (len(reach) - 1))],
            "rounds": len(reach),
        },
        "first_touch": [answer for answer in touched if answer["foreign"]],
        "ttft_ms": [round(answer["ttft_s"] * 1e3, 2) for answer in answers],
        "cold_ttft_ms": round(cold["ttft_s"] * 1e3, 2),
        "answers_equal": all(answer["token_ids"] == cold["token_ids"] for answer in answers),
    }


def report(document: dict[str, Any]) -> None:
    """A few sentences for people on stderr, one JSON line on stdout."""
    touched = document["first_touch"]
    faults = f"{touched[0]['faults']:,} page faults, {touched[0]['ms']:.1f} ms" if touched else "nobody read in place"
    Console(stderr=True).print(
        f"{document['workers']} workers, {document['context']:,} shared tokens: prefilled {document['prefilled']}, read in "
        f"place {document['in_place']}; all pools hold {document['held_ratio']:.3f} contexts\n"
        f"reaching it the first time (lookup + descriptor + map): {document['reach_ms']['p50']:.3f} ms, p95 "
        f"{document['reach_ms']['p95']:.3f}; first touch of its pages: {faults}\n"
        f"time to first token {document['ttft_ms']} ms, without any cache {document['cold_ttft_ms']:,} ms; answers equal: "
        f"{document['answers_equal']}"
    )
    sys.stdout.write(json.dumps(document) + "\n")


def _all(pipes: list[Connection], command: str) -> list[Any]:
    """The same command to everybody at once."""
    for pipe in pipes:
        pipe.send((command, ()))
    return [pipe.recv() for pipe in pipes]


def _ask(pipe: Connection, command: str, *args: object) -> Any:
    pipe.send((command, args))
    return pipe.recv()


def _work(pipe: Connection, model: str, dtype: str, url: str, context: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    engine = TransformersEngine.load(model, dtype=dtype, device="cpu")
    worker = _Worker(engine, url, context)
    pipe.send({"context": len(worker.ids), "context_bytes": engine.layout.num_bytes(even(len(worker.ids)))})
    while True:
        command, args = pipe.recv()
        pipe.send(getattr(worker, command)(*args))
        if command == "close":
            return


class _Worker:
    """What each process does, one command at a time."""

    def __init__(self, engine: TransformersEngine, url: str, context: int) -> None:
        context = min(context, engine.window - DECODED - 32)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, engine.vocab_size, (context,), generator=generator).tolist()
        self.engine = engine
        self.url = url
        self.pool_bytes = engine.layout.num_bytes(2 * context + 1024)
        self.broker = KVBroker.open(engine, index=url, pool_bytes=self.pool_bytes)
        self.handle: KVHandle | None = None

    def materialize(self) -> dict[str, Any]:
        self.handle = self.broker.materialize(self.ids)
        stats = self.broker.stats()
        moved = self.broker.transfer(self.handle)
        return {
            "prefilled": stats.num_prefilled_tokens,
            "in_place": moved.num_in_place,
            "used_bytes": stats.pool_used_bytes,
        }

    def touch(self) -> dict[str, Any]:
        """Read every page once."""
        store = self.broker._store
        sequence = store.sequence(tuple(self.ids))
        match = store.match(sequence, len(self.ids))
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        foreign = False
        for record, _, _ in match.parts:
            foreign = foreign or (record.place is not None and record.place.owner != store.pool.owner)
            store.rows(record).view(torch.uint8).flatten()[::4096].sum(dtype=torch.int64)
        seconds = time.perf_counter() - started
        store.release(match.receipt)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return {"foreign": foreign, "faults": faults, "ms": round(seconds * 1e3, 2)}

    def reach(self, rounds: int) -> list[float]:
        """Milliseconds of first lookups and attaches; empty for the one that computed."""
        store = self.broker._store
        query = store.query(store.sequence(tuple(self.ids)), ())
        times = []
        for _ in range(rounds):
            index = open_index(self.url, store.namespace)
            index.owners()  # the connection is there
            peers = Peers()
            started = time.perf_counter()
            match = index.match(query, len(self.ids), 5.0)
            foreign = [
                record for record, _, _ in match.parts if record.place and record.place.owner != store.pool.owner
            ]
            for record in foreign:
                assert record.place is not None
                shape = self.engine.layout.shape(even(record.num_tokens))
                peers.attach(record.place.owner).tensor(record.place.allocation, store.dtype, shape)
            times.append((time.perf_counter() - started) * 1e3)
            index.release(match.receipt)
            peers.close()
            index.close()
            if not foreign:
                return []
        return times

    def generate(self) -> dict[str, Any]:
        assert self.handle is not None
        return self._generated(self.broker, self.handle)

    def cold(self) -> dict[str, Any]:
        """Without any cache: prefill and decode in a broker that knows nothing."""
        with KVBroker.open(self.engine, pool_bytes=self.pool_bytes) as broker:
            started = time.perf_counter()
            handle = broker.materialize(self.ids)
            prefill_s = time.perf_counter() - started
            answer = self._generated(broker, handle)
        return answer | {"ttft_s": answer["ttft_s"] + prefill_s}

    def close(self) -> None:
        self.broker.close()

    @staticmethod
    def _generated(broker: KVBroker, handle: KVHandle) -> dict[str, Any]:
        answer = broker.generate("so", parent=handle, raw=True, sampling=Sampling(max_tokens=DECODED))
        return {"token_ids": answer.token_ids, "ttft_s": answer.usage.ttft_s}
