"""What `pdray` shows in a terminal: steps with their time, the panel of a running server, a table of checks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from services.config import ServeConfig
from services.doctor.checks import Check
from services.protocol.model_card import ModelCard

_MARK = {"ok": "[green]✓[/]", "note": "[cyan]•[/]", "warning": "[yellow]![/]", "error": "[red]✗[/]"}


@contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """Show one stage of a start: a spinner while it lasts on a terminal, its time when it is done."""
    began = time.monotonic()
    if console.is_terminal:
        with console.status(escape(text)):
            yield
    else:
        console.print(escape(f"{text} …"))
        yield
    console.print(f"{_MARK['ok']} {escape(text)} [dim]{time.monotonic() - began:.1f} s[/]")


def _url(scheme: str, host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}{shown}:{port}"


def example(config: ServeConfig, http_port: int) -> str:
    """A command to paste that asks the running server for a short answer."""
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}'
    url = _url("http://", config.router.host, http_port)
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def show_running(console: Console, config: ServeConfig, card: ModelCard, ports: tuple[int, int], logs: Path) -> None:
    """The panel of a server that is ready, and the example below it, free of borders."""
    host, router = config.router.host, config.router
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("OpenAI API, chat page", _url("http://", host, ports[0])),
        ("gRPC", _url("", host, ports[1])),
        ("through Ray Serve", f"{_url('http://', host, router.serve_port)}, gRPC {router.serve_grpc_port}"),
        ("model", f"{config.model.served_name or card.name}  ({card.folder})"),
        ("workers", _workers(config)),
        ("logs", str(logs)),
    ]
    for name, value in rows:
        table.add_row(f"[dim]{name}[/]", escape(value))
    console.print(Panel(table, title="[bold]pdray is ready[/]", title_align="left", border_style="green"))
    console.print(escape(example(config, ports[0])), soft_wrap=True, highlight=False)
    console.print("[dim]Ctrl-C stops everything.[/]")


def _workers(config: ServeConfig) -> str:
    counts = [(config.prefill, "prefill"), (config.decode, "decode"), (config.mixed, "mixed")]
    parts = [f"{count} {role}" for count, role in counts if count]
    return f"{' + '.join(parts)}, transport {config.transfer.transport}, {config.engine.num_threads} threads each"


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """Each check with its finding, and below it what mends it."""
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(_MARK[check.level], f"[bold]{escape(check.name)}[/]", escape(check.finding))
        if check.fix:
            table.add_row("", "", f"[yellow]→ {escape(check.fix)}[/]")
    console.print(table)
