"""Entry point of `choreograph` and `python -m choreograph`.

Joins the commands of the library with those of the lab; nothing else outside of the lab imports it.
"""

import sys
from typing import TYPE_CHECKING, Any

from .errors import MissingDependencyError
from .utils import require

if TYPE_CHECKING:
    import typer


def build_app() -> "typer.Typer":
    """Return the command line; its help lists the commands in this order."""
    import typer

    from .cli import engine_commands, prompt_cache_commands, proxy_command, serve_command, step_graph_commands
    from .lab.commands import calibrate, demo, evaluate, explain, layer_reuse, run, train

    app = typer.Typer(
        name="choreograph",
        help="Multi-step LLM workflows that never encode the same message twice.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    for command in (
        train.trace,
        train.train,
        explain.explain,
        serve_command.serve,
        proxy_command.proxy,
        engine_commands.info,
        engine_commands.autotune,
        calibrate.calibrate,
        engine_commands.models,
        demo.demo,
        run.run,
        evaluate.evaluate,
        evaluate.bench,
        engine_commands.chat,
    ):
        app.command(name="eval" if command is evaluate.evaluate else None)(command)
    app.command(name="tune", hidden=True)(engine_commands.autotune)
    for group, earlier_name in ((prompt_cache_commands, "pml"), (step_graph_commands, "graph"), (layer_reuse, "reuse")):
        app.add_typer(group.app)
        app.add_typer(group.app, name=earlier_name, hidden=True)
    return app


def main() -> None:
    """Run the command line; exit with code 2 without extra `cli`."""
    try:
        require("rich", "cli")
        require("typer", "cli")
    except MissingDependencyError as exc:
        print(f"error: {exc}", file=sys.stderr)
        raise SystemExit(2) from None
    from .cli.main import run_app
    from .cli.serve_command import DASHBOARD_TABS

    DASHBOARD_TABS["Playground"] = _open_playground
    run_app(build_app())


def _open_playground(service: Any) -> Any:
    from .lab.playground import open_playground  # loads the workflows

    return open_playground(service)


if __name__ == "__main__":
    main()
