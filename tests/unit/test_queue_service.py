"""The queue's server and its clients: what was asked for arrives as it was put, and nothing for anybody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from megarl.transfer_queue import Counters, Delivery, Keys, QueueClient, QueueError, QueueServer, TransferQueue
from megarl.transfer_queue.service import Fetch
from megarl.transfer_queue.shelf import HELD_STEPS
from megarl.types import Group, Offer, Prompt, Trajectory, VersionSpan

HOST = "127.0.0.1"
KEYS = Keys.new()
DEADLINE_S = 60.0
SILENCE_MS = 500


def group(*responses: list[int]) -> Group:
    trajectories = [
        Trajectory(
            output_ids=ids,
            engine_logprobs=[-0.1 * token for token in ids],
            versions=[VersionSpan(0, 0, len(ids))],
            finish_reason="stop",
            text="not sent",
            scores={"answer": 1.0},
        )
        for ids in responses
    ]
    return Group(Prompt(0, "not sent", [7, 8], "", "math"), trajectories, {"answer": 0.5})


STEP = [group([1, 2, 3], [9]), group([4, 8, 8], [8, 8])]
SEQUENCES = [[7, 8, 1, 2, 3], [7, 8, 9], [7, 8, 4, 8, 8], [7, 8, 8, 8]]


def served(run_dir: Path, test: Callable[[Offer], Awaitable[Any]]) -> Any:
    """What `test` says of the offer of one step."""

    async def run() -> Any:
        async with QueueServer(Counters(), host=HOST, client_key=KEYS.public, run_dir=run_dir) as server:
            return await test(await server.offer(0, STEP))

    return asyncio.run(run())


async def fetched(offer: Offer, **wanted: list[int]) -> dict[str, list[list[float]]]:
    client = QueueClient(KEYS, deadline_s=DEADLINE_S)
    arrays = await asyncio.to_thread(client.fetch, offer, wanted)
    client.close()
    return {field: [array.tolist() for array in some] for field, some in arrays.items()}


def test_headers_say_what_all_ranks_must_know(tmp_path: Path) -> None:
    async def look(offer: Offer) -> Offer:
        return offer

    offer = served(tmp_path, look)
    assert (offer.step, [(g.index, g.dataset, g.prompt_length) for g in offer.groups]) == (
        0,
        [(0, "math", 2)] * 2,
    )
    trajectories = [trajectory for g in offer.groups for trajectory in g.trajectories]
    assert [t.length for t in trajectories] == [3, 1, 3, 2]
    assert [t.ending for t in trajectories] == [(3, 1), (9, 1), (8, 2), (8, 3)]
    assert all(t.scores == {"answer": 1.0} and t.finish_reason == "stop" for t in trajectories)
    assert [g.greedy_scores for g in offer.groups] == [{"answer": 0.5}] * 2
    assert b"not sent" not in msgspec.msgpack.encode(offer)


def test_fields_arrive_as_they_were_put(tmp_path: Path) -> None:
    async def look(offer: Offer) -> None:
        got = await fetched(offer, input_ids=[2, 0], engine_logprob=[1, 3])
        assert got["input_ids"] == [SEQUENCES[2], SEQUENCES[0]]
        expected = [np.array(t.engine_logprobs, np.float32).tolist() for g in STEP for t in g.trajectories]
        assert got["engine_logprob"] == [expected[1], expected[3]]

    served(tmp_path, look)


def test_a_delivery_fetches_each_array_once(tmp_path: Path) -> None:
    class Counting(QueueClient):
        def fetch(self, offer: Offer, wanted: Any) -> Any:
            asked.append(wanted)
            return super().fetch(offer, wanted)

    asked: list[dict[str, list[int]]] = []

    async def look(offer: Offer) -> None:
        client = Counting(KEYS, deadline_s=DEADLINE_S)
        delivery = Delivery(offer, client)
        for wanted in ({"input_ids": [0, 1]}, {"input_ids": [2, 1], "engine_logprob": [1]}, {"input_ids": [2, 0]}):
            got = await asyncio.to_thread(delivery.load, wanted)
            assert [ids.tolist() for ids in got["input_ids"]] == [SEQUENCES[i] for i in wanted["input_ids"]]
        client.close()

    served(tmp_path, look)
    assert asked == [{"input_ids": [0, 1]}, {"input_ids": [2], "engine_logprob": [1]}]


@pytest.mark.parametrize(
    ("step", "wanted", "message"),
    [
        (5, {"input_ids": [0]}, r"step 6 is not held; steps \[1\] are"),
        (0, {"text": [0]}, r"no fields \['text'\]; expected some of \['engine_logprob', 'input_ids'\]"),
        (0, {"input_ids": [0, 4]}, r"step 1 has no sequences \[4\]; expected 0 to 3"),
        (0, {"input_ids": [-1]}, r"step 1 has no sequences \[-1\]"),
    ],
)
def test_what_is_not_there_is_refused_by_name(step: int, wanted: Any, message: str, tmp_path: Path) -> None:
    async def look(offer: Offer) -> None:
        with pytest.raises(QueueError, match=message):
            await fetched(msgspec.structs.replace(offer, step=step), **wanted)

    served(tmp_path, look)


def dealer(offer: Offer, keys: Keys | None = None, server_key: str = "") -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.curve_serverkey = server_key.encode()
    socket.connect(offer.endpoint)
    return socket


REQUEST = msgspec.msgpack.encode(Fetch(0, {"input_ids": [0]}))


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1 junk"],
        [REQUEST, REQUEST],
        [msgspec.msgpack.encode([0, {"input_ids": [0]}])],
        [msgspec.msgpack.encode({"step": 0, "wanted": {"input_ids": ["0"]}})],
        [msgspec.msgpack.encode({"step": 0, "wanted": {}, "more": 1})],
        [msgspec.msgpack.encode({"step": 1 << 63, "wanted": {"input_ids": [0]}})],
    ],
)
def test_what_is_no_request_is_answered_with_an_error(frames: list[bytes], tmp_path: Path) -> None:
    async def look(offer: Offer) -> None:
        socket = dealer(offer, KEYS, offer.server_key)
        socket.send_multipart(frames)
        assert await asyncio.to_thread(socket.poll, 60_000)
        error, *arrays = socket.recv_multipart()
        assert error
        assert not arrays
        socket.close()
        assert (await fetched(offer, input_ids=[0]))["input_ids"] == [SEQUENCES[0]]

    served(tmp_path, look)


@pytest.mark.parametrize("knows", ["address", "server key", "public key of clients"])
def test_a_stranger_gets_nothing(knows: str, tmp_path: Path) -> None:
    async def look(offer: Offer) -> None:
        if knows == "address":
            socket = dealer(offer)
        elif knows == "server key":
            socket = dealer(offer, Keys.new(), offer.server_key)
        else:
            socket = dealer(offer, Keys(KEYS.public, Keys.new().secret), offer.server_key)
        socket.send(REQUEST)
        assert not await asyncio.to_thread(socket.poll, SILENCE_MS)
        socket.close()
        assert (await fetched(offer, input_ids=[0]))["input_ids"] == [SEQUENCES[0]]

    served(tmp_path, look)


def test_a_request_without_an_answer_is_repeated_over_a_new_connection() -> None:
    """The first answer is lost, and comes when nobody waits for it any more."""
    keys, context = Keys.new(), zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.curve_server, router.curve_secretkey = True, keys.secret.encode()
    port = router.bind_to_random_port(f"tcp://{HOST}")
    requests: list[list[bytes]] = []

    def answer_the_second() -> None:
        requests.append(router.recv_multipart())
        requests.append(router.recv_multipart())
        for (client, _), token in zip(requests, (1, 2), strict=True):
            router.send_multipart([client, b"", np.array([token], np.int32).tobytes()])

    thread = threading.Thread(target=answer_the_second)
    thread.start()
    client = QueueClient(KEYS, deadline_s=12.8)
    got = client.fetch(Offer(0, [], f"tcp://{HOST}:{port}", keys.public, {}), {"input_ids": [0]})
    client.close()
    thread.join()
    context.destroy()
    assert got["input_ids"][0].tolist() == [2]
    (first, request), (second, repeated) = requests
    assert first != second
    assert request == repeated == REQUEST


def test_where_nobody_answers_the_address_and_the_step_are_named() -> None:
    listener = zmq.Context.instance().socket(zmq.ROUTER)  # speaks no CURVE
    port = listener.bind_to_random_port(f"tcp://{HOST}")
    offer = Offer(3, [], f"tcp://{HOST}:{port}", Keys.new().public, {})
    client = QueueClient(KEYS, deadline_s=0.4)
    message = rf"at tcp://{HOST}:{port} has not answered for 0\.4 s, asked for 2 arrays of step 4: see logs/coordinator"
    with pytest.raises(QueueError, match=message):
        client.fetch(offer, {"input_ids": [0, 1]})
    listener.close()


def test_two_steps_are_held_and_a_client_follows_to_another_server(tmp_path: Path) -> None:
    async def run() -> None:
        client = QueueClient(KEYS, deadline_s=DEADLINE_S)
        for _ in range(2):
            async with QueueServer(Counters(), host=HOST, client_key=KEYS.public, run_dir=tmp_path) as server:
                offers = [await server.offer(step, [group([step], [step + 1])]) for step in range(HELD_STEPS + 1)]
                for step, offer in enumerate(offers[1:], start=1):
                    got = await asyncio.to_thread(client.fetch, offer, {"input_ids": [1]})
                    assert got["input_ids"][0].tolist() == [7, 8, step + 1]
                with pytest.raises(QueueError, match=r"step 1 is not held; steps \[2, 3\] are"):
                    await asyncio.to_thread(client.fetch, offers[0], {"input_ids": [1]})
        client.close()

    asyncio.run(run())


def test_counters_are_logged_and_written_for_prometheus(tmp_path: Path) -> None:
    async def run() -> list[dict[str, float]]:
        options: dict[str, Any] = {"max_lag": 2, "ask": 6, "steps": 3, "directory": tmp_path / "journal"}
        queue = TransferQueue(2, sync="never", **options)
        async with QueueServer(queue.counters, host=HOST, client_key=KEYS.public, run_dir=tmp_path) as server:
            queue.publish(0)
            queue.admit()
            for row in range(5):  # the last is of a later step
                await queue.put(row, group([1], [2, 3]))
            offers = []
            for step in range(2):
                queue.publish(step)
                groups = queue.take(step)
                assert groups is not None
                offers.append(await server.offer(step, groups))
                await fetched(offers[-1], input_ids=[0, 1], engine_logprob=[1])
        await queue.close()
        return [offer.metrics for offer in offers]

    first, second = asyncio.run(run())
    assert (first["queue/depth"], first["queue/mb"]) == (5.0, 0.0)
    assert (second["queue/depth"], second["queue/mb"]) == (3.0, (3 + 4 + 2) * 4 / 1e6)
    assert 0 <= first["queue/age_s"] <= second["queue/age_s"]
    lines = (tmp_path / "metrics.prom").read_text().splitlines()
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert values["megarl_queue_groups_put_total"] == 5
    assert values["megarl_queue_groups_taken_total"] == 4
    assert values["megarl_queue_sent_bytes_total"] == 36
    assert values["megarl_queue_depth_groups"] == 3
    lags = {bound: values[f'megarl_queue_lag_versions_bucket{{le="{bound}"}}'] for bound in ("0.0", "1.0", "+Inf")}
    assert lags == {"0.0": 4, "1.0": 8, "+Inf": 8}
