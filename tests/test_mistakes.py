"""Mistakes that users make on the command line, and the sentence that each one gets.

A command ends with exit code 2 and one sentence, before it imports torch or reads a model. Failed connections are in
`core/test_failed_connection.py`. `exporter/test_bad_input.py`, `full/test_slow_mistakes.py` and the tests of a command
have mistakes that take longer to find.
"""

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result

from sharp.core import machine
from sharp.core.cli import main
from sharp.exporter.staging import Staging, held

NOT_A_FOLDER = "is not a model folder: it has no sharp.json; make one with sharp-export"
NO_FOLDER = "there is no folder none; give a model folder, which sharp-export makes"
CUT_OFF = "bytes, and its header describes more; download or copy it again"
FETCH = "A model of this name on the Hugging Face Hub is fetched with: hf download org/name --local-dir name"
POINTER = "is a pointer of Git LFS and not the file itself; fetch the file with: git lfs pull"
CONTROLS = "must be temperature=FACTOR, log-n=TOKENS or yarn=FACTOR, as temperature=1.1"
KINDS = "give a Hugging Face folder (config.json and safetensors), a .gguf file"
MISTAKES = [
    # Names: of commands, options and their values.
    ("exprt", "No such command 'exprt'. Did you mean 'export'?"),
    ("serve-model served", "No such command 'serve-model'."),
    ("--verion", "No such option '--verion'. Did you mean '--version'?"),
    ("help sreve", "No such command 'sreve'. Did you mean 'serve'?"),
    ("bench latncy served", "No such command 'latncy'. Did you mean 'latency'?"),
    ("export", "Missing argument 'SOURCE'."),
    ("export whole.gguf extra", "Got unexpected extra argument (extra)"),
    (
        "export whole.gguf --quantise int8",
        "'--quantise'. (Did you mean one of: '--quantize', '--quiet'?)",
    ),
    ("export whole.gguf --quantize int3", "'int3' is not one of 'int8', 'int4', 'int4-128'"),
    ("export whole.gguf --dtype fp16", "'fp16' is not one of 'float32', 'float16', 'bfloat16'"),
    ("export whole.gguf --alpha x", "'x' is not a valid float"),
    ("export whole.gguf --norm-parameter b", "--norm-parameter is 'b', but must be NAME=TENSOR or NAME=NUMBER"),
    ("export whole.gguf --weights w.pt", "--weights is for FILE.py:CLASS, and SOURCE is whole.gguf; leave it out"),
    # Norms.
    ("export whole.gguf --norm sssa", "norm 'sssa' is not known; did you mean ssa? choose one of: softmax, "),
    ("export whole.gguf --norm Entmax", "norm 'Entmax' is not known; did you mean entmax? "),
    ("export whole.gguf --norm adaptive_temperature", "did you mean adaptive-temperature? "),
    ("export whole.gguf --norm layernorm", "norm 'layernorm' is not known; choose one of: softmax, "),
    ("adapt whole.gguf --norm emtmax", "norm 'emtmax' is not known; did you mean entmax? "),
    ("adapt whole.gguf", "Missing option '--norm'."),
    # Checkpoints: none there, of another kind, cut off.
    ("export none.gguf", f"none.gguf does not exist; {KINDS}"),
    ("export cut.gguf", CUT_OFF),
    ("export metadata.gguf", CUT_OFF),
    ("export tiny.gguf", "tiny.gguf cannot be read as a GGUF file: its header is damaged; copy it again"),
    ("export pointer.gguf", POINTER),
    ("export page.gguf", "is a web page and no model; download the file itself (/resolve/ in its link, not /blob/)"),
    ("export cut.safetensors", "cut.safetensors is cut off: it has 127 bytes, and its header describes 137; download"),
    ("export cut-folder", "cut-folder/model.safetensors is cut off: it has 134 bytes, and its header describes 137"),
    ("export ggufs", "ggufs has no config.json; give its GGUF file, ggufs/a-Q4.gguf"),
    ("export empty", f"empty has no config.json; {KINDS}"),
    (
        "export served",
        "is a model folder of sharp-export; serve it (sharp serve served), or give the checkpoint",
    ),
    ("export text.txt", f"text.txt is not a checkpoint that Sharp can read; {KINDS}"),
    ("export model.onnx", "model.onnx is an ONNX model, which has no attention that Sharp could find"),
    ("export class.py", "class.py is Python: name the class in it, or a function that makes it, as class.py:CLASS"),
    ("export none.py:Model --weights w.pt", "none.py does not exist; give FILE.py:CLASS"),
    ("adapt none --norm ssa", "none does not exist; give a Hugging Face folder or a .gguf file"),
    ("adapt org/name --norm ssa", FETCH),
    ("adapt cut.gguf --norm ssa", CUT_OFF),
    ("adapt text.txt --norm ssa", "is no Hugging Face folder and no .gguf file, which is what sharp adapt takes"),
    ("inspect none", "none does not exist; give a model folder (of sharp-export), a .pt or"),
    ("inspect org/name", FETCH),
    ("inspect pointer.gguf", POINTER),
    ("fit-temperature none.gguf", "none.gguf does not exist; give"),
    ("fit-temperature cut.gguf", CUT_OFF),
    (
        "fit-length-scale text.txt",
        "is no folder and no .gguf file; give the Hugging Face folder of a model trained",
    ),
    ("fit-length-scale cut.gguf", CUT_OFF),
    ("evaluate org/name", FETCH),
    (
        "evaluate empty",
        "is not a model that sharp evaluate reads; give a Hugging Face folder, a .gguf file, a",
    ),
    ("evaluate cut.gguf", CUT_OFF),
    ("check-normalizer none.py", "there is no file none.py"),
    # Folders and files to write.
    ("export whole.gguf -o full", "the output folder full is not empty; choose another with -o, or remove it first"),
    ("export whole.gguf -o text.txt", "the output folder text.txt is not empty; choose another with -o"),
    ("bench serve 127.0.0.1:1 --output none/x.json", "none/x.json cannot be written; choose a file in a folder"),
    ("baseline served text.txt -o none/out.json", "none/out.json cannot be written; choose a file in a folder"),
    # Times, ranges and lists.
    ("adapt whole.gguf --norm ssa --budget 20", "--budget is '20', but must be a time as 90s, 20m or 1.5h"),
    ("adapt whole.gguf --norm ssa --layers 5-2", "--layers is '5-2', but must be a layer or a range as 0-11"),
    ("evaluate whole.gguf --lengths 100", "--lengths must be numbers from 512 to 1048576, as 512,1k,2k"),
    ("evaluate whole.gguf --lengths 1k,x", "--lengths is '1k,x', but must be numbers of tokens, as 512,1k,2k"),
    ("evaluate whole.gguf --tasks retrievl", "--tasks has 'retrievl', but must be some of: retrieval, tracking, "),
    ("evaluate whole.gguf --documents 0", "--documents is 0, but must be from 1 to 10000"),
    ("evaluate whole.gguf --control temprature=1", CONTROLS),
    ("evaluate whole.gguf --control temperature=0", CONTROLS),
    ("evaluate whole.gguf whole.gguf", "2 models are given; put them into one page with --compare, or give one"),
    (
        "evaluate whole.gguf whole.gguf --compare",
        "two models have the same name, which the page needs; rename",
    ),
    ("evaluate served --control yarn=2", "--control yarn=2 is for checkpoints, and served is none; give the folder or"),
    ("inspect whole.gguf --token-ids a,b", "--token-ids is 'a,b'; it must be whole numbers, separated by commas"),
    ("inspect whole.gguf --prompt a --text text.txt", "give one of --text, --prompt, --token-ids and --numbers"),
    ("fit-length-scale whole.gguf --onset 512 --length 256", "--length is 256, but must be above --onset (512)"),
    ("baseline served text.txt -o out.json --context 1", "--context is 1, but must be above 32"),
    ("baseline served none.txt -o out.json", "File 'none.txt' does not exist."),
    # Serving: models, settings of flags, variables and files.
    (
        "serve none",
        "none does not exist; give a model folder, a checkpoint (a Hugging Face folder or a .gguf file)",
    ),
    ("serve empty", f"empty {NOT_A_FOLDER}"),
    ("serve served", "served/sharp.json is not a valid manifest: format_version: Field required; export it again"),
    ("serve served --norm ssa", "served is not a checkpoint, and --norm is for checkpoints only; leave it out"),
    ("serve served --grpc-port x", "'x' is not a valid integer"),
    ("serve served --grpc-port 70000", "grpc_port is 70000; it must be from 0 to 65535"),
    ("serve served --devise cuda", "No such option '--devise'. Did you mean '--device'?"),
    ("serve served --device tpu", "device is 'tpu'; it must be auto, cpu, cuda or cuda:N"),
    ("serve served --config none.toml", "the configuration none.toml does not exist"),
    ("serve served --config misspelt.toml", "grpc_prot: there is no such setting; did you mean grpc_port? "),
    ("serve served --config text.txt", "text.txt is not TOML: "),
    ("serve served --tls-cert a.pem", "TLS needs both tls_cert and tls_key"),
    ("serve served --tls-cert a.pem --tls-key b.pem", "the TLS file a.pem does not exist"),
    ("serve served --token-file none", "the token file none cannot be read; it must be text with one token a line"),
    ("serve served --host 192.0.2.1 --grpc-port 0", "choose an address of this machine with --host: 127.0.0.1, or"),
    ("serve served --host none.invalid", "there is no such address; choose another --host"),
    ("SHARP_GRPC_PORT=abc serve served", "grpc_port is 'abc'; it must be a whole number (variable SHARP_GRPC_PORT)"),
    ("SHARP_KERNELS=maybe serve served", "kernels is 'maybe'; it must be true or false (variable SHARP_KERNELS)"),
    ("SHARP_DEVICE=tpu serve served", "it must be auto, cpu, cuda or cuda:N (variable SHARP_DEVICE)"),
    ("SHARP_CONFIG=none.toml serve served", "the configuration none.toml does not exist"),
    (
        "SHARP_CACHE=text.txt/in serve whole.gguf",
        "cannot be written: Not a directory; set SHARP_CACHE to another",
    ),
    ("health --config none.toml", "the configuration none.toml does not exist"),
    ("run none", "none does not exist; give a model folder, a checkpoint"),
    ("run empty", f"empty {NOT_A_FOLDER}"),
    ("run served --temperature hot", "'hot' is not a valid float"),
    # Models where a server is meant, and the other way round.
    ("generate none a", "there is no file or folder none; give a model folder, a checkpoint, or a server as host:port"),
    ("generate org/name a", "; sharp run org/name fetches the model of this name from the Hub"),
    ("generate empty a", f"empty {NOT_A_FOLDER}"),
    ("generate served a --token secret", "served is a file or folder; --model, --token and TLS are for a server"),
    ("generate served a --top-p 2", "top_p is 2.0; it must be a number more than 0 and at most 1"),
    ("generate 127.0.0.1:1 a --attempts 9", "attempts is 9; it must be from 1 to 5"),
    ("generate 127.0.0.1:1 a --tls-cert a.pem", "a client certificate needs both its file and that of its key"),
    ("generate 127.0.0.1:1 a --tls-ca none.pem", "the TLS file none.pem cannot be read: No such file or directory"),
    (
        "compare served --with none",
        "--with none does not exist; give a URL such as http://127.0.0.1:8000, a",
    ),
    ("compare served --with org/name", "is fetched with: hf download org/name --local-dir name"),
    (
        "compare served --with served",
        "is a model folder of Sharp, which is no second opinion; give what it was",
    ),
    ("compare served --with text.txt", "is no .gguf file; give one, a Hugging Face folder or a server's URL"),
    ("compare none --with whole.gguf", NO_FOLDER),
    ("bench latency none", NO_FOLDER),
    ("doctor none", NO_FOLDER),
    ("plan none --device L4 --context 10 --rate 1", NO_FOLDER),
    ("plan served --device H1000 --context 10 --rate 1", "there is no device 'H1000'; there are: a100-sxm-80gb, "),
    ("plan served --context 10 --rate 1", "Missing option '--device' / '--gpu'."),
    ("build empty --backend tensorrt-rtx", "needs --compute-capability and takes no --timing-cache"),
    ("build empty --backend tensort", "'tensort' is not one of 'cuda', 'tensorrt', 'tensorrt-rtx'"),
    ("cache remove", "give the names of models, or --all"),
    ("cache remove smollm2", "the cache has no model smollm2; sharp cache lists what it has"),
]


def write_safetensors(path: Path, cut: int = 0) -> None:
    """Write a file of one tensor of 16 float32 numbers, without its last `cut` bytes."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(64)
    path.write_bytes(content[: len(content) - cut])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the mistakes name."""
    folder = tmp_path_factory.mktemp("files")
    writer = gguf.GGUFWriter(folder / "whole.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    whole = (folder / "whole.gguf").read_bytes()
    for name, size in (("cut", len(whole) // 2), ("metadata", 40), ("tiny", 10)):
        (folder / f"{name}.gguf").write_bytes(whole[:size])
    (folder / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (folder / "page.gguf").write_text("<!DOCTYPE html>\n<html></html>")
    write_safetensors(folder / "cut.safetensors", cut=10)
    for name in ("empty", "cut-folder", "ggufs", "served", "full"):
        (folder / name).mkdir()
    (folder / "cut-folder" / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(folder / "cut-folder" / "model.safetensors", cut=3)
    (folder / "ggufs" / "a-Q4.gguf").write_bytes(b"")
    (folder / "served" / "sharp.json").write_text("{}")
    (folder / "full" / "precious").write_text("")
    (folder / "text.txt").write_text("hello")
    (folder / "misspelt.toml").write_text("grpc_prot = 1")
    (folder / "model.onnx").write_bytes(b"\x08\x0b")
    (folder / "class.py").write_text("")
    return folder


@pytest.fixture
def sharp(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Run `sharp` in this process, in the folder of the files; words before the command are variables."""
    monkeypatch.chdir(files)

    def run(line: str, **variables: str) -> Result:
        words = line.split()
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        variables = {"SHARP_CACHE": str(files / "cache"), **variables}
        return CliRunner().invoke(main, words, env=variables, prog_name="sharp")

    yield run


def assert_refused(result: Result, sentence: str) -> None:
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    usage, _, said = result.stderr.partition("Error: ")
    assert usage == "" or usage.startswith("Usage: sharp"), usage  # no progress and no warning before it
    assert sentence in said
    assert said.count("\n") == 1, said


@pytest.mark.parametrize(("line", "sentence"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_sentence(sharp, line, sentence):
    assert_refused(sharp(line), sentence)


def test_the_list_has_eighty_mistakes_and_none_twice():
    lines = [line for line, _ in MISTAKES]
    assert len(lines) == len(set(lines)) >= 80


def test_no_mistake_waits_for_torch(files):
    """In a process of their own, because other tests import torch."""
    code = (
        "import sys; from click.testing import CliRunner; from sharp.core.cli import main\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    CliRunner().invoke(main, line.split())\n"
        "    if 'torch' in sys.modules: sys.exit(line)\n"
    )
    lines = [line for line, _ in MISTAKES if "=" not in line.split()[0]]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=files,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["export whole.gguf", "adapt whole.gguf --norm ssa", "inspect whole.gguf"])
def test_weights_that_do_not_fit_into_memory_are_refused_before_they_are_read(sharp, monkeypatch, tmp_path, command):
    (tmp_path / "meminfo").write_text("MemAvailable: 400000 kB\nSwapFree: 50000 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    sentence = (
        "whole.gguf has 4,096 weights, which take 0.5 GB of memory in float32, and 0.5 GB are free; choose a smaller "
        "model, or a machine with more memory"
    )
    assert_refused(sharp(command), sentence)


def test_a_second_command_for_the_same_folder_stops_at_its_start(sharp, files):
    staging = Staging(files / "out")
    try:
        assert_refused(sharp("export whole.gguf -o out"), "another command is writing ")
    finally:
        staging.remove()
    with held(files / "whole-ssa-adapted.partial"):
        assert_refused(sharp("adapt whole.gguf --norm ssa"), "another command is working in ")
    with held(files / "whole-evaluation"):
        assert_refused(sharp("evaluate whole.gguf"), "another command is working in ")
    assert not {path.name for path in files.iterdir()} & {"out", "whole-ssa-adapted.partial", "whole-evaluation"}
