"""The ranker in KServe's Open Inference Protocol, version 2, with tensors in JSON or binary.

`POST /v2/models/NAME/infer` is `POST /rank` with other words. Its input tensors have one dimension:

| name | length | datatype |
|---|---|---|
| `user` | 1 | INT64 or BYTES |
| `candidates` | C | INT64 or BYTES |
| `event_items` | E, optional | INT64 or BYTES |
| `event_ratings` | E, for models with ratings | FP32 or FP64 |

The output is `scores`, FP32 [C]; model_version is the version of the weights. The parameter
`deadline_ms` is that of /rank, and the answer's parameter `unknown_user` too.

Binary tensors follow the JSON, whose length is then the header inference-header-content-length. The
parameter `binary_data_size` of an input is in place of its data. `binary_data_output` of the
request, or `binary_data` of its output, asks for binary scores. Parameters of other extensions are
ignored, as the protocol says.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, FailFast, ValidationError
from pydantic_core import to_json
from serving_bodies import Asked, RankBody, parse
from serving_errors import fault

IDS, FLOATS = ("INT64", "BYTES"), ("FP32", "FP64")
INPUTS = {"user": IDS, "candidates": IDS, "event_items": IDS, "event_ratings": FLOATS}
TYPES = {"INT64": {int}, "BYTES": {str}, "FP32": {int, float}, "FP64": {int, float}}
BINARY = {"INT64": np.dtype("<i8"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8")}
JSON_LENGTH = "inference-header-content-length"  # of a body with binary tensors


class InputTensor(BaseModel):
    name: str
    shape: Annotated[list[int], FailFast()]
    datatype: Literal["INT64", "BYTES", "FP32", "FP64"]
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}

    def values(self, binary: "Binary") -> list[Any]:
        """The data, checked. ValueError with what is wrong."""
        if self.name not in INPUTS:
            raise ValueError(f"inputs must be of {list(INPUTS)}, got {self.name!r}")
        if self.datatype not in INPUTS[self.name]:
            raise ValueError(
                f"the datatype of {self.name} must be of {INPUTS[self.name]}, got {self.datatype}"
            )
        size = self.parameters.get("binary_data_size")
        if (self.data is None) == (size is None):
            raise ValueError(f"{self.name} must have either data or the parameter binary_data_size")
        data = self.data if size is None else binary.take(self.name, self.datatype, size)
        if self.shape != [len(data)]:
            raise ValueError(
                f"the shape of {self.name} must be [{len(data)}], as its data, got {self.shape}"
            )
        wrong = [x for x in data if type(x) not in TYPES[self.datatype]]
        if wrong:
            raise ValueError(f"the data of {self.name} must be {self.datatype}, got {wrong[0]!r}")
        return data


class Binary:
    """The bytes behind the JSON, of which each input takes its own."""

    def __init__(self, content: bytes):
        self.left = memoryview(content)

    def take(self, name: str, datatype: str, size: Any) -> list[Any]:
        """The next elements, of so many bytes. ValueError with what is wrong."""
        if type(size) is not int or not 0 <= size <= len(self.left):
            raise ValueError(
                f"the binary_data_size of {name} must be at most the {len(self.left)} bytes that"
                f" are left, got {size!r}"
            )
        own, self.left = self.left[:size], self.left[size:]
        try:
            if datatype == "BYTES":
                return _texts(own)
            return np.frombuffer(own, BINARY[datatype]).tolist()
        except ValueError as error:
            raise ValueError(f"the {size} bytes of {name} are not {datatype}: {error}") from error


def _texts(content: memoryview) -> list[str]:
    """Texts in UTF-8, each behind its length in 4 bytes. ValueError if they are none."""
    texts, begin = [], 0
    while begin < len(content):
        first = begin + 4
        end = first + int.from_bytes(content[begin:first], "little")
        if not first <= end <= len(content):
            raise ValueError(f"a text of {end - first} bytes ends behind them")
        texts.append(str(content[first:end], "utf-8"))
        begin = end
    return texts


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

    def to_rank(self, content: bytes) -> RankBody:
        """The body of /rank. ValueError with what is wrong. content: the binary tensors."""
        values: dict[str, list[Any]] = {}
        binary = Binary(content)
        for tensor in self.inputs:
            if tensor.name in values:
                raise ValueError(f"the input {tensor.name} is given twice")
            values[tensor.name] = tensor.values(binary)
        if binary.left:
            raise ValueError(f"{len(binary.left)} bytes behind the JSON are of no input")
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

    def wants_binary(self) -> bool:
        """Whether the answer has binary scores. What is said of the output itself counts first."""
        parameters = [x.parameters for x in self.outputs]
        known = [x["binary_data"] for x in parameters if "binary_data" in x]
        return bool(known[0] if known else self.parameters.get("binary_data_output", False))


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

    def read(self, headers: Mapping[str, str], content: bytes) -> Asked:
        """A request to infer. HTTPException with what is wrong."""
        length, binary = headers.get(JSON_LENGTH), b""
        if length is not None:
            digits = length if re.fullmatch("[0-9]{1,9}", length) else "-1"
            if not 0 <= int(digits) <= len(content):
                text = f"{JSON_LENGTH} must be at most the body's {len(content)} bytes"
                raise HTTPException(400, f"{text}, got {length!r}")
            content, binary = content[: int(digits)], content[int(digits) :]
            headers = {"content-type": "application/json"}
        asked = parse(InferBody, headers, content)
        try:
            body = asked.to_rank(binary)
        except ValidationError as error:
            raise HTTPException(*fault(error, "inputs")) from error
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

        def answer(result: dict[str, Any]) -> Response:
            scores, is_binary = np.array(result["scores"], BINARY["FP32"]), asked.wants_binary()
            tensor = dict(name="scores", shape=[len(scores)], datatype="FP32")
            tensor |= (
                {"parameters": {"binary_data_size": scores.nbytes}}
                if is_binary
                else {"data": result["scores"]}
            )
            names = dict(model_name=self.name, model_version=str(result["weights_version"]))
            known = {key: result[key] for key in ("unknown_user",) if key in result}
            id_ = {} if asked.id is None else {"id": asked.id}
            text = to_json({**names, **id_, "parameters": known, "outputs": [tensor]})
            if not is_binary:
                return Response(text, media_type="application/json")
            return Response(
                text + scores.tobytes(),
                headers={JSON_LENGTH: str(len(text))},
                media_type="application/octet-stream",
            )

        return Asked(body, answer)

    async def server(self) -> dict[str, Any]:
        return {"name": "jagged-modules", "version": "2", "extensions": ["binary_tensor_data"]}

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
