"""`ApiConfig`: the settings of what requests over HTTP may say."""

from dataclasses import dataclass
from typing import Annotated

from sharp.serving.setting import Setting, check_settings


@dataclass(frozen=True)
class ApiConfig:
    """What requests over HTTP and of KServe's protocol may say."""

    unknown_fields: Annotated[
        str,
        Setting(
            "What happens to fields of requests that are not known here: an error, or they are left out as in vLLM and "
            "the log names each once. A misspelt name of a known field is an error in all but ignore.",
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
    tool_parser: Annotated[
        str,
        Setting(
            "Form in which the model writes calls of tools; auto finds it out from the chat template.",
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
    page: Annotated[
        bool,
        Setting("Serve the page to try the model and to watch its heads, at /, with its data at /live and /attention."),
    ] = True
    docs: Annotated[bool, Setting("Serve a page of the API at /docs; /openapi.json is always there.")] = False

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model; empty where it keeps its own."""
        return tuple(dict.fromkeys((self.served_model_name or "").replace(",", " ").split()))

    @property
    def origins(self) -> list[str]:
        """The allowed origins; a JSON list is read, too, as vLLM's flag has one."""
        return [one.strip(" \"'[]") for one in (self.allowed_origins or "").split(",") if one.strip(" \"'[]")]
