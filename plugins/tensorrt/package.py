"""TensorRT's Python package, which is installed with TensorRT, and the loading of our plugin into it."""

from typing import Any

from sharp.core.errors import SharpError
from sharp.plugins import library_path


def import_tensorrt(otherwise: str = "") -> Any:
    """Return TensorRT's Python module; `otherwise` is appended to the error's message and names an alternative.

    Raises:
        SharpError: the package is not installed.
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
    """Load Sharp's plugin library into TensorRT, which registers the plugin's creators, and return the library's path.

    `trt` is the module that `import_tensorrt` returned.

    Raises:
        SharpError: the library is not built, or TensorRT could not load it.
    """
    plugin = library_path("tensorrt")
    if trt.get_plugin_registry().load_library(plugin) is None:
        raise SharpError(f"TensorRT {trt.__version__} could not load {plugin}; its messages are above")
    return plugin
