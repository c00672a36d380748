"""The project's own predict.py behind the real server: what a caller of the HTTP API gets for every kind of request."""

import contextlib
import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _server import Server, from_data_url
from judge import read_digits
from PIL import Image
from webhook import Webhook

from predict import MAX_OUTPUTS, SHAPES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FORMATS = {"webp": ("image/webp", "WEBP"), "png": ("image/png", "PNG"), "jpg": ("image/jpeg", "JPEG")}
LONG = {"num_inference_steps": 50, "num_outputs": MAX_OUTPUTS, "guidance": 5, "seed": 1, "upscale": 16}
SHORT = {"num_inference_steps": 2, "seed": 1, "output_format": "png"}


def succeeded(server: Server, **inputs: Any) -> dict[str, Any]:
    answer = server.predict(inputs)
    assert answer.status == 200, answer.body
    assert answer.body["status"] == "succeeded", answer.body
    body: dict[str, Any] = answer.body
    return body


def pictures(body: dict[str, Any]) -> list[Image.Image]:
    opened = [Image.open(io.BytesIO(from_data_url(url)[1])) for url in body["output"]]
    for picture in opened:
        picture.load()
    return opened


def pixels(body: dict[str, Any]) -> list[bytes]:
    return [picture.convert("RGB").tobytes() for picture in pictures(body)]


@contextlib.contextmanager
def held(server: Server) -> Iterator[int]:
    """Stops the worker's process meanwhile: on a fast machine no prediction is long enough to be met at work."""
    worker = server.worker_pid()
    assert worker
    os.kill(worker, signal.SIGSTOP)
    try:
        yield worker
    finally:
        os.kill(worker, signal.SIGCONT)


def let_go_on(worker: int) -> None:
    """Lets a process that is held work for a moment."""
    os.kill(worker, signal.SIGCONT)
    time.sleep(0.02)
    os.kill(worker, signal.SIGSTOP)


def test_the_boot_tells_what_it_did(server: Server) -> None:
    health = server.health()
    assert health["status"] == "READY"
    assert health["setup"]["status"] == "succeeded"
    report = server.setup_report()
    # A machine without a compiler serves uncompiled, and these tests hold there as well.
    assert report["outcome"] in {"warm", "partial", "cold", "eager"}
    assert report["reason"]
    planned = {f"{shape} x{count}" for shape in SHAPES for count in range(1, MAX_OUTPUTS + 1)}
    assert {request["label"] for request in report["requests"]} == planned


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, MAX_OUTPUTS])
def test_every_shape_is_drawn_in_its_size(server: Server, shape: str, count: int) -> None:
    body = succeeded(server, **SHORT, aspect_ratio=shape, num_outputs=count, upscale=3)
    width, height = SHAPES[shape]
    assert [picture.size for picture in pictures(body)] == [(width * 3, height * 3)] * count
    assert len(set(pixels(body))) == count, "each picture is another"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_what_it_says(server: Server, name: str) -> None:
    body = succeeded(server, **SHORT | {"output_format": name}, num_outputs=2)
    media_type, format_name = FORMATS[name]
    assert [from_data_url(url)[0] for url in body["output"]] == [media_type] * 2
    assert [picture.format for picture in pictures(body)] == [format_name] * 2


def test_lower_quality_is_smaller(server: Server) -> None:
    sizes = [
        len(from_data_url(succeeded(server, seed=1, output_format="jpg", output_quality=quality)["output"][0])[1])
        for quality in (1, 100)
    ]
    assert sizes[0] < sizes[1]


def test_the_digit_that_was_asked_for_is_drawn(server: Server) -> None:
    body = succeeded(server, prompt="a handwritten three", seed=3, num_outputs=MAX_OUTPUTS, output_format="png")
    read = read_digits([picture.convert("RGB") for picture in pictures(body)])
    assert read.count(3) >= MAX_OUTPUTS - 1, read


def test_everything_may_be_left_out(server: Server) -> None:
    body = succeeded(server)
    (picture,) = pictures(body)
    assert (picture.format, picture.size) == ("WEBP", tuple(4 * side for side in SHAPES["1:1"]))


def test_the_same_seed_draws_the_same_picture(server: Server) -> None:
    first, again, other = (
        succeeded(server, output_format="png", num_inference_steps=2, seed=seed) for seed in (5, 5, 6)
    )
    assert pixels(first) == pixels(again)
    assert pixels(first) != pixels(other)


def test_a_drawn_seed_is_logged_and_draws_the_picture_again(server: Server) -> None:
    first = succeeded(server, output_format="png", num_inference_steps=2)
    (line,) = [line for line in first["logs"].splitlines() if line.startswith("seed: ")]
    again = succeeded(server, output_format="png", num_inference_steps=2, seed=int(line.removeprefix("seed: ")))
    assert pixels(first) == pixels(again)
    assert succeeded(server, num_inference_steps=2)["logs"] != first["logs"], "another seed is drawn each time"


def test_a_planned_request_compiles_nothing(server: Server) -> None:
    for shape in SHAPES:
        for count in range(1, MAX_OUTPUTS + 1):
            body = succeeded(server, **SHORT, aspect_ratio=shape, num_outputs=count)
            assert body["metrics"]["graphs_compiled"] == 0, f"{shape} x{count}"


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"num_outputs": "2"}, "not of type"),
        ({"prompt": 7}, "not of type"),
        ({"guidance": "high"}, "not of type"),
        ({"num_outputs": 1.5}, "not of type"),
        ({"num_outputs": True}, "not of type"),
        ({"num_outputs": 0}, "less than the minimum"),
        ({"num_outputs": MAX_OUTPUTS + 1}, "greater than the maximum"),
        ({"num_inference_steps": 51}, "greater than the maximum"),
        ({"guidance": 0.5}, "less than the minimum"),
        ({"upscale": 17}, "greater than the maximum"),
        ({"output_quality": 101}, "greater than the maximum"),
        ({"seed": -1}, "less than the minimum"),
        ({"aspect_ratio": "16:9"}, "is not one of"),
        ({"output_format": "gif"}, "is not one of"),
        ({"seed": None}, "not of type"),
    ],
)
def test_a_bad_value_is_refused_and_named(server: Server, inputs: dict[str, Any], said: str) -> None:
    answer = server.predict(inputs)
    assert answer.status == 422
    detail = answer.body["detail"][0]
    assert detail["loc"] == ["body", "input", next(iter(inputs))]
    assert said in detail["msg"]


def test_a_whole_number_written_with_a_point_is_a_whole_number(server: Server) -> None:
    """In JSON 2.0 is an integer: the server lets it through, and some languages write no other form."""
    body = succeeded(server, **SHORT | {"num_inference_steps": 2.0, "seed": 1.0}, num_outputs=2.0, upscale=2.0)
    assert pixels(body) == pixels(succeeded(server, **SHORT, num_outputs=2, upscale=2))


def test_files_of_old_predictions_are_removed(server: Server, boot_environment: dict[str, str]) -> None:
    for _ in range(6):
        succeeded(server, **SHORT)
    assert len(list(Path(boot_environment["TMPDIR"]).glob("prediction-*"))) == 4


def test_an_unknown_field_is_dropped(server: Server) -> None:
    """As Replicate always did: a client of a newer version can talk to an older one."""
    assert pixels(succeeded(server, **SHORT, megapixels="1")) == pixels(succeeded(server, **SHORT))


def test_a_body_that_is_no_json_is_refused(server: Server) -> None:
    assert server.post("/predictions", b"prompt=seven").status == 400
    assert server.health()["status"] == "READY"


def test_an_asynchronous_prediction_tells_its_progress(server: Server, webhook: Webhook) -> None:
    answer = server.predict(
        {**SHORT, "num_outputs": 2},
        asynchronous=True,
        id="told",
        webhook=webhook.url,
        webhook_events_filter=["start", "output", "completed"],
    )
    assert answer.status == 202
    assert answer.body["id"] == "told"
    events = webhook.until_done()
    assert {event["id"] for event in events} == {"told"}
    assert events[0]["status"] in {"starting", "processing"}
    assert events[-1]["status"] == "succeeded"
    assert pixels(events[-1]) == pixels(succeeded(server, **SHORT, num_outputs=2))


def test_the_same_id_twice_is_one_prediction(server: Server, webhook: Webhook) -> None:
    """A client that lost the answer asks again under the same id; it must not pay twice."""
    server.wait_idle()
    body = {"input": LONG, "webhook": webhook.url, "webhook_events_filter": ["completed"]}
    with held(server):
        asked = [server.put("/predictions/once", body, headers={"Prefer": "respond-async"}) for _ in range(2)]
        assert [answer.status for answer in asked] == [202, 202]
        assert [answer.body["id"] for answer in asked] == ["once", "once"]
        server.cancel("once")
    assert len(webhook.until_done()) == 1
    assert webhook.events.empty(), "one prediction ended, not two"


def test_an_id_in_the_body_must_be_that_of_the_address(server: Server) -> None:
    assert server.put("/predictions/one", {"id": "other", "input": SHORT}).status == 422
    server.wait_idle()
    answer = server.put("/predictions/one", {"id": "one", "input": SHORT})
    assert (answer.status, answer.body["id"], answer.body["status"]) == (200, "one", "succeeded")


def test_a_second_prediction_beside_a_running_one_is_refused(server: Server, webhook: Webhook) -> None:
    with held(server):
        server.predict(LONG, asynchronous=True, id="running", webhook=webhook.url)
        assert server.post("/predictions", {"input": SHORT}).status == 409
        server.cancel("running")
    webhook.until_done()


def test_a_cancelled_prediction_ends_and_the_next_one_is_right(server: Server, webhook: Webhook) -> None:
    expected = pixels(succeeded(server, **SHORT))
    with held(server) as worker:
        server.predict(LONG, asynchronous=True, id="given-up", webhook=webhook.url)
        # Its first line of log says that it is inside run().
        while "seed: " not in server.put("/predictions/given-up", {"input": LONG}).body["logs"]:
            let_go_on(worker)
            assert webhook.events.empty() or webhook.events.queue[-1]["status"] in {"starting", "processing"}
        assert server.cancel("given-up").status == 200
    assert webhook.until_done()[-1]["status"] == "canceled"
    assert pixels(succeeded(server, **SHORT)) == expected


def test_cancelling_what_is_not_there_is_an_error(server: Server) -> None:
    assert server.cancel("never-asked-for").status == 404


@pytest.fixture(autouse=True)
def idle_afterwards(server: Server) -> Iterator[None]:
    """No test leaves a prediction behind for the next one to collide with."""
    yield
    assert server.wait_idle()
