"""Options of simulated hostile clients."""

from typing import Literal

from pydantic import Field

from cfl.config.section import Positive, Section


class AttackConfig(Section):
    """Hostile clients, simulated to measure what they do to a run."""

    name: Literal["none", "sign_flip", "scale", "label_flip", "alie", "ipm", "sketch"] = Field(
        "none",
        description="what hostile clients do: send the update reversed, or noise in its place; train on reversed "
        "labels; collude by ALIE or IPM; poison the sketches of a strategy",
    )
    clients: Positive = Field(1, description="number of hostile clients in the population, drawn by the seed")
    strength: float | None = Field(
        None,
        gt=0,
        description="factor: of the reversed update (null: 1), the noise (10), the standard deviations of alie (null: "
        "by the paper's formula), the mean of ipm (0.5), or the sketch (100)",
    )
