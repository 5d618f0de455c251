"""Simulators that render frames, each in another way. Workers need no torch to import them."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulators.dict_rules import DictRules


class Painting(DictRules):
    """Its frames have the number of the environment and of the step."""

    render_mode: str | None = "rgb_array"

    def __init__(self, env_id: int) -> None:
        super().__init__()
        self.number = env_id

    def render(self) -> Any:
        return np.full((4, 6, 3), 10 * self.number + self.time, np.uint8)


class OldPainting(Painting):
    """Without `render_mode`, as before Gymnasium."""

    render_mode = None

    def render(self, mode: str = "human", brightness: int = 0) -> Any:
        return super().render() + np.uint8(brightness) if mode == "rgb_array" else None


class OnScreen(Painting):
    render_mode = "human"

    def render(self) -> Any:
        return None


class Nothing(Painting):
    """It was constructed without a `render_mode`."""

    render_mode = None
