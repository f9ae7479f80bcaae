"""`sharp fit-temperature` and `sharp fit-length-scale`, which fit parameters of a norm to a model."""
