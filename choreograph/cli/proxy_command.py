"""`choreograph proxy`: reuse of quotes for the clients of a vLLM server."""

from typing import Annotated, Any

import typer

from ..utils import importing_torch, require


def proxy(
    upstream: Annotated[str, typer.Option(help="Address of a vLLM server that runs the connector.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8100,
    api_key: Annotated[
        str | None, typer.Option(help="A key of the vLLM server, for the check at start; clients send their own.")
    ] = None,
    repair: Annotated[
        float, typer.Option(min=0, max=1, help="Share of reused tokens to compute again, of requests without one.")
    ] = 0.0,
    max_stored_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of entries to remember; the server should hold as many.")
    ] = 1 << 20,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 64 << 20,
    log_level: Annotated[str, typer.Option(help="Level of the log: debug, info, warning, error.")] = "info",
) -> None:
    """Reuse quotes of messages in the requests to a vLLM server."""
    for module in ("fastapi", "uvicorn"):
        require(module, "serve")
    require("httpx", "remote")
    with importing_torch():
        from ..server.proxy.proxy_app import check_upstream, create_proxy_app
        from ..server.server_config import ProxyConfig

    config = ProxyConfig(
        upstream=upstream,
        api_key=api_key,
        repair=repair,
        max_stored_tokens=max_stored_tokens,
        max_body_bytes=max_body_bytes,
    )
    app = create_proxy_app(config, has_holes=check_upstream(config))
    uvicorn: Any = require("uvicorn", "serve")
    uvicorn.run(app, host=host, port=port, log_level=log_level, server_header=False, date_header=False)
