"""A proxy in a thread of the test process, on a free port."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from choreograph.server.proxy.proxy_app import UpstreamProxy, check_upstream, create_proxy_app
from choreograph.server.server_config import ProxyConfig


@contextmanager
def serving_app(app: FastAPI) -> Iterator[str]:
    """Serve an application on a free port; yield its URL."""
    config = uvicorn.Config(app, port=0, log_level="warning", server_header=False, date_header=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@contextmanager
def serving_proxy(upstream: str, **options: Any) -> Iterator[tuple[str, UpstreamProxy]]:
    """Serve a proxy; its store is checked at the end."""
    config = ProxyConfig(upstream=upstream, **options)
    app = create_proxy_app(config, has_holes=check_upstream(config))
    with serving_app(app) as url:
        yield url, app.state.proxy
    app.state.proxy.store.check()
