"""Peers of ``bench agents``: what their sides say when a server is missing, dies, hangs or answers nonsense."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from aaflow_langgraph.bench.peers import VLLM, LlamaCpp, process
from aaflow_langgraph.bench.peers.process import PeerProcess
from aaflow_langgraph.bench.sides import NotRun, Task

TASK = Task("text", ("a", "b"), tuple(range(300)), ((7, 8), (8, 7)), new=2, output=4)
SERVERS = Path(process.__file__).parent / "servers"


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed environment, as far as this process can tell, and a folder for servers that run in it."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".installed").touch()
    (tmp_path / "serve.py").write_text((SERVERS / "serve.py").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(process, "FOLDER", tmp_path)
    monkeypatch.setattr(process, "_SERVE", tmp_path / "serve.py")
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 700,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def server(folder: Path, body: str) -> None:
    """``body`` stands in the method ``work`` of its peer."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    (folder / "one.py").write_text(
        "import os, sys, time\nclass Peer:\n    def __init__(self, **options):\n        self.options = options\n"
        f"    def work(self, **request):\n{lines}\n"
    )


def runs(pid: int) -> bool:
    """Not when it has ended and only its parent has not looked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("peer", [VLLM, LlamaCpp])
def test_without_the_environment_a_peer_says_what_to_run(
    peer: type[VLLM] | type[LlamaCpp], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "FOLDER", tmp_path / "nothing")
    (model / "some.gguf").touch()
    side = peer(model, TASK, 2)
    for call in (lambda: side.run(2), lambda: side.single_stream(8), lambda: side.first_logprobs(0)):
        with pytest.raises(NotRun, match="`make peers`"):
            call()
    side.close()


def test_an_answer_comes_with_the_cpu_seconds_of_the_server_and_its_children(servers: Path) -> None:
    server(
        servers,
        "child = os.fork()\n"
        "end = time.process_time() + 0.2\n"
        "while time.process_time() < end: pass\n"
        "if child == 0: time.sleep(60)\n"
        "return {'said': request['word'], 'child': child, 'window': self.options['window']}",
    )
    peer = PeerProcess("one", {"window": 9}, {})
    answer = peer.ask("work", word="hello")
    assert (answer["said"], answer["window"]) == ("hello", 9)
    assert answer["cpu_s"] >= 0.2
    assert runs(answer["child"])
    peer.close()
    peer.close()
    assert not runs(answer["child"])


def test_what_a_server_prints_is_no_answer(servers: Path) -> None:
    server(servers, "print('loading'); os.write(1, b'raw'); return {'done': True}")
    peer = PeerProcess("one", {}, {})
    assert peer.ask("work")["done"] is True
    peer.close()


def test_a_server_that_dies_is_told_with_its_last_words(servers: Path) -> None:
    server(servers, "raise ValueError('no such layer')")
    peer = PeerProcess("one", {}, {})
    with pytest.raises(NotRun, match=r"ended with status 1; its last words: .*ValueError: no such layer"):
        peer.ask("work")
    with pytest.raises(NotRun, match="closed"):
        peer.ask("work")


def test_a_server_that_does_not_come_up_is_told_with_its_last_words(servers: Path) -> None:
    (servers / "one.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(NotRun, match="No module named 'nothing_of_that_name'"):
        PeerProcess("one", {}, {})


def test_a_server_that_says_nothing_is_ended_at_the_deadline(servers: Path) -> None:
    server(servers, "sys.stderr.write(f'{os.getpid()}\\n'); sys.stderr.flush(); time.sleep(60)")
    # Up first: the deadline is for the answer.
    peer = PeerProcess("one", {}, {})
    peer._deadline_s = 0.5
    with pytest.raises(NotRun, match=r"said nothing for .*; its last words: \d+") as told:
        peer.ask("work")
    assert not runs(int(str(told.value).rsplit(" ", 1)[1]))


def test_an_answer_that_is_cut_is_no_answer(servers: Path) -> None:
    server(servers, "return {}")
    source = (servers / "serve.py").read_text(encoding="utf-8")
    cut = source.replace('json.dumps(answer) + "\\n"', 'json.dumps(answer)[:9] + "\\n"')
    assert cut != source
    (servers / "serve.py").write_text(cut, encoding="utf-8")
    with pytest.raises(NotRun, match="cut or no JSON"):
        PeerProcess("one", {}, {})


def test_a_side_that_failed_does_not_start_its_server_again(servers: Path, model: Path) -> None:
    started = servers / "started"
    (servers / "serve_vllm.py").write_text(f"open({str(started)!r}, 'a').write('x')\nraise SystemExit('no engine')\n")
    side = VLLM(model, TASK, 2)
    for _ in range(2):
        with pytest.raises(NotRun, match="no engine"):
            side.run(1)
    side.close()
    assert started.read_text() == "x"


def test_a_prefix_that_was_not_found_is_not_measured_as_a_warm_one(servers: Path, model: Path) -> None:
    (servers / "serve_vllm.py").write_text(
        "class Peer:\n"
        "    def __init__(self, **options): pass\n"
        "    def warm(self, context): return {}\n"
        "    def rewind(self, num_agents): return {}\n"
        "    def generate(self, questions, max_tokens):\n"
        "        n = len(questions)\n"
        "        return {'token_ids': [[1] * max_tokens] * n, 'first_s': [0.1] * n, 'end_s': [0.2] * n,\n"
        "                'num_cached': [256] * (n - 1) + [128 if n > 1 else 256]}\n"
    )
    side = VLLM(model, TASK, 2)
    assert side.run(1).token_ids == ((1, 1, 1, 1),)
    with pytest.raises(NotRun, match=r"found \[128, 256\] tokens .* 256 should be there"):
        side.run(2)
    side.close()


def test_kv_bytes_are_whole_blocks_for_vllm_and_whole_contexts_for_llama_cpp(model: Path) -> None:
    token = 2 * 2 * 2 * 16 * 2
    # 300 tokens: two whole blocks are shared, 44 + 2 + 4 more are a block of each agent's own.
    assert VLLM(model, TASK, 2).kv_bytes(2) == (2 + 2) * 128 * token
    assert LlamaCpp(model, TASK, 2).kv_bytes(2) == 2 * 306 * token


def test_the_servers_import_nothing_of_ours() -> None:
    files = sorted(SERVERS.glob("*.py"))
    assert [file.name for file in files] == ["serve.py", "serve_llama.py", "serve_vllm.py"]
    for file in files:
        assert "aaflow" not in file.read_text(encoding="utf-8"), file
    assert os.access(SERVERS / "serve.py", os.R_OK)
