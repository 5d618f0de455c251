"""Sends the caller's levels of loggers and filters of warnings to workers with each reset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marl_parallel.core.messages import Message, Request
from marl_parallel.core.pool.extensions import Extension
from marl_parallel.core.worker.caller_settings import CallerSettings

_BEGIN = frozenset({Message.RESET, Message.TAKE_OVER})
"""Requests that begin an episode in an environment that may have been constructed before the reset."""


class SettingsAtResets(Extension):
    """Sends the settings of the caller's process with resets, to each worker that does not have them yet.

    Attributes:
        present: The pickled settings of the last reset; environments that are constructed again get them.
    """

    sees_steps = False

    def __init__(self, caller: CallerSettings) -> None:
        self._caller = caller
        self.present = b""
        self._sent: dict[int, bytes] = {}

    def before_send(self, message: Message, env_ids: Sequence[int], payloads: Any) -> Sequence[int]:
        if message is Message.RESET:
            self.present = self._caller.pickled()
        return env_ids

    def before_post(self, worker: int, request: Request) -> Request:
        if request.message not in _BEGIN or not self.present or self._sent.get(worker) is self.present:
            return request
        self._sent[worker] = self.present
        return request._replace(settings=self.present)
