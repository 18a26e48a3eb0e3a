"""What `pdray` shows in a terminal: steps with their time, the panel of a running server, a table of checks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Started:
    """What only a running server knows of itself."""

    card: ModelCard
    http_port: int
    grpc_port: int
    transports: str
    logs: Path


def url(scheme: str, host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}{shown}:{port}"


def example(config: ServeConfig, http_port: int) -> str:
    """A command to paste that asks the running server for a short answer."""
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
    base = url(_scheme(config), config.router.host, http_port)
    key = " -H 'Authorization: Bearer KEY'" if config.access.keys_file else ""
    return f"curl {base}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


def _scheme(config: ServeConfig) -> str:
    return "https://" if config.tls.is_on else "http://"


def show_running(console: Console, config: ServeConfig, started: Started) -> None:
    """The panel of a server that is ready, and the example below it, free of borders."""
    host, router = config.router.host, config.router
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("OpenAI API, chat page", url(_scheme(config), host, started.http_port)),
        ("gRPC", url("", host, started.grpc_port)),
        ("through Ray Serve", f"{url('http://', host, router.serve_port)}, gRPC {router.serve_grpc_port}"),
        ("model", f"{config.model.served_name or started.card.name}  ({started.card.folder})"),
        ("workers", _workers(config, started.transports)),
        ("logs", str(started.logs)),
    ]
    for name, value in rows:
        table.add_row(f"[dim]{name}[/]", escape(value))
    console.print(Panel(table, title="[bold]pdray is ready[/]", title_align="left", border_style="green"))
    console.print(escape(example(config, started.http_port)), soft_wrap=True, highlight=False)
    console.print("[dim]Ctrl-C stops everything.[/]")


def _workers(config: ServeConfig, transports: str) -> str:
    counts = [(config.prefill, "prefill"), (config.decode, "decode"), (config.mixed, "mixed")]
    parts = [f"{count} {role}" for count, role in counts if count]
    moves = f", KV moves by {transports}" if config.prefill and transports else ""
    threads = config.engine.num_threads
    return f"{' + '.join(parts)}{moves}, {threads} {'thread' if threads == 1 else 'threads'} each"


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """Each check with its finding, and below it what mends it."""
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(_MARK[check.level], f"[bold]{escape(check.name)}[/]", escape(check.finding))
        if check.fix:
            table.add_row("", "", f"[yellow]→ {escape(check.fix)}[/]")
    console.print(table)
