"""Stand-ins for what lies behind the router's fronts: a small byte-level model card and a core with a scripted flow."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.config import ModelConfig, RouterConfig, ServeConfig
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.model_card import CARD_FILE, ModelCard
from services.router.record import Recorder
from services.router.serve import Fronts, serve_fronts
from services.router.timeline import Timelines
from services.router.types import RouterRequest, TokenEvent
from tests.strict import StrictAnswers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog, and then it jumps back again. Once upon a time there was a model.",
    "안녕하세요 세계, 오늘은 날씨가 좋습니다. नमस्ते दुनिया, आज मौसम अच्छा है। 家族👨‍👩‍👧‍👦と一緒に行く hello",
)


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE of about 500 tokens, with the three special tokens first."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(list(CORPUS) * 20, trainer)
    made.add_tokens([AddedToken("<added é>", special=False)])
    return made


def make_card(folder: Path, **changes: Any) -> ModelCard:
    """A prepared folder without weights. ``changes``: fields of the card, and ``chat_template``."""
    template = changes.pop("chat_template", TEMPLATE)
    tokenizer().save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    card = {
        "name": "tiny",
        "architecture": "LlamaForCausalLM",
        "model_fingerprint": "ab" * 16,
        "tokenizer_fingerprint": "cd" * 16,
        "max_model_len": 256,
        "vocab_size": tokenizer().get_vocab_size(),
        "eos_token_ids": [EOS_ID],
        "bos_token_id": 1,
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "native_dtype": "float32",
        "special_tokens": {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]},
        "version": 1,
    }
    (folder / CARD_FILE).write_text(json.dumps({**card, **changes}), encoding="utf-8")
    return ModelCard.load(folder)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


Script = Callable[[RouterRequest], AsyncIterator[TokenEvent]]


def saying(text: str, *, cached_tokens: int = 0, at_once: int = 1) -> Script:
    """A script that answers with this text, ``at_once`` tokens to an event, then ends by an end token or max_tokens."""

    async def script(request: RouterRequest) -> AsyncIterator[TokenEvent]:
        ids = (*ids_of(text), EOS_ID)
        limit = request.sampling.max_tokens
        reason = "stop" if len(ids) <= limit else "length"
        ids = ids[:limit]
        for start in range(0, len(ids), at_once):
            piece = ids[start : start + at_once]
            is_last = start + at_once >= len(ids)
            yield TokenEvent(token_ids=piece, finish_reason=reason if is_last else "", cached_tokens=cached_tokens)
            await asyncio.sleep(0)

    return script


def saying_each(*texts: str) -> Script:
    """A script that gives choice i the i-th text, token by token in turns."""

    async def script(request: RouterRequest) -> AsyncIterator[TokenEvent]:
        ids = [(*ids_of(text), EOS_ID)[: request.sampling.max_tokens] for text in texts[: request.n]]
        for at in range(max(map(len, ids))):
            for choice, own in enumerate(ids):
                if at < len(own):
                    reason = "" if at + 1 < len(own) else "stop" if own[at] == EOS_ID else "length"
                    yield TokenEvent(token_ids=(own[at],), finish_reason=reason, choice=choice)
                    await asyncio.sleep(0)

    return script


def failing(error: RequestError, after: str = "") -> Script:
    """A script that says some text, then fails."""

    async def script(_request: RouterRequest) -> AsyncIterator[TokenEvent]:
        for token_id in ids_of(after):
            yield TokenEvent(token_ids=(token_id,))
        raise error

    return script


def hanging(after: str = "") -> Script:
    """A script that says some text and then nothing, until it is closed."""

    async def script(_request: RouterRequest) -> AsyncIterator[TokenEvent]:
        for token_id in ids_of(after):
            yield TokenEvent(token_ids=(token_id,))
        await asyncio.Event().wait()

    return script


def pooling(states: Mapping[tuple[int, ...], Sequence[float]]) -> Script:
    """A script that gives each prompt, by its token ids, a state; the more tokens, the longer it takes."""

    async def script(request: RouterRequest) -> AsyncIterator[TokenEvent]:
        assert request.pools
        await asyncio.sleep(0.001 * len(request.prompt_ids))
        yield TokenEvent(
            token_ids=(), finish_reason="stop", pooled=np.array(states[request.prompt_ids], "<f4").tobytes()
        )

    return script


class ScriptedFlow:
    """Plays ``script`` for each request and keeps how each one ended: done, closed, cancelled or error."""

    def __init__(self) -> None:
        self.script: Script = saying("Hello world")
        self.requests: list[RouterRequest] = []
        self.ends: dict[str, str] = {}
        self.ended_choices: list[int] = []

    async def stream(self, request: RouterRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        try:
            async for event in self.script(request):
                yield event
            self.ends[request.request_id] = "done"
        except GeneratorExit:
            self.ends[request.request_id] = "closed"
            raise
        except asyncio.CancelledError:
            self.ends[request.request_id] = "cancelled"
            raise
        except RequestError:
            self.ends[request.request_id] = "error"
            raise

    def end_choice(self, request_id: str, choice: int) -> None:
        self.ended_choices.append(choice)


class FakeCore:
    """A core without workers; its timelines are the real ones."""

    def __init__(self, card: ModelCard, config: ServeConfig) -> None:
        self.card = card
        self.config = config
        self.forget()

    def forget(self) -> None:
        """As new; for tests that share one running router."""
        self.flow = ScriptedFlow()
        self.recorder = Recorder(time.monotonic)
        self.timelines = Timelines(self.config.router.timelines_kept)
        self.not_ready = ""
        self.capacity = 0
        self.width = 0  # of pooled states
        self.refused: Counter[str] = Counter()  # callers, by reason

    def ready(self) -> tuple[bool, str]:
        return not self.not_ready, self.not_ready

    def hidden_size(self) -> int:
        if not self.width:
            raise RequestError(ErrorCode.NOT_YET_SUPPORTED, "no embeddings: these workers give no hidden states")
        return self.width

    def capacity_tokens(self) -> int:
        return self.capacity

    def cluster(self) -> dict[str, Any]:
        return {"redis": {"mode": "down"}, "models": [self.card.name], "workers": []}

    def request_debug(self, request_id: str) -> dict[str, Any] | None:
        found = self.timelines.find(request_id)
        return found.to_dict() if found else None

    async def steps(self, worker_id: str | None = None) -> dict[str, Any]:
        if worker_id is not None:
            raise RequestError(ErrorCode.NOT_FOUND, f"no worker {worker_id}")
        return {"workers": {}}

    def key_refused(self, reason: str) -> None:
        self.refused[reason] += 1

    def metrics_text(self) -> bytes:
        return b"# HELP pdray_up 1 while the router runs\n# TYPE pdray_up gauge\npdray_up 1.0\n"


def make_core(
    folder: Path, *, router: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **card: Any
) -> FakeCore:
    """``router``: fields of RouterConfig, ports are free ones; ``model``: of ModelConfig; ``card``: for `make_card`."""
    config = ServeConfig(
        model=ModelConfig(path=str(folder), **(model or {})),
        router=RouterConfig(**{"port": 0, "grpc_port": 0, **(router or {})}),
    )
    return FakeCore(make_card(folder, **card), config)


@asynccontextmanager
async def running(core: FakeCore) -> AsyncIterator[Fronts]:
    """Both fronts of a core on free ports; every answer over HTTP is read strictly (see `tests.strict`)."""
    fronts = await serve_fronts(core, core.config)
    wrong: list[str] = []
    fronts.http_app.add_middleware(StrictAnswers, found=wrong)
    try:
        yield fronts
    finally:
        await fronts.stop(0.2)
    assert not wrong, "\n".join(wrong)


def prompt_of(core: FakeCore) -> str:
    """Text of the prompt that came last, special tokens and all."""
    return str(tokenizer().decode(list(core.flow.requests[-1].prompt_ids), skip_special_tokens=False))


def client_of(fronts: Fronts) -> httpx.AsyncClient:
    """An HTTP client of these fronts, past any proxy of the environment."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{fronts.http_port}", timeout=60, trust_env=False)


def events_of(body: str) -> list[Any]:
    """Every event of a stream; [DONE] as it is."""
    data = [block.removeprefix("data: ") for block in body.split("\n\n") if block and not block.startswith(":")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must have the OpenAI form."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)
    return dict(error)


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait for something that another task brings about."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
