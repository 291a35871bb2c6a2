"""`choreograph proxy`: reuse of quotes for the clients of a vLLM server."""

from typing import Annotated, Any

import typer

from ..server.server_config import KEEP_ALIVE_SECONDS, ProxyConfig
from ..utils import importing_torch, require
from .config_options import add_parameters, config_parameters


def proxy(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8100,
    log_level: Annotated[str, typer.Option(help="Level of the log: debug, info, warning, error.")] = "info",
    **options: Any,
) -> None:
    """Reuse quotes of messages in the requests to a vLLM server."""
    for module in ("fastapi", "uvicorn"):
        require(module, "serve")
    require("httpx", "remote")
    with importing_torch():
        from ..server.proxy.proxy_app import check_upstream, create_proxy_app

    config = ProxyConfig(**{name: value for name, value in options.items() if value is not None})
    app = create_proxy_app(config, has_holes=check_upstream(config))
    uvicorn: Any = require("uvicorn", "serve")
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level=log_level,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        date_header=False,
    )


add_parameters(proxy, config_parameters([ProxyConfig]))
