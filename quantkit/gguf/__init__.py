"""GGUF, llama.cpp's file format: types, arithmetic, conversion and files."""
