"""`sharp inspect` on model folders and checkpoints: its numbers, its page, and its refusals."""

import base64
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result

from sharp.core.cli import main
from sharp.core.errors import InputError
from sharp.exporter.inspection.attention_map import MAP_CELLS, attention_map, attention_weights
from sharp.exporter.inspection.heads import extreme_heads, head_statistics
from sharp.exporter.inspection.inspection import open_model
from sharp.exporter.inspection.page import STEPS
from sharp.exporter.inspection.prompt import DEFAULT_TOKENS, PromptSource, tokenize
from sharp.models.attention import EagerAttention
from sharp.models.checkpoint import save_checkpoint
from sharp.models.hugging_face import to_hugging_face
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.plugins.op.normalizers import normalize
from sharp.plugins.op.torch_normalizers import entropy
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny
from tests.marks import full

TEXT = "Sharp heads keep their eyes on few tokens; dispersed heads look everywhere."


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that makes a tiny model's checkpoint and model folder, once for each norm and positions."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(norm: str, positions: str) -> tuple[Path, Path]:
        if (norm, positions) not in made:
            folder = tmp_path_factory.mktemp(f"{norm}-{positions}")
            save_checkpoint(folder / "tiny.safetensors", tiny_model(norm, positions, layers=2))
            exported = CliRunner().invoke(
                main, ["export", str(folder / "tiny.safetensors"), "--norm", norm, "-o", str(folder / "exported")]
            )
            assert exported.exit_code == 0, exported.output
            made[norm, positions] = (folder / "tiny.safetensors", folder / "exported")
        return made[norm, positions]

    return get


@pytest.fixture
def sharp_inspect(tmp_path):
    def run(*arguments: object) -> Result:
        words = [str(argument) for argument in arguments]
        return CliRunner().invoke(main, ["inspect", *words, "-o", str(tmp_path / "out")], prog_name="sharp")

    return run


def recorded(path: Path):
    model = open_model(path)
    text = tokenize(PromptSource(text=TEXT), model)
    return text, model.record(text.token_ids)


COMBINATIONS = [
    ("ssa", "nape"),
    *(full(*pair) for pair in (("asentmax", "nape"), ("softmax", "rope"), ("adaptive-temperature", "alibi"))),
]


@pytest.mark.parametrize(("norm", "positions"), COMBINATIONS)
def test_folder_and_checkpoint_say_the_same(models, norm, positions):
    checkpoint, folder = models(norm, positions)
    (text, from_checkpoint), (same_text, from_folder) = recorded(checkpoint), recorded(folder)
    assert text.pieces == same_text.pieces
    one, other = head_statistics(from_checkpoint, "one"), head_statistics(from_folder, "other")
    for field in ("visible", "entropy", "support", "inverse_temperature", "spread", "bound"):
        np.testing.assert_allclose(getattr(one, field), getattr(other, field), atol=1e-4, rtol=1e-4)
    for layer, (record, same) in enumerate(zip(from_checkpoint, from_folder, strict=True)):
        one_map, other_map = attention_map(record, layer, 3), attention_map(same, layer, 3)
        np.testing.assert_allclose(one_map.weights, other_map.weights, atol=1e-5)


@pytest.mark.parametrize("norm", ["asentmax", full("ssmax")])
def test_learned_length_scales_are_shown(models, sharp_inspect, norm):
    checkpoint = models(norm, "nape")[0]
    text, records = recorded(checkpoint)
    statistics = head_statistics(records, "tiny")
    model = tiny_model(norm, "nape", layers=2)
    seen = []
    for block in model.blocks:
        block.attention.query_scale.register_forward_hook(lambda _module, _inputs, factor: seen.append(factor[0].T))
    with torch.no_grad():
        model.hidden_states(torch.from_numpy(text.token_ids)[None], attention=EagerAttention(model.config))
    np.testing.assert_allclose(statistics.length_scale, torch.stack(seen).numpy(), rtol=1e-5)
    np.testing.assert_array_equal(statistics.inverse_temperature, statistics.length_scale)
    of_folder = head_statistics(recorded(models(norm, "nape")[1])[1], "folder")
    np.testing.assert_allclose(of_folder.length_scale, statistics.length_scale, rtol=1e-5)
    assert statistics.sink is None
    result = sharp_inspect(checkpoint, "--prompt", TEXT)
    assert result.exit_code == 0, result.output
    assert "length" in result.output


def test_the_weight_of_sinks_is_shown(sharp_inspect, tmp_path):
    save(tiny("gpt_oss"), tmp_path / "model")
    records = open_model(tmp_path / "model").record(np.arange(40))
    statistics = head_statistics(records, "tiny")
    for layer, record in enumerate(records):
        for head, query in ((0, 0), (1, 7), (3, 20)):
            _, weights = attention_weights(record, head, query)
            assert statistics.sink[layer, head, query] == pytest.approx(1 - weights.sum(), abs=1e-5)
    assert (statistics.sink > 1e-4).any()
    result = sharp_inspect(tmp_path / "model", "--token-ids", ",".join(map(str, range(40))))
    assert result.exit_code == 0, result.output
    assert "sink" in result.output


@pytest.mark.parametrize(("norm", "positions"), COMBINATIONS)
def test_entropies_and_maps_are_those_of_eager_attention(models, norm, positions):
    text, records = recorded(models(norm, positions)[1])
    model = tiny_model(norm, positions, layers=2)
    eager = EagerAttention(model.config, record=True)
    with torch.no_grad():
        model.hidden_states(torch.from_numpy(text.token_ids)[None], attention=eager)
    statistics = head_statistics(records, "tiny")
    for layer, weights in enumerate(eager.weights):
        np.testing.assert_allclose(statistics.entropy[layer], entropy(weights)[0], atol=1e-4)
        for head in range(model.config.q_heads):
            found = attention_map(records[layer], layer, head)
            assert (found.layer, found.head, found.group) == (layer, head, 1)
            np.testing.assert_allclose(found.weights, weights[0, head], atol=1e-5)


@pytest.mark.parametrize(("norm", "positions"), COMBINATIONS)
def test_statistics_are_those_of_the_float64_reference(models, norm, positions):
    text, records = recorded(models(norm, positions)[1])
    statistics = head_statistics(records, "tiny")
    last = len(text.token_ids) - 1
    for layer, record in enumerate(records):
        slopes = np.zeros(6) if record.alibi_slopes is None else record.alibi_slopes
        for head in range(6):
            content = record.key[:, head // 3].astype(float) @ record.query[last, head].astype(float) * 8**-0.5
            parameters = () if record.head_params is None else record.head_params[head]
            weights, row = normalize(content + slopes[head] * np.arange(-last, 1), record.normalizer, parameters)
            np.testing.assert_allclose(attention_weights(record, head, last)[1], weights, atol=1e-7)
            assert statistics.entropy[layer, head, last] == pytest.approx(row.entropy, abs=1e-4)
            assert statistics.support[layer, head, last] == row.support
            factor = 1.0 if record.length_scale is None else record.length_scale[last, head]
            expected = factor * row.inverse_temperature
            assert statistics.inverse_temperature[layer, head, last] == pytest.approx(expected, rel=1e-4)
            assert statistics.spread[layer, head, last] == pytest.approx(row.logit_spread, rel=1e-4)


@pytest.mark.parametrize(("norm", "positions"), COMBINATIONS)
def test_no_spread_is_above_the_bound_of_proposition_3_1(models, norm, positions):
    _, records = recorded(models(norm, positions)[1])
    statistics = head_statistics(records, "tiny")
    assert statistics.bound is not None
    assert (statistics.spread <= statistics.bound * (1 + 1e-5)).all()


def test_the_bound_is_the_formula_of_the_paper(models):
    _, records = recorded(models("softmax", "rope")[0])
    model = tiny_model("softmax", "rope", layers=2)
    bound = head_statistics(records, "tiny").bound
    assert bound is not None
    attention = model.blocks[1].attention
    assert records[1].projections is not None
    inputs = np.linalg.norm(records[1].projections.hidden.astype(float), axis=1)
    for head in range(6):
        q_matrix = attention.q_proj.weight[8 * head : 8 * head + 8].detach().double()
        k_matrix = attention.k_proj.weight[8 * (head // 3) : 8 * (head // 3) + 8].detach().double()
        sigmas = float(torch.linalg.svdvals(q_matrix)[0] * torch.linalg.svdvals(k_matrix)[0])
        expected = 2 * 8**-0.5 * sigmas * inputs * np.maximum.accumulate(inputs)
        np.testing.assert_allclose(bound[1, head], expected, rtol=1e-4)


@pytest.mark.full
def test_long_texts_have_maps_of_limited_size_that_keep_the_largest_weights(models):
    model = open_model(models("asentmax", "nape")[0])
    tokens = 2 * MAP_CELLS + 7
    record = model.record(np.arange(tokens) % 250)[1]
    found = attention_map(record, 1, 4)
    assert (found.group, found.queries[-1]) == (3, tokens - 1)
    assert max(found.weights.shape) <= MAP_CELLS
    _, weights = attention_weights(record, 4, tokens - 1)
    assert found.weights[-1, 1] == weights[3:6].max()
    assert (found.weights[-1] == 0).any()  # entmax weights have exact zeros


class Page(HTMLParser):
    """A parsed page: the addresses that a browser would fetch, and the text of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.script = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.script += data


def test_table_pictures_and_page(models, sharp_inspect, tmp_path):
    checkpoint, folder = models("ssa", "nape")
    result = sharp_inspect(folder, "--prompt", TEXT, "--layer", 1, "--head", 4)
    assert result.exit_code == 0, result.output
    assert f"{len(TEXT)} tokens" in result.output
    _, records = recorded(checkpoint)
    statistics = head_statistics(records, "tiny")
    sharpest = extreme_heads(statistics, None)[0]
    cells = next(line.split("│")[1:-1] for line in result.output.splitlines() if line.startswith("│"))
    assert (int(cells[0]), int(cells[1])) == sharpest
    assert float(cells[2]) == pytest.approx(statistics.entropy[sharpest][1:].mean(), abs=0.006)
    assert float(cells[3]) == pytest.approx(statistics.normalized_entropy[sharpest], abs=6e-4)
    for name in ("entropy.png", "heads.png", "attention.png", "spread.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG"), name
    html = (tmp_path / "out" / "index.html").read_text()
    page = Page(html)
    assert page.fetched == []
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)", html)
    data = json.loads(re.search(r"const data = (.*);", page.script)[1])
    assert "".join(data["pieces"]) == TEXT
    assert np.shape(data["entropy"]) == (2, 6, len(data["length"]))
    np.testing.assert_allclose(data["entropy"][1][4][0], statistics.entropy[1, 4, 0], atol=1e-3)
    [packed] = data["maps"]
    steps = np.frombuffer(base64.b64decode(packed["steps"]), "<u2")
    requested = attention_map(records[1], 1, 4).weights[np.tril_indices(len(TEXT))]
    np.testing.assert_allclose(steps * packed["peak"] / STEPS, requested, atol=2e-4)


def test_the_text_cannot_break_out_of_the_page(models, sharp_inspect, tmp_path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    file = tmp_path / "<b>.txt"
    file.write_text(hostile)
    assert sharp_inspect(models("ssa", "nape")[0], "--text", file).exit_code == 0
    page = Page((tmp_path / "out" / "index.html").read_text())
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert "".join(json.loads(re.search(r"const data = (.*);", page.script)[1])["pieces"]) == hostile


def test_without_a_text_the_sharpest_and_the_most_dispersed_head_are_those_of_the_papers_prompt(models, tmp_path):
    model = open_model(models("softmax", "rope")[1])
    text = tokenize(PromptSource(), model)
    assert DEFAULT_TOKENS - 6 < len(text.token_ids) <= DEFAULT_TOKENS
    question = "".join(text.pieces)
    assert re.fullmatch(r"What is the maximum in the following sequence: (\d+, )+\d+\? The maximum is:", question)
    statistics = head_statistics(model.record(text.token_ids), model.name)
    sharpest, dispersed = extreme_heads(statistics, None)
    values = statistics.normalized_entropy
    assert (values[sharpest], values[dispersed]) == (values.min(), values.max())
    assert [layer for layer, _ in extreme_heads(statistics, 1)] == [1, 1]


def test_hugging_face_folder_and_token_ids(sharp_inspect, tmp_path):
    to_hugging_face(tiny_model("softmax", tokenizer="none")).save_pretrained(tmp_path / "mine")
    result = sharp_inspect(tmp_path / "mine", "--token-ids", "5, 6, 7,8", "--max-tokens", 3)
    assert result.exit_code == 0, result.output
    assert "the first 3 of 4 tokens" in result.output
    refused = sharp_inspect(tmp_path / "mine", "--prompt", "hello")
    assert (refused.exit_code, "--token-ids" in refused.output) == (2, True)


BAD = {
    "no such model": (["MISSING"], "does not exist"),
    "no model folder": (["EMPTY"], "sharp.json"),
    "no such text": (["MODEL", "--text", "missing.txt"], "missing.txt does not exist"),
    "empty text": (["MODEL", "--prompt", ""], "empty"),
    "a prompt in another encoding": (["MODEL", "--prompt", "caf\udce9"], "not valid text"),
    "one token": (["MODEL", "--prompt", "a"], "at least 2"),
    "two texts": (["MODEL", "--prompt", "a", "--token-ids", "1,2"], "one of"),
    "binary text": (["MODEL", "--text", "BINARY"], "UTF-8"),
    "no numbers": (["MODEL", "--token-ids", "1,x"], "whole numbers"),
    "unknown token": (["MODEL", "--token-ids", "1,257"], "257"),
    "too long": (["MODEL", "--prompt", "a" * 41], "--max-tokens 40"),
    "no tokens requested": (["MODEL", "--max-tokens", "0"], "at least 2"),
    "no such layer": (["MODEL", "--layer", "2"], "layers 0 to 1"),
    "no such head": (["MODEL", "--layer", "0", "--head", "6"], "heads 0 to 5"),
    "head without layer": (["MODEL", "--head", "0"], "--layer"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kind", ["checkpoint", "folder"])
def test_bad_input_is_one_sentence(models, sharp_inspect, tmp_path, kind, case):
    _, folder = models("softmax", "rope")
    if kind == "checkpoint":
        model = tmp_path / "short.pt"
        save_checkpoint(model, tiny_model("softmax", trained_context=40, max_context=40, layers=2))
    else:
        model = tmp_path / "short"
        shutil.copytree(folder, model)
        manifest = json.loads((model / "sharp.json").read_text()) | {"max_context": 40}
        (model / "sharp.json").write_text(json.dumps(manifest))
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    places = {"MODEL": model, "MISSING": tmp_path / "nothing", "EMPTY": tmp_path / "empty"}
    places["BINARY"] = tmp_path / "binary"
    arguments, word = BAD[case]
    result = sharp_inspect(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert word in result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_models_that_are_no_decoders_are_refused(models, sharp_inspect, tmp_path):
    folder = models("softmax", "rope")[1]
    (tmp_path / "broken").mkdir()
    for name in ("sharp.json", "tokenizer.json"):
        (tmp_path / "broken" / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "broken" / "model.onnx").write_bytes(b"this is not a model")
    result = sharp_inspect(tmp_path / "broken")
    assert (result.exit_code, "export the model again" in result.output) == (2, True), result.output
    shutil.copytree(folder, tmp_path / "contiguous")
    written = json.loads((folder / "sharp.json").read_text())
    for changes, option in (
        ({"cache": written["cache"] | {"form": "contiguous"}}, "--cache contiguous"),
        ({"target": "portable"}, "--target portable"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
    ):
        (tmp_path / "contiguous" / "sharp.json").write_text(json.dumps(written | changes))
        result = sharp_inspect(tmp_path / "contiguous")
        assert (result.exit_code, f"was exported with {option}" in result.output) == (2, True), result.output
    save_checkpoint(tmp_path / "encoder.pt", SharpForMaskedLM(replace(tiny_model("softmax").config, causal=False)))
    result = sharp_inspect(tmp_path / "encoder.pt")
    assert (result.exit_code, "SharpForMaskedLM" in result.output) == (2, True), result.output


def test_a_window_of_one_key_is_sharp(sharp_inspect, tmp_path):
    save(tiny("mistral", sliding_window=1), tmp_path / "one")
    result = sharp_inspect(tmp_path / "one", "--token-ids", "5,6,7,8")
    assert result.exit_code == 0, result.output
    assert "0.000" in result.output
    assert "spread.png" not in result.output


def test_statistics_that_are_no_numbers_are_refused(models):
    _, records = recorded(models("softmax", "rope")[0])
    broken = replace(records[1], stats=np.full_like(records[1].stats, np.nan))
    with pytest.raises(InputError, match="layer 1 of tiny"):
        head_statistics([records[0], broken], "tiny")


def test_an_output_folder_that_cannot_be_made(models, tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(
        main, ["inspect", str(models("softmax", "rope")[0]), "-o", str(tmp_path / "file" / "x")]
    )
    assert (result.exit_code, "cannot be made" in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    "damage",
    [
        lambda graph, _node: graph.initializer[0].ClearField("dims"),
        lambda _graph, node: node.input.__setitem__(3, "key_cache.first"),
        lambda _graph, node: node.attribute[0].ClearField("type"),
        lambda _graph, node: node.ClearField("input"),
    ],
    ids=["weights", "number-of-a-cache", "attribute", "inputs"],
)
def test_a_damaged_graph_is_refused_in_one_sentence(models, sharp_inspect, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(models("ssa", "nape")[1], folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    damage(model.graph, next(node for node in model.graph.node if node.op_type == "PagedAttention"))
    onnx.save(model, folder / "model.onnx")
    result = sharp_inspect(folder, "--prompt", TEXT)
    assert (result.exit_code, "export" in result.output.strip().splitlines()[-1]) == (2, True), result.output
    assert result.output.strip().splitlines()[-1].startswith("Error: ")
