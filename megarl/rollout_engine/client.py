"""Generation and scoring over HTTP: token ids in; token ids with log-probabilities, or scores, out."""

from __future__ import annotations

import http
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from megarl.config import RewardHead
from megarl.rollout_engine.engine import EngineAddress, EngineError
from megarl.types import Completion, VersionSpan


class _FinishReason(msgspec.Struct):
    type: str
    message: str = ""


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason
    weight_versions: list[_Span]
    output_token_logprobs: list[tuple[float, int, Any]]
    cached_tokens: int
    num_retractions: int


class _Answer(msgspec.Struct):
    output_ids: list[int]
    meta_info: _MetaInfo


class Load(msgspec.Struct, frozen=True):
    """What an engine says of itself; all in tokens or requests. The last two only grow while it works."""

    max_total_num_tokens: int
    max_running_requests: int
    num_used_tokens: int
    num_running_reqs: int
    num_waiting_reqs: int
    total_prefill_uncached_tokens: int
    decode_moments: list[float] | None


class _Loads(msgspec.Struct):
    loads: list[Load]


class _Scores(msgspec.Struct):
    embedding: tuple[float]


class Chunk(msgspec.Struct):
    """What came of one request; of its prompt, `cached` tokens did not have to be computed again."""

    completion: Completion
    cached: int
    preemptions: int


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_loads = msgspec.json.Decoder(_Loads).decode
_decode_scores = msgspec.json.Decoder(list[_Scores]).decode


class EngineLost(EngineError):
    """An engine hung up or does not listen."""


class _Client:
    """An async client of one engine; use it as a context manager. It waits as long as its caller does.

    `owed` are the requests that the engine has not answered yet.
    """

    def __init__(self, address: EngineAddress, key: str) -> None:
        self.address, self.name, self.owed = address, address.name, 0
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
        """Its answer. Raises EngineLost, or EngineError: it refused to do `what`."""
        self.owed += 1
        try:
            async with self._session.post(path, json=body) as response:
                payload = await response.read()
        except aiohttp.ClientError as error:
            raise EngineLost(f"{self.name} was asked {what} and did not answer: {error!r}") from error
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
        self, input_ids: list[int], *, temperature: float, max_new_tokens: int, stop_token: int
    ) -> Chunk:
        """What follows `input_ids`; temperature 0 is greedy. The stop token, where reached, is included.

        Raises EngineLost, or EngineError: the engine refused.
        """
        sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "stop_token_ids": [stop_token]}
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        what = f"for {max_new_tokens} tokens after {len(input_ids)}"
        payload = await self._post("/generate", body, what)
        try:
            answer = _decode_answer(payload)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name} was asked {what} and answered otherwise ({error}); see its log") from error
        info, reason = answer.meta_info, answer.meta_info.finish_reason.type
        if reason not in ("stop", "length"):
            raise EngineError(f"{self.name} ended a request by {info.finish_reason}")
        return Chunk(
            Completion(
                output_ids=answer.output_ids,
                logprobs=[logprob for logprob, _, _ in info.output_token_logprobs],
                finish_reason=reason,  # type: ignore[arg-type]
                versions=[VersionSpan(int(span.version), span.start, span.end) for span in info.weight_versions],
            ),
            info.cached_tokens,
            info.num_retractions,
        )

    async def load(self, *, timeout_s: float) -> Load:
        """Raises EngineLost, or EngineError: no answer in time, or none that makes sense."""
        payload = await self._get("/v1/loads?include=core", timeout_s)
        try:
            return _decode_loads(payload).loads[0]
        except (msgspec.DecodeError, IndexError) as error:
            raise EngineError(f"{self.name} was asked for its load and answered {payload[:500]!r}") from error

    async def check_health(self, *, timeout_s: float) -> None:
        """Have its scheduler look at a request. Raises EngineLost, or EngineError: it did not, in time."""
        await self._get("/health", timeout_s)

    async def _get(self, path: str, timeout_s: float) -> bytes:
        try:
            async with self._session.get(path, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                response.raise_for_status()
                return await response.read()
        except (aiohttp.ClientResponseError, TimeoutError) as error:
            raise EngineError(f"{self.name} was asked for {path}: {error!r}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{self.name} was asked for {path} and did not answer: {error!r}") from error

    async def pause(self) -> None:
        """Requests wait, until new weights come; their caches may be lost. Raises EngineLost."""
        await self._post("/pause_generation", {"mode": "retract"}, "to pause")


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
