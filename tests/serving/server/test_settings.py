"""The settings of `sharp-serve`: flags before the environment before the file, and one sentence for what cannot be."""

import pytest
from click.testing import CliRunner

from sharp.serving.api.errors import InputError
from sharp.serving.cli import serve
from sharp.serving.server.settings import ServeSettings, read_settings


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


def test_every_setting_reaches_the_server(file, tmp_path):
    changed = {
        name: (not field.default if isinstance(field.default, bool) else 77.0 if field.annotation is float else 77)
        for name, field in ServeSettings.model_fields.items()
        if field.annotation in (int, float, bool, int | None)
    }
    texts = {name: str(tmp_path / name) for name in ServeSettings.model_fields if name not in changed}
    texts |= {"backend": "onnxruntime", "device": "cuda", "attention_metrics": "layer", "log_format": "json"}
    changed["dispersion_threshold"] = 0.5
    settings = read_settings(changed | texts, None)
    parts = (settings.server, settings.engine, settings.metrics, settings.backend, settings.server.tls)
    found = {name: value for part in parts for name, value in vars(part).items()}
    names = {"backend": "name", "tls_cert": "cert", "tls_key": "key", "tls_client_ca": "client_ca"}
    for name, value in (changed | texts).items():
        assert str(found[names.get(name, name)]) == str(value), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpc_prot = 1", "grpc_prot: there is no such setting"),
        ("grpc_port = 'x'", "grpc_port: Input should be a valid integer"),
        ("grpc_port = 70000", "grpc_port is 70000; it must be from 0 to 65535"),
        ("grpc_port = ", "is not TOML"),
        ("[server]\ngrpc_port = 1", "server: there is no such setting"),
        ("tls_cert = 'a'", "TLS needs both tls_cert and tls_key"),
        ("tls_client_ca = 'a'", "tls_client_ca needs tls_cert and tls_key too"),
        ("stall_seconds = 0", "stall_seconds: Input should be greater than 0"),
    ],
)
def test_bad_files_are_one_sentence(file, text, message):
    with pytest.raises(InputError) as refused:
        read_settings({}, file(text))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bad_environment_is_one_sentence(monkeypatch):
    monkeypatch.setenv("SHARP_THREADS", "many")
    with pytest.raises(InputError, match="threads: Input should be a valid integer"):
        read_settings({}, None)


def test_a_misspelt_variable_is_named(monkeypatch, caplog):
    monkeypatch.setenv("SHARP_GRPC_PROT", "1")
    monkeypatch.setenv("SHARP_ISA", "avx2")  # the kernels read it
    read_settings({}, None)
    assert "SHARP_GRPC_PROT is no setting of sharp-serve" in caplog.text
    assert "SHARP_ISA" not in caplog.text


def test_the_command_reads_the_file_that_a_variable_names(file, tmp_path):
    config = file("max_sequences = 0")
    for arguments, environment in ((["--config", str(config)], {}), ([], {"SHARP_CONFIG": str(config)})):
        result = CliRunner().invoke(serve, [str(tmp_path), *arguments], env=environment)
        assert (result.exit_code, "max_sequences is 0; it must be at least 1" in result.output) == (2, True)
    result = CliRunner().invoke(serve, [str(tmp_path), "--config", str(tmp_path / "none.toml")])
    assert (result.exit_code, "does not exist" in result.output) == (2, True)
