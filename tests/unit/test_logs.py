from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from cluster import logs
from cluster.core.errors import InvalidRequest, Unavailable

IDS = {"router_id": "router-7"}


@pytest.fixture
def written() -> Iterator[Callable[[str], io.StringIO]]:
    """The root logger is given back as it was."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level

    def configure(log_format: str) -> io.StringIO:
        stream = io.StringIO()
        logs.configure(log_format, "debug", IDS, stream)
        return stream

    yield configure
    root.handlers[:] = before
    root.setLevel(level)


def test_json_is_one_object_per_line(written):
    stream = written("json")
    log = logging.getLogger("some.where")
    log.info("%s two\nlines", "of", extra={"request_id": "r1", "facts": {"tokens": 3}})
    log.warning("plain")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "some.where",
        "message": "of two\nlines",
        "router_id": "router-7",
        "request_id": "r1",
        "tokens": 3,
    }
    assert "request_id" not in second


def test_code_that_serves_a_call_names_it(written):
    stream = written("json")
    token = logs.REQUEST_ID.set("r9")
    logging.getLogger("a").info("x")
    logs.REQUEST_ID.reset(token)
    assert json.loads(stream.getvalue())["request_id"] == "r9"


def test_text_is_one_line_with_the_ids(written):
    stream = written("text")
    logging.getLogger("a.b").info("request r1\nmoves", extra={"request_id": "r1"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(" INFO a.b router-7: request r1\\nmoves")


def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("log_format", logs.FORMATS)
@pytest.mark.parametrize(
    ("error", "in_call", "told"),
    [
        (ValueError("SECRET prompt"), True, "ValueError"),
        (RuntimeError("SECRET prompt"), True, "RuntimeError"),
        (ValueError("SECRET prompt"), False, "ValueError"),
        (KeyError("SECRET"), False, "KeyError"),
        (RuntimeError("CUDA out of memory"), False, "RuntimeError: CUDA out of memory"),
        (Unavailable("no engine"), True, "Unavailable: no engine"),
        (InvalidRequest.single("a", "b"), True, "InvalidRequest: a: b"),
    ],
    ids=repr,
)
def test_errors_are_told_with_their_place_and_without_what_was_sent(
    written, log_format: str, error: Exception, in_call: bool, told: str
):
    stream = written(log_format)
    token = logs.REQUEST_ID.set("r1" if in_call else "")
    try:
        failing(error)
    except Exception:
        logging.getLogger("a").exception("it failed")
    logs.REQUEST_ID.reset(token)
    text = stream.getvalue()
    assert "SECRET" not in text
    assert "test_logs.py:" in text
    if log_format == "json":
        assert json.loads(text)["error"] == told
    else:
        assert text.splitlines()[-1] == told
