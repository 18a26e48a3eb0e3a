"""The command line: pdray serve | prepare | doctor | bench | replay | version.

Each command imports what it needs only when it runs: `pdray --help` loads neither Ray nor torch.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvstore.errors import ConfigError
from services.access_cli import key_app
from services.config import DTYPES, ServeConfig, home, load
from services.start.system import StartError

app = typer.Typer(
    name="pdray",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Serves language models with prefill and decode apart, on Ray.",
)

trace_app = typer.Typer(no_args_is_help=True, help="Live traffic as a trace.")
app.add_typer(trace_app, name="trace")
app.add_typer(key_app, name="key")

Model = Annotated[
    str | None, typer.Option(help="Folder, Hugging Face id, GGUF file, or `default` (SmolLM2-135M-Instruct).")
]
Dtype = Annotated[str | None, typer.Option(help=f"Of weights and KV: {', '.join(DTYPES)}.")]
Config = Annotated[Path | None, typer.Option(help="YAML file with settings.", exists=True, dir_okay=False)]
RedisUrl = Annotated[str | None, typer.Option(help="redis://…, `embedded` (a Valkey of our own) or `none`.")]
Transport = Annotated[str | None, typer.Option(help="How KV moves: auto, nvlink, rdma, mooncake, tcp, module:Class.")]
AllowFallback = Annotated[
    bool | None,
    typer.Option("--allow-fallback", help="Where --transport cannot be used: the next slower one, and say so."),
]
Port = Annotated[int | None, typer.Option(help="HTTP port of the router; 0: a free one.", min=0, max=65535)]
GrpcPort = Annotated[int | None, typer.Option(help="gRPC port of the router; 0: a free one.", min=0, max=65535)]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting by its dotted name; repeatable.")
]


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, soft_wrap=True).print(f"error: {message}", style="bold red", markup=False, highlight=False)
    return typer.Exit(1)


def parse_sets(pairs: list[str]) -> dict[str, Any]:
    """``["engine.block_size=32"]`` as a mapping. Raises ConfigError for an item without ``=``."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {pair}: give it as KEY=VALUE, for example --set engine.block_size=32")
        found[key.strip()] = value
    return found


def load_config(file: Path | None, sets: list[str] | None, options: dict[str, Any]) -> ServeConfig:
    """File, then PDRAY_* variables, then --set, then the options that were given. Raises ConfigError."""
    given = {name: value for name, value in options.items() if value is not None}
    return load(file, {**parse_sets(sets or []), **given})


@app.command()
def serve(
    model: Model = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.", show_default="1", min=0)] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.", show_default="1", min=0)] = None,
    mixed: Annotated[
        int | None, typer.Option(help="Workers that take whole requests.", show_default="0", min=0)
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address the router listens on.", show_default="127.0.0.1")] = None,
    port: Port = None,
    grpc_port: GrpcPort = None,
    dtype: Dtype = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.", min=0)] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a KV block.", show_default="16", min=1)] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks of each worker; 0: by memory.", min=0)] = None,
    transport: Transport = None,
    allow_fallback: AllowFallback = None,
    redis_url: RedisUrl = None,
    namespace: Annotated[str | None, typer.Option(help="Separates applications in one Redis.")] = None,
    log_dir: Annotated[str | None, typer.Option(help="Folder for Ray's session and all logs.")] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Start Ray's dashboard; `serve status` needs it.")
    ] = False,
    config: Config = None,
    sets: Set = None,
) -> None:
    """Start router, prefill and decode workers on this machine, and stop them all with Ctrl-C."""
    from services.launch import run

    options = {
        "model.path": model,
        "prefill": prefill,
        "decode": decode,
        "mixed": mixed,
        "router.host": host,
        "router.port": port,
        "router.grpc_port": grpc_port,
        "model.dtype": dtype,
        "model.max_model_len": max_model_len,
        "engine.block_size": block_size,
        "engine.num_blocks": num_blocks,
        "transfer.transport": transport,
        "transfer.allow_fallback": allow_fallback,
        "redis.url": redis_url,
        "redis.namespace": namespace,
        "log_dir": log_dir,
    }
    try:
        run(load_config(config, sets, options), Console(soft_wrap=True), dashboard=dashboard)
    except (ConfigError, StartError) as exc:
        raise _fail(str(exc)) from None


@app.command()
def prepare(
    model: Model = "default",
    dtype: Dtype = "auto",
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where prepared models lie.", show_default="~/.cache/pdray/models")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Bare lines, for other programs.")] = False,
) -> None:
    """Turn a model into the folder that router and workers read; quick where it is there already."""
    from services.engine.prepare import prepare as prepare_folder
    from services.start.model import result_line

    out = Console(soft_wrap=True)

    def tell(line: str) -> None:
        out.print(line, markup=False, highlight=False)

    try:
        folder = prepare_folder(
            model or "default",
            cache_dir=cache_dir or home() / "models",
            dtype=dtype or "auto",
            progress=tell,
            trust_remote_code=trust_remote_code,
        )
    except ConfigError as exc:
        if plain:
            tell(" ".join(str(exc).split()))
            raise typer.Exit(1) from None
        raise _fail(str(exc)) from None
    tell(result_line(folder) if plain else str(folder))


@app.command()
def doctor(
    model: Model = None,
    transport: Transport = None,
    redis_url: RedisUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    config: Config = None,
    sets: Set = None,
) -> None:
    """Check what serving needs here, and tell what mends each finding. Exit code 1 where serving cannot work."""
    from services.doctor.checks import run_checks, to_json
    from services.present import show_checks

    options = {"model.path": model, "transfer.transport": transport, "redis.url": redis_url}
    try:
        checks = run_checks(load_config(config, sets, options))
    except ConfigError as exc:
        raise _fail(str(exc)) from None
    console = Console(soft_wrap=as_json)
    if as_json:
        console.print(to_json(checks), markup=False, highlight=False)
    else:
        show_checks(console, checks)
    if any(check.level == "error" for check in checks):
        raise typer.Exit(1)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(ctx: typer.Context) -> None:
    """Put a load on a server and tell what it did; also `pdray bench sweep`, `compare`, `report` and `scenario`."""
    from services.bench.load.main import main as bench_main

    raise typer.Exit(bench_main(ctx.args))


@trace_app.command("record")
def trace_record(
    url: Annotated[str, typer.Option(help="Base URL of a router, http://host:port.")],
    out: Annotated[Path, typer.Option(help="File to write, JSON lines in Mooncake's form.", dir_okay=False)],
    seconds: Annotated[float, typer.Option(help="How long; Ctrl-C ends it before.", min=1, max=86_400)] = 60.0,
    api_key: Annotated[str, typer.Option(help="Where the server has keys: one with the scope admin.")] = "",
) -> None:
    """Record live arrivals of a router: times, lengths and salted block ids, no text. For `pdray bench` and replay."""
    from services.bench.trace_record import record

    try:
        count = record(url, out, seconds, api_key)
    except ConfigError as exc:
        raise _fail(str(exc)) from None
    Console().print(f"{count} requests in {out}", markup=False, highlight=False)


@app.command()
def replay(
    trace: Annotated[
        Path, typer.Option(help="JSON lines in Mooncake's form.", exists=True, dir_okay=False, show_default=False)
    ],
    policy: Annotated[list[str] | None, typer.Option(help="As router.policy; repeatable.", show_default="cost")] = None,
    prefill: Annotated[int, typer.Option(help="Simulated prefill workers.")] = 16,
    decode: Annotated[int, typer.Option(help="Simulated decode workers.")] = 16,
    scale_rate: Annotated[float, typer.Option(help="How many times as fast requests come.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Varies the arrivals; 0: as recorded.")] = 0,
    cost_model: Annotated[str, typer.Option(help="llama-70b or smollm2-135m-cpu.")] = "llama-70b",
    pull: Annotated[bool, typer.Option(help="KV is loaded from other workers where that is faster.")] = True,
    ttft_ms: Annotated[float, typer.Option(help="Target for the first token …")] = 2000.0,
    ttft_token_ms: Annotated[float, typer.Option(help="… and more for each prompt token.")] = 0.2,
    tpot_ms: Annotated[float, typer.Option(help="Target for the mean gap between tokens.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line for each policy.")] = False,
) -> None:
    """Replay recorded arrivals under a routing policy, on simulated workers and a virtual clock."""
    from services.replay.command import Options, run
    from services.replay.outcome import Targets

    try:
        options = Options(
            trace=trace,
            policies=tuple(policy or ["cost"]),
            prefill=prefill,
            decode=decode,
            scale_rate=scale_rate,
            seed=seed,
            cost_model=cost_model,
            pulls=pull,
            as_json=as_json,
            targets=Targets(ttft_ms=ttft_ms, ttft_token_ms=ttft_token_ms, tpot_ms=tpot_ms),
        )
        run(options, Console(soft_wrap=as_json))
    except ConfigError as exc:
        raise _fail(str(exc)) from None


@app.command()
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Requests, one JSON object a line.", exists=True, dir_okay=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Answers; a later run goes on from them.", dir_okay=False)],
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(help="Key of the server.", envvar="OPENAI_API_KEY")] = "none",
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 16,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for one answer.", min=0.001)] = 3600.0,
) -> None:
    """Answer a file of requests in OpenAI's batch form. Exit code 1 where some failed, 2 for a bad file."""
    from services.batch.command import batch_main
    from services.batch.run import Batch

    asked = Batch(
        source=source,
        target=out,
        base_url=url.rstrip("/").removesuffix("/v1"),
        api_key=api_key,
        concurrency=concurrency,
        timeout_s=timeout_s,
    )
    raise typer.Exit(batch_main(asked, Console(soft_wrap=True)))


@app.command()
def version() -> None:
    """The version of pdray and of what it stands on."""
    console = Console()
    for name in ("pdray", "ray", "torch", "transformers"):
        console.print(f"{name} {importlib.metadata.version(name)}", highlight=False)
    console.print(f"python {sys.version.split()[0]}", highlight=False)


def main() -> None:
    """Entry point of the ``pdray`` command."""
    app()


if __name__ == "__main__":
    main()
