"""Shapes that clients of structured output ask for: small enough for a model that can only tell stories."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Animal(BaseModel):
    """An animal of a story."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["mouse", "fox", "owl"]
    age: int = Field(ge=0, le=99)
    clever: bool
