"""TensorRT's Python package, which is installed with TensorRT, and our plugin in it."""

from typing import Any

from sharp.plugins import library_path
from sharp.plugins.errors import SharpError


def import_tensorrt(otherwise: str = "") -> Any:
    """The package; `otherwise` is what else the user can do where there is none.

    Raises:
        SharpError: it is not installed.
    """
    try:
        import tensorrt
    except ModuleNotFoundError as error:
        raise SharpError(
            "the Python package tensorrt is not installed; install TensorRT 10.14 or newer with its package for this "
            f"Python{otherwise}"
        ) from error
    return tensorrt


def load_plugin(trt: Any) -> str:
    """Register the plugin's creators; returns the library's path.

    Raises:
        SharpError: the library is not built, or TensorRT could not load it.
    """
    plugin = library_path("tensorrt")
    if trt.get_plugin_registry().load_library(plugin) is None:
        raise SharpError(f"TensorRT {trt.__version__} could not load {plugin}; its messages are above")
    return plugin
