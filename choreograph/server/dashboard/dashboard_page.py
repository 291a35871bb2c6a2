"""/dashboard: a page of the server's state, and further tabs (extra `dashboard`)."""

import secrets
import time
import warnings
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.types import Receive, Scope, Send

from ...errors import ConfigError
from ...utils import require
from ..api_errors import ApiError
from ..service import InferenceService
from . import dashboard_panels as panels

COOKIE = "choreograph_dashboard"
LOGIN_SECONDS, MAX_LOGINS = 12 * 3600, 1000
REFRESH_SECONDS = 1.0
STYLE = Path(__file__).with_name("dashboard.css")
HEAD = "<style>{style}</style>"

LOGIN = """<!doctype html><html lang="en"><head><title>Choreograph</title><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1">{head}</head><body><div class="head"><div class="inner">
<b>Choreograph</b></div></div><form class="login" method="post" action="{path}/login"><div class="card">
<h2>Dashboard</h2><p>Enter an API key of this server. You see the requests of this key.</p>{error}
<label for="key">API key</label><input id="key" name="key" type="password" autocomplete="current-password" autofocus required>
<button type="submit">Open</button></div></form></body></html>"""


# called once a server; returns what adds a tab's content to the page of one browser
TabFactory = Callable[[InferenceService], Callable[["DashboardPage"], None]]


class Dashboard:
    """ASGI application of one server's dashboard: keys first, then NiceGUI's pages.

    Args:
        tabs: further tabs by title.
    """

    def __init__(self, service: InferenceService, tabs: Mapping[str, TabFactory]) -> None:
        assert service.log is not None
        self.service, self.log = service, service.log
        self.tabs = {title: factory(service) for title, factory in tabs.items()}
        self.logins: OrderedDict[str, tuple[str, float]] = OrderedDict()  # token: tenant, end (time.monotonic())
        self._pages = nicegui_pages()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run NiceGUI, of which a process has one."""
        from nicegui import core

        if core.app.is_started:
            raise ConfigError("dashboard=True: another server of this process shows one; start one process for each")
        async with AsyncExitStack() as stack:
            with warnings.catch_warnings():  # NiceGUI looks at every object of the process, deprecated ones included
                warnings.simplefilter("ignore", FutureWarning)
                await stack.enter_async_context(self._pages.router.lifespan_context(self._pages))
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and (not self._is_same_origin(scope) or self._tenant(scope) is None):
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and (response := await self._answer(Request(scope, receive))) is not None:
            await response(scope, receive, send)
            return
        tenant = self._tenant(scope)
        await self._pages({**scope, "choreograph.page": (self, tenant, _token(scope))}, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        """Return the response to a request that does not reach NiceGUI."""
        root, path = request.scope["root_path"], request.scope["path"].removeprefix(request.scope["root_path"])
        if not self._is_same_origin(request.scope):
            return Response("requests from pages of other sites are refused", 403)
        if path == "/login" and request.method == "POST":
            return await self._login(request, root)
        if path == "/logout":
            self.logins.pop(_token(request.scope), None)
            response: Response = RedirectResponse(f"{root}/", 303)
            response.delete_cookie(COOKIE, path=root)
            return response
        if self._tenant(request.scope) is None:
            if path != "/":
                return ApiError(401, "the dashboard needs an API key: log in first", code="invalid_api_key").response()
            return self._login_page(root)
        return None

    async def _login(self, request: Request, root: str) -> Response:
        key = str((await request.form()).get("key", ""))
        try:
            tenant = self.service.tenant(f"Bearer {key}")
        except ApiError:
            return self._login_page(root, "No such key: enter one that the server was started with.")
        token = secrets.token_urlsafe(32)
        self.logins[token] = tenant, time.monotonic() + LOGIN_SECONDS
        if len(self.logins) > MAX_LOGINS:
            self.logins.popitem(last=False)
        response = RedirectResponse(f"{root}/", 303)
        is_secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, token, LOGIN_SECONDS, path=root, secure=is_secure, httponly=True, samesite="strict")
        return response

    def _login_page(self, root: str, error: str = "") -> Response:
        error = f'<p class="error" role="alert">{escape(error)}</p>' if error else ""
        text = LOGIN.format(head=HEAD.format(style=STYLE.read_text()), path=escape(root), error=error)
        return HTMLResponse(text, 401, {"Cache-Control": "no-store"})

    def tenant_of_token(self, token: str) -> str | None:
        """Return the tenant of a login, if it is valid."""
        tenant, end = self.logins.get(token, (None, 0.0))
        return tenant if time.monotonic() < end else None

    def _tenant(self, scope: Scope) -> str | None:
        """Return the tenant of an Authorization header or a login, if valid."""
        try:
            return self.service.tenant(_header(scope, b"authorization"))
        except ApiError:
            return self.tenant_of_token(_token(scope))

    def _is_same_origin(self, scope: Scope) -> bool:
        origin = _header(scope, b"origin")
        hosts = (_header(scope, b"host"), _header(scope, b"x-forwarded-host"))
        return not origin or urlsplit(origin).netloc in hosts


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _token(scope: Scope) -> str:
    pairs = (pair.strip().partition("=") for pair in _header(scope, b"cookie").split(";"))
    return next((value for name, _, value in pairs if name == COOKIE), "")


def add_dashboard(app: FastAPI, service: InferenceService, tabs: Mapping[str, TabFactory]) -> Dashboard:
    """Mount the dashboard; run it in the application's lifespan."""
    dashboard = Dashboard(service, tabs)
    app.mount("/dashboard", dashboard)
    return dashboard


@cache
def nicegui_pages() -> FastAPI:
    """Return the application that holds NiceGUI, of which a process has one."""
    ui: Any = require("nicegui", "dashboard").ui

    @ui.page("/", title="Choreograph")
    def page(request: Request) -> None:
        DashboardPage(ui, *request.scope["choreograph.page"])

    pages = FastAPI(openapi_url=None)
    ui.run_with(pages, tailwind=False, dark=False, show_welcome_message=False)
    return pages


class DashboardPage:
    """The page of one browser."""

    def __init__(self, ui: Any, dashboard: Dashboard, tenant: str, token: str) -> None:
        self.ui, self.tenant = ui, tenant
        self.panels: dict[str, Any] = {}  # HTML elements by name
        self._dashboard, self._token = dashboard, token
        self._service = dashboard.service
        ui.add_head_html(HEAD.format(style=STYLE.read_text()))
        ui.colors(primary="#2f5d8a")
        leave = '<a href="logout">Log out</a>' if token else ""
        self.html(
            f'<div class="inner"><b>Choreograph</b><span>{escape(self._service.model_name)}</span>{leave}</div>', "head"
        )
        tabs_by_title = {"Live": DashboardPage._live, "Messages": DashboardPage._messages, **dashboard.tabs}
        with ui.tabs().classes("tabs").props("dense no-caps align=left") as tabs:
            for name in tabs_by_title:
                ui.tab(name)
        with ui.tab_panels(tabs, value="Live", animated=False, keep_alive=True):
            for name, add_content in tabs_by_title.items():
                with ui.tab_panel(name), ui.element("div").classes("page"):
                    add_content(self)
        ui.timer(REFRESH_SECONDS, self.refresh)

    def html(self, content: str, classes: str = "") -> Any:
        return self.ui.html(content, sanitize=False).classes(classes)

    def card(self, title: str, text: str, panel: str) -> Any:
        """Add a card with a panel that `refresh` fills."""
        with self.ui.element("section").classes("card") as card:
            self.html(f"<h2>{title}</h2><p>{text}</p>")
            self.panels[panel] = self.html("")
        return card

    def _live(self) -> None:
        self.panels["tiles"] = self.html("", "tiles")
        with self.ui.element("div").classes("columns stretch"):
            self.card("KV cache by tier", "Tokens whose keys and values are stored.", "cache")
            self.card("Prompt tokens by source", "Of all requests that have ended.", "sources")
        self.card("Requests", "The latest minute of requests, the newest first.", "timeline")

    def _messages(self) -> None:
        with self.ui.element("section").classes("card"):
            self.html("<h2>Message graph</h2><p>What every message of a workflow attended to, at which positions.</p>")
            self._workflow = self.ui.select([], label="Workflow", on_change=lambda: self.refresh()).props(
                "outlined dense"
            )
            self._workflow.style("max-width: 420px")
            self.panels["graph"] = self.html("")

    async def refresh(self, *, select_latest: bool = False) -> None:
        """Show the current state; only panels that changed are sent."""
        if self._token and self._dashboard.tenant_of_token(self._token) is None:
            self.ui.navigate.reload()
            return
        service, log = self._service, self._dashboard.log
        if not service.thread.is_running:
            return
        state = await service.thread.call(lambda: panels.read_state(service, self.tenant))
        workflow, names = self._workflow.value, list(state.workflows)
        if select_latest or names != self._workflow.options:
            is_kept = workflow in names and not select_latest
            self._workflow.set_options(names, value=workflow if is_kept else next(iter(names), None))
            workflow = self._workflow.value
        rows = await service.thread.call(lambda: list(log.tenant(self.tenant).graphs.get(workflow, {}).values()))
        contents = {
            "tiles": panels.tiles(state),
            "cache": panels.cache_panel(state),
            "sources": panels.sources_panel(state),
            "timeline": panels.timeline_panel(state),
            "graph": panels.graph_panel(sorted(rows)),
        }
        for name, content in contents.items():
            self.panels[name].set_content(content)
