"""The page at `/` in a real Chromium, and the numbers that it shows."""

import json
import os
import re
import struct
import threading
import urllib.request
from pathlib import Path

import grpc
import pytest

from sharp.serving.config import EngineConfig, MetricsConfig
from sharp.serving.frontends.http.status_page import PAGE
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.full.browser.chromium import Chromium

WINDOWS = [("light", 1200, 720), ("dark", 1200, 720), ("light", 390, 900), ("dark", 390, 900)]


def generate(started, text, max_tokens, n=1):
    with grpc.insecure_channel(started.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(
            text=text,
            sampling={"temperature": 0, "n": n},
            stopping={"max_tokens": max_tokens, "ignore_eos": True},
        )
        return list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60))


def get(started, path):
    with urllib.request.urlopen(f"http://{started.http_address}{path}", timeout=10) as response:
        return response.headers, response.read().decode()


@pytest.fixture(scope="module")
def started(start_server, counting):
    """A server whose head 0 attends to everything, so it is dispersed once contexts are long enough."""
    started = start_server(counting, metrics=MetricsConfig("head", dispersion_tokens=16))
    generate(started, "a" * 40, 60)
    return started


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def test_the_page_is_one_file_that_loads_nothing_else(started):
    headers, text = get(started, "/")
    assert text == PAGE
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["content-security-policy"]
    names_of_formats = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"https?://[^\"'\s)]+", text)) == names_of_formats
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", text)


def test_the_state_is_what_the_metrics_say(started):
    headers, text = get(started, "/live")
    state = json.loads(text)
    assert headers["cache-control"] == "no-store"
    assert state["model"] == {"name": "counting", "norm": "softmax", "layers": 1, "heads": 2}
    assert state["numbers"]["generated_tokens_total"] == 60
    assert state["numbers"]["time_to_first_token_seconds_count"] == 1
    attention = state["attention"]
    assert attention["normalized_entropy"] == [[1, 0.5]]
    assert (attention["support_ratio"], attention["inverse_temperature"]) == ([[1, 0.5]], [[1, 2]])
    assert (attention["dispersed"], attention["crossing"]) == ([[True, False]], [[32, None]])


def test_the_state_of_a_server_without_statistics_or_tokens(start_server, counting):
    started = start_server(counting, metrics=MetricsConfig("off"))
    assert json.loads(get(started, "/live")[1])["attention"] is None
    started = start_server(counting)
    attention = json.loads(get(started, "/live")[1])["attention"]
    assert (attention["tokens"], attention["smoothed"]) == (0, [[None, None]])


@pytest.mark.parametrize(("scheme", "width", "height"), WINDOWS)
def test_the_page_in_both_themes_and_a_narrow_window(started, chromium, tmp_path, scheme, width, height):
    chromium.errors.clear()
    chromium.open(f"http://{started.http_address}/", width=width, height=height, scheme=scheme)
    chromium.wait_for("document.body.dataset.updates >= 2")
    # Nothing is cut off at the sides.
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate("document.querySelectorAll('#map rect').length") == 2
    assert chromium.evaluate("document.getElementById('connection').textContent") == "live"
    assert "1 of 2 heads" in chromium.evaluate("document.getElementById('dispersed').textContent")
    text, ground = chromium.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(text, ground) > 7
    quiet = chromium.evaluate("getComputedStyle(document.getElementById('note')).color")
    panel = chromium.evaluate("getComputedStyle(document.querySelector('.panel')).backgroundColor")
    assert contrast(quiet, panel) > 4.5
    assert (luminance(ground) < 0.1) == (scheme == "dark")
    chromium.point_at("#map rect[data-head='0']")
    tip = chromium.evaluate("document.getElementById('tip').innerText")
    for line in (
        "Layer 0, head 0",
        "Normalized entropy\t1.000",
        "Support\t100.0 % of keys",
        "Inverse temperature\t1.000",
    ):
        assert line in tip
    assert "Dispersed\tyes" in tip
    box = chromium.evaluate("(() => { const b = document.getElementById('tip').getBoundingClientRect();"
                            "return [b.left, b.right, b.bottom] })()")  # fmt: skip
    assert box[0] >= 0
    assert box[1] <= width
    picture = Path(os.environ.get("TEST_PICTURES", tmp_path)) / f"page-{scheme}-{width}.png"
    chromium.screenshot(picture)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (width, height)
    assert chromium.errors == []


def test_colours_are_those_of_the_legend(started, chromium):
    chromium.open(f"http://{started.http_address}/", width=800, height=600, scheme="light")
    chromium.wait_for("document.querySelectorAll('#map rect').length")
    assert chromium.evaluate("colour(0)") == "rgb(0 34 78)"
    assert chromium.evaluate("colour(1)") == "rgb(254 232 56)"
    fills = "[0, 1].map((head) => document.querySelector(`#map rect[data-head='${head}']`).getAttribute('fill'))"
    assert chromium.evaluate(fills) == [chromium.evaluate("colour(1)"), chromium.evaluate("colour(0.5)")]
    # Lighter without a turn: the scale can be read without colour.
    light = [luminance(chromium.evaluate(f"colour({value / 20})")) for value in range(21)]
    assert light == sorted(light)


def test_the_page_follows_the_tokens(start_server, counting, chromium, monkeypatch):
    started = start_server(counting, engine=EngineConfig(attention_interval=1))
    chromium.open(f"http://{started.http_address}/", width=1200, height=720, scheme="light")
    chromium.wait_for("document.body.dataset.updates >= 1")
    assert "No tokens yet" in chromium.evaluate("document.getElementById('note').textContent")
    assert chromium.evaluate("document.querySelector('#map rect').getAttribute('fill')") == "var(--empty)"
    going = threading.Thread(target=generate, args=(started, "a", 100, 4))
    going.start()
    chromium.wait_for("Number.parseFloat(document.querySelector('.tile dd').textContent) > 0")
    chromium.wait_for("document.querySelector('#map rect').getAttribute('fill').startsWith('rgb')")
    going.join()


def test_a_link_and_the_keyboard_choose_a_head(started, chromium):
    chromium.open(f"http://{started.http_address}/#0.1", width=800, height=600, scheme="light")
    title = "document.querySelector('#tip strong')?.textContent"
    chromium.wait_for(f"{title} === 'Layer 0, head 1'")
    chromium.evaluate("document.getElementById('map').focus()")
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft")
    assert chromium.evaluate(title) == "Layer 0, head 0"
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert chromium.evaluate("document.getElementById('tip').hasAttribute('hidden')")


def channels(colour):
    return [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]


def luminance(colour):
    """Relative luminance of WCAG 2."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
