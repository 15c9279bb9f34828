"""One SGLang engine as its rank sees it: a child process, and the administration of its weights over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from megarl.config import Model, RewardEngine, Rollout, Serving
from megarl.runtime import Child, Guard, hold_port, start_child

LOADER = "megarl.checkpoint_engine.receive.receive"
"""What SGLang's processes call when they are to look at a slot."""

_POLL_S = 0.2
_HEALTH_TIMEOUT_S = 30.0  # the server itself gives up after 20 s, and a new question costs it a new request


class EngineAddress(msgspec.Struct, frozen=True):
    """What an engine is called and where it listens; requests need the job's key as well."""

    name: str
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Span(msgspec.Struct, frozen=True):
    """How an engine of several nodes is put together: this node's place, and where the nodes' processes meet."""

    nodes: int
    node: int
    meeting: str


class EngineError(RuntimeError):
    """An engine refused a request or did not answer."""


class EngineTimeout(EngineError):
    """Engines have not answered in time."""


class EngineControl:
    """Administration of a running engine: its weights are changed only through this object, by one rank."""

    def __init__(self, address: EngineAddress, key: str, *, tensor_parallel: int, timeout_s: float) -> None:
        self.name, self.address = address.name, address
        self._key, self._ranks, self._answer_timeout_s = key, tensor_parallel, timeout_s

    def begin_update(self) -> None:
        """Before the first of new weights: requests wait, and those that ran will go on with the new ones."""
        self._post_all({"/pause_generation": {"mode": "retract"}, "/begin_weight_update": {}})

    def load_slots(self, handles: list[bytes], *, last: bool) -> None:
        """Each of the engine's ranks looks at the slot whose handle it gets.

        After the `last` the cached keys and values of the old weights are dropped.
        """
        self._load(handles, load_format=LOADER, flush_cache=last)

    def load_tensors(self, payload: bytes) -> None:
        """Load whole tensors by their names in a checkpoint: a pickled list of (name, tensor)."""
        self._load([payload] * self._ranks, flush_cache=True)

    def load_directory(self, path: Path) -> None:
        """Load a Hugging Face directory."""
        self._post("/update_weights_from_disk", {"model_path": str(path), "flush_cache": True})

    def end_update(self, version: int) -> None:
        """After the last: requests go on, with weights that are called `version`."""
        new = {"new_version": str(version), "abort_all_requests": False}
        self._post_all({"/end_weight_update": {}, "/update_weight_version": new, "/continue_generation": {}})

    def checksums(self) -> list[dict[str, str]]:
        """For each of the engine's ranks: parameter name to the hash of the rank's shard."""
        ranks = self._post("/weights_checker", {"action": "checksum"})["ranks"]
        return [entry["checksums"] for entry in sorted(ranks, key=lambda r: r["parallelism_info"][0]["tp_rank"])]

    def _load(self, payloads: list[bytes], **options: Any) -> None:
        self._post("/update_weights_from_tensor", {"serialized_named_tensors": payloads, **options})

    def _post_all(self, requests: Mapping[str, dict[str, Any]]) -> None:
        """One after the other, in the time that one may take."""
        end = time.monotonic() + self._answer_timeout_s
        for path, body in requests.items():
            self._post(path, body, max(0.1, end - time.monotonic()))

    def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        timeout_s = self._answer_timeout_s if timeout_s is None else timeout_s
        try:
            status, answer = self._request("POST", path, msgspec.json.encode(body), timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.name} did not answer {path}: {error!r}") from error
        text = answer.decode(errors="replace")
        if status != http.HTTPStatus.OK:
            raise EngineError(f"{self.name} refused {path}: HTTP {status} {text[:500]}")
        parsed = json.loads(text) if text.startswith(("{", "[")) else text
        if isinstance(parsed, dict) and parsed.get("success") is False:
            raise EngineError(f"{self.name} failed at {path}: {parsed.get('message')}")
        return parsed

    def _request(self, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.address.url).netloc, timeout=timeout)
        try:
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class Engine(EngineControl):
    """An engine that this rank started; of one that spans nodes, this node's part, of which the first one is asked."""

    def __init__(
        self,
        model: Model,
        serving: Serving,
        *,
        name: str,
        host: str,
        key: str,
        device: str,
        seed: int,
        log: Path,
        guard: Guard,
        answer_timeout_s: float,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        span: Span | None = None,
    ) -> None:
        """Start the server, ended by `guard` at the latest; it becomes healthy while the caller does other things.

        A reward engine's end is the end of its rank. `arguments` are further ones of SGLang; the recipe's own come on
        top.
        """
        # the server binds them many seconds from now
        self._ports = server, distributed = hold_port(host), hold_port(host)
        address = EngineAddress(name, host, server.getsockname()[1])
        super().__init__(address, key, tensor_parallel=serving.tensor_parallel, timeout_s=answer_timeout_s)
        self._start_timeout_s, self._started = serving.start_timeout_s, time.monotonic()
        arguments = {
            **arguments,
            "model_path": str(model.path),
            "dtype": model.dtype,
            "host": host,
            "port": address.port,
            "nccl_port": distributed.getsockname()[1],
            "api_key": key,
            "tp_size": serving.tensor_parallel,
            "random_seed": seed,
            "weight_version": "0",
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "log_level": "warning",
            "sleep_on_idle": True,  # an idle scheduler would poll, and take a core from the trainer
            "custom_weight_loader": [LOADER],
            **({"ep_size": serving.expert_parallel} if isinstance(serving, Rollout) else {}),
            **({"nnodes": span.nodes, "node_rank": span.node, "dist_init_addr": span.meeting} if span else {}),
            **({"is_embedding": True} if isinstance(serving, RewardEngine) else {}),
            **(_CPU_ARGUMENTS if device == "cpu" else {}),
            **serving.server_args,
        }
        env = _ENVIRONMENT | (_cpu_environment(serving.tensor_parallel) if device == "cpu" else {})
        self.child: Child = start_child("megarl.rollout_engine.server:main", arguments, name=name, log=log, env=env)
        guard.watch(self.child, vital=isinstance(serving, RewardEngine))

    def wait_healthy(self) -> float:
        """Wait until the engine answers. Returns the seconds since its start.

        Raises EngineError: it ended, or took longer than `start_timeout_s`.
        """
        while not self.is_healthy():
            time.sleep(_POLL_S)
        return time.monotonic() - self._started

    def is_healthy(self) -> bool:
        """Whether an engine that was started answers by now. Raises EngineError, as `wait_healthy` does."""
        timeout_s = min(_HEALTH_TIMEOUT_S, self._answer_timeout_s)
        with contextlib.suppress(OSError, http.client.HTTPException):
            if self._request("GET", "/health", None, timeout_s)[0] == http.HTTPStatus.OK:
                self._post("/freeze_gc", {})  # else each full collection walks a million objects that stay
                return True
        if self.child.process.poll() is not None:
            raise EngineError(self.child.describe_end())
        if (seconds := time.monotonic() - self._started) > self._start_timeout_s:
            raise EngineError(
                f"{self.name} is not healthy after {seconds:.0f} s (start_timeout_s); see {self.child.log}"
            )
        return False


# The default closes idle connections after 5 s, under a client that is about to reuse one. A crashed server would sleep
# for up to a minute to dump its stacks before it ends.
_ENVIRONMENT = {
    "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}

_CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
    "max_running_requests": 256,
    "mem_fraction_static": 0.3,
}


def _cpu_environment(tensor_parallel: int) -> dict[str, str]:
    env = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    if tensor_parallel > 1:  # else SGLang wants a NUMA node for each rank
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tensor_parallel)))
    return env
