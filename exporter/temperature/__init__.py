"""`sharp fit-temperature`: the polynomial of adaptive temperature, fitted to a model."""
