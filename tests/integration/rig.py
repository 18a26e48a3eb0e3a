"""A small pdray on loopback without Ray: real worker and router processes, a real Valkey where asked for.

After each use `Cluster.stop` checks what must always hold: blocks are conserved on every worker, forwarded tokens add
up, no decode worker computed a prompt, and no process is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

START_S = 120.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@dataclass
class Cluster:
    """Processes of one application; `start` and `stop` bracket a test."""

    folder: Path  # for config and logs
    model: Path
    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # dotted names, as in services.config.load
    worker_settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # by worker id, e.g. "prefill-0"
    hosts: dict[str, str] = field(default_factory=dict)  # by worker id, where it is not loopback
    wrappers: dict[str, list[str]] = field(default_factory=dict)  # by worker id: a command that runs another
    redis_url: str = "none"
    check_decode_computes_nothing: bool = True
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    http_port: int = 0
    grpc_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def start(self, wait: bool = True) -> Cluster:
        names = [f"{role}-{i}" for role in ("prefill", "decode", "mixed") for i in range(getattr(self, role))]
        ports = free_ports(len(names) + 2)
        self.http_port, self.grpc_port = ports[-2:]
        self.addresses = {n: f"{self.hosts.get(n, '127.0.0.1')}:{p}" for n, p in zip(names, ports, strict=False)}
        for name in names:
            self.start_worker(name)
        self.start_router()
        try:
            if wait:
                await self.ready()
        except BaseException:
            await self._kill_all()
            raise
        return self

    def start_worker(self, name: str) -> None:
        role = name.split("-")[0]
        host, _, port = self.addresses[name].rpartition(":")
        place = {"worker.host": host, "worker.port": int(port)}
        config = self._config({**place, **self.worker_settings.get(name, {})})
        module = "services.prefill" if role == "prefill" else "services.decode"
        self._spawn(name, [module, "--role", role, "--worker-id", name], config)

    def start_router(self, name: str = "router") -> None:
        config = self._config({"router.port": self.http_port, "router.grpc_port": self.grpc_port})
        self._spawn(name, ["services.router"], config)

    async def ready(self, timeout_s: float = START_S) -> None:
        """Until the router says that a live pair can serve, and every started worker is attached."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        last = "nothing answered"
        expected = {n for n, p in self.processes.items() if p.poll() is None and not n.startswith("router")}
        async with httpx.AsyncClient() as client:
            while asyncio.get_running_loop().time() < deadline:
                for name, process in self.processes.items():
                    if name in expected and process.poll() is not None:
                        raise AssertionError(f"{name} ended with {process.returncode}:\n{self.log(name)[-3000:]}")
                try:
                    reply = await client.get(f"{self.url}/ready", timeout=2)
                    states = {w["worker_id"]: w["state"] for w in (await self.cluster(client))["workers"]}
                    if reply.status_code == 200 and expected <= {k for k, v in states.items() if v == "ready"}:
                        return
                    last = f"{reply.status_code} {reply.text[:300]} {states}"
                except httpx.HTTPError as exc:
                    last = repr(exc)
                await asyncio.sleep(0.1)
        raise AssertionError(f"not ready within {timeout_s} s: {last}\n{self.log('router')[-3000:]}")

    async def cluster(self, client: httpx.AsyncClient | None = None) -> dict[str, Any]:
        async with httpx.AsyncClient() as own:
            reply = await (client or own).get(f"{self.url}/v1/cluster", timeout=5)
            data: dict[str, Any] = reply.json()
            return data

    def complete(self, prompt: list[int] | str, **body: Any) -> httpx.Response:
        """One greedy completion over HTTP."""
        values = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **body}
        return httpx.post(f"{self.url}/v1/completions", json=values, timeout=120)

    async def worker(self, name: str) -> dict[str, Any]:
        return next(w for w in (await self.cluster())["workers"] if w["worker_id"] == name)

    async def debug(self, request_id: str) -> dict[str, Any]:
        async with httpx.AsyncClient() as client:
            reply = await client.get(f"{self.url}/debug/requests/{request_id}", timeout=5)
            assert reply.status_code == 200, reply.text
            data: dict[str, Any] = reply.json()
            return data

    async def idle(self, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """Worker rows once nothing runs, waits, is reserved or quarantined any more."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        rows: list[dict[str, Any]] = []
        while asyncio.get_running_loop().time() < deadline:
            rows = [w for w in (await self.cluster())["workers"] if w["state"] in ("ready", "draining")]
            busy = [w for w in rows if w["running"] or w["waiting"]]
            held = [w for w in rows if any(w["blocks"][k] for k in ("used", "reserved", "quarantined"))]
            if not busy and not held:
                return rows
            await asyncio.sleep(0.1)
        raise AssertionError(f"not idle within {timeout_s} s: {rows}")

    async def stop(self) -> None:
        """Check the invariants, then end everything."""
        try:
            if self.processes["router"].poll() is None:
                self.check(await self.idle())
        finally:
            await self._kill_all()

    def check(self, rows: list[dict[str, Any]]) -> None:
        for w in rows:
            blocks = w["blocks"]
            parts = sum(blocks[k] for k in ("free", "used", "cached", "reserved", "quarantined"))
            assert parts == blocks["total"], w
            forwarded = w["prompt_tokens_computed"] + w["decode_tokens_forwarded"] + w["tokens_recomputed"]
            assert w["tokens_forwarded"] == forwarded, w
            if w["role"] == "decode" and self.check_decode_computes_nothing:
                assert w["prompt_tokens_computed"] == 0, w
            if w["role"] == "prefill":
                assert w["decode_tokens_forwarded"] == 0, w

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _config(self, extra: dict[str, Any]) -> Path:
        flat: dict[str, Any] = {
            "secret": "test-secret",
            "workers": list(self.addresses.values()),
            "model.dtype": "float32",
            "engine.num_threads": 1,
            "engine.kv_memory_bytes": 256 << 20,
            "redis.url": self.redis_url,
            "worker.drain_s": 20,
            "prefill": self.prefill,
            "decode": self.decode,
            "mixed": self.mixed,
            **self.settings,
            **extra,
        }
        tree: dict[str, Any] = {}
        for dotted, value in flat.items():
            node = tree
            *parents, leaf = dotted.split(".")
            for key in parents:
                node = node.setdefault(key, {})
            node[leaf] = value
        path = self.folder / f"config-{len(list(self.folder.glob('config-*')))}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    def _spawn(self, name: str, arguments: list[str], config: Path) -> None:
        wrapper = self.wrappers.get(name, [])
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [*wrapper, sys.executable, "-m", *arguments, "--config", str(config), "--model", str(self.model)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    async def _kill_all(self) -> None:
        live = [p for p in self.processes.values() if p.poll() is None]
        families = [psutil.Process(p.pid) for p in live]
        everyone = families + [c for f in families for c in f.children(recursive=True)]
        for process in live:
            process.send_signal(signal.SIGTERM)
        gone = await asyncio.to_thread(psutil.wait_procs, everyone, 30)
        for process in gone[1]:
            process.kill()
        for process in self.processes.values():
            process.wait(5)
        assert not gone[1], f"left behind after SIGTERM: {gone[1]}"
