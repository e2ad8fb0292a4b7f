"""A stand-in for tensorrt_llm: the surface that the contract file lists, over a small transformers model.

TRTLLM_STAND_IN chooses the profile, 1.2.1 (default), 1.3 or 1.4. Put the folder above on PYTHONPATH and whatever
drives TensorRT-LLM's LLM API runs on a CPU: the tokens are the model's own, the refusals and the traps are
those that the contract names. Other variables, for tests: TRTLLM_STAND_IN_STEP_MS (least time of an
iteration), TRTLLM_STAND_IN_TRANSFER_MS (of a KV transfer), TRTLLM_STAND_IN_SHUTDOWN_MS, TRTLLM_STAND_IN_BROKEN
(_broken.py).
"""

import os

from tensorrt_llm import _surface

__version__ = _surface.install()

if _ways := os.environ.get("TRTLLM_STAND_IN_BROKEN"):
    from tensorrt_llm import _broken

    _broken.break_named(_ways)
