"""Settings: what may be written where, which source wins, and what an error says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from services.config import (
    ServeConfig,
    TransferConfig,
    from_dict,
    load,
    set_mooncake_environment,
    set_ray_environment,
    to_dict,
)


def written(folder: Path, data: Any) -> Path:
    file = folder / "pdray.yaml"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    return file


def dotted_defaults() -> dict[str, Any]:
    """Every setting with its default, straight from the dataclasses: the oracle of this file."""
    found: dict[str, Any] = {}
    config = ServeConfig()
    for part in dataclasses.fields(config):
        value = getattr(config, part.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{part.name}.{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
        else:
            found[part.name] = value
    return found


def value_at(config: ServeConfig, dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def test_without_any_source_everything_has_its_default() -> None:
    assert load(environ={}) == ServeConfig()


def test_each_source_weighs_more_than_the_one_before(tmp_path: Path) -> None:
    file = written(tmp_path, {"engine": {"block_size": 2, "num_blocks": 2, "max_num_seqs": 2}})
    environ = {"PDRAY_ENGINE__NUM_BLOCKS": "3", "PDRAY_ENGINE__MAX_NUM_SEQS": "3"}
    defaults = dict.fromkeys(("engine.steps_kept", "engine.block_size", "engine.num_blocks", "engine.max_num_seqs"), 1)
    engine = load(file, {"engine.max_num_seqs": 4}, environ, defaults).engine
    assert (engine.steps_kept, engine.block_size, engine.num_blocks, engine.max_num_seqs) == (1, 2, 3, 4)
    assert engine.max_num_batched_tokens == ServeConfig().engine.max_num_batched_tokens


def test_an_override_of_none_says_nothing() -> None:
    assert load(overrides={"prefill": None, "model.path": None}, environ={}) == ServeConfig()


@pytest.mark.parametrize("dotted", sorted(dotted_defaults()))
def test_every_setting_can_be_given_by_environment_as_text(dotted: str) -> None:
    default = dotted_defaults()[dotted]
    text = ",".join(default) if isinstance(default, tuple) else str(default)
    name = "PDRAY_" + dotted.upper().replace(".", "__")
    config = load(environ={name: text})
    assert value_at(config, dotted) == default
    assert type(value_at(config, dotted)) is type(default)


@pytest.mark.parametrize(
    ("data", "start"),
    [
        ({"engin": {}}, "engin is not a setting"),
        ({"engine": {"blocksize": 16}}, "engine.blocksize is not a setting"),
        ({"engine": 3}, "engine must be a mapping"),
        ({"engine": {"block_size": "many"}}, "engine.block_size must be of type int"),
        ({"engine": {"block_size": 1.5}}, "engine.block_size must be a whole number"),
        ({"engine": {"block_size": True}}, "engine.block_size must be a number"),
        ({"engine": {"block_size": 0}}, "engine.block_size must be at least 1"),
        ({"transfer": {"layerwise": "maybe"}}, "transfer.layerwise must be true or false"),
        ({"transfer": {"protocol": "smoke"}}, "transfer.protocol must be tcp or rdma"),
        ({"transfer": {"lease_ms": 1000, "lease_renew_ms": 900}}, "transfer.lease_renew_ms must be at most half"),
        ({"model": {"dtype": "int3"}}, "model.dtype must be one of"),
        ({"model": {"path": ["a"]}}, "model.path must be text"),
        ({"router": {"port": 70000}}, "router.port must be a port number or 0"),
        ({"router": {"policy": "luck"}}, "router.policy must be cost"),
        ({"redis": {"namespace": "a:b"}}, "redis.namespace must not be empty"),
        ({"budget": {"idle_s": float("nan")}}, "budget.idle_s must be positive"),
        ({"prefill": -1}, "prefill must not be negative"),
        ({"workers": 5}, "workers must be a list"),
        ([1, 2], "config file"),
    ],
)
def test_an_error_begins_with_the_dotted_path_of_the_setting(tmp_path: Path, data: Any, start: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, data), environ={})
    assert str(error.value).startswith(start)


@pytest.mark.parametrize("text", ["prefill: [", "\x00"])
def test_a_file_that_is_no_yaml_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load(file, environ={})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load(tmp_path / "absent.yaml", environ={})


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("", encoding="utf-8")
    assert load(file, environ={}) == ServeConfig()


def test_variables_of_others_are_left_alone() -> None:
    assert load(environ={"PDRAY_HOME": "/x", "PDRAY_SOMETHING": "1", "ENGINE__BLOCK_SIZE": "7"}) == ServeConfig()


def test_an_override_below_a_plain_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill"):
        load(overrides={"prefill": 1, "prefill.more": 2}, environ={})


@settings(deadline=None)
@given(
    st.builds(
        lambda **values: values,
        prefill=st.integers(0, 9),
        decode=st.integers(0, 9),
        workers=st.lists(st.from_regex(r"[a-z]{1,8}:[0-9]{1,5}", fullmatch=True)).map(tuple),
        transfer=st.builds(
            TransferConfig, digests=st.booleans(), max_outstanding=st.integers(1, 2048), device=st.text(max_size=20)
        ),
    )
)
def test_plain_data_restores_an_equal_configuration(values: dict[str, Any]) -> None:
    config = ServeConfig(**values)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("prefill", "decode", "mixed", "serves"),
    [(1, 1, 0, True), (0, 0, 1, True), (1, 0, 1, True), (1, 0, 0, False), (0, 1, 0, False), (0, 0, 0, False)],
)
def test_counts_that_could_never_answer_are_refused(prefill: int, decode: int, mixed: int, serves: bool) -> None:
    config = ServeConfig(prefill=prefill, decode=decode, mixed=mixed)
    if serves:
        config.check_pairs()
    else:
        with pytest.raises(ConfigError, match=f"prefill={prefill}, decode={decode}"):
            config.check_pairs()


def test_mooncake_variables_respect_what_the_user_set() -> None:
    environ = {"MC_LOG_LEVEL": "INFO"}
    set_mooncake_environment(TransferConfig(), environ)
    assert environ["MC_LOG_LEVEL"] == "INFO"
    assert environ["MC_FORCE_TCP"] == "1"
    rdma: dict[str, str] = {}
    set_mooncake_environment(TransferConfig(protocol="rdma"), rdma)
    assert "MC_FORCE_TCP" not in rdma


def test_a_ray_of_our_own_reports_nothing_and_gives_replicas_full_priority() -> None:
    environ = {"RAY_worker_niceness": "3"}
    set_ray_environment(environ)
    assert environ == {"RAY_worker_niceness": "3", "RAY_USAGE_STATS_ENABLED": "0"}
    fresh: dict[str, str] = {}
    set_ray_environment(fresh)
    assert fresh["RAY_worker_niceness"] == "0"
