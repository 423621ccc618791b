"""What requests and answers say, and the limits of requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import HTTPException
from fastapi.responses import Response
from published_ids import Id
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    GetPydanticSchema,
    ValidationError,
    model_validator,
)
from pydantic_core import core_schema, to_json
from serving_batcher import Limits, check_limits
from serving_errors import NOT_JSON, fault


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of a request. deadline: seconds, if the request has none. The body's bytes are checked
    before it is parsed.

    body_seconds: from the first to the last byte of the body.

    Raises ValueError for a limit that refuses all requests.
    """

    batches: Limits = field(default_factory=Limits)
    max_candidates: int = 10_000
    max_events: int = 1_000
    max_body: int = 1_000_000
    body_seconds: float = 10.0
    deadline: float = 1.0

    def __post_init__(self) -> None:
        check_limits(max_candidates=self.max_candidates, max_body=self.max_body)
        if not self.deadline > 0:
            raise ValueError(f"deadline must be positive, got {self.deadline} s")


STRICT = ConfigDict(extra="forbid", strict=True)  # otherwise true would be a rating of 1
ID_SCHEMA = core_schema.union_schema(
    # not true, which would be user or item 1
    [core_schema.int_schema(strict=True), core_schema.str_schema(strict=True)],
    mode="left_to_right",
    custom_error_type="id_type",
    custom_error_message="Input should be an id, an integer or text",
)
PublishedId = Annotated[Id, GetPydanticSchema(lambda source, handler: ID_SCHEMA)]


class Body(BaseModel):
    """Validation ends at the first fault of a list, and at the first unknown field. A megabyte of
    faults would take seconds to list."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_fields_but_one(cls, data: Any) -> Any:
        known = cls.model_fields
        if not isinstance(data, dict) or len(data) <= len(known) + 1:
            return data
        unknown = next(name for name in data if name not in known)
        return {name: value for name, value in data.items() if name in known or name is unknown}


class Event(Body):
    item: PublishedId
    rating: Annotated[float | None, Field(allow_inf_nan=False)] = None


class RankBody(Body):
    user: PublishedId
    candidates: Annotated[list[PublishedId], Field(min_length=1), FailFast()]
    events: Annotated[list[Event], FailFast()] = []
    deadline_ms: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None


class Ranked(BaseModel):
    """The answer to `POST /rank`. unknown_user: the policy, for a user who is not in the log."""

    user: PublishedId
    scores: list[float]
    weights_version: int
    queue_ms: float
    latency_ms: float
    unknown_user: str | None = None


class Error(BaseModel):
    error: str


class Asked(NamedTuple):
    """A parsed request: what is ranked, and the answer that the result is put into."""

    body: RankBody
    answer: Callable[[dict[str, Any]], Response] = lambda result: Response(
        to_json(result), media_type="application/json"
    )


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse(kind: type[Parsed], headers: Mapping[str, str], content: bytes) -> Parsed:
    """The body of a request. HTTPException with what is wrong."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, NOT_JSON)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise HTTPException(*fault(error, "body")) from error
