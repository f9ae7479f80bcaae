"""`sharp evaluate` on tiny models: every kind of MODEL, controls, resumed runs, and refusals."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sharp.exporter.adapt.student import finish, make_student
from sharp.exporter.long_context.cli import evaluate as command
from sharp.exporter.long_context.documents import ANIMALS, CITIES, GOODS, TREES, WORDS, Question
from sharp.exporter.long_context.reader import Response
from sharp.exporter.long_context.subjects import parse_control
from sharp.exporter.long_context.token_reader import TokenReader
from sharp.exporter.long_context.torch_runtime import TorchRuntime
from sharp.exporter.sources.norm_options import NO_OPTIONS
from tests.exporter.tiny_hugging_face import tiny

TEXT = "".join(
    f"On day {number} the bottles were {TREES[number % 15].lower()} again by nobody. Nobody said why they were.\n\n"
    for number in range(9000)
)
CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "bottles.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def teacher(tmp_path: Path):
    def make(model_type: str = "llama", **changes: object) -> Path:
        folder = tmp_path / f"teacher-{model_type}"
        sizes = {"vocab_size": 1000, "max_position_embeddings": 1024}
        tiny(model_type, **{**sizes, **changes}).save_pretrained(folder)
        word_tokenizer().save_pretrained(folder)
        return folder

    return make


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for most words of the documents, so that short documents have all facts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    sentences = "The special word for is. Box holds the same as. The number of times that a ran past is."
    words = (*CITIES, *WORDS, *TREES, *GOODS, *ANIMALS, *sentences.split(), "Question:", "Answer:")
    tokenizer.train_from_iterator([TEXT[:4000], *(f"{word} {word}. {word}" for word in words)] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], prog_name="sharp evaluate")


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())


def documents(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "documents.jsonl").read_text().splitlines()][1:]


def test_a_checkpoint_and_its_controls_are_on_one_page(teacher, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    controls = ("--control", "temperature=1.2", "--control", "log-n=64", "--control", "yarn=2")
    result = run(teacher(), *controls, "--text", text, "--lengths", "512", "--documents", 2, "-o", out)
    assert result.exit_code == 0, result.output
    found = figures(out)
    names = ["teacher-llama", *(f"teacher-llama {control}" for control in ("temperature=1.2", "log-n=64", "yarn=2"))]
    assert found["models"] == names
    for row in found["rows"]:
        assert row["documents"] == 2 and set(row["tasks"]) == {"retrieval", "tracking", "counting", "copy"}
        assert row["tasks"]["retrieval"]["questions"] == 32
        assert row["tasks"]["retrieval"]["chance"] == pytest.approx(1 / 16)
        assert row["heads"]["support"] == pytest.approx(1.0) and len(row["heads"]["entropy_by_head"]) > 1
    perplexities = {row["model"]: row["perplexity"] for row in found["perplexity"] if row["to"] == 512}
    assert len(set(perplexities.values())) == 4  # every control changes the model
    page = (out / "evaluation.html").read_text()
    assert "retrieval, right among the choices, chance 6%" in page and "data:image/png;base64," in page


def test_more_documents_and_models_are_added_to_what_is_there(teacher, text: Path, tmp_path: Path) -> None:
    shared = ("--text", text, "--lengths", "512", "--tasks", "retrieval", "-o", tmp_path / "out")
    assert run(teacher(), *shared, "--documents", 1).exit_code == 0
    (_,) = documents(tmp_path / "out")
    with (tmp_path / "out" / "documents.jsonl").open("a") as file:
        file.write('{"model": "cut o')  # as if the command was killed while it wrote
    second = run("--compare", teacher(), teacher("qwen3"), *shared, "--documents", 2)
    assert second.exit_code == 0, second.output
    assert "2 of 2 documents" in second.output and "1 of 1 documents" in second.output
    found = figures(tmp_path / "out")
    assert [row["documents"] for row in found["rows"]] == [2, 2]
    assert found["rows"][1]["tasks"]["retrieval"]["among"]["against_first"] is not None
    assert found["rows"][1]["tasks"]["retrieval"]["nats"]["against_first"] is not None
    assert 0 < found["rows"][0]["tasks"]["retrieval"]["nats"]["value"] < 10
    assert len(documents(tmp_path / "out")) == 4  # the incomplete line is gone, so every line can be read
    again = run("--compare", teacher(), teacher("qwen3"), *shared, "--documents", 2)
    assert again.exit_code == 0 and "opening" not in again.output
    other = run(teacher(), "--text", text, "--lengths", "512", "--seed", 1, "-o", tmp_path / "out")
    assert other.exit_code == 2 and "has results of other settings" in " ".join(other.output.split())


@pytest.mark.parametrize("start", ["", '{"version": 1, "te', '{"version": 1}\n'])
def test_a_run_that_was_killed_before_its_first_document_can_begin_with_any_settings(
    teacher, text: Path, tmp_path: Path, start: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "documents.jsonl").write_text(start)
    result = run(teacher(), "--text", text, "--lengths", "512", "--documents", 1, "--tasks", "counting", "-o", out)
    assert result.exit_code == 0, result.output
    assert len(documents(out)) == 1


def test_bad_options_are_refused_before_torch_is_imported_and_a_folder_is_made(teacher, tmp_path: Path) -> None:
    script = (
        "import sys; from sharp.exporter.long_context.cli import evaluate\n"
        "try: evaluate(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules)"
    )
    arguments = (teacher(), "--control", "heat=2", "-o", tmp_path / "out")
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 2 and "--control is 'heat=2'" in done.stderr, done.stderr
    assert done.stdout == "False\n" and not (tmp_path / "out").exists()


def test_a_prompt_is_what_transformers_own_run_of_the_whole_text_says(teacher, text: Path) -> None:
    path = teacher()
    reader = TokenReader(TorchRuntime(path, None, CPU), AutoTokenizer.from_pretrained(path), "plain", "teacher")
    read = reader.read(TEXT[:600])
    questions = [
        Question(
            "retrieval",
            f"What is the special word for {city}?",
            f"The word for {city} is",
            " apple",
            (" apple", " river"),
            0,
        )
        for city in ("Oslo", "Lima", "Cairo")
    ]
    responses = reader.ask(questions)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    for question, response in zip(questions, responses, strict=True):
        prompt = f"{TEXT[:600]}\n\nQuestion: {question.question}\nAnswer: {question.lead}"
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits[0]
        expected = logits[-1].log_softmax(-1)
        assert response.scores is not None
        for choice in question.choices:
            first = tokenizer(prompt + choice, add_special_tokens=False)["input_ids"][ids.shape[1]]
            assert response.scores[choice] == pytest.approx(expected[first].item(), abs=1e-4)
        made = model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert response.text.startswith(tokenizer.decode(made))
    assert read.losses is not None and read.tokens == len(read.losses) + 1
    losses = torch.nn.functional.cross_entropy(logits[: read.tokens - 1], ids[0, 1 : read.tokens], reduction="none")
    torch.testing.assert_close(read.losses, losses, atol=1e-4, rtol=1e-4)


def test_questions_of_a_model_with_windows_are_read_one_by_one(teacher) -> None:
    path = teacher("mistral", sliding_window=32)
    reader = TokenReader(TorchRuntime(path, None, CPU), AutoTokenizer.from_pretrained(path), "plain", "teacher")
    reader.read(TEXT[:300])
    runtime = reader.runtime
    several = [[5, 6, 7], [8, 9]]
    together = runtime.extend_each(several)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    start = AutoTokenizer.from_pretrained(path)(TEXT[:300], add_special_tokens=False)["input_ids"]
    for ids, found in zip(several, together, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([start + ids])).logits[0, -1]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_model_with_a_table_of_positions_is_not_read_beyond_it(teacher, text: Path, tmp_path: Path) -> None:
    path = teacher("gpt2", n_positions=1024)
    shared = ("--text", text, "--documents", 1, "--tasks", "counting", "-o", tmp_path / "out")
    result = run(path, "--lengths", "512,1k", *shared)
    assert result.exit_code == 0, result.output
    assert "no documents of 1024 tokens, as its context is 1024" in " ".join(result.output.split())
    assert figures(tmp_path / "out")["lengths"] == [512]
    assert run(path, "--lengths", "1k", *shared).exit_code == 2


def test_an_adapted_model_is_read_with_its_norm(teacher, text: Path, tmp_path: Path) -> None:
    student = make_student(teacher(), "entmax", NO_OPTIONS, 4, None, 24, 0)
    finish(student)
    student.model.save_pretrained(tmp_path / "student")
    word_tokenizer().save_pretrained(tmp_path / "student")
    out = tmp_path / "out"
    result = run(
        "--compare", teacher(), tmp_path / "student", "--text", text, "--lengths", "512", "--documents", 1, "-o", out
    )
    assert result.exit_code == 0, result.output
    supports = [row["heads"]["support"] for row in figures(out)["rows"]]
    assert supports[0] == pytest.approx(1.0) and supports[1] < 0.9
    refused = run(tmp_path / "student", "--control", "yarn=2", "--text", text, "-o", tmp_path / "no")
    assert not (tmp_path / "no").exists()  # the command refuses before it reads the first model
    assert refused.exit_code == 2 and "is for softmax models" in " ".join(refused.output.split())


def test_an_exported_folder_says_what_its_checkpoint_says(teacher, text: Path, tmp_path: Path, sharp_export) -> None:
    exported = sharp_export(teacher(), "--norm", "softmax", "-o", tmp_path / "exported")
    assert exported.exit_code == 0, exported.output
    out = tmp_path / "out"
    shared = ("--text", text, "--lengths", "512", "--documents", 1, "-o", out)
    result = run("--compare", teacher(), tmp_path / "exported", *shared)
    assert result.exit_code == 0, result.output
    one, two = documents(out)
    assert one["tokens"] == two["tokens"] and one["tasks"] == two["tasks"]
    for mine, theirs in zip(one["losses"], two["losses"], strict=True):
        assert mine["count"] == theirs["count"] and mine["sum"] == pytest.approx(theirs["sum"], rel=1e-3)
    for mine, theirs in zip(one["heads"], two["heads"], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-3, rtol=1e-3)


class Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that looks up the fact in the prompt, and returns logprobs if `logprobs` is True."""

    logprobs = True

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "oracle"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        lead = body["prompt"].rpartition("Answer: ")[2]
        fact = body["prompt"].partition(f"{lead} ")[2].split(".")[0] if lead else ""
        word = f" {fact}" if fact in WORDS else " nothing"
        choice: dict[str, Any] = {"text": f"{word}.", "logprobs": None}
        if self.logprobs and "logprobs" in body:
            choice["logprobs"] = {"top_logprobs": [{word: -0.1, " the": -3.0}]}
        self.reply({"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"]) // 4}})

    def reply(self, content: dict[str, Any]) -> None:
        sent = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    running = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_address[1]}"
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_server_that_finds_everything_has_all_right(
    server: str, text: Path, tmp_path: Path, monkeypatch, logprobs: bool
) -> None:
    monkeypatch.setattr(Server, "logprobs", logprobs)
    out = tmp_path / "out"
    result = run(
        server, "--text", text, "--lengths", "1k", "--tasks", "retrieval,counting", "--documents", 2, "-o", out
    )
    assert result.exit_code == 0, result.output
    (row,) = figures(out)["rows"]
    retrieval, counting = row["tasks"]["retrieval"], row["tasks"]["counting"]
    assert retrieval["text"]["value"] == 1.0 and counting["text"]["value"] == 0.0
    assert (retrieval["among"]["value"] == 1.0) if logprobs else (retrieval["among"] is None)
    assert row["heads"] is None and 950 <= row["prompt_tokens"] <= 1030


def test_bad_input_is_one_sentence(teacher, text: Path, tmp_path: Path, server: str) -> None:
    def refused(*arguments: object) -> str:
        result = run(*arguments, "-o", tmp_path / "out")
        assert result.exit_code == 2 and "Traceback" not in result.output, result.output
        return " ".join(result.output.split())

    path = teacher()
    assert "give a Hugging Face folder, a .gguf file" in refused(tmp_path / "none")
    assert "is not a model that sharp evaluate reads" in refused(text)
    assert "with --compare, or give one" in refused(path, path)
    assert "two models have the same name" in refused("--compare", path, path, "--text", text)
    assert "--lengths is '1x'" in refused(path, "--lengths", "1x")
    assert "--lengths must be numbers from 512" in refused(path, "--lengths", "100")
    assert "--tasks has 'magic'" in refused(path, "--tasks", "magic")
    assert "--control is 'heat=2', but must be" in refused(path, "--control", "heat=2")
    assert "temperature=nan" in refused(path, "--control", "temperature=nan")
    assert "has no chat template" in refused(path, "--form", "chat", "--text", text)
    assert "is for models that run here" in refused(server, "--form", "chat", "--text", text, "--lengths", "1k")
    assert "--control yarn=2 is for checkpoints" in refused(server, "--control", "yarn=2", "--text", text)
    (tmp_path / "same.txt").write_text("Nobody said why they were.\n\n" * 9000)
    assert "which the task copy needs" in refused(path, "--text", tmp_path / "same.txt")
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:30_000])
    assert "too few for a document of 4096 tokens" in refused(path, "--text", short, "--lengths", "4k")


def test_a_control_has_a_number() -> None:
    assert parse_control("log-n=512").name == "log-n=512"
    assert parse_control("temperature=1.10").name == "temperature=1.1"


@pytest.mark.parametrize(
    ("said", "right"), [(" river.", True), (" river and", True), (" rivers", False), ("", False), (" a river", False)]
)
def test_a_text_is_right_where_it_begins_with_the_word(said: str, right: bool) -> None:
    question = Question("retrieval", "", "", " river", (" river", " apple"), 0.0)
    assert Response(None, said).right_text(question) == right
    assert Response({" apple": -2.0, " river": -1.0}, said).right_among(question) is True
    assert Response({}, said).right_among(question) is False
    assert Response({" apple": -2.0, " river": -1.0}, said).nats(question) == pytest.approx(math.log(1 + math.exp(-1)))
    assert Response({}, said).nats(question) is None
