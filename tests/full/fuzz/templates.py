"""Chat templates in this process, instead of in the process of `sharp.serving.text.template_worker`."""

import json
from collections.abc import Mapping
from typing import Any

from sharp.serving.api.errors import InputError
from sharp.serving.text.template_process import MOST_CHARACTERS
from sharp.serving.text.template_worker import Templates


class InProcess:
    """A renderer of one template, in place of `TemplateProcess`."""

    def __init__(self, source: str) -> None:
        self._templates = Templates({"default": source, "tools": source}, {})
        self.variables = self._templates.variables

    def render(self, name: str, values: Mapping[str, Any]) -> str:
        """Render the template with the errors of `TemplateProcess.render` but without limits of time and memory."""
        try:
            sent = json.loads(json.dumps({"name": name, "values": values}))
        except (RecursionError, TypeError, ValueError) as error:
            raise InputError(f"they are no JSON, or nested too deeply ({error})") from error
        try:
            text = self._templates.render(sent["name"], sent["values"], MOST_CHARACTERS)
        except RecursionError as error:
            raise InputError("it is nested too deeply") from error
        except Exception as error:
            raise InputError(str(error)[:4096] or type(error).__name__) from error
        return str(json.loads(json.dumps(text)))
