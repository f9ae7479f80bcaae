"""The op `ai.sharp::PagedAttention`: schema, float64 reference, standard-ONNX function body and torch op."""
