"""The scripts of the Redis index as text: shipped, documented, of commands that Redis 7.0 knows."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from aaflow_langgraph.index._lua import ScriptText, scripts

COMMANDS_OF_7_0 = {
    "HDEL", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HSET", "HVALS", "TIME",
    "ZADD", "ZLEXCOUNT", "ZRANGE", "ZRANGEBYLEX", "ZRANGEBYSCORE", "ZREM", "ZSCORE",
}  # fmt: skip
MUST_RUN_WHEN_FULL = {
    "release", "remove", "lose", "leave", "sweep", "set_on_disk", "renew", "heartbeat", "unclaim", "take_over",
}  # fmt: skip
ALL = [pytest.param(script, id=name) for name, script in sorted(scripts().items())]


def test_they_are_files_of_the_package() -> None:
    folder = files("aaflow_langgraph.index") / "scripts"
    assert {file.name for file in folder.iterdir() if file.name.endswith(".lua")} == {
        f"{name}.lua" for name in scripts()
    }


@pytest.mark.parametrize("script", ALL)
def test_a_header_states_keys_arguments_and_reply(script: ScriptText) -> None:
    header = script.text.split("\nlocal", 1)[0]
    assert header.startswith("#!lua")  # checked for memory before it runs, never in the middle
    assert all(f"-- {part}:" in header for part in ("Keys", "Reply"))
    assert "Arguments: now or ''" in header


@pytest.mark.parametrize("script", ALL)
def test_only_old_commands_are_used_and_every_key_is_declared(script: ScriptText) -> None:
    used = set(re.findall(r"(?:redis\.call|try)\(\s*'(\w+)'", script.text))
    assert used <= COMMANDS_OF_7_0
    assert "include:" not in script.text
    keys = re.findall(r"redis\.call\('\w+', (\w+)", script.text)
    assert set(keys) - {"set", "key"} <= set(script.keys)  # `set` and `key` stand for one of them


def test_what_frees_memory_runs_when_there_is_none_left() -> None:
    """C7."""
    flagged = {name for name, script in scripts().items() if script.text.startswith("#!lua flags=allow-oom\n")}
    assert flagged == MUST_RUN_WHEN_FULL
    for name, script in scripts().items():
        writes = re.search(r"'(HSET|HDEL|ZADD|ZREM)'", script.text.replace("try('", "")) is not None
        assert script.text.startswith("#!lua flags=no-writes\n") == (
            not writes or name in ("probe", "candidates", "records")
        )
