"""A headless Chromium driven by the DevTools protocol over a pipe: one page, its console, and the hosts it calls."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-proxy-server",
    "--window-size=1280,860",
    "--remote-debugging-pipe",
)
ANSWER_LIMIT_S = 30.0
LAUNCH = (
    "import fcntl, os, sys\n"
    "high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]\n"
    "os.dup2(high[0], 3)\n"
    "os.dup2(high[1], 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)
"""Chromium reads commands from descriptor 3 and answers on 4."""


class Page:
    """One tab. ``problems``: errors on the console and uncaught exceptions; ``urls``: everything it asked for."""

    def __init__(self, reader: asyncio.StreamReader, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self.problems: list[str] = []
        self.urls: list[str] = []

    async def start(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        future = self._waiting[message["id"]] = asyncio.get_running_loop().create_future()
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(ANSWER_LIMIT_S):
            return await future

    async def listen(self) -> None:
        """Sort what the browser says, until it ends."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                self._sort(json.loads((await self._reader.readuntil(b"\0"))[:-1]))

    def _sort(self, message: dict[str, Any]) -> None:
        future = self._waiting.pop(message.get("id", 0), None)
        params = message.get("params", {})
        match message.get("method"):
            case None if future is not None and not future.done():
                if "error" in message:
                    future.set_exception(RuntimeError(str(message["error"])))
                else:
                    future.set_result(message["result"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(json.dumps(params["entry"]))
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def eval(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until the expression is true; its value."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                while not (value := await self.eval(expression)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.eval("document.body.innerText")
            raise AssertionError(f"{expression} never held; console: {self.problems}; page: {text}") from None
        return value

    async def type(self, text: str) -> None:
        """Text into the focused field, then Enter."""
        await self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            await self.call("Input.dispatchKeyEvent", type=kind, **key)

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A page of a fresh Chromium, which ends with the block."""
    to_read, to_write = os.pipe()  # commands
    from_read, from_write = os.pipe()  # answers
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        launch = (sys.executable, "-c", LAUNCH, str(to_read), str(from_write), str(CHROMIUM))
        process = subprocess.Popen(
            [*launch, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        reader = asyncio.StreamReader(limit=64 << 20)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_read, "rb", 0)
        )
        page = Page(reader, to_write)
        listening = asyncio.create_task(page.listen())
        try:
            await page.start()
            yield page
        finally:
            process.kill()
            await asyncio.to_thread(process.wait, 30)
            await listening
            transport.close()
            os.close(to_write)
