"""Generation and scoring over HTTP: token ids in; token ids with log-probabilities, or scores, out."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from megarl.rollout_engine.engine import EngineAddress, EngineError
from megarl.types import Completion


class _FinishReason(msgspec.Struct):
    type: str
    message: str = ""


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason
    weight_version: str
    output_token_logprobs: list[tuple[float, int, Any]]


class _Answer(msgspec.Struct):
    output_ids: list[int]
    meta_info: _MetaInfo


class _Scores(msgspec.Struct):
    embedding: tuple[float]


_decode_one = msgspec.json.Decoder(_Answer).decode
_decode_many = msgspec.json.Decoder(list[_Answer]).decode
_decode_scores = msgspec.json.Decoder(list[_Scores]).decode


class EngineClient:
    """An async client of one engine; use it as a context manager."""

    def __init__(self, address: EngineAddress, key: str, *, timeout_s: float) -> None:
        self.address = address
        self._session = aiohttp.ClientSession(
            base_url=address.url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._session.close()

    async def generate(
        self, input_ids: list[int], *, samples: int, temperature: float, max_new_tokens: int, stop_token: int
    ) -> list[Completion]:
        """`samples` responses to one prompt; temperature 0 is greedy. The stop token, where reached, is included.

        Raises EngineError: the engine failed, refused, or took longer than the client's time limit.
        """
        body = {
            "input_ids": input_ids,
            "sampling_params": {
                "n": samples,
                "temperature": temperature,
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": [stop_token],
            },
            "return_logprob": True,
        }
        payload = await self._post("/generate", body)
        answers = _decode_many(payload) if samples > 1 else [_decode_one(payload)]
        return [self._completion(answer) for answer in answers]

    async def score(self, sequences: list[list[int]]) -> list[float]:
        """A reward model's score of each token sequence. Raises EngineError, as `generate` does."""
        payload = await self._post("/classify", {"input_ids": sequences})
        try:
            return [answer.embedding[0] for answer in _decode_scores(payload)]
        except msgspec.DecodeError as error:
            raise EngineError(f"engine at {self.address.url} gave no score for each sequence: {error}") from error

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        try:
            async with self._session.post(path, json=body) as response:
                payload = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"engine at {self.address.url} did not answer: {error!r}") from error
        if response.status != 200:
            text = payload.decode(errors="replace")[:500]
            raise EngineError(f"engine at {self.address.url}: HTTP {response.status} {text}")
        return payload

    def _completion(self, answer: _Answer) -> Completion:
        info = answer.meta_info
        if info.finish_reason.type not in ("stop", "length"):
            raise EngineError(f"engine at {self.address.url} ended a request by {info.finish_reason}")
        return Completion(
            output_ids=answer.output_ids,
            logprobs=[logprob for logprob, _, _ in info.output_token_logprobs],
            finish_reason=info.finish_reason.type,  # type: ignore[arg-type]
            version=int(info.weight_version),
        )
