"""KServe's protocol, the probes and the OpenAPI document, over real sockets."""

import json
import struct

import pytest

for _name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

from serving_app import Service

from ..marks import PATIENCE
from .running import LIMITS, Running
from .serving import Requests, body_of, ranker_of

INFER = "/v2/models/ranker/infer"
KINDS = {"INT64": "q", "FP32": "f", "FP64": "d"}  # of struct


def tensor(name, datatype, data, shape=None) -> dict:
    shape = [len(data)] if shape is None else shape
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


USER, CANDIDATES = tensor("user", "INT64", [3]), tensor("candidates", "INT64", [4, 6, 8])
EVENTS = [tensor("event_items", "INT64", [9, 4]), tensor("event_ratings", "FP32", [4, 3])]


@pytest.fixture(params=["attention", "hstu"])
def running(request, served):
    running = Running(Service(ranker_of(served[request.param]), LIMITS))
    running.offline = ranker_of(served[request.param], 0)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def shared(served):
    running = Running(Service(ranker_of(served["attention"]), LIMITS))
    yield running
    running.stop()


@pytest.mark.parametrize("id_datatype, of", [("INT64", int), ("BYTES", str)])
def test_infer_gives_the_scores_of_rank(running, id_datatype, of):
    """With new events, which the next request finds in the history."""
    requests, has_ratings = Requests(running.offline), bool(running.offline.ratings)
    for events in (0, 2, 1, 0):
        request = requests.of(3, events=events)
        body = body_of(request, running.offline)
        items = [of(event["item"]) for event in body["events"]]
        inputs = [
            tensor("user", id_datatype, [of(body["user"])]),
            tensor("candidates", id_datatype, list(map(of, body["candidates"]))),
            tensor("event_items", id_datatype, items),
        ]
        if has_ratings:
            inputs.append(tensor("event_ratings", "FP64", [x["rating"] for x in body["events"]]))
        answer = running.client.post(INFER, json={"id": "a", "inputs": inputs})
        scores = running.offline.score([request])[0].tolist()
        assert answer.status_code == 200, answer.text
        found = answer.json()
        (output,) = found.pop("outputs")
        assert found == {"model_name": "ranker", "model_version": "1", "id": "a", "parameters": {}}
        data = output.pop("data")
        assert output == {"name": "scores", "shape": [len(scores)], "datatype": "FP32"}
        assert data == pytest.approx(scores, rel=1.3e-6, abs=1e-5)
    assert running.metric('rank_requests_total{status="200"}') == 4


FAULTS = {  # inputs, other fields → error
    "no user": ([CANDIDATES], {}, "the input user is missing"),
    "no candidates": ([USER], {}, "the input candidates is missing"),
    "two users": (
        [tensor("user", "INT64", [3, 4]), CANDIDATES],
        {},
        "the shape of user must be [1], got [2]",
    ),
    "an input twice": ([USER, CANDIDATES, USER], {}, "the input user is given twice"),
    "an unknown input": (
        [USER, CANDIDATES, tensor("x", "INT64", [])],
        {},
        "inputs must be of ['user', 'candidates', 'event_items', 'event_ratings'], got 'x'",
    ),
    "another datatype": (
        [USER, tensor("candidates", "FP32", [4, 6])],
        {},
        "the datatype of candidates must be of ('INT64', 'BYTES'), got FP32",
    ),
    "an unknown datatype": (
        [USER, tensor("candidates", "INT7", [4])],
        {},
        "body.inputs.1.datatype: Input should be 'INT64', 'BYTES', 'FP32' or 'FP64'",
    ),
    "another shape": (
        [USER, tensor("candidates", "INT64", [4, 6], [1, 2])],
        {},
        "the shape of candidates must be [2], as its data, got [1, 2]",
    ),
    "text among integers": (
        [USER, tensor("candidates", "INT64", [4, "6"])],
        {},
        "the data of candidates must be INT64, got '6'",
    ),
    "a bool": (
        [USER, tensor("candidates", "INT64", [True])],
        {},
        "the data of candidates must be INT64, got True",
    ),
    "empty candidates": (
        [USER, tensor("candidates", "INT64", [])],
        {},
        "inputs.candidates: List should have at least 1 item after validation, not 0",
    ),
    "fewer ratings than items": (
        [USER, CANDIDATES, EVENTS[0], tensor("event_ratings", "FP32", [4])],
        {},
        "event_items and event_ratings must have equal shapes, got [2] and [1]",
    ),
    "no ratings": (
        [USER, CANDIDATES, EVENTS[0]],
        {},
        "ratings must be of [1.0, 2.0, 3.0, 4.0, 5.0], got None",
    ),
    "an unknown output": (
        [USER, CANDIDATES],
        {"outputs": [{"name": "x"}]},
        "body.outputs.0.name: Input should be 'scores'",
    ),
    "a deadline of 0": (
        [USER, CANDIDATES],
        {"parameters": {"deadline_ms": 0}},
        "inputs.deadline_ms: Input should be greater than 0",
    ),
    "no inputs": (None, {}, "body.inputs: Input should be a valid array"),
}


@pytest.mark.parametrize("inputs, fields, error", FAULTS.values(), ids=FAULTS)
def test_bad_requests_to_infer(shared, inputs, fields, error):
    """Each is answered, counted, and does not change the user's history."""
    length = shared.service.ranker.histories.length(3)
    before = shared.metric('rank_requests_total{status="422"}')
    answer = shared.client.post(INFER, json={"inputs": inputs, **fields})
    assert answer.status_code == 422, answer.text
    assert answer.json() == {"error": error}
    assert shared.metric('rank_requests_total{status="422"}') == before + 1
    assert shared.service.ranker.histories.length(3) == length


def test_what_infer_shares_with_rank(shared):
    """Extensions of a client are ignored; other bodies, paths and methods are refused."""
    inputs = [{**USER, "parameters": {"classification": 3}}, CANDIDATES, *EVENTS]
    wanted = {"outputs": [{"name": "scores", "parameters": {"binary_data": False}}]}
    extra = {"parameters": {"binary_data_output": True, "deadline_ms": 1e3 * PATIENCE}}
    answer = shared.client.post(INFER, json={"inputs": inputs, **wanted, **extra})
    assert answer.status_code == 200 and "id" not in answer.json()
    binary = {"content-type": "application/octet-stream"}
    assert shared.client.post(INFER, content=b"{}", headers=binary).status_code == 415
    unknown = {"inputs": [tensor("user", "INT64", [99]), CANDIDATES]}
    assert shared.client.post(INFER, json=unknown).status_code == 404
    assert shared.client.get(INFER).status_code == 405
    assert shared.client.post("/v2/models/other/infer", json=unknown).status_code == 404
    large = {"inputs": [USER, tensor("candidates", "INT64", [4] * 10_000)]}
    assert shared.client.post(INFER, json=large).status_code == 413


def binary_tensor(name, datatype, data, parameters=None) -> tuple[dict, bytes]:
    """An input without data, and its bytes."""
    if datatype == "BYTES":
        texts = [text.encode() for text in data]
        content = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    else:
        content = struct.pack(f"<{len(data)}{KINDS[datatype]}", *data)
    parameters = {"binary_data_size": len(content)} if parameters is None else parameters
    fields = {"name": name, "shape": [len(data)], "datatype": datatype, "parameters": parameters}
    return fields, content


def post_binary(running, tensors, length=None, after=b"", **fields):
    """POST of these tensors, of which some are binary."""
    text = json.dumps({"inputs": [x[0] for x in tensors], **fields}).encode()
    headers = {
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(text)) if length is None else length,
    }
    content = b"".join([text, *(x[1] for x in tensors), after])
    return running.client.post(INFER, content=content, headers=headers)


WAYS = {  # fields of a request → whether its answer is binary
    "nothing": ({}, False),
    "all outputs": ({"parameters": {"binary_data_output": True}}, True),
    "the output": ({"outputs": [{"name": "scores", "parameters": {"binary_data": True}}]}, True),
    "not the output": (
        {
            "parameters": {"binary_data_output": True},
            "outputs": [{"name": "scores", "parameters": {"binary_data": False}}],
        },
        False,
    ),
}


@pytest.mark.parametrize("id_datatype, of", [("INT64", int), ("BYTES", str)])
@pytest.mark.parametrize("way", WAYS)
def test_binary_tensors(shared, id_datatype, of, way):
    """Among tensors in JSON. The scores have the bits of those in JSON."""
    fields, is_binary = WAYS[way]
    events = [tensor("event_items", "INT64", [9, 4])]
    rated = binary_tensor("event_ratings", "FP32", [4.0, 3.0])
    inputs = [
        binary_tensor("user", id_datatype, [of(3)]),
        (events[0], b""),
        rated,
        binary_tensor("candidates", id_datatype, list(map(of, [4, 6, 8]))),
    ]
    shared.service.ranker.forget()
    expected = shared.client.post(INFER, json={"inputs": [USER, CANDIDATES, *EVENTS]}).json()
    shared.service.ranker.forget()
    answer = post_binary(shared, inputs, id="a", **fields)
    assert answer.status_code == 200, answer.text
    length = int(answer.headers.get("inference-header-content-length", len(answer.content)))
    found, content = json.loads(answer.content[:length]), answer.content[length:]
    scores = expected["outputs"][0].pop("data")
    assert ("inference-header-content-length" in answer.headers) == is_binary
    if is_binary:
        assert answer.headers["content-type"] == "application/octet-stream"
        assert list(struct.unpack("<3f", content)) == scores
        assert found["outputs"][0].pop("parameters") == {"binary_data_size": 12}
    else:
        assert found["outputs"][0].pop("data") == scores and not content
    assert found == {**expected, "id": "a"}


def bytes_of(data: bytes, datatype="BYTES", size=1) -> tuple[dict, bytes]:
    """Candidates of these bytes."""
    fields, _ = binary_tensor("candidates", datatype, [], {"binary_data_size": len(data)})
    return {**fields, "shape": [size]}, data


BOTH = {**CANDIDATES, "parameters": {"binary_data_size": 0}}
NEITHER = binary_tensor("candidates", "INT64", [4], {})
BINARY_FAULTS = {  # candidates, fields → status, error
    "cut numbers": (
        bytes_of(b"1234567", "INT64"),
        {},
        422,
        "the 7 bytes of candidates are not INT64",
    ),
    "a cut length": (bytes_of(b"\1\0"), {}, 422, "the 2 bytes of candidates are not BYTES: a text"),
    "a cut text": (bytes_of(b"\2\0\0\0a"), {}, 422, "a text of 2 bytes ends behind them"),
    "no UTF-8": (bytes_of(b"\1\0\0\0\xff"), {}, 422, "candidates are not BYTES: 'utf-8' codec"),
    "another shape": (bytes_of(b"\1\0\0\x004", size=2), {}, 422, "of candidates must be [1], as"),
    "more bytes than there are": (
        binary_tensor("candidates", "INT64", [4], {"binary_data_size": 9}),
        {},
        422,
        "binary_data_size of candidates must be at most the 8 bytes that are left, got 9",
    ),
    "a size that is no integer": (
        binary_tensor("candidates", "INT64", [4], {"binary_data_size": True}),
        {},
        422,
        "that are left, got True",
    ),
    "a negative size": (
        binary_tensor("candidates", "INT64", [4], {"binary_data_size": -8}),
        {},
        422,
        "that are left, got -8",
    ),
    "bytes of no input": ((CANDIDATES, b""), {"after": b"12"}, 422, "2 bytes behind the JSON are"),
    "data and bytes": ((BOTH, b""), {}, 422, "candidates must have either data or the parameter"),
    "neither": (NEITHER, {}, 422, "candidates must have either data or the parameter"),
    "a longer header": ((CANDIDATES, b""), {"length": "9999"}, 400, "bytes, got '9999'"),
    "a negative header": ((CANDIDATES, b""), {"length": "-1"}, 400, "bytes, got '-1'"),
    "a header of many digits": ((CANDIDATES, b""), {"length": "9" * 5000}, 400, "got '999"),
    "a shorter header": ((CANDIDATES, b""), {"length": "7"}, 400, "Invalid JSON"),
}


@pytest.mark.parametrize("name", BINARY_FAULTS)
def test_bad_binary_requests(shared, name):
    candidates, fields, status, error = BINARY_FAULTS[name]
    answer = post_binary(shared, [(USER, b""), candidates], **fields)
    assert answer.status_code == status and error in answer.json()["error"], answer.text


def test_what_the_model_is(running):
    server = running.client.get("/v2").json()
    assert server["name"] == "jagged-modules" and server["extensions"] == ["binary_tensor_data"]
    model = running.client.get("/v2/models/ranker").json()
    inputs = {x["name"]: (x["datatype"], x["shape"]) for x in model.pop("inputs")}
    expected = {"user": ("INT64", [1])}
    expected |= dict.fromkeys(("candidates", "event_items"), ("INT64", [-1]))
    if running.offline.ratings:
        expected["event_ratings"] = ("FP32", [-1])
    assert inputs == expected
    assert model == {
        "name": "ranker",
        "versions": ["1"],
        "platform": "pytorch",
        "outputs": [{"name": "scores", "datatype": "FP32", "shape": [-1]}],
    }


def test_live_and_ready_probes(shared, monkeypatch):
    """A server that stops is live, so that nothing ends it before its time, and is not ready."""

    def states():
        paths = ("health/live", "health/ready", "models/ranker/ready")
        answers = [shared.client.get(f"/v2/{path}") for path in paths]
        return [(x.status_code, *x.json().items()) for x in answers]

    good = [(200, ("live", True)), (200, ("ready", True)), (200, ("ready", True))]
    assert states() == good
    monkeypatch.setattr(shared.service, "is_stopping", True)
    assert states() == [good[0], (503, ("ready", False)), (503, ("ready", False))]
    monkeypatch.undo()
    monkeypatch.setattr(shared.service.batcher, "is_alive", lambda: False)
    assert states()[:2] == [(503, ("live", False)), (503, ("ready", False))]
    monkeypatch.undo()
    assert states() == good


def test_the_openapi_document(shared):
    """It has each public route, and the fields of /rank and of its answer."""
    document = shared.client.get("/openapi.json").json()
    paths = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert paths == {
        ("/rank", "post"),
        (INFER, "post"),
        ("/users/{user}", "get"),
        *((path, "get") for path in ("/health", "/metrics", "/v2", "/v2/models/ranker")),
        *((f"/v2/{path}", "get") for path in ("health/live", "health/ready")),
        ("/v2/models/ranker/ready", "get"),
    }
    schemas = document["components"]["schemas"]
    rank = schemas["RankBody"]
    assert set(rank["properties"]) == {"user", "candidates", "events", "deadline_ms"}
    assert rank["required"] == ["user", "candidates"] and rank["additionalProperties"] is False
    ids = [{"type": "integer"}, {"type": "string"}]
    assert rank["properties"]["user"]["anyOf"] == ids
    answer = shared.client.post("/rank", json={"user": 3, "candidates": [4]}).json()
    assert set(answer) == set(schemas["Ranked"]["required"])
    responses = document["paths"]["/rank"]["post"]["responses"]
    for status in ("422", "default"):
        content = responses[status]["content"]["application/json"]
        assert content["schema"] == {"$ref": "#/components/schemas/Error"}
