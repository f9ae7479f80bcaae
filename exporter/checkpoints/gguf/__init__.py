"""The reader of GGUF files. It reads the keys as llama.cpp does and makes models of transformers' classes."""
