"""What `scripts/check_engines.py` is made of: real engines over folders that we write.

* `venv`: an environment of their own for vLLM, and SGLang's wheel, unpacked.
* `sources`: small checkpoints whose weights MXFP4 holds exactly, so that nothing need be rounded.
* `vllm_load`, `watch`: run vLLM's model class and loader over a folder, and note what it did.
* `compare`: what vLLM made of the source against what it made of our folder.
* `worker`: the process in vLLM's environment; one child of it for each folder.
* `sglang`: the rules by which SGLang finds a scheme for a name.
"""
