"""What is said of an engine that does not do what it is asked, with a real server in its place."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aiohttp import web

from megarl.config import RewardHead
from megarl.rollout_engine import EngineAddress, EngineClient, EngineError, ScoreClient
from megarl.runtime.network import LOOPBACK

HEAD = RewardHead("LlamaForSequenceClassification", 0)


def ask(body: str, *, status: int = 200, generate: bool = False) -> tuple[Any, list[dict[str, Any]]]:
    """What a client makes of an engine that answers `body`, and what the engine was asked."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(text=body, status=status)

    async def run() -> Any:
        app = web.Application()
        app.router.add_post("/{path}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, LOOPBACK, 0).start()
            address = EngineAddress("reward engine taste", *runner.addresses[0][:2])
            if generate:
                options = {"temperature": 1.0, "max_new_tokens": 8, "stop_token": 2}
                async with EngineClient(address, "key") as client:
                    return await client.generate([7, 8, 9], **options)
            async with ScoreClient(address, "key", HEAD) as scorer:
                return await scorer.score([[5, 6], [5, 0, 6, 0, 0]])
        finally:
            await runner.cleanup()

    return asyncio.run(run()), asked


def test_sequences_are_scored_without_the_padding_at_their_ends() -> None:
    scores, asked = ask('[{"embedding": [0.5]}, {"embedding": [-1]}]')
    assert scores == [0.5, -1.0]
    assert asked == [{"input_ids": [[5, 6], [5, 0, 6]]}]


@pytest.mark.parametrize(
    ("body", "status", "generate", "message"),
    [
        ("out of range", 500, False, "to score 2 sequences of up to 3 tokens and answered HTTP 500: out of range; see"),
        ("", 500, False, "to score 2 sequences of up to 3 tokens and answered HTTP 500: nothing; see its log"),
        (
            '[{"embedding": [null]}]',
            200,
            False,
            "to score 2 sequences of up to 3 tokens and gave no number for each (Expected `float`",
        ),
        ("no", 400, True, "for 8 tokens after 3 and answered HTTP 400: no; see its log"),
    ],
)
def test_an_engine_that_fails_is_named_with_what_it_was_asked_and_said(
    body: str, status: int, generate: bool, message: str
) -> None:
    with pytest.raises(EngineError, match=re.escape(f"reward engine taste was asked {message}")) as caught:
        ask(body, status=status, generate=generate)
    assert body in str(caught.value)
