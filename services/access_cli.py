"""``pdray key new | hash``: API keys for the file that ``access.keys_file`` names."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

key_app = typer.Typer(no_args_is_help=True, help="Make API keys, and hashes of keys, for access.keys_file.")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@key_app.command("new")
def new(
    name: Annotated[str, typer.Option(help="Whose key; stands in logs.")],
    tenant: Annotated[str | None, typer.Option(help="Owner of cached KV and limits.", show_default="the name")] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help="infer, metrics or admin; repeatable.", show_default="infer")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A random key, shown this once, and the entry of the file that knows it by its hash."""
    from services.router.access.keys import INFER, new_key, sha256_of

    key = new_key()
    entry = {"name": name, "hash": sha256_of(key), "tenant": tenant or name, "scopes": scope or [INFER]}
    _check(entry)
    _show({"key": key, "entry": entry}, as_json=as_json)


@key_app.command("hash")
def hashed(
    slow: Annotated[bool, typer.Option("--scrypt", help="For a key that somebody made up.")] = False,
    as_json: AsJson = False,
) -> None:
    """The hash of a key that is read from standard input, or asked for where that is a terminal."""
    from services.router.access.keys import MAX_KEY_CHARS, scrypt_of, sha256_of

    key = typer.prompt("key", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")
    if not 0 < len(key) <= MAX_KEY_CHARS:
        typer.echo(f"error: a key has 1 to {MAX_KEY_CHARS} characters, got {len(key)}", err=True)
        raise typer.Exit(1)
    found = scrypt_of(key) if slow else sha256_of(key)
    typer.echo(json.dumps({"hash": found}) if as_json else found)


def _check(entry: dict[str, Any]) -> None:
    """Exit with the reason where the file would not take the entry."""
    from kvstore.errors import ConfigError
    from services.router.access.keys import read_keys

    try:
        read_keys(json.dumps({"keys": [entry]}).encode())
    except ConfigError as exc:
        typer.echo(f"error: {str(exc).removeprefix('access.keys_file: keys[0].')}", err=True)
        raise typer.Exit(1) from None


def _show(made: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(made))
        return
    entry = made["entry"]
    lines = [f"key: {made['key']}", "", "entry under keys: in access.keys_file:", ""]
    lines += [
        f"  {'- ' if i == 0 else '  '}{name}: {json.dumps(value)}" for i, (name, value) in enumerate(entry.items())
    ]
    typer.echo("\n".join(lines))
