"""`ApiConfig`: the settings for the content of requests over HTTP and KServe's protocol."""

from dataclasses import dataclass
from typing import Annotated

from sharp.serving.setting import Setting, check_settings


@dataclass(frozen=True)
class ApiConfig:
    """The settings for the content of requests over HTTP and KServe's protocol. Values are checked at creation.

    Raises:
        InputError: a value is not one of the choices of its setting.
    """

    unknown_fields: Annotated[
        str,
        Setting(
            "Treatment of unknown fields in requests: an error, or they are left out as in vLLM and the log names each "
            "once. A misspelt name of a known field is an error, except with ignore.",
            choices=("error", "warn", "ignore"),
        ),
    ] = "warn"
    served_model_name: Annotated[
        str | None,
        Setting(
            "Names under which the model is served, separated by commas; responses and metrics have the first.",
            default="the name in sharp.json",
            common=True,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Setting(
            "File of a chat template in Jinja, or the name of one of the model's own, or chatml.",
            default="the model's",
            common=True,
        ),
    ] = None
    on_dropped_content: Annotated[
        str,
        Setting(
            "Treatment of conversations that the chat template does not show completely, as some templates leave out "
            "the system message or tool calls: an error, a warning in the log, or nothing.",
            choices=("error", "warn", "ignore"),
        ),
    ] = "error"
    tool_parser: Annotated[
        str,
        Setting(
            "Form in which the model writes calls of tools; auto reads it from the chat template.",
            choices=("auto", "hermes", "qwen", "llama3", "llama3_json", "mistral", "pythonic"),
            aliases=("--tool-call-parser",),
            common=True,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Setting(
            "Moves the model's reasoning out of the text into reasoning_content. deepseek_r1 begins inside it, qwen3 "
            "with <think>, mistral with [THINK].",
            choices=("none", "deepseek_r1", "qwen3", "mistral"),
        ),
    ] = "none"
    allowed_origins: Annotated[
        str | None,
        Setting(
            "Origins whose pages may call this server from browsers (CORS), separated by commas; * is all.",
            default="none",
            group="Security",
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Setting(
            "Host names that requests may use for this server (the Host header), separated by commas; * is all. "
            "Without tokens, a server on 127.0.0.1 accepts only names that this machine and its network can have; "
            "otherwise a page could make its own name point to this server and read responses (DNS rebinding).",
            default="all; without tokens on 127.0.0.1 localhost, addresses and names without a public domain",
            group="Security",
        ),
    ] = None
    page: Annotated[
        bool,
        Setting("Serve the page to try the model and to watch its heads, at /, with its data at /live and /attention."),
    ] = True
    docs: Annotated[bool, Setting("Serve a page of the API at /docs; /openapi.json is always there.")] = False

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, each once; empty if the model keeps the name in sharp.json."""
        return tuple(dict.fromkeys((self.served_model_name or "").replace(",", " ").split()))

    @property
    def origins(self) -> list[str]:
        """The allowed origins; empty if there are none, and `*` stands for all.

        A JSON list is accepted as the setting, too, because vLLM's flag takes one.
        """
        return _listed(self.allowed_origins)

    @property
    def hosts(self) -> list[str]:
        """The allowed names of this server; `*` stands for all. Empty if the setting is not given.

        A JSON list is accepted as the setting, too.
        """
        return _listed(self.allowed_hosts)


def _listed(text: str | None) -> list[str]:
    """Return the names in a list that is separated by commas, or in a JSON list."""
    return [name.strip(" \"'[]") for name in (text or "").split(",") if name.strip(" \"'[]")]
