"""`ImportedConfig`, the configuration of a model that is not Sharp's own: its values may be wider than its keys."""

from dataclasses import dataclass

from sharp.models.config import SharpConfig


@dataclass(frozen=True)
class ImportedConfig(SharpConfig):
    """`SharpConfig` with the size of values. `value_size` None means head_dim, as in every model of Sharp's own."""

    value_size: int | None = None

    @property
    def value_dim(self) -> int:
        """The number of channels of a value."""
        return self.head_dim if self.value_size is None else self.value_size
