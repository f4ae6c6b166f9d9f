"""What the groups of options are made of."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, le=2**31)]
# YAML has lists only; the strict models require tuples.
Tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class Section(BaseModel):
    """Group of options: immutable, without unknown keys or silent conversions (`true` is not 1)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, revalidate_instances="always"
    )
