"""Keys, scopes and limits of the front door, without a server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.errors import ConfigError
from services.access_config import AccessConfig, LimitsConfig
from services.protocol.errors import ErrorCode, RequestError
from services.router.access.audit import Audit
from services.router.access.caps import check_limits
from services.router.access.guard import Guard
from services.router.access.keys import KeyRing, matches, new_key, read_keys, scrypt_of, sha256_of
from services.router.access.limits import Limits, Meter, duration, headers
from services.router.access.scopes import ADMINISTER, ANYBODY, OPEN, READ, WATCH, WORK, http_rule, rpc_rule
from services.router.access.tenancy import block_salt


def key_file(*entries: dict[str, Any], tenants: dict[str, Any] | None = None) -> bytes:
    return yaml.safe_dump({"keys": list(entries), "tenants": tenants or {}}).encode()


def entry(name: str, key: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "hash": sha256_of(key), **more}


# --- the file ---


def test_a_file_is_yaml_or_json_and_its_defaults_are_narrow() -> None:
    data = {
        "keys": [entry("a", "k", tenant="t", scopes=["admin"]), entry("b", "l")],
        "tenants": {"t": {"concurrency": 3}},
    }
    for text in (yaml.safe_dump(data), json.dumps(data)):
        found = read_keys(text.encode())
        assert [(k.name, k.tenant, set(k.scopes)) for k in found.keys] == [("a", "t", {"admin"}), ("b", "b", {"infer"})]
        assert found.tenants == {"t": Limits(concurrency=3)}
    assert read_keys(b"").keys == ()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\xff", "UTF-8"),
        (b"{", "line 1"),
        (b"[]", "mapping"),
        (b"keys: 5", "list"),
        (b"keys: [5]", "keys[0]"),
        (key_file({"name": "a", "hash": "md5:00"}), "keys[0].hash"),
        (key_file({"name": "a", "hash": "sha256:00"}), "keys[0].hash"),
        (key_file({"name": "a", "hash": f"scrypt:3:8:1:{'00' * 16}:{'00' * 32}"}), "keys[0].hash"),
        (key_file({"name": "a", "hash": f"scrypt:{1 << 30}:8:1:{'00' * 16}:{'00' * 32}"}), "keys[0].hash"),
        (key_file({"name": "", "hash": sha256_of("k")}), "keys[0].name"),
        (key_file(entry("a", "k", tenant="")), "keys[0].tenant"),
        (key_file(entry("a", "k", scopes=["root"])), "keys[0].scopes"),
        (key_file(entry("a", "k", scope=["infer"])), "keys[0]"),
        (key_file(entry("a", "k", limits={"requests_per_minute": -1})), "requests_per_minute"),
        (key_file(entry("a", "k", limits={"rpm": 1})), "keys[0].limits"),
        (key_file(entry("a", "k"), entry("a", "l")), "'a'"),
        (key_file(tenants={"t": 5}), "tenants.t"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_place_and_without_its_hashes(data: bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=r"access\.keys_file") as caught:
        read_keys(data)
    assert told in str(caught.value)
    assert sha256_of("k")[10:] not in str(caught.value)


def test_cve_2025_59425_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.router.access import keys as module

    found = read_keys(key_file(*(entry(f"k{i}", f"key {i}") for i in range(5))))
    ring, compared = KeyRing(found.keys), []
    real = module.hmac.compare_digest
    monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    for key in ("key 0", "key 4", "nobody's"):
        compared.clear()
        who = ring.find(key)
        assert (None if who is None else who.name) == {"key 0": "k0", "key 4": "k4"}.get(key)
        assert len(compared) == 5
        assert {len(side) for pair in compared for side in pair} == {32}


def test_a_key_under_scrypt_is_slow_once() -> None:
    hashed = scrypt_of("hunter2", n=1 << 4)
    assert matches("hunter2", hashed)
    assert not matches("hunter3", hashed)
    ring = KeyRing(read_keys(key_file({"name": "a", "hash": hashed})).keys)
    assert ring.has_slow
    assert ring.find("hunter2") is None
    assert ring.find_slow("hunter3") is None
    assert ring.find_slow("hunter2") is not None
    assert ring.find("hunter2") is not None


def test_new_keys_are_long_and_never_twice() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 48


# --- rules ---


@pytest.mark.parametrize(
    ("method", "path", "rule"),
    [
        ("GET", "/health", OPEN),
        ("HEAD", "/ready", OPEN),
        ("POST", "/health", ADMINISTER),
        ("GET", "/health/", ADMINISTER),
        ("GET", "/", ANYBODY),
        ("GET", "/metrics", WATCH),
        ("GET", "/v1/models", READ),
        ("POST", "/v1/chat/completions", WORK),
        ("POST", "/v1/whatever", WORK),
        ("POST", "/tokenize", WORK),
        ("GET", "/v1/cluster", ADMINISTER),
        ("GET", "/v1/cluster/", ADMINISTER),
        ("GET", "/v1/cluster/x", ADMINISTER),
        ("GET", "/debug/requests/x", ADMINISTER),
        ("GET", "/invocations", ADMINISTER),
        ("GET", "//v1/models", ADMINISTER),
        ("OPTIONS", "/health", ADMINISTER),
    ],
)
def test_what_no_rule_names_is_the_administrators(method: str, path: str, rule: Any) -> None:
    assert http_rule(method, path) is rule


def test_an_rpc_that_no_rule_names_is_the_administrators() -> None:
    assert rpc_rule("/pdray.v1.Inference/Generate") is WORK
    assert rpc_rule("/pdray.v1.Inference/Generate2") is ADMINISTER
    assert rpc_rule("/grpc.health.v1.Health/Check") is OPEN


# --- the guard ---


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def guard_of(tmp_path: Path, data: bytes, clock: Clock | None = None, **settings: Any) -> Guard:
    path = tmp_path / "keys.yaml"
    path.write_bytes(data)
    return Guard(AccessConfig(keys_file=str(path), **settings), clock or Clock())


async def code_of(guard: Guard, key: str | None, rule: Any) -> ErrorCode | None:
    """How the guard refuses this key; None where it does not."""
    try:
        await guard.caller(key, rule)
    except RequestError as exc:
        refusal = exc
    else:
        return None
    assert not key or key not in refusal.message
    return refusal.code


async def test_a_key_opens_what_its_scopes_name(tmp_path: Path) -> None:
    guard = guard_of(tmp_path, key_file(entry("a", "infer-key"), entry("m", "metrics-key", scopes=["metrics"])))
    assert (await guard.caller("infer-key", WORK)).tenant == "a"
    assert await code_of(guard, None, WORK) is ErrorCode.UNAUTHENTICATED
    assert await code_of(guard, "", WORK) is ErrorCode.UNAUTHENTICATED
    assert await code_of(guard, "wrong-key", WORK) is ErrorCode.UNAUTHENTICATED
    assert await code_of(guard, "infer-key" + "x" * 1000, WORK) is ErrorCode.UNAUTHENTICATED
    assert await code_of(guard, "infer-key\ud800", WORK) is ErrorCode.UNAUTHENTICATED
    assert await code_of(guard, "infer-key", WATCH) is ErrorCode.PERMISSION_DENIED
    assert await code_of(guard, "metrics-key", WATCH) is None
    assert await code_of(guard, "metrics-key", WORK) is ErrorCode.PERMISSION_DENIED
    assert await code_of(guard, None, OPEN) is None
    assert await code_of(guard, "infer-key", ADMINISTER) is ErrorCode.PERMISSION_DENIED


async def test_a_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    guard = guard_of(tmp_path, b"keys: []")
    assert guard.wants_keys
    assert await code_of(guard, "anything", READ) is ErrorCode.UNAUTHENTICATED


def test_a_file_that_is_missing_or_broken_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"access\.keys_file.*cannot be read"):
        Guard(AccessConfig(keys_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"keys\[0\]"):
        guard_of(tmp_path, b"keys: [5]")


async def test_a_changed_file_counts_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    guard = guard_of(tmp_path, key_file(entry("a", "old-key")), reload_s=0.01)
    guard.start()
    try:
        os.replace(_written(tmp_path, key_file(entry("a", "new-key"))), path)
        async with asyncio.timeout(20):
            while await code_of(guard, "new-key", READ) is not None:
                await asyncio.sleep(0.01)
        assert await code_of(guard, "old-key", READ) is ErrorCode.UNAUTHENTICATED
        for broken in (b"keys: [5]", None):
            caplog.clear()
            path.unlink() if broken is None else os.replace(_written(tmp_path, broken), path)
            async with asyncio.timeout(20):
                while "keys stay as they were" not in caplog.text:
                    await asyncio.sleep(0.01)
            assert await code_of(guard, "new-key", READ) is None
    finally:
        await guard.stop()


def _written(folder: Path, data: bytes) -> Path:
    path = folder / "next"
    path.write_bytes(data)
    return path


async def test_limits_of_tenant_and_key_both_hold_and_survive_a_reload(tmp_path: Path) -> None:
    clock = Clock()
    limits = {"requests_per_minute": 2}
    data = key_file(
        entry("a", "a-key", tenant="t", limits=limits),
        entry("b", "b-key", tenant="t"),
        tenants={"t": {"requests_per_minute": 3}},
    )
    guard = guard_of(tmp_path, data, clock)
    a, b = await guard.caller("a-key", WORK), await guard.caller("b-key", WORK)
    for caller in (a, a, b):
        with caller.running(clock):
            pass
    for caller, name in ((a, "key 'a'"), (b, "tenant 't'")):
        with pytest.raises(RequestError, match=name) as caught, caller.running(clock):
            pass
        assert caught.value.code is ErrorCode.RATE_LIMITED
        assert caught.value.retry_after_s is not None
    await guard.reload(_touched(tmp_path / "keys.yaml", data + b"\n"))
    again = await guard.caller("b-key", WORK)
    with pytest.raises(RequestError), again.running(clock):
        pass
    clock.now += 20.0
    with again.running(clock):
        pass


def _touched(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


async def test_requests_at_once_are_limited_and_let_go_of(tmp_path: Path) -> None:
    clock = Clock()
    guard = guard_of(tmp_path, key_file(entry("a", "a-key")), clock, concurrency=1)
    caller = await guard.caller("a-key", WORK)
    with (
        caller.running(clock),
        pytest.raises(RequestError, match=r"1 requests running, its limit is 1"),
        caller.running(clock),
    ):
        pass
    with pytest.raises(ZeroDivisionError), caller.running(clock):
        raise ZeroDivisionError
    with caller.running(clock):
        pass


async def test_tokens_are_taken_at_admission_and_on_the_way(tmp_path: Path) -> None:
    clock = Clock()
    guard = guard_of(tmp_path, key_file(entry("a", "a-key")), clock, tokens_per_minute=100)
    caller = await guard.caller("a-key", WORK)
    with pytest.raises(RequestError, match="101 tokens") as caught:
        caller.take_prompt(101, clock.now)
    assert caught.value.retry_after_s is None
    caller.take_prompt(60, clock.now)
    with pytest.raises(RequestError, match="40 left of 100") as caught:
        caller.take_prompt(50, clock.now)
    assert caught.value.retry_after_s == pytest.approx(6.0)
    caller.take_output(70, clock.now)  # a running answer is never cut
    with pytest.raises(RequestError) as caught, caller.running(clock):
        pass
    assert caught.value.retry_after_s == pytest.approx(31 * 0.6)
    assert caller.headers(clock.now)["x-ratelimit-remaining-tokens"] == "0"


def test_headers_tell_the_tightest_meter() -> None:
    meters = [
        Meter("a", Limits(requests_per_minute=10), 0.0),
        Meter("b", Limits(requests_per_minute=4, tokens_per_minute=9), 0.0),
    ]
    assert meters[1].requests is not None
    meters[1].requests.take(1, 0.0)
    assert headers(meters, 0.0) == {
        "x-ratelimit-limit-requests": "4",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "15s",
        "x-ratelimit-limit-tokens": "9",
        "x-ratelimit-remaining-tokens": "9",
        "x-ratelimit-reset-tokens": "0ms",
    }
    assert headers([], 0.0) == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.12, "120ms"), (1.5, "1.5s"), (360, "6m0s"), (61.25, "1m1.25s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- audit ---


def test_the_audit_file_has_one_json_object_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, audit = tmp_path / "audit.jsonl", Audit()
    audit.open(str(path))
    try:
        audit.tell(action="GET /v1/cluster\n{}" + "x" * 500, outcome="200", key='o"ps', tenant="t", peer="10.0.0.1")
    finally:
        audit.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["key"], x["tenant"], x["outcome"], x["peer"]) for x in lines] == [('o"ps', "t", "200", "10.0.0.1")]
    assert lines[0]["action"].startswith("GET /v1/cluster\n")
    assert len(lines[0]["action"]) == 200
    assert os.stat(path).st_mode & 0o077 == 0
    assert logging.getLogger("pdray.audit").handlers == []
    with pytest.raises(ConfigError, match=r"access\.audit_file"):
        Audit().open(str(tmp_path / "no" / "folder"))


# --- salts ---


def test_no_two_pairs_of_tenant_and_salt_meet() -> None:
    texts = ["", "a", "b", "ab", "aa", "a\x00", "tenant", "\ud800", "x" * 256]
    salts = {block_salt(tenant, salt) for tenant in texts for salt in texts}
    assert len(salts) == len(texts) ** 2
    assert block_salt("", "") == ""
    digest = block_salt("team-a", "")
    assert block_salt("", digest) != digest, "a client's text is never a salt as it is"


# --- limits of one request ---


@pytest.mark.parametrize(
    ("body", "setting"),
    [
        ({"messages": [{}] * 3}, "messages"),
        ({"input": [{}] * 3}, "messages"),
        ({"messages": [{"content": [{}] * 3}]}, "parts"),
        ({"system": [{}] * 3}, "parts"),
        ({"messages": [{"tool_calls": [{}] * 3}]}, "tools"),
        ({"prompt": ["x"] * 3}, "prompts"),
        ({"prompt": [[1]] * 3}, "prompts"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 3.0}, "logprobs"),
        ({"stop": ["a"] * 3}, "stops"),
        ({"stop_sequences": ["a"] * 3}, "stops"),
        ({"stop": "aaaa"}, "stop_chars"),
        ({"stop": ["aaaa"]}, "stop_chars"),
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
        ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "bias_entries"),
        ({"tools": [{}] * 3}, "tools"),
        ({"chat_template_kwargs": {"a": 1, "b": 1, "c": 1}}, "template_kwargs"),
        ({"metadata": {"a": "1", "b": "1", "c": "1"}}, "metadata_entries"),
        ({"response_format": {"json_schema": {"schema": {"enum": ["x" * 30] * 4}}}}, "schema_bytes"),
        ({"structured_outputs": {"regex": "x" * 101}}, "schema_bytes"),
        ({"guided_grammar": "x" * 101}, "schema_bytes"),
        ({"text": {"format": {"schema": {"a": {"a": {"a": 1}}}}}}, "schema_depth"),
        ({"guided_json": '{"a": {"a": {"a": 1}}}'}, "schema_depth"),
        ({"tools": [{"function": {"parameters": {"a": [[1]]}}}]}, "schema_depth"),
        ({"tools": [{"input_schema": {"a": [[1]]}}]}, "schema_depth"),
    ],
)
def test_cve_2026_34756_every_count_size_and_depth_has_a_cap(body: dict[str, Any], setting: str) -> None:
    small = LimitsConfig(
        messages=2, parts=2, prompts=2, logprobs=2, stops=2, stop_chars=3, stop_token_ids=2, bias_entries=2,
        tools=2, schema_bytes=100, schema_depth=2, template_kwargs=2, metadata_entries=2,
    )  # fmt: skip
    with pytest.raises(RequestError, match=rf"limits\.{setting}\)") as caught:
        check_limits(body, small)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.param
    check_limits(body, LimitsConfig())


def test_the_limits_are_the_settings_own(tmp_path: Path) -> None:
    odd: list[Any] = [5, None, "x", [], {}, True, [[[]]], {"a": None}]
    names = (
        "messages",
        "input",
        "prompt",
        "stop",
        "logit_bias",
        "tools",
        "response_format",
        "structured_outputs",
        "text",
    )
    for name in names:
        for value in odd:
            check_limits({name: value}, LimitsConfig())
    with pytest.raises(ConfigError, match=r"limits\.stops must be positive, got 0"):
        LimitsConfig(stops=0)


def test_a_schema_is_measured_in_bounded_time() -> None:
    wide: Any = {"enum": list(range(2_000_000))}
    with pytest.raises(RequestError, match="schema_bytes"):
        check_limits({"guided_json": wide}, LimitsConfig())
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="schema_depth"):
        check_limits({"guided_json": deep}, LimitsConfig())
