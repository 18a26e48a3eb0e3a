"""The command line: what it accepts, how it refuses, and that it stays light."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvstore.errors import ConfigError
from services import cli
from services.config import ServeConfig


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServeConfig, bool]]:
    """What `pdray serve` would have started."""
    import services.launch

    seen: list[tuple[ServeConfig, bool]] = []

    def record(config: ServeConfig, _console: Any, *, dashboard: bool) -> None:
        seen.append((config, dashboard))

    monkeypatch.setattr(services.launch, "run", record)
    return seen


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_every_option_reaches_its_setting(launched: list[tuple[ServeConfig, bool]]) -> None:
    arguments = {
        "--model": ("x/y", lambda c: c.model.path),
        "--prefill": ("3", lambda c: str(c.prefill)),
        "--decode": ("4", lambda c: str(c.decode)),
        "--mixed": ("5", lambda c: str(c.mixed)),
        "--host": ("0.0.0.0", lambda c: c.router.host),
        "--port": ("81", lambda c: str(c.router.port)),
        "--grpc-port": ("91", lambda c: str(c.router.grpc_port)),
        "--dtype": ("float32", lambda c: c.model.dtype),
        "--max-model-len": ("99", lambda c: str(c.model.max_model_len)),
        "--block-size": ("32", lambda c: str(c.engine.block_size)),
        "--num-blocks": ("77", lambda c: str(c.engine.num_blocks)),
        "--transport": ("tcp", lambda c: c.transfer.transport),
        "--redis-url": ("none", lambda c: c.redis.url),
        "--namespace": ("blue", lambda c: c.redis.namespace),
        "--log-dir": ("/logs", lambda c: c.log_dir),
    }
    flags = ("--dashboard", "--allow-fallback")
    result = call("serve", *(part for option, (text, _) in arguments.items() for part in (option, text)), *flags)
    assert result.exit_code == 0, result.output
    config, dashboard = launched[0]
    assert dashboard
    assert config.transfer.allow_fallback
    assert {option: read(config) for option, (_, read) in arguments.items()} == {
        option: text for option, (text, _) in arguments.items()
    }


def test_without_options_everything_has_its_default(launched: list[tuple[ServeConfig, bool]]) -> None:
    assert call("serve").exit_code == 0
    assert launched == [(ServeConfig(), False)]


def test_an_option_weighs_more_than_set_and_set_more_than_the_file(
    launched: list[tuple[ServeConfig, bool]], tmp_path: Path
) -> None:
    file = tmp_path / "pdray.yaml"
    file.write_text("engine: {block_size: 2, num_blocks: 2, steps_kept: 2}\n", encoding="utf-8")
    sets = ["--set", "engine.block_size=3", "--set", "engine.num_blocks=3"]
    assert call("serve", "--config", str(file), *sets, "--block-size", "4").exit_code == 0
    engine = launched[0][0].engine
    assert (engine.block_size, engine.num_blocks, engine.steps_kept) == (4, 3, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "engine.blocksize=3"], "engine.blocksize is not a setting"),
        (["--set", "engine.block_size"], "KEY=VALUE"),
        (["--set", "=3"], "KEY=VALUE"),
        (["--dtype", "int3"], "model.dtype must be one of"),
        (["--prefill", "0"], "serves nothing"),
    ],
)
def test_a_setting_that_cannot_work_ends_with_one_line_and_status_1(arguments: list[str], words: str) -> None:
    result = call("serve", *arguments)
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments", [["--port", "70000"], ["--prefill", "-1"], ["--config", "/absent"], ["--nonsense"]]
)
def test_an_option_out_of_its_range_is_a_usage_error(arguments: list[str]) -> None:
    assert call("serve", *arguments).exit_code == 2


def test_a_busy_port_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        result = call("serve", "--port", number, "--model", "/absent")
    assert result.exit_code == 1
    assert number in result.output
    assert "--port" in result.output
    assert "/absent" not in result.output


def test_values_with_an_equals_sign_are_kept_whole() -> None:
    assert cli.parse_sets(["redis.url=redis://h/0?a=b", "secret="]) == {"redis.url": "redis://h/0?a=b", "secret": ""}
    with pytest.raises(ConfigError):
        cli.parse_sets(["a"])


def test_version_names_pdray_and_what_it_stands_on() -> None:
    output = call("version").output
    assert all(f"{name} " in output for name in ("pdray", "ray", "torch", "transformers", "python"))


def test_doctor_reports_as_json_and_by_its_status(tmp_path: Path) -> None:
    ports = ["--set", "router.port=0", "--set", "router.grpc_port=0"]
    ports += ["--set", "router.serve_port=0", "--set", "router.serve_grpc_port=0"]
    good = call("doctor", "--json", "--redis-url", "none", "--transport", "tcp", *ports)
    assert json.loads(good.output)["ok"] is True
    assert good.exit_code == 0
    bad = call("doctor", "--json", "--redis-url", "none", "--model", str(tmp_path), *ports)
    assert json.loads(bad.output)["ok"] is False
    assert bad.exit_code == 1


def test_preparing_what_is_no_model_ends_with_its_name(tmp_path: Path) -> None:
    result = call("prepare", "--model", str(tmp_path / "absent"), "--cache-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "absent" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["version"], ["serve", "--prefill", "0"]])
def test_light_commands_load_neither_ray_nor_torch(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom services import cli\n"
        f"try:\n    cli.app({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'ray', 'torch', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
