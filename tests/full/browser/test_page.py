"""The page at `/` in a real Chromium, and the numbers that it shows."""

import json
import os
import re
import struct
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
import torch
from click.testing import CliRunner

from sharp.core.cli import main
from sharp.models.attention import EagerAttention
from sharp.models.checkpoint import save_checkpoint
from sharp.serving.api_config import ApiConfig
from sharp.serving.config import BackendConfig, EngineConfig, MetricsConfig, ServerConfig
from sharp.serving.engine.engine import Engine
from sharp.serving.frontends.http.status_page import PAGE
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.exporter.conftest import tiny_model
from tests.full.browser.chromium import Chromium

WINDOWS = [("light", 1280, 720), ("dark", 1280, 720), ("light", 400, 900), ("dark", 400, 900)]


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
    """Return a server whose head 0 attends to every key, and so is dispersed once contexts are long enough."""
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
    kind = {"served_name": "counting", "generates": True, "chat": False}
    assert "runs without them" in state["model"].pop("attention_refusal")
    assert state["model"].pop("sampling") == {"temperature": 1, "top_p": 1}
    assert state["model"].pop("sampling_source") is None
    assert state["model"] == {"name": "counting", "norm": "softmax", "layers": 1, "heads": 2, **kind}
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
    # The colours become steadily lighter, so that the scale can be read without colour vision.
    light = [luminance(chromium.evaluate(f"colour({value / 20})")) for value in range(21)]
    assert light == sorted(light)


def test_the_page_follows_the_tokens(start_server, counting, chromium, monkeypatch):
    started = start_server(counting, engine=EngineConfig(attention_interval=1))
    chromium.open(f"http://{started.http_address}/", width=1280, height=720, scheme="light")
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


def test_what_a_screen_reader_is_told(started, chromium):
    chromium.open(f"http://{started.http_address}/", width=1280, height=1000, scheme="light")
    chromium.wait_for("document.querySelector('#requests form') && document.body.dataset.updates >= 1")
    form = submit(chromium, prompt="abc", max_tokens="6", temperature="0")
    chromium.wait_for(f"{form}.dataset.running === 'false'")
    nodes = [node for node in chromium.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes}
    for label in ("Prompt", "Most tokens", "Temperature", "Top-p", "Seed"):
        assert any(name.startswith(label) and role in ("textbox", "spinbutton") for role, name in named), label
    assert ("button", "Generate") in named and ("log", "Completion") in named
    # screen readers pass the arrow keys in these elements on to the page
    maps = [name for role, name in named if role == "application"]
    assert len(maps) == 2 and any("every head at position 7" in name for name in maps)
    assert any("Normalized entropy by position" in name for _, name in named)
    spoken = f"[...{form}.querySelectorAll('[role=log], .says')].map((one) => one.getAttribute('aria-busy'))"
    assert chromium.evaluate(spoken) == ["false", "false"]


def submit(chromium, number=0, **fields):
    """Fill in a request of the page and send it; return a JavaScript expression for its form."""
    form = f"document.querySelectorAll('#requests form')[{number}]"
    for name, value in fields.items():
        chromium.evaluate(f"{form}.elements.{name}.value = {json.dumps(value)}")
    chromium.evaluate(f"{form}.requestSubmit()")
    return form


def test_a_request_of_the_page_shows_its_heads_token_by_token(started, chromium, tmp_path):
    chromium.errors.clear()
    chromium.open(f"http://{started.http_address}/", width=1280, height=1000, scheme="light")
    chromium.wait_for("document.querySelector('#requests form')")
    form = submit(chromium, prompt="abc", max_tokens="6", temperature="0")
    chromium.wait_for(f"{form}.dataset.running === 'false'")
    with grpc.insecure_channel(started.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(text="abc", sampling={"temperature": 0}, stopping={"max_tokens": 6})
        text = "".join(message.delta.text for message in stub.Generate(request, timeout=60))
    assert chromium.evaluate(f"{form}.querySelector('.output').textContent") == text
    # In the counting model, head 0 has a normalized entropy of 1 and head 1 of 0.5, at every position.
    assert chromium.evaluate("requests[0].tokens.map((one) => [one.position, one.entropy])") == [
        [position, [[1, 0.5]]] for position in range(2, 8)
    ]
    fills = f"[...{form}.querySelectorAll('rect')].map((cell) => cell.getAttribute('fill'))"
    assert chromium.evaluate(fills) == [chromium.evaluate("colour(1)"), chromium.evaluate("colour(0.5)")]
    says = f"{form}.querySelector('.says').textContent"
    assert "mean of all heads" in chromium.evaluate(says)
    assert "0.750" in chromium.evaluate(says)
    # Choose a head in the map, then a token in the text, with the keyboard.
    chromium.evaluate(f"{form}.querySelector('svg.heads').focus()")
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert "layer 0, head 1: 0.500" in chromium.evaluate(says)
    # The curve of head 1 is flat, halfway between 0 and 1, with a point for each token.
    points, zero, one = chromium.evaluate(
        f"[[...{form}.querySelector('.curve polyline').points].map((p) => [p.x, p.y]),"
        f"...[...{form}.querySelectorAll('.curve line')].slice(0, 2).map((line) => line.y1.baseVal.value)]"
    )
    assert len(points) == 6 and [x for x, _ in points] == sorted({x for x, _ in points})
    assert {y for _, y in points} == {(zero + one) / 2} and one < zero
    chromium.evaluate(f"{form}.querySelector('.output').focus()")
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft")
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft")
    assert "at position 6" in chromium.evaluate(says)
    chromium.screenshot(Path(os.environ.get("TEST_PICTURES", tmp_path)) / "request.png")
    assert chromium.errors == []


@pytest.mark.parametrize("width", [1280, 400])
def test_two_requests_stand_side_by_side_or_below_each_other(started, chromium, tmp_path, width):
    chromium.open(f"http://{started.http_address}/", width=width, height=1600, scheme="dark")
    chromium.wait_for("document.querySelector('#requests form')")
    chromium.evaluate("document.getElementById('compare').click()")
    for number, prompt in enumerate(("abc", "xyz")):
        form = submit(chromium, number, prompt=prompt, max_tokens="30", temperature="0")
        chromium.wait_for(f"{form}.dataset.running === 'false' && requests[{number}].tokens.length > 1")
    first, second = chromium.evaluate(
        "[...document.querySelectorAll('#requests form')].map((one) => "
        "[one.getBoundingClientRect().x, one.getBoundingClientRect().y])"
    )
    assert (first[0] == second[0]) == (width == 400)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    chromium.screenshot(Path(os.environ.get("TEST_PICTURES", tmp_path)) / f"two-requests-{width}.png")
    chromium.evaluate("document.getElementById('compare').click()")
    assert chromium.evaluate("document.querySelectorAll('#requests form').length") == 1


def test_stop_ends_a_request_and_errors_are_shown(start_server, counting, chromium, monkeypatch):
    started = start_server(counting)
    step = Engine.step

    def slow(engine):
        time.sleep(0.05)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)
    chromium.open(f"http://{started.http_address}/", width=800, height=900, scheme="light")
    chromium.wait_for("document.querySelector('#requests form')")
    form = submit(chromium, prompt="a", max_tokens="200")
    chromium.wait_for("requests[0].tokens.length > 2")
    chromium.evaluate(f"{form}.elements.stop.click()")
    chromium.wait_for(f"{form}.dataset.running === 'false'")
    assert chromium.evaluate("requests[0].tokens.length") < 100
    chromium.wait_for("state.numbers.requests_running === 0")
    submit(chromium, prompt="a" * 300)
    chromium.wait_for(f"!{form}.querySelector('.error').hidden")
    assert "tokens" in chromium.evaluate(f"{form}.querySelector('.error').textContent")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Return the folder of a tiny entmax model, and the model."""
    folder, model = tmp_path_factory.mktemp("sparse"), tiny_model("entmax", layers=2)
    with torch.no_grad():
        for block in model.blocks:
            # large query weights make some logits so low that entmax gives them no weight
            block.attention.q_proj.weight.mul_(8)
    save_checkpoint(folder / "tiny.safetensors", model, dtype=torch.float32)
    result = CliRunner().invoke(
        main, ["export", str(folder / "tiny.safetensors"), "--norm", "entmax", "-o", str(folder / "sparse")]
    )
    assert result.exit_code == 0, result.output
    return folder / "sparse", model


@pytest.fixture(scope="module")
def sparse_server(start_server, sparse):
    return start_server(sparse[0], backend=BackendConfig(threads=2))


def click(chromium, element):
    chromium.evaluate(f"{element}.dispatchEvent(new MouseEvent('click', {{ bubbles: true }}))")


def pressed(chromium, *keys):
    for key in keys:
        chromium.call("Input.dispatchKeyEvent", type="keyDown", key=key)


def weights_of_pytorch(model, tokens, layer, head, position):
    attention = EagerAttention(model.config, record=True)
    with torch.no_grad():
        model.hidden_states(torch.tensor([tokens]), attention=attention)
    return attention.weights[layer][0, head, position].tolist()


@pytest.mark.parametrize(
    ("scheme", "width"), [(scheme, width) for scheme in ("light", "dark") for width in (1280, 400)]
)
def test_a_head_shows_its_weights_on_the_tokens(sparse, sparse_server, chromium, tmp_path, scheme, width):
    prompt = "The quick brown fox"
    chromium.errors.clear()
    chromium.open(f"http://{sparse_server.http_address}/", width=width, height=1500, scheme=scheme)
    chromium.wait_for("document.querySelector('#requests form')")
    form = submit(chromium, prompt=prompt, max_tokens="12", temperature="0")
    chromium.wait_for(f"{form}.dataset.running === 'false'")
    section = f"{form}.querySelector('.attention')"
    assert chromium.evaluate(f"{section}.hidden")
    click(chromium, f"{form}.querySelector(\"rect[data-layer='1'][data-head='2']\")")
    chromium.wait_for("requests[0].weights.row !== null", 60)

    # The row is the one from which the last token was sampled.
    position = chromium.evaluate("requests[0].tokens.at(-1).position")
    tokens = chromium.evaluate("requests[0].ids")
    assert tokens[: len(prompt)] == list(prompt.encode())
    expected = weights_of_pytorch(sparse[1], tokens, 1, 2, position)
    options = chromium.evaluate(
        f"[...{section}.querySelectorAll('[role=option]')].map((one) => [one.textContent, "
        "one.getAttribute('aria-label'), getComputedStyle(one).backgroundColor, one.getAttribute('aria-selected')])"
    )
    assert len(options) == len(tokens)
    assert [option[0] for option in options[: len(prompt)]] == list(prompt)
    assert [at for at, one in enumerate(options) if one[3] == "true"] == [position]
    largest = max(expected)
    for at, (_, label, shade, _) in enumerate(options):
        if at > position:
            assert "comes later" in label
            continue
        assert f"position {at}: weight " in label
        assert float(label.rpartition(" ")[2]) == pytest.approx(expected[at], rel=0.006, abs=1e-5)
        opacity = float(re.findall(r"[\d.]+", shade)[3]) if shade.startswith("rgba") else 1
        darkest = {"light": 0.6, "dark": 0.75}[scheme]
        assert opacity == pytest.approx(darkest * (expected[at] / largest) ** 0.5, abs=0.01)
    assert min(expected[: position + 1]) == 0  # entmax gives some tokens no weight
    asks = chromium.evaluate(f"{section}.querySelector('.asks').textContent")
    above = sum(weight > 0 for weight in expected)
    assert f"{above} of {position + 1} tokens have weight" in asks
    # The entropy equals that of the curve, which the server computed while it generated.
    counted = chromium.evaluate("requests[0].tokens.at(-1).entropy[1][2]")
    assert float(re.search(r"H / ln n is ([\d.]+)", asks)[1].rstrip(".")) == pytest.approx(counted, abs=0.0011)
    named = chromium.evaluate(f"[...{section}.querySelectorAll('li')].map((one) => one.textContent)")
    assert [float(item.split()[0]) for item in named] == pytest.approx(sorted(expected)[::-1][: len(named)], rel=0.006)

    # Text on the darkest shade can be read, and nothing is cut off at the sides.
    ink, panel = chromium.evaluate(
        f"[getComputedStyle({section}).color, getComputedStyle(document.querySelector('.panel')).backgroundColor]"
    )
    shade = max((option[2] for option in options), key=lambda one: float(re.findall(r"[\d.]+", one)[-1]))
    assert contrast(ink, over(shade, panel)) > 4.5
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width

    # With the keyboard, go to another token, see what weight it gets, and then what weights it gives.
    chromium.evaluate(f"{section}.querySelector('.tokens').focus()")
    pressed(chromium, "Home", "ArrowRight", "ArrowRight", "ArrowRight")
    active = f"{section}.querySelector('.tokens').ariaActiveDescendantElement"
    assert chromium.evaluate(f"{active}.getAttribute('aria-label')") == options[3][1]
    assert chromium.evaluate(f"{section}.querySelector('.pointed').textContent") == f"{options[3][1]}."
    pressed(chromium, "Enter")
    chromium.wait_for("requests[0].weights.row.position === 3", 60)
    assert "position 3, before “q”" in chromium.evaluate(f"{section}.querySelector('.asks').textContent").replace(
        "“ ”, ", ""
    )
    shown = chromium.evaluate("requests[0].weights.row.weights")
    assert shown == pytest.approx(weights_of_pytorch(sparse[1], tokens, 1, 2, 3)[:4], abs=1e-5)
    chromium.evaluate(f"{section}.scrollIntoView({{ block: 'center' }})")
    chromium.screenshot(Path(os.environ.get("TEST_PICTURES", tmp_path)) / f"weights-{scheme}-{width}.png")
    # A token of the completion shows the row from which the token was sampled.
    chromium.evaluate(f"{form}.querySelector('.output').focus()")
    pressed(chromium, "ArrowLeft", "ArrowLeft", "Enter")
    chromium.wait_for("requests[0].weights.row.position === requests[0].tokens.at(-2).position", 60)
    # A new request begins without weights. Once it is complete, the same head is shown.
    submit(chromium, prompt="xyz", max_tokens="4")
    chromium.wait_for("requests[0].weights.row?.tokens[0] === 'x'", 60)
    assert chromium.errors == []


def test_a_head_that_is_chosen_during_a_request_follows_its_tokens(sparse_server, chromium, monkeypatch):
    step, steps, seen = Engine.step, [], threading.Event()

    def held(engine):
        steps.append(1)
        if len(steps) == 4:
            seen.wait(90)
        return step(engine)

    monkeypatch.setattr(Engine, "step", held)
    chromium.open(f"http://{sparse_server.http_address}/", width=800, height=900, scheme="light")
    chromium.wait_for("document.querySelector('#requests form')")
    form = submit(chromium, prompt="abc", max_tokens="40", temperature="0")
    chromium.wait_for("requests[0].tokens.length > 0")
    click(chromium, f"{form}.querySelector(\"rect[data-layer='0'][data-head='1']\")")
    chromium.wait_for("requests[0].weights.row !== null", 90)
    running, position, tokens = chromium.evaluate(
        "[requests[0].form.dataset.running, requests[0].weights.row.position, requests[0].weights.row.tokens.length]"
    )
    seen.set()
    assert running == "true"
    assert position == tokens - 2 < 40
    chromium.wait_for(f"{form}.dataset.running === 'false'")
    chromium.wait_for("!requests[0].weights.busy && requests[0].weights.row?.position === 41", 90)
    assert chromium.evaluate("requests[0].weights.row.tokens.length") == 43


def test_where_weights_cannot_be_computed_the_page_says_so(started, chromium):
    chromium.open(f"http://{started.http_address}/", width=800, height=900, scheme="light")
    chromium.wait_for("document.querySelector('#requests form')")
    form = submit(chromium, prompt="abc", max_tokens="3")
    chromium.wait_for(f"{form}.dataset.running === 'false'")
    click(chromium, f"{form}.querySelector(\"rect[data-head='1']\")")
    asks = chromium.evaluate(f"{form}.querySelector('.attention .asks').textContent")
    assert asks == chromium.evaluate("state.model.attention_refusal")
    assert chromium.evaluate(f"{form}.querySelector('.tokens').hidden")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(f"http://{started.http_address}/attention", b"{}", timeout=10)


def test_the_page_asks_for_the_token_of_the_server(start_server, counting, chromium, tmp_path):
    secrets = tmp_path / "tokens"
    secrets.write_text("a-secret-of-twenty-characters\n")
    started = start_server(counting, server=ServerConfig(grpc_port=0, http_port=0, token_file=secrets))
    chromium.open(f"http://{started.http_address}/", width=800, height=900, scheme="light")
    chromium.wait_for("!document.getElementById('access').hidden")
    assert chromium.evaluate("state") is None
    chromium.evaluate("document.getElementById('access').elements.token.value = 'a-secret-of-twenty-characters'")
    chromium.evaluate("document.getElementById('access').requestSubmit()")
    chromium.wait_for("document.getElementById('connection').textContent === 'live'")
    form = submit(chromium, prompt="abc", max_tokens="3")
    chromium.wait_for(f"{form}.dataset.running === 'false' && requests[0].tokens.length === 3")


def test_without_the_page_there_is_none(start_server, counting):
    started = start_server(counting, api=ApiConfig(page=False))
    for path in ("/", "/live", "/attention"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(started, path)


def over(shade, ground):
    """Return the color of a translucent shade on a ground."""
    red, green, blue, opacity = map(float, re.findall(r"[\d.]+", shade))
    mixed = (
        opacity * own + (1 - opacity) * 255 * below
        for own, below in zip((red, green, blue), channels(ground), strict=True)
    )
    return f"rgb({', '.join(str(round(part)) for part in mixed)})"


def channels(colour):
    return [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]


def luminance(colour):
    """Return the relative luminance of WCAG 2."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
