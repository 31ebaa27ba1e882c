"""llama.cpp's own server in this process, spoken to over a socket file. See ``serve.py``.

One slot per agent. A slot's cache is its own: none reads another's. The context is run through the model once, saved, and
restored into every slot. After a run a slot holds a question and an answer too; before the next it is cut back to the
context, untimed.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import xllamacpp


class Peer:
    """A server with ``most_agents`` slots of ``window`` tokens. Its socket is a file in ``folder``, which the caller removes."""

    def __init__(self, model: str, window: int, most_agents: int, threads: int, folder: str) -> None:
        self._folder = Path(folder)
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = most_agents
        # In one unified cache every query would be compared with the keys of all slots.
        params.kv_unified = False
        params.n_ctx = window * most_agents
        params.fit_params = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = 0
        params.cache_idle_slots = False
        params.endpoint_slots = True
        params.slot_save_path = f"{self._folder}/"
        params.ui = False
        # A socket file: no port is opened.
        params.hostnames = [str(self._folder / "http.sock")]
        self._server = xllamacpp.Server(params)
        self._most_agents = most_agents
        self._context: list[int] = []

    def warm(self, context: list[int]) -> dict[str, Any]:
        """Run the context through the model once, and copy its keys and values into every slot."""
        self._context = context
        self._ask(0, context, 1)
        self._post("/slots/0?action=save", {"filename": "context"})
        for slot in range(1, self._most_agents):
            self._post(f"/slots/{slot}?action=restore", {"filename": "context"})
        (self._folder / "context").unlink()
        return {}

    def rewind(self, num_agents: int) -> dict[str, Any]:
        """Cut the slots back to the context: what they remember of the last questions would be found again."""
        for slot in range(num_agents):
            self._ask(slot, self._context, 1)
        return {}

    def generate(self, questions: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All questions at once, one per slot, greedy, exactly ``max_tokens`` each."""
        prompts = [self._context + question for question in questions]
        started = time.perf_counter()
        asked: list[dict[str, Any]] = [{} for _ in prompts]

        def ask(slot: int) -> None:
            asked[slot] = self._ask(slot, prompts[slot], max_tokens)

        threads = [threading.Thread(target=ask, args=(slot,)) for slot in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {
            "token_ids": [one["token_ids"] for one in asked],
            "first_s": [one["first_at"] - started for one in asked],
            "end_s": [one["end_at"] - started for one in asked],
            "num_cached": [one["num_cached"] for one in asked],
        }

    def first_logprobs(self, question: list[int]) -> dict[str, Any]:
        """Log-probabilities of the first token over the whole vocabulary, in the order of its ids."""
        options = {"n_predict": 1, "n_probs": 1 << 20, "stream": False}
        answer = self._post("/completion", self._request(0, self._context + question, options))
        top = answer["completion_probabilities"][0]["top_logprobs"]
        by_id = {one["id"]: one["logprob"] for one in top}
        return {"logprobs": [by_id[token_id] for token_id in range(len(by_id))]}

    def _request(self, slot: int, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "id_slot": slot,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            **options,
        }

    def _ask(self, slot: int, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        connection = _OverFile(self._folder / "http.sock")
        body = json.dumps(self._request(slot, prompt, {"n_predict": max_tokens, "stream": True}))
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        token_ids: list[int] = []
        first_at = 0.0
        num_cached = 0
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if event.get("tokens") and not event.get("stop"):
                first_at = first_at or time.perf_counter()
                token_ids += event["tokens"]
            num_cached = event.get("timings", {}).get("cache_n", num_cached)
        end_at = time.perf_counter()
        connection.close()
        if len(token_ids) != max_tokens:
            raise RuntimeError(f"slot {slot}: {len(token_ids)} of {max_tokens} tokens, HTTP status {response.status}")
        return {"token_ids": token_ids, "first_at": first_at, "end_at": end_at, "num_cached": num_cached}

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = _OverFile(self._folder / "http.sock")
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: HTTP status {response.status}: {text[:200]!r}")
        answer: dict[str, Any] = json.loads(text)
        return answer


class _OverFile(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))
