"""vLLM on the CPU, prefix caching on, driven step by step in this process. See ``serve.py``."""

from __future__ import annotations

import time
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine


class Peer:
    """An engine that takes token ids."""

    def __init__(self, model: str, window: int, most_agents: int) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                dtype="bfloat16",
                max_model_len=window,
                max_num_seqs=max(2, most_agents),
                enforce_eager=True,
                enable_prefix_caching=True,
                max_logprobs=-1,
                disable_log_stats=True,
                seed=0,
            )
        )
        self._num_asked = 0
        self._context: list[int] = []
        self._block_tokens = self._engine.vllm_config.cache_config.block_size
        self._longest = 0

    def warm(self, context: list[int]) -> dict[str, Any]:
        """Bring the context into the prefix cache, and nothing else."""
        self._context = context
        self._engine.reset_prefix_cache()
        answer = self.generate([[]], 1)
        self._longest = 0
        return answer

    def rewind(self, num_agents: int) -> dict[str, Any]:
        """Forget the last questions where they filled a block behind the context: they would be found again."""
        if len(self._context) % self._block_tokens + self._longest >= self._block_tokens:
            self.warm(self._context)
        return {}

    def generate(self, questions: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All questions at once behind the context, greedy, exactly ``max_tokens`` each."""
        self._longest = max(self._longest, *map(len, questions))
        prompts = [self._context + question for question in questions]
        started = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        numbers = {self._add(prompt, sampling): number for number, prompt in enumerate(prompts)}
        first_s, end_s = [0.0] * len(prompts), [0.0] * len(prompts)
        num_cached = [0] * len(prompts)
        token_ids: list[list[int]] = [[] for _ in prompts]
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                number = numbers[output.request_id]
                first_s[number] = first_s[number] or now
                if output.finished:
                    end_s[number] = now
                    token_ids[number] = list(output.outputs[0].token_ids)
                    num_cached[number] = output.num_cached_tokens or 0
        return {"token_ids": token_ids, "first_s": first_s, "end_s": end_s, "num_cached": num_cached}

    def first_logprobs(self, question: list[int]) -> dict[str, Any]:
        """Log-probabilities of the first token over the whole vocabulary, in the order of its ids."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=-1)
        self._longest = max(self._longest, len(question))
        self._add(self._context + question, sampling)
        outputs: list[Any] = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
        values = outputs[0].outputs[0].logprobs[0]
        return {"logprobs": [values[token_id].logprob for token_id in range(len(values))]}

    def _add(self, prompt: list[int], sampling: Any) -> str:
        self._num_asked += 1
        name = str(self._num_asked)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name
