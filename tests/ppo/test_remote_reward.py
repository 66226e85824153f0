"""A reward server that answers, that is slow at first, that is broken, and that is wrong."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from integrations.ppo.rewards.remote import RemoteReward, RemoteRewardError
from tests.ppo.samples import rollout

ROLLOUTS = [rollout([7], label="a"), rollout([8])]


@contextmanager
def server(statuses: list[int], answer: Any) -> Iterator[tuple[str, list[Any]]]:
    """(URL, what was posted). Gives each status in turn, the last one from then on; -1 hangs until the end.

    An answer of None is one that is no JSON.
    """
    asked: list[Any] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status = statuses[min(len(asked), len(statuses)) - 1]
            if status < 0:
                over.wait(60)
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"words" if answer is None else json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/", asked
        finally:
            over.set()
            listening.shutdown()
            thread.join()


def remote(url: str, retries: int = 2, timeout_s: float = 30.0) -> RemoteReward:
    return RemoteReward(url, timeout_s=timeout_s, retries=retries, pause_s=0.0)


def test_it_posts_texts_and_labels() -> None:
    with server([200], {"rewards": [0.5, 2]}) as (url, asked):
        assert remote(url)(ROLLOUTS).tolist() == [0.5, 2.0]
        assert asked == [{"prompts": ["p", "p"], "responses": ["r", "r"], "labels": ["a", None]}]
        assert remote(url)([]).shape == (0,)
        assert len(asked) == 1


def test_it_asks_again_after_500_and_after_a_timeout() -> None:
    with server([500, -1, 200], {"rewards": [1, 2]}) as (url, asked):
        assert remote(url, timeout_s=0.5)(ROLLOUTS).tolist() == [1, 2]
        assert len(asked) == 3


def test_it_gives_up() -> None:
    with server([503], {"no": 1}) as (url, asked):
        with pytest.raises(RemoteRewardError, match="asked 3 times; at last status 503"):
            remote(url)(ROLLOUTS)
        assert len(asked) == 3


def test_what_is_wrong_is_not_asked_again() -> None:
    with server([404], {}) as (url, asked):
        with pytest.raises(RemoteRewardError, match="asked 1 times; at last status 404"):
            remote(url)(ROLLOUTS)
        assert len(asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"rewards": [1]},
        {"scores": [1, 2]},
        [1, 2],
        {"rewards": [1, None]},
        {"rewards": ["1", "2"]},
        {"rewards": 1},
        None,
    ],
)
def test_another_answer_than_was_asked_for(answer: Any) -> None:
    with server([200], answer) as (url, _), pytest.raises(RemoteRewardError, match="asked for 2 rewards and said"):
        remote(url)(ROLLOUTS)


def test_nobody_listens() -> None:
    with server([200], {}) as (url, _):
        pass
    with pytest.raises(RemoteRewardError, match="ConnectError"):
        remote(url)(ROLLOUTS)
