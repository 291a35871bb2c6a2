"""/dashboard: a page of the server's state and a playground (extra `dashboard`)."""

import secrets
import time
import warnings
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.types import Receive, Scope, Send

from ...errors import ChoreographError, ConfigError
from ...utils import require
from ..api_errors import ApiError
from ..service import InferenceService
from . import dashboard_panels as panels
from .playground import WORKFLOWS, ModeResult, Playground

COOKIE = "choreograph_dashboard"
LOGIN_SECONDS, MAX_LOGINS = 12 * 3600, 1000
REFRESH_SECONDS = 1.0
STYLE = Path(__file__).with_name("dashboard.css")
HEAD = "<style>{style}</style>"
MODES = ("prefix", "choreographed")
MAX_TOKENS = 256  # of a message in the playground

LOGIN = """<!doctype html><html lang="en"><head><title>Choreograph</title><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1">{head}</head><body><div class="head"><div class="inner">
<b>Choreograph</b></div></div><form class="login" method="post" action="{path}/login"><div class="card">
<h2>Dashboard</h2><p>Enter an API key of this server. You see the requests of this key.</p>{error}
<label for="key">API key</label><input id="key" name="key" type="password" autocomplete="current-password" autofocus required>
<button type="submit">Open</button></div></form></body></html>"""


class Dashboard:
    """ASGI application of one server's dashboard: keys first, then NiceGUI's pages."""

    def __init__(self, service: InferenceService) -> None:
        assert service.log is not None
        self.service, self.log = service, service.log
        self.playground = Playground(service, self.log)
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


def add_dashboard(app: FastAPI, service: InferenceService) -> Dashboard:
    """Mount the dashboard; run it in the application's lifespan."""
    dashboard = Dashboard(service)
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
        self._ui, self._dashboard, self._tenant, self._token = ui, dashboard, tenant, token
        self._service = dashboard.service
        self._panels: dict[str, Any] = {}
        self._results: dict[str, ModeResult] = {}
        ui.add_head_html(HEAD.format(style=STYLE.read_text()))
        ui.colors(primary="#2f5d8a")
        leave = '<a href="logout">Log out</a>' if token else ""
        self._html(
            f'<div class="inner"><b>Choreograph</b><span>{escape(self._service.model_name)}</span>{leave}</div>', "head"
        )
        with ui.tabs().classes("tabs").props("dense no-caps align=left") as tabs:
            for name in ("Live", "Messages", "Playground"):
                ui.tab(name)
        with ui.tab_panels(tabs, value="Live", animated=False, keep_alive=True):
            for name, build in (("Live", self._live), ("Messages", self._messages), ("Playground", self._playground)):
                with ui.tab_panel(name), ui.element("div").classes("page"):
                    build()
        ui.timer(REFRESH_SECONDS, self._refresh)

    def _html(self, content: str, classes: str = "") -> Any:
        return self._ui.html(content, sanitize=False).classes(classes)

    def _card(self, title: str, text: str, panel: str) -> Any:
        """Add a card with a panel that `_refresh` fills."""
        with self._ui.element("section").classes("card") as card:
            self._html(f"<h2>{title}</h2><p>{text}</p>")
            self._panels[panel] = self._html("")
        return card

    def _live(self) -> None:
        self._panels["tiles"] = self._html("", "tiles")
        with self._ui.element("div").classes("columns stretch"):
            self._card("KV cache by tier", "Tokens whose keys and values are stored.", "cache")
            self._card("Prompt tokens by source", "Of all requests that have ended.", "sources")
        self._card("Requests", "The latest minute of requests, the newest first.", "timeline")

    def _messages(self) -> None:
        with self._ui.element("section").classes("card"):
            self._html("<h2>Message graph</h2><p>What every message of a workflow attended to, at which positions.</p>")
            self._workflow = self._ui.select([], label="Workflow", on_change=lambda: self._refresh()).props(
                "outlined dense"
            )
            self._workflow.style("max-width: 420px")
            self._panels["graph"] = self._html("")

    def _playground(self) -> None:
        ui = self._ui
        titles = {name: workflow.title for name, workflow in WORKFLOWS.items()}
        first = next(iter(titles))
        with ui.element("section").classes("card"):
            self._html(
                "<h2>Playground</h2><p>Runs one workflow twice, each time with an empty cache: in prefix mode, as other "
                "servers cache, then in choreographed mode, which reuses messages at any position.</p>"
            )
            with ui.element("div").classes("form"):
                choice = ui.select(titles, value=first, label="Workflow").props("outlined dense")
                limit = ui.number("Tokens per message", value=48, min=1, max=MAX_TOKENS, precision=0).props(
                    "outlined dense"
                )
                task = ui.textarea("Task", value=WORKFLOWS[first].task).classes("wide").props("outlined rows=2")
                choice.on_value_change(lambda event: task.set_value(WORKFLOWS[event.value].task))
                button = ui.button("Run both modes").props("no-caps unelevated")
            self._status = ui.label("").classes("status").props('role=status aria-live="polite"')
        button.on_click(lambda: self._run(button, choice.value, task.value or "", limit.value))
        with ui.element("div").classes("columns"):
            for mode in MODES:
                self._card(
                    f"{mode.capitalize()} mode", "One run. The time to first token is the mean of its calls.", mode
                )
                self._panels[mode].set_content(panels.empty("No run yet", "Choose a workflow and run both modes."))

    async def _run(self, button: Any, name: str, task: str, max_tokens: float | None) -> None:
        button.disable()
        limit = min(max(int(max_tokens or 48), 1), MAX_TOKENS)
        self._results.clear()
        try:
            for mode in MODES:
                self._status.set_text(f"Running in {mode} mode…")
                self._panels[mode].set_content(panels.empty("Running", "The answer appears when the run has ended."))
                self._results[mode] = await self._dashboard.playground.run(
                    self._tenant,
                    name,
                    task,
                    limit,
                    mode,  # type: ignore[arg-type]
                )
                self._show_results()
            await self._refresh(select_latest=True)
            self._status.set_text("Both runs have ended. The tab Messages shows what each message attended to.")
        except ChoreographError as exc:
            self._status.set_text(f"The run failed: {exc}")
            for mode in MODES:
                if mode not in self._results:
                    self._panels[mode].set_content(panels.empty("No result", "The run failed."))
        finally:
            button.enable()

    def _show_results(self) -> None:
        for mode, other in (MODES, MODES[::-1]):
            if mode in self._results:
                self._panels[mode].set_content(panels.result_panel(self._results[mode], self._results.get(other)))

    async def _refresh(self, *, select_latest: bool = False) -> None:
        """Show the current state; only panels that changed are sent."""
        if self._token and self._dashboard.tenant_of_token(self._token) is None:
            self._ui.navigate.reload()
            return
        service, log = self._service, self._dashboard.log
        if not service.thread.is_running:
            return
        state = await service.thread.call(lambda: panels.read_state(service, self._tenant))
        workflow, names = self._workflow.value, list(state.workflows)
        if select_latest or names != self._workflow.options:
            is_kept = workflow in names and not select_latest
            self._workflow.set_options(names, value=workflow if is_kept else next(iter(names), None))
            workflow = self._workflow.value
        rows = await service.thread.call(lambda: list(log.tenant(self._tenant).graphs.get(workflow, {}).values()))
        contents = {
            "tiles": panels.tiles(state),
            "cache": panels.cache_panel(state),
            "sources": panels.sources_panel(state),
            "timeline": panels.timeline_panel(state),
            "graph": panels.graph_panel(sorted(rows)),
        }
        for name, content in contents.items():
            self._panels[name].set_content(content)
