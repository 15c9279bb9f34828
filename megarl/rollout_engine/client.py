"""Generation and scoring over HTTP: token ids in; token ids with log-probabilities, or scores, out."""

from __future__ import annotations

import http
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from megarl.config import RewardHead
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


class _Client:
    """An async client of one engine; use it as a context manager. It waits as long as its caller does.

    `owed` are the requests that the engine has not answered yet.
    """

    def __init__(self, address: EngineAddress, key: str) -> None:
        self.name, self.owed = address.name, 0
        self._session = aiohttp.ClientSession(
            base_url=address.url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._session.close()

    async def _post(self, path: str, body: dict[str, Any], what: str) -> bytes:
        """Its answer. Raises EngineError: it failed or refused to do `what`."""
        self.owed += 1
        try:
            async with self._session.post(path, json=body) as response:
                payload = await response.read()
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.name} was asked {what} and did not answer: {error!r}") from error
        finally:
            self.owed -= 1
        if response.status != http.HTTPStatus.OK:
            text = payload.decode(errors="replace")[:500]
            raise EngineError(
                f"{self.name} was asked {what} and answered HTTP {response.status}: {text or 'nothing'}; see its log"
            )
        return payload


class EngineClient(_Client):
    """Generation."""

    async def generate(
        self, input_ids: list[int], *, samples: int, temperature: float, max_new_tokens: int, stop_token: int
    ) -> list[Completion]:
        """`samples` responses to one prompt; temperature 0 is greedy. The stop token, where reached, is included.

        Raises EngineError: the engine failed or refused.
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
        what = f"for {samples} responses to a prompt of {len(input_ids)} tokens"
        payload = await self._post("/generate", body, what)
        answers = _decode_many(payload) if samples > 1 else [_decode_one(payload)]
        return [self._completion(answer) for answer in answers]

    def _completion(self, answer: _Answer) -> Completion:
        info = answer.meta_info
        if info.finish_reason.type not in ("stop", "length"):
            raise EngineError(f"{self.name} ended a request by {info.finish_reason}")
        return Completion(
            output_ids=answer.output_ids,
            logprobs=[logprob for logprob, _, _ in info.output_token_logprobs],
            finish_reason=info.finish_reason.type,  # type: ignore[arg-type]
            version=int(info.weight_version),
        )


class ScoreClient(_Client):
    """A reward model's scores, for which its `head` says which tokens it reads."""

    def __init__(self, address: EngineAddress, key: str, head: RewardHead) -> None:
        super().__init__(address, key)
        self._head = head

    async def score(self, sequences: list[list[int]]) -> list[float]:
        """The score of each token sequence. Raises EngineError: the engine failed or refused."""
        read = [self._head.scored(sequence) for sequence in sequences]
        what = f"to score {len(read)} sequences of up to {max(map(len, read))} tokens"
        payload = await self._post("/classify", {"input_ids": read}, what)
        try:
            return [answer.embedding[0] for answer in _decode_scores(payload)]
        except msgspec.DecodeError as error:
            given = payload.decode(errors="replace")[:500]
            raise EngineError(
                f"{self.name} was asked {what} and gave no number for each ({error}): {given}; see its log"
            ) from error
