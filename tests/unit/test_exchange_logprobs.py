"""Logprobs in a request's mailbox: with their tokens, whoever sends these first, and never before the whole prompt."""

from __future__ import annotations

import asyncio

from services.protocol.proto import worker_pb2
from services.router.exchange import Exchange
from services.router.timeline import Timelines
from services.router.types import TokenLogprobs

PROMPT = (7, 8, 9)


def exchange(prompt_ids: tuple[int, ...] = ()) -> Exchange:
    made = Exchange(
        request_id="r",
        max_tokens=8,
        timeline=Timelines(4).open("r"),
        clock=lambda: 0.0,
        prompt_ids=prompt_ids,
    )
    made.begin(1, "p", "d")
    return made


def told(logprob: float) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(logprob=logprob, rank=2, top_ids=[5], top_logprobs=[-0.5])


def output(position: int, *ids: int, **more: object) -> worker_pb2.Output:
    logprobs = [told(-1.0 - i) for i in ids]
    return worker_pb2.Output(
        request_id="r",
        attempt=1,
        position=position,
        token_ids=ids,
        logprobs=logprobs,
        **more,  # type: ignore[arg-type]
    )


def piece(start: int, *logprobs: float) -> worker_pb2.Output:
    return worker_pb2.Output(request_id="r", attempt=1, prompt_start=start, prompt_logprobs=[told(x) for x in logprobs])


def test_each_position_is_taken_once_with_its_logprobs() -> None:
    x = exchange()
    x.on_output("d", output(0, 3))  # the reader's stream is faster than the writer's
    x.on_output("p", output(0, 3))
    x.on_output("d", output(1, 4))
    assert x.lanes[0].take(0.0) == (
        (3, 4),
        (TokenLogprobs(3, -4.0, 2, ((5, -0.5),)), TokenLogprobs(4, -5.0, 2, ((5, -0.5),))),
    )
    x.on_output("d", output(2, 6, finish_reason="length"))
    assert x.lanes[0].take(0.0) == ((6,), (TokenLogprobs(6, -7.0, 2, ((5, -0.5),)),))


def test_nothing_is_given_out_before_the_whole_prompt_is_told() -> None:
    x = exchange(PROMPT)
    x.on_output("d", output(0, 3, finish_reason="length"))
    assert x.is_finished
    assert x.next_choice() is None
    x.on_output("d", piece(1, -8.0))  # not the reader's to tell
    x.on_output("p", piece(1, -1.0))
    assert x.next_choice() is None
    x.on_output("p", piece(1, -9.0, -2.0, -3.0))  # a recomputed prompt comes again, and more than there is
    assert x.next_choice() == 0
    assert [(t.token_id, t.logprob) for t in x.prompt_logprobs] == [(8, -1.0), (9, -2.0)]


async def test_waiting_for_the_prompt_waits_even_when_the_tokens_are_all_there() -> None:
    x = exchange(PROMPT)
    x.on_output("d", output(0, 3, finish_reason="stop"))
    waiting = asyncio.create_task(x.wait(30.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    x.on_output("p", piece(1, -1.0, -2.0))
    await asyncio.wait_for(waiting, 10)


def test_a_new_attempt_tells_only_what_is_missing() -> None:
    x = exchange(PROMPT)
    x.on_output("p", piece(1, -1.0))
    assert not x.has_prompt_logprobs
    x.begin(2, "p2", "d2")
    x.on_output("p2", piece(1, -5.0, -2.0))
    assert [t.logprob for t in x.prompt_logprobs] == [-1.0, -2.0]
    assert x.has_prompt_logprobs
    assert x.next_choice() is None
