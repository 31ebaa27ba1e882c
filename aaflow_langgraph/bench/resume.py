"""What a restart costs a thread whose KV was kept beside its checkpoints.

Question. A process computed a context in turns, checkpointed each, and ended. A new process opens the same directory. How
long until its first token, what does it compute again, and what did keeping all that take?

Legs. One process runs the turns, notes the greedy tokens that it would go on with, closes saver and broker, and ends. Then,
round by round, a new process loads the model (not counted) and measures, one after the other:

* ``resume_s``   from the question to the saver (``get_tuple``) to the first token: row, recipe, tensors from disk, forward
* ``prefill_s``  stock transformers: one forward over the same tokens through the model's own attention, logits of the last
  token only, the cheapest way to ask for it

Files are dropped from the page cache before each round (``posix_fadvise``), so tensors come from the disk as far as the file
system lets go of them; ``warm_s`` is the same with the files in memory, in a fresh broker.

``ratio`` = median prefill_s / median resume_s. ``disk_ratio`` = bytes of all files of tensors over the bytes of the KV of the
final context. ``step_bytes`` = the most that LangGraph's saver stores for one step, its pending writes included.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from aaflow_langgraph._cache_dir import cache_dir
from aaflow_langgraph.bench.ttft import stock_forward, timed
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.checkpoint.beside import LOCAL, Beside
from aaflow_langgraph.checkpoint.saver import KVCheckpointSaver
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import ConfigError, ContextTooLong
from aaflow_langgraph.handle import KVHandle

TURNS = 8
DECODED = 16
_PROMPT = "so"
_PLACE = {"thread_id": "bench", "checkpoint_ns": ""}
Answer = dict[str, Any]


def run(model: str, dtype: str, context: int, rounds: int, directory: str | None = None) -> dict[str, Any]:
    """Measure below ``directory`` (default: the cache directory). The result is a JSON-ready document.

    Raises:
        ConfigError: Too few tokens for the turns, or a process could not do its work; says why. Way out: fail.
    """
    if context < TURNS:
        raise ConfigError(f"a context of {context} tokens cannot be made in {TURNS} turns: pass more")
    place = Path(directory) if directory is not None else cache_dir()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-resume-", dir=place) as folder:
        first = _in_a_process(keep, model, dtype, folder, context)
        with Beside(folder) as beside:
            tensor_bytes = sum(file.num_bytes for file in beside.files())
        resumed = []
        for _ in range(rounds):
            _drop_from_memory(Path(folder))
            resumed.append(_in_a_process(resume, model, dtype, folder, first["context"]))
        step_bytes = _largest_step(Path(folder) / LOCAL)
    seconds = {leg: [answer[leg] for answer in resumed] for leg in ("resume_s", "warm_s", "prefill_s")}
    medians = {leg: statistics.median(values) for leg, values in seconds.items()}
    return {
        "schema": 1,
        "name": "bench resume",
        "model": first["model"],
        "dtype": first["dtype"],
        "context": first["context"],
        "turns": TURNS,
        "rounds": rounds,
        **{leg: round(value, 5) for leg, value in medians.items()},
        "spread": {leg: round((max(v) - min(v)) / medians[leg], 3) for leg, v in seconds.items()},
        "ratio": round(medians["prefill_s"] / medians["resume_s"], 1),
        "warm_ratio": round(medians["prefill_s"] / medians["warm_s"], 1),
        "recomputed": [answer["recomputed"] for answer in resumed],
        "prefilled": [answer["prefilled"] for answer in resumed],
        "prompt": first["prompt"],
        "tokens_equal": all(answer["token_ids"] == first["token_ids"] for answer in resumed),
        "open_s": round(statistics.median(answer["open_s"] for answer in resumed), 5),
        "close_s": round(first["close_s"], 5),
        "disk_ratio": round(tensor_bytes / first["context_bytes"], 4),
        "tensor_bytes": tensor_bytes,
        "recipe_bytes": first["recipe_bytes"],
        "step_bytes": step_bytes,
    }


def report(document: dict[str, Any]) -> None:
    """A few sentences for people on stderr, one JSON line on stdout."""
    Console(stderr=True).print(
        f"{document['context']:,} tokens in {document['turns']} turns, {document['model']}, {document['dtype']}: first token "
        f"after a restart {document['resume_s'] * 1e3:,.0f} ms (files in memory {document['warm_s'] * 1e3:,.0f} ms), "
        f"re-prefill {document['prefill_s'] * 1e3:,.0f} ms: {document['ratio']}x\n"
        f"computed again {document['recomputed']} tokens; the same greedy tokens: {document['tokens_equal']}\n"
        f"tensors on disk take {document['disk_ratio']:.3f} of the final context, recipes {document['recipe_bytes']:,} bytes, a "
        f"step in the saver at most {document['step_bytes']:,} bytes; opening {document['open_s'] * 1e3:,.0f} ms, closing "
        f"{document['close_s'] * 1e3:,.0f} ms"
    )
    sys.stdout.write(json.dumps(document) + "\n")


def keep(engine: TransformersEngine, folder: str, context: int) -> Answer:
    """The first process: compute the context in turns, checkpoint each, say how it would go on, close."""
    context = min(context, engine.window - DECODED - 32)
    if context < TURNS:
        raise ContextTooLong(f"{TURNS} turns and an answer do not fit a window of {engine.window} tokens")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, engine.vocab_size, (context,), generator=generator).tolist()
    with KVBroker.open(engine, pool_bytes=_pool_bytes(engine, context)) as broker:
        with KVCheckpointSaver.local(folder, broker) as saver:
            handle: KVHandle | None = None
            for turn in range(TURNS):
                added = ids[context * turn // TURNS : context * (turn + 1) // TURNS]
                handle = broker.materialize(added) if handle is None else broker.append(handle, added)
                put_step(saver, "bench", turn, {"plan": handle})
            assert handle is not None
            made = broker.generate(_PROMPT, parent=handle, raw=True, sampling=Sampling(max_tokens=DECODED))
            recipe_bytes = saver.stats().manifest.recipe_bytes
            closing_since = time.perf_counter()
        close_s = time.perf_counter() - closing_since
    return {
        "model": engine.namespace.model,
        "dtype": engine.namespace.dtype,
        "context": context,
        "context_bytes": engine.layout.num_bytes(context),
        "token_ids": made.token_ids,
        "prompt": made.usage.num_context - context,
        "recipe_bytes": recipe_bytes,
        "close_s": close_s,
    }


def resume(engine: TransformersEngine, folder: str, context: int) -> Answer:
    """A later process: go on, from the disk and from memory, then compute the same tokens from nothing."""
    cold, ids = _resumed(engine, folder, context)
    warm, _ = _resumed(engine, folder, context)
    with engine.stock_attention():
        prefill_s = timed(partial(stock_forward, engine, ids), engine.device)
    return cold | {"warm_s": warm["resume_s"], "prefill_s": prefill_s}


def put_step(saver: Any, thread_id: str, step: int, values: dict[str, Any]) -> None:
    """A checkpoint as LangGraph's loop stores it, with what a task wrote behind it."""
    checkpoint_id = f"{step:032x}"
    versions = dict.fromkeys(values, f"{step:032}.0")
    checkpoint = {
        "v": 4,
        "id": checkpoint_id,
        "ts": "2000-01-01T00:00:00+00:00",
        "channel_values": values,
        "channel_versions": versions,
        "versions_seen": {},
        "updated_channels": list(values),
    }
    place = {**_PLACE, "thread_id": thread_id}
    parent = {"checkpoint_id": f"{step - 1:032x}"} if step else {}
    metadata = {"source": "loop", "step": step, "parents": {}}
    stored = saver.put({"configurable": {**place, **parent}}, checkpoint, metadata, versions)
    saver.put_writes(stored, list(values.items()), f"{step:032x}")


def _resumed(engine: TransformersEngine, folder: str, context: int) -> tuple[Answer, list[int]]:
    """Open, ask for the thread, generate; and the token ids of the context and the prompt."""
    with KVBroker.open(engine, pool_bytes=_pool_bytes(engine, context)) as broker:
        opening_since = time.perf_counter()
        with KVCheckpointSaver.local(folder, broker) as saver:
            started = time.perf_counter()
            found = saver.get_tuple({"configurable": _PLACE})
            if found is None:
                raise ConfigError(f"{folder} has no checkpoint of the thread that was kept")
            asked_s = time.perf_counter() - started
            plan = KVHandle.coerce(found.checkpoint["channel_values"]["plan"])
            made = broker.generate(_PROMPT, parent=plan, raw=True, sampling=Sampling(max_tokens=DECODED))
            ids = list(broker.token_ids(made.handle)[: made.usage.num_context])
            stats = broker.stats()
    return {
        "open_s": started - opening_since,
        "resume_s": asked_s + made.usage.ttft_s,
        "token_ids": made.token_ids,
        "recomputed": stats.num_recomputed_tokens,
        "prefilled": stats.num_prefilled_tokens,
    }, ids


def _pool_bytes(engine: TransformersEngine, context: int) -> int:
    return engine.layout.num_bytes(2 * context + 1024)


def _in_a_process(work: Callable[..., Answer], model: str, dtype: str, *args: Any) -> Answer:
    """Run ``work(engine, *args)`` in a process of its own, which has ended when this returns."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs, work, model, dtype, args), daemon=True)
    process.start()
    theirs.close()
    try:
        answer: Answer = ours.recv()
    except EOFError:
        answer = {"error": "it died"}
    finally:
        process.join()
    if "error" in answer:
        raise ConfigError(f"{work.__name__} failed in its process: {answer['error']}")
    return answer


def _work(pipe: Connection, work: Callable[..., Answer], model: str, dtype: str, args: tuple[Any, ...]) -> None:
    try:
        pipe.send(work(TransformersEngine.load(model, dtype=dtype, device="cpu"), *args))
    except (ConfigError, ContextTooLong) as error:
        pipe.send({"error": str(error)})


def _drop_from_memory(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _largest_step(file: Path) -> int:
    """Bytes of the largest step in LangGraph's rows: its checkpoint, and what tasks wrote behind it."""
    with closing(sqlite3.connect(file)) as db:
        (found,) = db.execute(
            "SELECT MAX(LENGTH(c.checkpoint) + LENGTH(c.metadata) + (SELECT COALESCE(SUM(LENGTH(w.value)), 0) FROM writes w "
            "WHERE w.thread_id = c.thread_id AND w.checkpoint_id = c.checkpoint_id)) FROM checkpoints c"
        ).fetchone()
    return int(found)
