"""`sharp fit-temperature` and `sharp fit-length-scale`: parameters of a norm, fitted to a model."""
