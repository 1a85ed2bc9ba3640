"""Responses of inference engines -> keyword arguments of `Session.append`.

::

    step = spool.engines.from_sglang(response, prompt_token_ids=ids, experts=shape)
    session.append(**step)

Every reader takes the response as a mapping, or as the JSON text of one. Routing is decoded once, into the narrow
dtype it travelled in; its values are checked by `Session.append`, which knows the session's model shape.
"""

from spool.engines.sglang import from_sglang
from spool.engines.step import EngineStep
from spool.engines.vllm import from_vllm
from spool.engines.wires import Routing, decode_routing

__all__ = ["EngineStep", "Routing", "decode_routing", "from_sglang", "from_vllm"]
