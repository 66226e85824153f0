"""Rewards by a server, over HTTP."""

import time
from collections.abc import Sequence

import httpx
import torch

from integrations.ppo.experience import Rollout

PAUSE_S = 1.0
"""Before the first retry; twice that before the next one, and so on."""


class RemoteRewardError(RuntimeError):
    """A reward server does not answer, or answers something else than was asked."""


class RemoteReward:
    """Posts {"prompts": [...], "responses": [...], "labels": [...]}, expects {"rewards": [...]}. See `RewardSource`."""

    def __init__(self, url: str, *, timeout_s: float, retries: int, pause_s: float = PAUSE_S) -> None:
        """Args:
        url: of the server.
        timeout_s: longest wait for one answer.
        retries: how often it is asked again after a timeout, a broken connection or a status of 500 and above.
        pause_s: before the first retry.
        """
        self._url, self._retries, self._pause_s = url, retries, pause_s
        self._client = httpx.Client(timeout=timeout_s)

    def __call__(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """See `RewardSource`. Raises `RemoteRewardError`."""
        if not rollouts:
            return torch.zeros(0)
        asked = {
            "prompts": [one.prompt for one in rollouts],
            "responses": [one.response for one in rollouts],
            "labels": [one.label for one in rollouts],
        }
        response = self._post(asked)
        try:
            rewards = torch.tensor(response.json()["rewards"], dtype=torch.float32)
        except (ValueError, TypeError, KeyError):  # no JSON, no such key, or no numbers
            rewards = torch.zeros(())
        if rewards.shape != (len(rollouts),):
            raise RemoteRewardError(f"{self._url} was asked for {len(rollouts)} rewards and said {response.text[:200]}")
        return rewards

    def _post(self, asked: object) -> httpx.Response:
        trouble = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(self._pause_s * 2 ** (attempt - 1))
            try:
                response = self._client.post(self._url, json=asked)
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            trouble = f"status {response.status_code}: {response.text[:200]}"
            if not response.is_server_error:
                break
        raise RemoteRewardError(f"{self._url} gave no rewards, asked {attempt + 1} times; at last {trouble}")
