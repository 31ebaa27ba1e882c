"""The operator ``transfer``, held to the shipped contract on every index that we ship."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aaflow_langgraph import KVBroker, TransformersEngine
from aaflow_langgraph.testing.transfer_contract import TransferContract
from tests.servers import RealServer, redis_server, short_folder  # noqa: F401


class _Transfer(TransferContract):
    url: str

    @pytest.fixture(autouse=True)
    def _private(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Callable[..., TransformersEngine]
    ) -> Iterator[None]:
        self.folder, self.engine = tmp_path, engines("llama")
        with short_folder() as run_dir:
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_dir))
            self.short = run_dir
            yield

    def open_broker(self, *, disk: bool = False) -> KVBroker:
        return KVBroker.open(
            self.engine, index=self.url, pool_bytes=4 << 20, disk=self.folder / "disk" if disk else None
        )


class TestTransferInOneProcess(_Transfer):
    url = "memory://"
    shares_pools = False


class TestTransferOverRedis(_Transfer):
    @pytest.fixture(autouse=True)
    def _on_server(self, redis_server: RealServer) -> None:
        self.url = redis_server.url
        with redis_server.client() as client:
            client.flushall()


class TestTransferOverAnEmbeddedServer(_Transfer):
    @pytest.fixture(autouse=True)
    def _in_folder(self, _private: None) -> None:
        self.url = f"embedded://{self.short}/index"
