"""`truncation: auto` of /v1/responses: what the context has no room for is left out of the prompt."""

from __future__ import annotations

from dataclasses import replace

from bireme.errors import RequestError
from bireme.openai.text.served_model import ServedModel
from bireme.pipelines.chat_request import ChatRequest
from bireme.request import check_prompt_tokens


async def truncated(model: ServedModel, request: ChatRequest) -> ChatRequest:
    """Return the request without its oldest messages, as few as the context asks for; the system's stay.

    It is cut before a user's message, so that no call loses its result. Raises RequestError when nothing helps.
    """
    messages, capacity = request.messages, model.capacity
    first = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    cuts = [first, *(at for at in range(first + 1, len(messages)) if messages[at]["role"] == "user")]

    async def fitting(cut: int) -> ChatRequest:
        dropped = [part for message in messages[first:cut] for part in message["content"] if isinstance(part, dict)]
        num_pictures = sum(part["type"] == "image" for part in dropped)
        shorter = replace(request, messages=messages[:first] + messages[cut:], pictures=request.pictures[num_pictures:])
        prompt = await model.chat.prompts.chat(
            shorter.messages, shorter.tools, shorter.variables, shorter.options.cache_salt
        )
        check_prompt_tokens(len(prompt.ids), model.recipe.limits, capacity.max_seq_len if capacity else None)
        return shorter

    low, high = 0, len(cuts) - 1  # the answer is among these
    while low < high:
        middle = (low + high) // 2
        try:
            await fitting(cuts[middle])
            high = middle
        except RequestError:
            low = middle + 1
    return await fitting(cuts[low])
