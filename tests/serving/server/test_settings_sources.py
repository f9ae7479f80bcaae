"""Settings of `sharp-serve`: flags override the environment, which overrides the file, and errors are one sentence."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.serving.api.errors import InputError, UnauthenticatedError
from sharp.serving.cli import joined_names, serve
from sharp.serving.config import ServerConfig, TlsConfig
from sharp.serving.security.tokens import tokens_of
from sharp.serving.server.settings_page import settings_page
from sharp.serving.server.settings_sources import SERVER_SETTINGS, read_settings


@pytest.fixture
def file(tmp_path):
    def write(text):
        (tmp_path / "sharp.toml").write_text(text)
        return tmp_path / "sharp.toml"

    return write


def test_without_anything_everything_has_its_default():
    settings = read_settings({}, None)
    assert (settings.server.grpc_port, settings.engine.max_sequences) == (50051, 64)
    assert (settings.server.tls, settings.server.token_file, settings.backend.kernels) == (None, None, True)


def test_flags_count_before_the_environment_before_the_file(file, monkeypatch):
    config = file("grpc_port = 1\nhttp_port = 1\nmax_sequences = 1\n")
    monkeypatch.setenv("SHARP_HTTP_PORT", "2")
    monkeypatch.setenv("SHARP_MAX_SEQUENCES", "2")
    settings = read_settings({"max_sequences": 3}, config)
    assert (settings.server.grpc_port, settings.server.http_port, settings.engine.max_sequences) == (1, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "grpc_prot = 1",
            "grpc_prot: there is no such setting; did you mean grpc_port? ",
        ),
        ("grpc_port = 'x'", "grpc_port is 'x'; it must be a whole number (in "),
        ("kernels = 3", "kernels is 3; it must be true or false (in "),
        ("stall_seconds = []", "stall_seconds is []; it must be a number (in "),
        ("grpc_port = 70000", "grpc_port is 70000; it must be from 0 to 65535 (in "),
        ("grpc_port = ", "is not TOML"),
        ("[server]\ngrpc_port = 1", "server: there is no such setting"),
        ("tls_cert = 'a'", "TLS needs both tls_cert and tls_key"),
        ("tls_client_ca = 'a'", "tls_client_ca needs tls_cert and tls_key too"),
        ("stall_seconds = 0", "stall_seconds: Input should be greater than 0"),
        ("idle_seconds = inf", "idle_seconds is inf; it must be above 0 and at most 2000000"),
        ("grace_seconds = inf", "grace_seconds is inf; it must be at least 0 and at most 2000000"),
    ],
)
def test_bad_files_are_one_sentence(file, text, message):
    with pytest.raises(InputError) as refused:
        read_settings({}, file(text))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bad_environment_is_one_sentence(monkeypatch):
    monkeypatch.setenv("SHARP_THREADS", "many")
    with pytest.raises(InputError, match=r"^threads is 'many'; it must be a whole number \(variable SHARP_THREADS\)$"):
        read_settings({}, None)
    monkeypatch.setenv("SHARP_THREADS", "-1")
    with pytest.raises(InputError, match=r"^threads is -1; it must be at least 1 \(variable SHARP_THREADS\)$"):
        read_settings({}, None)
    with pytest.raises(InputError, match=r"^threads is 0; it must be at least 1$"):
        read_settings({"threads": 0}, None)  # a flag needs no explanation


def test_a_misspelt_variable_is_named(monkeypatch, caplog):
    monkeypatch.setenv("SHARP_GRPC_PROT", "1")
    monkeypatch.setenv("SHARP_ISA", "avx2")  # a variable that the kernels read, not the server
    monkeypatch.setenv("SHARP_CACHE", "elsewhere")
    read_settings({}, None)
    assert "SHARP_GRPC_PROT is no setting of sharp-serve; did you mean SHARP_GRPC_PORT? " in caplog.text
    assert "SHARP_ISA" not in caplog.text and "SHARP_CACHE" not in caplog.text


def test_the_command_reads_the_file_that_a_variable_names(file, tmp_path):
    config = file("max_sequences = 0")
    for arguments, environment in ((["--config", str(config)], {}), ([], {"SHARP_CONFIG": str(config)})):
        result = CliRunner().invoke(serve, [str(tmp_path), *arguments], env=environment)
        assert (result.exit_code, "max_sequences is 0; it must be at least 1" in result.output) == (2, True)
    result = CliRunner().invoke(serve, [str(tmp_path), "--config", str(tmp_path / "none.toml")])
    assert (result.exit_code, "does not exist" in result.output) == (2, True)


def test_the_reference_page_is_current():
    page = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"
    command = "python -m sharp.serving.server.settings_page > docs/reference/settings.md"
    assert page.read_text() == settings_page(), f"run {command}"


VALUES = {bool: False, int: 77, float: 0.5, str: "x", Path: Path("x")}
CHOSEN = {
    "device": "cuda",
    "cuda_graph_sizes": "1,8",
    "attention_metrics": "layer",
    "log_format": "json",
    "max_buffered_bytes": 2**21,
}
CHOSEN |= {"metric_aliases": "vllm", "model_version": "0123456789ab"}
CHOSEN |= {
    "unknown_fields": "error",
    "on_dropped_content": "warn",
    "json_whitespace": "flexible",
    "async_scheduling": "on",
    "tool_parser": "llama3",
    "reasoning_parser": "qwen3",
    "pooling": "cls",
    "normalize": "on",
    "weights": "map",
    "prefix_isolation": "none",
}


@pytest.mark.parametrize("setting", SERVER_SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_a_flag_a_variable_and_a_key(setting, file, monkeypatch):
    flags = {flag: option for option in serve.params for flag in (*option.opts, *option.secondary_opts)}
    assert flags[setting.flag].name == setting.name
    assert setting.metadata.help in flags[setting.flag].help
    assert (f"--no-{setting.flag[2:]}" in flags) == (setting.type is bool)

    def read(flags, config):
        settings = read_settings(flags, config)
        components = (
            settings.server,
            settings.server.tls,
            settings.backend,
            settings.engine,
            settings.encoder,
            settings.metrics,
            settings.api,
        )
        (component,) = (component for component in components if type(component) is setting.component)
        return getattr(component, setting.field.name)

    value = CHOSEN.get(setting.name, VALUES[setting.type])
    for name in {"tls_cert", "tls_key"} - {setting.name} if setting.component is TlsConfig else ():
        monkeypatch.setenv(f"SHARP_{name.upper()}", "needed beside it")
    written = str(value).lower() if setting.type in (bool, int, float) else repr(str(value))
    assert read({}, file(f"{setting.name} = {written}")) == value
    assert read({setting.name: value}, None) == value
    monkeypatch.setenv(setting.variable, str(value))
    assert read({}, None) == value


VLLMS = {
    "--max-model-len": ("max_context", "64"),
    "--max-num-seqs": ("max_sequences", "3"),
    "--max-num-batched-tokens": ("max_batch_tokens", "128"),
    "--gpu-memory-utilization": ("gpu_memory_share", "0.5"),
    "--api-key": ("api_key", "secret"),
    "--host": ("host", "127.0.0.1"),
    "--port": ("http_port", "1"),
    "--chat-template": ("chat_template", "chatml"),
    "--served-model-name": ("served_model_name", "a"),
    "--tool-call-parser": ("tool_parser", "llama3_json"),
    "--enable-prefix-caching": ("prefix_cache", None),
    "--no-enable-prefix-caching": ("prefix_cache", None),
}


@pytest.mark.parametrize("flag", VLLMS)
def test_vllms_flags(flag):
    name, value = VLLMS[flag]
    context = serve.make_context("serve", ["folder", flag, *([] if value is None else [value])])
    expected = {None: not flag.startswith("--no-")}.get(value, value)
    assert str(context.params[name]) == str(expected)
    read_settings({name: context.params[name]}, None)


def test_several_served_names():
    for args in (["folder", "--served-model-name", "a", "b"], ["--served-model-name", "a", "b", "folder"]):
        context = serve.make_context("serve", [*args, "--port", "1"] if args[0] == "folder" else args)
        assert (context.params["served_model_name"], str(context.params["source"])) == ("a,b", "folder")
    assert joined_names(["f", "--served-model-name", "a"]) == ["f", "--served-model-name", "a"]
    assert joined_names(["--served-model-name"]) == ["--served-model-name"]


def test_one_key_or_a_file_of_tokens(tmp_path):
    assert tokens_of(ServerConfig()) is None
    tokens = tokens_of(ServerConfig(api_key="secret"))
    tokens.check("Bearer secret")
    with pytest.raises(UnauthenticatedError):
        tokens.check("Bearer other")
    with pytest.raises(InputError, match="api_key and token_file are both set"):
        tokens_of(ServerConfig(api_key="a", token_file=tmp_path))
    with pytest.raises(InputError, match="api_key cannot be sent"):
        tokens_of(ServerConfig(api_key="a b"))


def test_the_longest_context_may_be_shorter(start_server, counting, server_settings):
    started = start_server(counting, engine=replace(server_settings.engine, max_context=64))
    assert started.model.context_limit == 64
    with pytest.raises(InputError, match="max_context is 200; the model takes at most 128 tokens"):
        start_server(counting, engine=replace(server_settings.engine, max_context=200))


def test_an_empty_variable_is_no_number(monkeypatch):
    monkeypatch.setenv("SHARP_CACHE_TOKENS", "")
    with pytest.raises(
        InputError, match=r"^cache_tokens is ''; it must be a whole number \(variable SHARP_CACHE_TOKENS\)$"
    ):
        read_settings({}, None)
