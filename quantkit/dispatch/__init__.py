"""What a serving engine will do with a checkpoint, by its own dispatch rules, without running it.

`rules.py` is the table; `vllm.py` and `llamacpp.py` apply it to a config and the files' headers.
"""
