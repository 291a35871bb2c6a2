"""A server in a thread of the test process, on a free port."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.lab.playground import open_playground
from choreograph.server.app import create_app
from choreograph.server.server_config import ServerConfig

from .inspect_engine import inspect


@dataclass
class LiveServer:
    """A running server and the engine that it owns."""

    url: str
    engine: Engine
    server: uvicorn.Server
    app: Any

    @property
    def model(self) -> str:
        return self.app.state.service.model_name

    def wait_until_idle(self, seconds: float = 20) -> None:
        """Wait until the engine has no request; fails if it takes too long."""
        service, end = self.app.state.service, time.monotonic() + seconds
        while inspect(self.engine).num_unfinished or service.thread.num_generations:
            assert time.monotonic() < end, "requests are still running"
            time.sleep(0.01)


def make_engine(
    folder: str, tokens: int = 8192, *, math: str | None = None, pattern: Sequence[int] | None = None, **cache: Any
) -> Engine:
    """Load a model, and a sibling "math" that reuses its layers."""
    config = EngineConfig(cache=CacheConfig(capacity=tokens, poison_freed_pages=True, **cache))
    models, reuse = ({} if math is None else {"math": math}), ({} if pattern is None else {"math": pattern})
    return Engine.from_pretrained(
        folder, config=config, dtype="float32", device="cpu", models=models, layer_reuse=reuse
    )


@contextmanager
def serving(engine: Engine, *, tracer_provider: Any = None, **options: Any) -> Iterator[LiveServer]:
    """Serve an engine; its invariants and those of the stored messages are checked at the end."""
    config = ServerConfig(**{"served_model_name": "tiny", "max_tokens": 24} | options)
    tabs = {"Playground": open_playground}
    app = create_app(engine, config, tracer_provider=tracer_provider, dashboard_tabs=tabs)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        live = LiveServer(f"http://127.0.0.1:{port}", engine, server, app)
        yield live
        if thread.is_alive() and not server.should_exit:
            live.wait_until_idle()
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
    engine.check()
    app.state.service.planner.store.check()
