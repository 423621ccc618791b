"""The ranker in KServe's Open Inference Protocol, version 2, with tensors in JSON.

`POST /v2/models/NAME/infer` is `POST /rank` with other words. Its input tensors have one dimension:

| name | length | datatype |
|---|---|---|
| `user` | 1 | INT64 or BYTES |
| `candidates` | C | INT64 or BYTES |
| `event_items` | E, optional | INT64 or BYTES |
| `event_ratings` | E, for models with ratings | FP32 or FP64 |

The output is `scores`, FP32 [C]; model_version is the version of the weights. The parameter
`deadline_ms` is that of /rank, and the answer's parameter `unknown_user` too. Other parameters are
of extensions that this server does not have, and are ignored, as the protocol says.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, FailFast, ValidationError
from serving_bodies import Asked, RankBody, parse
from serving_errors import fault

IDS, FLOATS = ("INT64", "BYTES"), ("FP32", "FP64")
INPUTS = {"user": IDS, "candidates": IDS, "event_items": IDS, "event_ratings": FLOATS}
TYPES = {"INT64": {int}, "BYTES": {str}, "FP32": {int, float}, "FP64": {int, float}}


class InputTensor(BaseModel):
    name: str
    shape: Annotated[list[int], FailFast()]
    datatype: Literal["INT64", "BYTES", "FP32", "FP64"]
    data: list[Any]
    parameters: dict[str, Any] = {}

    def values(self) -> list[Any]:
        """The data, checked. ValueError with what is wrong."""
        if self.name not in INPUTS:
            raise ValueError(f"inputs must be of {list(INPUTS)}, got {self.name!r}")
        if self.datatype not in INPUTS[self.name]:
            raise ValueError(
                f"the datatype of {self.name} must be of {INPUTS[self.name]}, got {self.datatype}"
            )
        if self.shape != [len(self.data)]:
            raise ValueError(
                f"the shape of {self.name} must be [{len(self.data)}], as its data, got"
                f" {self.shape}"
            )
        wrong = [x for x in self.data if type(x) not in TYPES[self.datatype]]
        if wrong:
            raise ValueError(f"the data of {self.name} must be {self.datatype}, got {wrong[0]!r}")
        return self.data


class OutputTensor(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[float]


class RequestedOutput(BaseModel):
    name: Literal["scores"]
    parameters: dict[str, Any] = {}


class InferBody(BaseModel):
    id: str | None = None
    inputs: Annotated[list[InputTensor], FailFast()]
    outputs: Annotated[list[RequestedOutput], FailFast()] = []
    parameters: dict[str, Any] = {}

    def to_rank(self) -> RankBody:
        """The body of /rank. ValueError with what is wrong."""
        values: dict[str, list[Any]] = {}
        for tensor in self.inputs:
            if tensor.name in values:
                raise ValueError(f"the input {tensor.name} is given twice")
            values[tensor.name] = tensor.values()
        missing = [name for name in ("user", "candidates") if name not in values]
        if missing:
            raise ValueError(f"the input {missing[0]} is missing")
        if len(values["user"]) != 1:
            raise ValueError(f"the shape of user must be [1], got [{len(values['user'])}]")
        items = values.get("event_items", [])
        ratings = values.get("event_ratings", [None] * len(items))
        if len(items) != len(ratings):
            raise ValueError(
                f"event_items and event_ratings must have equal shapes, got [{len(items)}] and"
                f" [{len(ratings)}]"
            )
        return RankBody(
            user=values["user"][0],
            candidates=values["candidates"],
            events=[{"item": item, "rating": x} for item, x in zip(items, ratings, strict=True)],
            deadline_ms=self.parameters.get("deadline_ms"),
        )


class InferAnswer(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: list[OutputTensor]


class KServe:
    """The protocol's routes of a service whose model has this name, except infer itself, for which
    `read` reads the request."""

    def __init__(self, service: Any, name: str):
        self.service, self.name, self.router = service, name, APIRouter(prefix="/v2")
        for path, answer in {
            "": self.server,
            "/health/live": self.live,
            "/health/ready": self.ready,
            f"/models/{name}": self.model,
            f"/models/{name}/ready": self.ready,
        }.items():
            self.router.get(path)(answer)

    def read(self, content_type: str, content: bytes) -> Asked:
        """A request to infer. HTTPException with what is wrong."""
        asked = parse(InferBody, content_type, content)
        try:
            body = asked.to_rank()
        except ValidationError as error:
            raise HTTPException(*fault(error, "inputs")) from error
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

        def answer(result: dict[str, Any]) -> dict[str, Any]:
            scores = result["scores"]
            tensor = dict(name="scores", shape=[len(scores)], datatype="FP32", data=scores)
            names = dict(model_name=self.name, model_version=str(result["weights_version"]))
            known = {key: result[key] for key in ("unknown_user",) if key in result}
            id_ = {} if asked.id is None else {"id": asked.id}
            return {**names, **id_, "parameters": known, "outputs": [tensor]}

        return Asked(body, answer)

    async def server(self) -> dict[str, Any]:
        return {"name": "jagged-modules", "version": "2", "extensions": []}

    async def live(self) -> Response:
        """Whether the scoring thread runs. A process that is not live must be started again."""
        return _state("live", self.service.batcher.is_alive())

    async def ready(self) -> Response:
        """Whether requests are accepted. A process that stops is not ready."""
        return _state("ready", self.service.is_ready())

    async def model(self) -> dict[str, Any]:
        ranker = self.service.ranker
        kinds = {}
        for name, ids in (("user", ranker.histories.users), ("item", ranker.histories.items)):
            kinds[name] = "INT64" if isinstance(ids[0], int) else "BYTES"
        inputs = {"user": kinds["user"], "candidates": kinds["item"], "event_items": kinds["item"]}
        if ranker.ratings:
            inputs["event_ratings"] = "FP32"
        return {
            "name": self.name,
            "versions": [str(self.service.version)],
            "platform": "pytorch",
            "inputs": [
                {"name": name, "datatype": kind, "shape": [1 if name == "user" else -1]}
                for name, kind in inputs.items()
            ],
            "outputs": [{"name": "scores", "datatype": "FP32", "shape": [-1]}],
        }


def _state(name: str, value: bool) -> Response:
    return JSONResponse({name: value}, 200 if value else 503)
